"""What servers do about memory once they have loaded."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from cli.long_lived import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for turn in range(30):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bodies = [bytes(6_000_000) for _ in range(3)]
    bodies = [body + b"." for body in bodies]  # calloc clears nothing that is new
    del bodies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

NOISY_FREEZE = """
import gc, sys
freeze = gc.freeze
def frozen():
    freeze()
    print("frozen", gc.get_freeze_count() > 10_000, flush=True)
gc.freeze = frozen
sys.argv = ["turnkeep", *sys.argv[1:]]
from cli.main import main
main()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc is told")
def test_memory_that_bodies_had_is_not_asked_for_again():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    pages = 20 * 3 * 6_000_000 // 4096
    assert faults["given back"] > pages / 4
    assert faults["kept"] < pages / 20


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_servers_freeze_what_they_loaded_before_they_are_ready(command, smollm2_dir):
    options = {
        "serve": ["serve", "--simulate", "--model", smollm2_dir, "--port", "0"],
        "engine": ["engine", "--simulate", "--model", smollm2_dir, "--port", "0"],
    }
    process = subprocess.Popen(
        [sys.executable, "-c", NOISY_FREEZE, *options[command]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if "is ready at" in line or '"event": "ready"' in line:
                break
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
    assert "frozen True" in lines, lines
