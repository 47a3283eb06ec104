import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.supervision.config import SupervisorConfig
from gateway.supervision.death import Death
from gateway.supervision.runtime_dir import RuntimeDir
from gateway.supervision.supervisor import ReplicaStartError, Supervisor, divide_cores

ROOT = Path(__file__).parents[3]


def simulated(number, socket, threads):
    code = "from cli.main import main; main()"
    return [sys.executable, "-c", code, "engine", "--simulate", "--uds", str(socket), "--threads", str(threads)]


def script(text):
    """A command whose process runs `text`; `socket` is the path to serve on."""
    return lambda number, socket, threads: [
        sys.executable,
        "-c",
        f"socket, number, threads = {str(socket)!r}, {number}, {threads}\n" + textwrap.dedent(text),
    ]


@pytest.fixture
def run_dir():
    """Short enough for the paths of unix sockets, which pytest's own directories are not."""
    with tempfile.TemporaryDirectory(prefix="tk-") as path:
        yield Path(path)


HEALTHY = """
    import http.server, socketserver, sys, time
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        def address_string(self): return "-"
        def log_message(self, *args): pass
    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): daemon_threads = True
    server = Server(socket, Handler)
"""


class Watch:
    """What a supervisor said."""

    def __init__(self, run_dir, command_for, **config):
        self.ups, self.downs, self.lines = [], [], []
        self.changed = asyncio.Event()
        settings = {"backoff_first": 0.05, "probe_interval": 0.02, "stop_timeout": 5.0, "runtime_dir": run_dir} | config
        self.supervisor = Supervisor(
            SupervisorConfig(**settings),
            command_for,
            on_up=self._up,
            on_down=self._down,
            forward=lambda name, line: self.lines.append((name, line)),
        )

    def _up(self, up):
        self.ups.append(up)
        self.changed.set()

    def _down(self, name):
        self.downs.append(name)
        self.changed.set()

    async def until(self, condition, seconds=20):
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def gone(pids, seconds=5):
    async with asyncio.timeout(seconds):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.01)


async def test_real_replicas_come_up_serve_and_are_gone_afterwards(run_dir):
    watch = Watch(run_dir, simulated, replicas=2, cores=(0, 1))
    async with watch.supervisor as supervisor:
        await supervisor.ready()
        assert sorted(up.name for up in watch.ups) == ["replica-0", "replica-1"]
        for up in watch.ups:
            assert psutil.Process(up.pid).cpu_affinity() == [up.number]
            connector = aiohttp.UnixConnector(up.url.removeprefix("unix:"))
            async with aiohttp.ClientSession(connector=connector) as session:
                async with session.get("http://w/v1/info") as response:
                    assert (await response.json())["simulated"] is True
        (directory,) = run_dir.glob("turnkeep-run-*")
        assert directory.stat().st_mode & 0o777 == 0o700
        assert watch.downs == []
    assert sorted(watch.downs) == ["replica-0", "replica-1"]
    assert not any(alive(up.pid) for up in watch.ups)
    assert list(run_dir.iterdir()) == []
    assert any("SIGTERM received" in line for _, line in watch.lines)


async def test_a_killed_replica_is_explained_and_comes_back(run_dir, caplog):
    watch = Watch(run_dir, simulated)
    async with watch.supervisor as supervisor:
        await supervisor.ready()
        first = watch.ups[0]
        os.kill(first.pid, signal.SIGKILL)
        await watch.until(lambda: len(watch.ups) == 2)
        second = watch.ups[1]
        assert watch.downs == ["replica-0"]
        assert second.pid != first.pid
        assert second.url != first.url
        assert first.url.rpartition("/")[2] not in os.listdir(first.url.removeprefix("unix:").rpartition("/")[0])
        (message,) = [m for m in caplog.messages if "died" in m]
        assert "killed by SIGKILL" in message
        assert "memory ran out" in message
    assert list(run_dir.iterdir()) == []


