"""What goes wrong with a model on disk, said to a person."""

from __future__ import annotations


class CheckpointError(Exception):
    """A model that cannot be found, fetched or loaded. The message is a sentence that names the file and the remedy."""
