"""A real redis-server in a process of its own, which tests may stop, kill and start again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


class RedisServer:
    """On a free port of this machine; its port stays the same when it is started again. It stores nothing on disk."""

    def __init__(self, directory):
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith(b"+PONG"):
                    return
            assert self.process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server did not answer"
            time.sleep(0.01)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()


@contextlib.contextmanager
def redis_server():
    """A running server. Skips the test where redis-server is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed here (Debian: apt-get install redis-server)")
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.close()
