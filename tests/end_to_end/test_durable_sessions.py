"""The whole stack stops, or is killed, and starts again: the session's next turn loads its KV from disk, and says what it would
have said. The clients are the OpenAI SDK's, the model is real, in float32, where tokens are promised to be the same."""

import os
import signal
import time

import httpx2
import msgspec
import openai
import psutil
import pytest
from live_gateway import serve
from tokenizers import Tokenizer

from gateway.workers.protocol import WorkerStats
from tests.redis_server import redis_server

BLOCK = 16
SYSTEM = {"role": "system", "content": "You tell the story of a library. " + "Be kind to every reader of it. " * 30}
GREEDY = {"temperature": 0}
WILD = {"temperature": 1.6, "seed": 2}
"""What is generated so is not what the tokenizer makes of its text."""
TURNS = {"greedy": GREEDY, "filed": WILD, "shared": WILD}


class Session:
    """A conversation that outlives the stack it speaks with."""

    def __init__(self, name):
        self.name = name
        self.messages = [SYSTEM]
        self.turns = []
        self.computed = []

    def turn(self, served):
        """One more; returns what was cached of its prompt."""
        self.messages.append({"role": "user", "content": f"Part {len(self.turns)} of {self.name}, in a few words."})
        with openai.OpenAI(base_url=served.api, api_key="x", max_retries=0, timeout=120) as client:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=self.messages,
                max_tokens=40,
                extra_headers={"Session-ID": self.name},
                extra_body={"return_token_ids": True},
                **TURNS[self.name],
            )
        said = answer.model_dump()
        prompt, choice = said["prompt_token_ids"], said["choices"][0]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"].strip()})
        cached = answer.usage.prompt_tokens_details.cached_tokens
        self.turns.append((prompt, choice["token_ids"], cached))
        # The KV of a token is computed when another follows it, be it the end of the turn, which is not shown.
        whole = [*prompt, *choice["token_ids"]]
        self.computed = whole[:-1] if choice["finish_reason"] == "length" else whole
        return cached


@pytest.fixture(scope="module")
def stack(smollm2_dir):
    def start(*options):
        fixed = ("--model", smollm2_dir, "--served-model-name", "smollm2", "--dtype", "float32", "--num-blocks", 300)
        return serve(*fixed, "--engine", "threads=1", *options)

    return start


@pytest.fixture(scope="module")
def undisturbed(stack):
    """The same sessions on a stack that nothing happens to."""
    sessions = {name: Session(name) for name in TURNS}
    with stack() as served:
        for session in sessions.values():
            for _ in range(3):
                session.turn(served)
    return {name: session.turns for name, session in sessions.items()}


def tier(served, name):
    """What the replica says of one of its tiers."""
    url = httpx2.get(served.url + "/workers").json()["data"][0]["url"]
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=url.removeprefix("unix:"))) as client:
        stats = msgspec.json.decode(client.get("http://replica/v1/stats").content, type=WorkerStats)
    return next(each for each in stats.tiers if each.name == name)


def written_down(served, *sessions):
    """Waits until the disk tier has all whole blocks of these sessions. A kill before that costs the blocks that were not
    written yet (tests/offload/test_kills.py)."""
    blocks = set()
    for session in sessions:
        for end in range(BLOCK, len(session.computed) + 1, BLOCK):
            blocks.add(tuple(session.computed[:end]))
    deadline = time.monotonic() + 60
    while tier(served, "disk").blocks < len(blocks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_everything(served):
    """kill -9 of the gateway and of all that it has started."""
    gateway = psutil.Process(served.process.pid)
    everybody = [gateway, *gateway.children(recursive=True)]
    for process in everybody:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(everybody[1:], 20)
    served.process.wait(20)


@pytest.mark.timeout(900)
def test_what_was_generated_is_not_what_the_tokenizer_makes_of_it(undisturbed, smollm2_dir):
    """Or sessions would go on without their ledger too."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    for name in ("filed", "shared"):
        _, generated, _ = undisturbed[name][0]
        text = tokenizer.decode(generated, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids != generated


@pytest.mark.timeout(900)
def test_sessions_go_on_after_stops_and_kills_of_everything(stack, undisturbed, tmp_path):
    disk = (
        "--disk-kv-dir",
        tmp_path,
        "--disk-kv-bytes",
        "1GiB",
        "--engine",
        "disk-kv-min-free=1MiB",
        "--engine",
        "kv-load=always",
    )
    greedy, filed, shared = map(Session, TURNS)

    def goes_on(served, session, from_disk):
        cached = session.turn(served)
        assert session.turns[-1] == undisturbed[session.name][len(session.turns) - 1]
        assert cached > 250
        # What it says of its tiers may be some seconds old.
        deadline = time.monotonic() + 20
        while tier(served, "disk").hit_tokens_total != (cached if from_disk else 0):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    ledgers = (*disk, "--session-dir", tmp_path / "sessions")
    with stack(*ledgers) as served:
        greedy.turn(served)
        goes_on(served, greedy, from_disk=False)
        filed.turn(served)
        # What a stop waits to be written, a kill does not: this one is stopped at once.
        assert served.stop() == 0
    with stack(*ledgers) as served:
        # Only with the ledger, since no tokenizer gives these ids.
        goes_on(served, filed, from_disk=True)
        written_down(served, greedy, filed)
        kill_everything(served)
    with redis_server() as redis:
        with stack(*disk, "--redis", redis.url) as served:
            # The ledger is not in this Redis: the prompt is tokenised whole, and names the same blocks.
            goes_on(served, greedy, from_disk=True)
            for number in range(2):
                shared.turn(served)
                assert shared.turns[-1][:2] == undisturbed["shared"][number][:2]
            written_down(served, greedy, filed, shared)
            kill_everything(served)
        with stack(*disk, "--redis", redis.url) as served:
            goes_on(served, shared, from_disk=True)
            figures = tier(served, "disk")
            assert (figures.errors_total, figures.healed_blocks_total) == (0, 0)
