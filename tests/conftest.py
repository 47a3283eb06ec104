"""Fixtures that several rooms' tests share."""

import os
from pathlib import Path

import pytest

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain


@pytest.fixture(scope="session")
def model_cache_dir():
    """The cache that `turnkeep model pull` fills on this machine, so that tests do not fetch the model again."""
    return Path(os.environ.get("TURNKEEP_CACHE_DIR") or default_cache_dir())


@pytest.fixture(scope="session")
def smollm2_dir(model_cache_dir):
    """The converted SmolLM2-135M-Instruct; fetched when it is not there."""
    return obtain(DEFAULT_MODEL, model_cache_dir)
