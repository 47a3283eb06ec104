"""A client whose machine goes down says nothing: no FIN, no reset. Its generation is ended all the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("vanishing.py")


def test_a_client_that_vanishes_without_a_word(smollm2_dir, tmp_path):
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("there is no unshare or no ip here (Debian: util-linux, iproute2)")
    if subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces (unshare -rn)")
    command = ["unshare", "-rn", sys.executable, str(SCRIPT), str(smollm2_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.strip().splitlines()[-1])
    assert outcome["aborted"] == 1
    assert outcome["generated"] < 4000