async def test_back_off_doubles_and_starts_over_after_a_healthy_period(run_dir, caplog):
    caplog.set_level(logging.ERROR)
    # Each life answers once it is probed, then ends with code 7; the fourth lives longer than the healthy period.
    text = HEALTHY + (
        "\n    import os, threading, pathlib"
        "\n    lives = pathlib.Path(socket).parent.parent / 'lives'"
        "\n    life = len(lives.read_text()) if lives.exists() else 0"
        "\n    lives.write_text('x' * (life + 1))"
        "\n    print('life', life, file=sys.stderr, flush=True)"
        "\n    threading.Timer(2.1 if life == 3 else 0.2, lambda: os._exit(7)).start()"
        "\n    server.serve_forever()"
    )
    watch = Watch(run_dir, script(text), backoff_first=0.04, backoff_max=10.0, healthy_period=2.0)
    async with watch.supervisor:
        await watch.until(lambda: len(watch.downs) >= 5)
    waits = [m.split("again in ")[1].split(" s")[0] for m in caplog.messages if "died" in m]
    assert waits[:5] == ["0.0", "0.1", "0.2", "0.0", "0.1"]
    assert "exit code 7" in caplog.messages[0]
    assert "life 0" in caplog.messages[0]


async def test_one_that_cannot_start_is_given_up_with_its_own_words(run_dir):
    text = "import sys; print('Error: no weights in models/x.', file=sys.stderr); sys.exit(1)"
    watch = Watch(run_dir, script(text), startup_attempts=2)
    async with watch.supervisor as supervisor:
        with pytest.raises(ReplicaStartError) as caught:
            async with asyncio.timeout(20):
                await supervisor.ready()
        with pytest.raises(ReplicaStartError):
            await supervisor.failed()
    assert str(caught.value).startswith("replica-0 died 2 times before it was ready and was given up (exit code 1).")
    assert "Error: no weights in models/x." in str(caught.value)
    assert watch.ups == []
    assert watch.downs == []
    assert watch.lines == [("replica-0", "Error: no weights in models/x.")] * 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (lambda number, socket, threads: ["/no/such/program"], "cannot run /no/such/program"),
        (lambda number, socket, threads: [sys.executable, "-c", "import sys; sys.exit(2)"], "exit code 2"),
    ],
)
async def test_what_trying_again_cannot_mend_is_given_up_at_once(run_dir, command, words):
    watch = Watch(run_dir, command)
    async with watch.supervisor as supervisor:
        with pytest.raises(ReplicaStartError, match="died once") as caught:
            await supervisor.ready()
    assert words in str(caught.value)


async def test_one_that_never_gets_ready_is_killed_and_given_up(run_dir):
    text = "import os, time, sys; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    watch = Watch(run_dir, script(text), startup_attempts=1, startup_timeout=0.8)
    async with watch.supervisor as supervisor:
        with pytest.raises(ReplicaStartError, match=r"not ready within 0\.8 s"):
            await supervisor.ready()
    assert not alive(int(watch.lines[0][1]))


async def test_a_bad_command_for_is_a_failure_not_a_silence(run_dir):
    def command_for(number, socket, threads):
        raise KeyError("model")

    watch = Watch(run_dir, command_for)
    async with watch.supervisor as supervisor:
        with pytest.raises(ReplicaStartError, match="can no longer be supervised"):
            await supervisor.ready()


async def test_one_that_ignores_sigterm_is_killed_with_its_children(run_dir):
    text = HEALTHY + (
        "\n    import signal, subprocess"
        "\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        "\n    child = subprocess.Popen(['sleep', '60'])"
        "\n    print('child', child.pid, file=sys.stderr, flush=True)"
        "\n    server.serve_forever()"
    )
    watch = Watch(run_dir, script(text), stop_timeout=0.3)
    async with watch.supervisor as supervisor:
        await supervisor.ready()
        began = time.monotonic()
    assert 0.3 <= time.monotonic() - began < 3
    child = int(watch.lines[0][1].split()[1])
    await gone([watch.ups[0].pid, child])


