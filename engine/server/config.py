"""Settings of the replica server. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES_PER_TOKEN = 12  # a 32-bit id in decimal, a comma and a space
BODY_BYTES_FOR_THE_REST = 8 * 2**20  # grammars, mostly


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`max_body`: bytes of the largest request body; None: as much as a prompt of the longest context takes as JSON.

    `body_timeout`: how long a body may take to arrive. `write_timeout`: how long a reader may take nothing before it is
    disconnected. `heartbeat`: silence on a KV event stream before a heartbeat is sent. `event_gather`: the least time between
    two writes to one. `shutdown_timeout`: how long streams may go on after the signal to stop.
    `prompt_memory`: bytes of prompts remembered, so that their sessions need not send them
    again.

    `kv_events`, `kv_replay`: ZMQ addresses to bind, where KV events are published as vLLM does, and replayed; None: not at all.
    `kv_topic`: of the messages.
    """

    max_body: int | None = None
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    heartbeat: float = 5.0
    max_subscribers: int = 64
    shutdown_timeout: float = 30.0
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_topic: str = ""
    event_gather: float = 0.02
    prompt_memory: int = 64 * 2**20

    def body_limit(self, max_model_len: int) -> int:
        """Bytes of the largest body for a context of `max_model_len` tokens."""
        return BODY_BYTES_PER_TOKEN * max_model_len + BODY_BYTES_FOR_THE_REST if self.max_body is None else self.max_body
