"""The values a turn passes through on its way, and the seams between the parts of the gateway.

    HTTP body -> (api codec) Turn -> (rendering) Prompt -> (dispatcher) Generation -> (parsers, codec) answer
                                                                                  -> TurnRecord -> observers

They are plain frozen values: a codec knows nothing of workers, a dispatcher nothing of dialects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.router.receipts import Decision
from gateway.workers.protocol import Chunk, RetentionHint, SamplingParams, Started, WorkerInfo
from grammar.thinking import Thinking
from grammar.tools import ResponseFormat, Tool, ToolChoice, Unenforced
from prefix_cache.packed_tokens import PackedTokens


class TurnError(Exception):
    """An answer that is not a completion. Every API codec turns it into its own dialect.

    `status` is the HTTP status, `code` a stable word (docs/http-api.md), `message` a sentence that names the remedy,
    `param` the offending field of the body, `retry_after` seconds for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class SessionRef:
    """Who is talking. `key` is None for a request that names no session; `source` says which header or field named it.

    `tenant` is a digest of the API key ("" without one): two tenants never share a session. `conflicts`: sources that name
    another session than the one taken. `final`: the caller says this turn is the last. `ttl`: seconds for which it asks
    its prefix to be kept.
    """

    tenant: str
    key: str | None
    source: str | None = None
    parent: str | None = None
    correlation: str | None = None
    conflicts: tuple[str, ...] = ()
    final: bool = False
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request in no dialect. `messages` are OpenAI-style dicts, normalised: content is str (never None) or absent
    only where tool_calls stand in its place; tool call arguments are JSON objects. `message_digests`: of the first of them,
    as far as they are known already, joined (sessions.digests)."""

    request_id: str
    model: str
    session: SessionRef
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    response_format: ResponseFormat = ResponseFormat()
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    priority: int = 0
    cache_salt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking | None = None
    warnings: tuple[str, ...] = ()
    message_digests: bytes = b""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a worker computes: token ids, plus the grammar source and what that does not hold.

    `digests` are the block hashes of the full blocks under the worker pool's namespace and the request's salt.
    `last_instance`: the worker that its session's last turn ran on, by its own id; "": not known.
    """

    tokens: PackedTokens
    digests: Sequence[bytes]
    grammar: str | None = None
    cache_salt: str | None = None
    unenforced: tuple[Unenforced, ...] = ()
    last_instance: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def packed_token_ids(self) -> bytes:
        """All ids as little-endian uint32; put together for each who asks."""
        return self.tokens.whole()


@dataclass(frozen=True, slots=True)
class Receipt:
    """Why a request went where it went. `matched_tokens` is what the index promised; the answer tells what came true.
    `instance`: of the worker (gateway.workers.protocol.WorkerInfo), as gateways name workers each for itself; "": not known.
    `seconds`: the estimate of the time to the first token. `decision`: all that was weighed, and later what came of it."""

    worker: str
    reason: str
    matched_tokens: int
    candidates: int
    instance: str = ""
    seconds: float = 0.0
    decision: Decision | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Migration:
    """A request's worker was `lost` (`why` is a sentence) and another `worker` went on after `tokens` generated ones.
    `at`: when it was lost, on the wall clock (Unix); `seconds`: from then until the other had accepted it."""

    lost: str
    worker: str
    tokens: int
    at: float
    seconds: float
    why: str


class Generation(Protocol):
    """A request in flight on a worker. Leaving it early (`aclose`) aborts it there."""

    @property
    def receipt(self) -> Receipt:
        """Where it went and why; of several workers, the last."""

    @property
    def migrations(self) -> Sequence[Migration]:
        """How it changed workers after it had started."""

    async def started(self) -> Started:
        """Waits until the worker has taken it out of its queue. Raises TurnError when it never will."""

    def chunks(self) -> AsyncIterator[Chunk]:
        """Tokens, Finished and Done. Raises TurnError when the worker fails; Failed chunks are raised as TurnError too."""

    async def aclose(self) -> None:
        """Ends it; idempotent. Awaiting it means the worker has been told."""


class Dispatcher(Protocol):
    """Chooses a worker and starts a generation on it."""

    async def dispatch(
        self,
        *,
        request_id: str,
        model: str,
        session: SessionRef,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int,
        trace_headers: Mapping[str, str],
        known_as: str | None = None,
        whole: bool = False,
    ) -> Generation:
        """`known_as`: what the gateway calls a session that the request did not name. Its worker knows it by that; where it
        goes is decided by its prompt, as of any that names none. `whole`: the answer is delivered when it is complete, so
        nobody waits for its tokens one by one.

        Raises TurnError: 503 when no worker can take it, 4xx when the worker refuses it as it is.

        A worker that fails before its first chunk is retried elsewhere.
        """

    def pool_info(self, model: str) -> WorkerInfo:
        """What the workers of a model have in common (namespace, block size, context length). Raises TurnError 404 for an
        unknown model, 503 while none of its workers is up."""

    def residency(self, digests: Sequence[bytes]) -> Mapping[str, int]:
        """Worker -> how many of these blocks, from the first on without a gap, it holds."""

    def supersede(self, model: str, digests: bytes) -> None:
        """Blocks (joined digests) that no session will come back to: the workers that hold them may give them up first. Returns
        at once."""

    def retain(self, worker: str, hint: RetentionHint) -> None:
        """Tells a worker when a session will be back, where it takes such hints. Returns at once."""

    def models(self) -> tuple[str, ...]:
        """Names that `model` may have, the default first."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What is known of a turn when it is over. Times are seconds; `started_at` is on the wall clock (Unix)."""

    request_id: str
    dialect: str
    model: str
    session: SessionRef
    started_at: float
    duration: float
    time_to_first_token: float | None
    request: Mapping[str, Any]
    response: Mapping[str, Any] | None
    status: int
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    worker: str | None
    error: str | None = None


class TurnObserver(Protocol):
    """Told of every finished turn, on the event loop: it must not block (the recorder writes on a thread of its own)."""

    def turn_finished(self, record: TurnRecord) -> None: ...
