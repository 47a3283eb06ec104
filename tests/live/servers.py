"""Servers of other projects that live tests start: found where the environment says, on free ports, ended with the block."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


def program(variable, name):
    """Its path, from an environment variable or the PATH. Skips the test, with a sentence, where it is not to be had."""
    found = os.environ.get(variable) or shutil.which(name)
    if not found or not Path(found).exists():
        pytest.skip(f"{name} is not here: make its environment with `make`, or set {variable} to its path")
    return str(Path(found).absolute())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command, health, *, env=None, seconds=300):
    """A process of its own group that answers 200 at `health` (a URL). Fails with the end of its log."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

        def said():
            log.seek(0)
            return log.read()[-4000:].decode("utf-8", "replace")

        try:
            deadline = time.monotonic() + seconds
            while True:
                with contextlib.suppress(OSError, urllib.error.URLError):
                    with urllib.request.urlopen(health, timeout=5) as answer:
                        if answer.status == 200:
                            break
                assert process.poll() is None, said()
                assert time.monotonic() < deadline, said()
                time.sleep(0.25)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
