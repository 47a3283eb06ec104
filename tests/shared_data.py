"""Where the recorded sessions are that tests read: a folder `shared` in the checkout or beside it, no part of the project."""

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]


def shared_traces(name: str) -> Path:
    """The folder shared/data/traces/NAME; skips the test, with a sentence, where it is not there."""
    for base in (_ROOT, _ROOT.parent):
        folder = base / "shared" / "data" / "traces" / name
        if folder.is_dir():
            return folder
    pytest.skip(f"there are no recorded sessions at shared/data/traces/{name}, in the checkout or beside it")
