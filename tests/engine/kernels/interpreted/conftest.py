"""These tests run the Triton kernels in Triton's interpreter, which must be asked for before Triton is first imported: in a
process of their own, which tests/engine/kernels/test_triton.py starts. By hand:

    TRITON_INTERPRET=1 pytest tests/engine/kernels/interpreted
"""

import os
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["*"]

if INTERPRETED:
    tests = Path(__file__).parents[2]
    for folder in ("kernels", "models", "core", "sampling"):
        sys.path.append(str(tests / folder))

    @pytest.fixture(autouse=True)
    def poisoned_outputs():
        """What torch allocates and does not fill is NaN, or the largest integer."""
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all()
        yield
        torch.use_deterministic_algorithms(False)
