"""Settings of the HTTP front. Frozen values, parsed once by the command line and passed down; times are seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from gateway.access.config import AuthConfig
from gateway.admission.config import AdmissionConfig
from gateway.turns.config import TurnsConfig
from gateway.watching.config import MissesConfig
from sessions.gaps.model import GapConfig
from sessions.identity import DEFAULT_ORDER, check_order

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model the gateway speaks for: its name in the API and the directory with tokenizer and chat template.

    `tool_format`: how it writes tool calls (grammar.formats.registry); None: as its chat template says.
    """

    name: str
    directory: Path
    aliases: tuple[str, ...] = ()
    tool_format: str | None = None


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Limits and patience towards clients.

    `max_body_bytes`: larger requests get a 413. `body_timeout`: for a body to arrive. `write_timeout`: a client that takes
    nothing for so long is dropped and its generation aborted. `ping_interval`: silence after which a stream gets a comment.
    `headers_within`: a stream's headers wait this long for the number of cached tokens. `max_prompts`: prompts in one
    /v1/completions request. `max_choices`: the same for `n`. `inline_characters`: texts above this are rendered and
    tokenised on one of `threads` threads, so that they do not hold up other streams. `request_timeout`: for a request in all;
    `stall_timeout`: for which nothing may be heard of its generation; 0: no limit. `header_timeout`: for the headers of a
    request to arrive, once its connection is there. `idle_timeout`: for which a connection is kept between requests.
    `max_header_bytes`: of all headers of a request. `max_connections`: beyond them, those that are idle are closed, and where
    none is, new ones get a 503; 0: no limit. `tls_cert`, `tls_key`: PEM files for HTTPS, read again when they change.
    `second_tries`: a call of an answer that is not streamed is generated once more where it violates its schema.
    `body_memo_bytes`: for what is remembered of conversations' bodies, so that the next turn's is parsed from where it goes
    on; 0: nothing.
    `cors_origins`: of web pages that may call this gateway ("*": all); none by default.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 64 * MIB
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    ping_interval: float = 10.0
    headers_within: float = 10.0
    shutdown_timeout: float = 10.0
    max_prompts: int = 128
    max_choices: int = 128
    inline_characters: int = 8192
    threads: int = 2
    request_timeout: float = 3600.0
    stall_timeout: float = 600.0
    header_timeout: float = 20.0
    idle_timeout: float = 75.0
    max_header_bytes: int = 64 * 1024
    max_connections: int = 10_000
    second_tries: bool = False
    body_memo_bytes: int = 64 * MIB
    tls_cert: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"http.port must lie between 0 and 65535, not {self.port}")
        for name in (
            "max_body_bytes",
            "body_timeout",
            "write_timeout",
            "ping_interval",
            "headers_within",
            "header_timeout",
            "idle_timeout",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"http.{name} must be positive, not {getattr(self, name)}")
        for name in ("max_prompts", "max_choices", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"http.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("request_timeout", "stall_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"http.{name} must be positive, or 0 for no limit, not {getattr(self, name)}")
        if self.max_connections < 0:
            raise ValueError(f"http.max_connections must be at least 0 (no limit), not {self.max_connections}")
        if self.body_memo_bytes < 0:
            raise ValueError(f"http.body_memo_bytes must be at least 0 (nothing is remembered), not {self.body_memo_bytes}")
        if self.max_header_bytes < 1024:
            raise ValueError(f"http.max_header_bytes must be at least 1024, not {self.max_header_bytes}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("http.tls_cert and http.tls_key go together: give both (--tls-cert, --tls-key) or neither")
        check_origins(self.cors_origins)


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises ValueError for what no browser would send as its Origin."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
            raise ValueError(f"http.cors_origins takes origins as https://app.example.com, or *, not {origin[:100]!r}")


@dataclass(frozen=True, slots=True)
class SessionsConfig:
    """How sessions are kept (docs/sessions.md).

    `ledger`: keep the exact token ids of conversations, so that a turn costs its new messages; False renders and tokenises
    everything every time. `max_bytes`: for all ledgers of this process; the least recently used go first. `max_branches`:
    conversations kept of one session. `restore_reasoning`: put back reasoning that a client dropped, where the template
    would have kept it. `check_every`: one turn in so many is rendered whole, to see that the short way gives the same,
    and up to 16 times as rarely as long as it does; 0: none.
    """

    ledger: bool = True
    max_bytes: int = 512 * MIB
    max_branches: int = 8
    restore_reasoning: bool = True
    check_every: int = 64

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_branches"):
            if getattr(self, name) < 1:
                raise ValueError(f"sessions.{name} must be at least 1, not {getattr(self, name)}")
        if self.check_every < 0:
            raise ValueError(f"sessions.check_every must be at least 0, not {self.check_every}")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything the HTTP front is told.

    `session_sources`: where to look for a session's name, in order (`sessions.identity.SOURCES`).
    """

    models: tuple[ModelConfig, ...]
    http: HttpConfig = field(default_factory=HttpConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    session_sources: tuple[str, ...] = DEFAULT_ORDER
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    misses: MissesConfig = field(default_factory=MissesConfig)
    gaps: GapConfig = field(default_factory=GapConfig)

    def __post_init__(self) -> None:
        check_order(self.session_sources)
