"""Models on disk: finding, fetching and converting them, and what their files promise. Imports no torch."""

from engine.checkpoints.cache import default_cache_dir
from engine.checkpoints.catalog import Installed, list_models, obtain, pull, resolve, with_blocks
from engine.checkpoints.embedded import DEFAULT_MODEL
from engine.checkpoints.errors import CheckpointError

__all__ = [
    "DEFAULT_MODEL",
    "CheckpointError",
    "Installed",
    "default_cache_dir",
    "list_models",
    "obtain",
    "pull",
    "resolve",
    "with_blocks",
]