async def test_output_without_line_ends_and_in_floods_is_taken(run_dir):
    text = HEALTHY + (
        "\n    import threading"
        "\n    sys.stderr.write('y' * 100_000); sys.stderr.write('\\n\\u00e9\\xff tail'); sys.stderr.flush()"
        "\n    print('{\"event\": \"ready\"}'); print('{not json'); print('hello', flush=True)"
        "\n    for _ in range(3000): sys.stderr.write('z' * 100 + '\\n')"
        "\n    sys.stderr.flush()"
        "\n    server.serve_forever()"
    )
    watch = Watch(run_dir, script(text))
    async with watch.supervisor as supervisor:
        await supervisor.ready()
        async with asyncio.timeout(10):
            while len(watch.lines) < 3000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    lines = [line for _, line in watch.lines]
    assert sum(line.count("y") for line in lines if set(line) == {"y"}) == 100_000
    assert max(map(len, lines)) <= 100_000
    assert "hello" in lines
    assert "{not json" in lines
    assert not any("ready" in line for line in lines)
    assert lines.count("z" * 100) >= 2990


PARENT = """
import asyncio, sys
from pathlib import Path
from gateway.supervision.config import SupervisorConfig
from gateway.supervision.supervisor import Supervisor
sys.path.insert(0, {here!r})
from test_supervisor import simulated

async def main():
    config = SupervisorConfig(replicas=2, runtime_dir=Path({tmp!r}))
    down = lambda name: None
    async with Supervisor(config, simulated, on_up=lambda up: print(up.pid, flush=True), on_down=down) as supervisor:
        await supervisor.ready()
        print("ready", flush=True)
        await supervisor.failed()

asyncio.run(main())
"""


async def test_replicas_die_with_a_parent_that_is_killed(run_dir):
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT.format(here=str(Path(__file__).parent), tmp=str(run_dir))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    try:
        said = [parent.stdout.readline().strip() for _ in range(3)]
        assert said[2] == "ready"
        pids = [int(pid) for pid in said[:2]]
        assert all(alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    await gone(pids)
    # Nobody was left to remove the sockets; whoever comes next does.
    assert len(list(run_dir.glob("turnkeep-run-*"))) == 1
    directory = RuntimeDir(run_dir)
    assert list(run_dir.iterdir()) == [directory.path]
    directory.close()
    assert list(run_dir.iterdir()) == []


def test_runtime_dirs_of_the_living_are_left_alone(run_dir):
    first = RuntimeDir(run_dir)
    second = RuntimeDir(run_dir)
    assert sorted(run_dir.iterdir()) == sorted([first.path, second.path])
    first.close()
    first.close()
    second.close()
    with pytest.raises(ValueError, match="no directory for sockets"):
        RuntimeDir(run_dir / "absent")
    deep = run_dir / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ValueError, match="too long for unix sockets"):
        RuntimeDir(deep)
    assert list(deep.iterdir()) == []


def test_cores_are_divided():
    assert divide_cores((0, 1, 2, 3, 4), 2) == [(0, 1, 2), (3, 4)]
    assert divide_cores((3, 5), 2) == [(3,), (5,)]
    assert divide_cores((3, 5), 3) == [(3,), (5,), (3,)]
    assert divide_cores(tuple(range(7)), 1) == [tuple(range(7))]


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (Death(0, 1.0), "exit code 0"),
        (Death(3, 1.0), "exit code 3"),
        (Death(-signal.SIGKILL, 1.0), "killed by SIGKILL: .*memory ran out"),
        (Death(-signal.SIGSEGV, 1.0), "killed by SIGSEGV: a fault in native code"),
        (Death(-signal.SIGTERM, 1.0), "killed by SIGTERM$"),
        (Death(-40, 1.0), "signal 40|SIGRT"),
        (Death(None, 0.0), "could not be started"),
        (Death(-9, 1.0, reason="it was not ready within 3 s"), "^it was not ready within 3 s$"),
    ],
)
def test_deaths_in_words(death, words):
    import re

    assert re.search(words, death.cause)


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"cores": ()}, {"startup_attempts": 0}, {"stop_timeout": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError):
        SupervisorConfig(**wrong)
