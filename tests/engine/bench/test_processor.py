"""Other processes' share of the processors: theirs counts, our own does not."""

import subprocess
import sys
import time

import psutil

from engine.bench.processor import OtherProcesses


def test_what_another_process_takes_counts_and_what_this_one_takes_does_not():
    others = OtherProcesses()
    began = time.monotonic()
    spin = "import time\nwhile time.process_time() < 2: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    processors = psutil.cpu_count() or 1
    taken = others.share() * (time.monotonic() - began) * processors
    assert taken > 1.5, "it took two seconds"
    others = OtherProcesses()
    began, own = time.monotonic(), time.process_time()
    while time.process_time() - own < 1.0:
        pass
    seconds = time.monotonic() - began
    # Whatever else runs here is counted, but not what is ours.
    assert others.share() <= 1 - 1.0 / (seconds * processors) + 0.05
