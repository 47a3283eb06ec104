"""What a gateway is told of a worker: where it is, what speaks there, and what else is needed to reach it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from gateway.workers.transport import parse_url

WorkerKind = Literal["turnkeep", "vllm", "sglang", "openai"]
KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)
OPTIONS = ("events", "replay", "topic", "model", "key-env", "concurrency")
"""Options of a worker in a text: `vllm=http://host:8000,events=tcp://host:5557,replay=tcp://host:5558`."""

_KIND = re.compile(r"([a-z0-9_-]+)=(.*)", re.DOTALL)
_ZMQ = re.compile(r"(tcp://[^\s]+:\d{1,5}|ipc://\S+)")
DEFAULT_CONCURRENCY = 256
PLACEHOLDER = "found.invalid:1"
"""Host and port of a worker's URL where those are still to be found (gateway/discovery)."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `kind`: turnkeep (our own replica), vllm, sglang, or openai (any OpenAI-compatible server, opaque).

    `events`, `replay`: ZMQ addresses of its KV events and of their replay; `topic`: of the events. `model`: what the gateway
    calls the worker's model, where that is not the worker's own name for it. `api_key`: sent as a bearer token. `concurrency`:
    requests it serves at once, for kinds that do not say.
    """

    url: str
    kind: WorkerKind = "turnkeep"
    events: str | None = None
    replay: str | None = None
    topic: str = ""
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = DEFAULT_CONCURRENCY

    def __post_init__(self) -> None:
        """Raises ValueError with a sentence."""
        if self.kind not in KINDS:
            raise ValueError(f"worker kind '{self.kind}' is not known; choose one of {', '.join(KINDS)}")
        parse_url(self.url)
        for name in ("events", "replay"):
            address = getattr(self, name)
            if address is None:
                continue
            if self.kind not in ("vllm", "sglang"):
                raise ValueError(f"worker {self.url}: {name} is for kinds vllm and sglang, not for {self.kind}")
            if not _ZMQ.fullmatch(address) or "*" in address:
                raise ValueError(f"worker {self.url}: {name} takes tcp://host:port or ipc://path, not '{address}'")
            if "{" in address and not self.url.endswith(f"://{PLACEHOLDER}"):
                raise ValueError(f"worker {self.url}: {name} is '{address}', but {{host}} is for hosts that are looked up")
        if self.replay is not None and self.events is None:
            raise ValueError(f"worker {self.url}: replay without events; give both")
        if self.concurrency < 1:
            raise ValueError(f"worker {self.url}: concurrency must be at least 1, not {self.concurrency}")
        if self.model == "":
            raise ValueError(f"worker {self.url}: model must not be empty")


def parse_worker(text: str, environ: Mapping[str, str]) -> WorkerSpec:
    """A worker as it stands on a command line: [KIND=]URL[,OPTION=VALUE ...]. Raises ValueError with a sentence.

    `environ` is where `key-env` looks up a key, so that none stands on a command line.
    """
    address, *given = text.split(",")
    match = _KIND.match(address) if not address.startswith(("http://", "https://", "unix:")) else None
    kind, url = (match[1], match[2]) if match else ("turnkeep", address)
    options: dict[str, str] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or name not in OPTIONS:
            raise ValueError(f"worker {url}: '{option}' is no option; they are {', '.join(f'{name}=...' for name in OPTIONS)}")
        options[name] = value
    return make_spec(url, kind, options, environ)


def make_spec(url: str, kind: str, options: Mapping[str, str | int], environ: Mapping[str, str]) -> WorkerSpec:
    """A worker from its parts, as text or file give them. Raises ValueError with a sentence."""
    key_env, key = options.get("key-env"), None
    if key_env is not None:
        key = environ.get(str(key_env))
        if not key:
            raise ValueError(f"worker {url}: the environment variable {key_env} of key-env is not set")
    try:
        concurrency = int(options.get("concurrency", DEFAULT_CONCURRENCY))
    except ValueError as error:
        raise ValueError(f"worker {url}: concurrency takes a whole number, not '{options['concurrency']}'") from error
    named = {name: str(options[name]) for name in ("events", "replay", "topic", "model") if name in options}
    if kind not in KINDS:
        raise ValueError(f"worker kind '{kind}' is not known; choose one of {', '.join(KINDS)}")
    return WorkerSpec(url, kind, api_key=key, concurrency=concurrency, **named)
