"""The worker protocol: the wire types between the gateway and a replica. Tokens in, tokens out.

A replica serves, over HTTP on a TCP port or a unix socket (docs/worker-protocol.md has examples):

    GET  /health            200 once it can generate, 503 with a sentence before that
    GET  /v1/info           WorkerInfo
    GET  /v1/stats          WorkerStats
    POST /v1/generate       GenerateRequest -> a stream of Chunk, one JSON value a line (application/x-ndjson)
    POST /v1/abort          AbortRequest -> AbortReply
    POST /v1/supersede      SupersedeRequest -> SupersedeReply
    POST /v1/retain         RetainRequest -> RetainReply
    GET  /v1/retain         WaitingSessions
    GET  /v1/kv_events      ?instance=I&after=SEQ -> a stream of prefix_cache.events.KVMessage, one a line
    GET  /metrics           Prometheus text

Requests are JSON or MessagePack (application/msgpack); MessagePack carries token ids as packed little-endian uint32, which
costs nothing to read at 100k tokens. A request that is refused gets a 4xx or 503 with an ErrorReply. One that was accepted
gets a 200, and its stream ends with exactly one Finished per choice followed by one Done, or with one Failed. Closing the
connection aborts the request.

This is the only file of `gateway` that `engine` may see.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 1

MAX_GATHER_SECONDS = 1.0

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to choose tokens. Ranges are checked by `engine.sampling` when a request is added; names follow OpenAI's API.

    `max_tokens` None: as many as the context holds. `top_k` 0: off. `logprobs` None: none; 0: the chosen token's only;
    k: the k most likely beside it. `seed` None: the replica draws one. `stop` strings do not fire inside `stop_exempt`
    regions, given as (begin text, end text), nor before the text `stop_after` has come ("" for none). `visible_tokens`:
    special tokens that count as text where stop strings are looked for. Penalties act as documented by OpenAI (presence,
    frequency: generated tokens) and by the CTRL paper (repetition: prompt and generated tokens).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_exempt: tuple[tuple[str, str], ...] = ()
    stop_after: str = ""
    visible_tokens: tuple[str, ...] = ()
    ignore_eos: bool = False


class PromptPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a prompt that the worker was sent before: so many tokens, and the xxh3-128 digest of them, packed."""

    tokens: int
    digest: bytes


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far a choice came on another worker: the ids it generated there, packed as little-endian uint32. `finished`: it has
    ended there, and nothing more is generated for it; its ids may be left out."""

    packed_token_ids: bytes = b""
    finished: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt. Exactly one of `token_ids` and `packed_token_ids` is given.

    `grammar` is the source of a structural tag (JSON text), never a compiled grammar. `priority`: lower goes first.
    `prefix`: what comes before packed_token_ids, for a worker whose capabilities say `prompt_prefixes`.
    `gather`: seconds for which tokens after the first may be kept back, to come together; whoever delivers the answer whole is
    woken up less often. For a worker whose capabilities say so.
    `session` is opaque: the replica uses it in logs and spans, and, within `tenant`, to know who is back (RetentionHint).
    Trace context travels in the traceparent header. `model`: one of the worker's `adapters`; None: its model.

    `resume`: empty, or one for each choice of a request that another worker began. The generation goes on from there as if it
    had been here all the time: `sampling` is that of the whole (its seed given, unless it is greedy), and only what is new
    is sent and counted.
    """

    request_id: str
    token_ids: list[int] | None = None
    packed_token_ids: bytes | None = None
    prefix: PromptPrefix | None = None
    sampling: SamplingParams = SamplingParams()
    grammar: str | None = None
    priority: int = 0
    session: str | None = None
    tenant: str = ""
    cache_salt: str | None = None
    model: str | None = None
    resume: tuple[ResumedChoice, ...] = ()
    gather: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_GATHER_SECONDS)] = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Natural log-probability of one generated token and of the `top` most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Started(msgspec.Struct, frozen=True, tag_field="type", tag="started", omit_defaults=True):
    """First on every stream: the request left the queue; `cached_tokens` of its prompt need no prefill. `cached_known` False:
    the worker says how many only at the end."""

    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    cached_known: bool = True


class Tokens(msgspec.Struct, frozen=True, tag_field="type", tag="tokens", omit_defaults=True):
    """New tokens of one choice, in order. `logprobs` is empty or as long as `token_ids`."""

    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag_field="type", tag="finished", omit_defaults=True):
    """The end of one choice. `stop_reason` is the stop string or stop token id that ended it (None: EOS or length).

    All its tokens were sent before, the stop token and the text of the stop string among them.
    """

    finish_reason: FinishReason
    index: int = 0
    stop_reason: str | int | None = None


class Done(msgspec.Struct, frozen=True, tag_field="type", tag="done", omit_defaults=True):
    """The end of a stream: what the request took. Seconds are on the replica's monotonic clock. `cached_known` False: the
    worker did not say what was cached. `drafted`, `accepted`, `forced` tokens, `decode_passes`: as WorkerStats counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int
    cached_known: bool = True
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    decode_passes: int = 0


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="failed", omit_defaults=True):
    """The request was accepted and could not be finished. Nothing follows."""

    code: str
    message: str


Chunk = Started | Tokens | Finished | Done | Failed


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends a request wherever it is."""

    request_id: str


class AbortReply(msgspec.Struct, frozen=True):
    """`aborted` is False when no such request was running or waiting."""

    aborted: bool


class SupersedeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that no session will come back to, as joined digests of 16 bytes: they are given up before any other. Blocks in
    use, and blocks that are used again before they are given up, are blocks like any other."""

    digests: bytes


class SupersedeReply(msgspec.Struct, frozen=True):
    """How many of the blocks are now the first to go."""

    marked: int


class RetentionHint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A session's turn has ended, and this is when its next one is expected.

    `request_id`: of the turn. `tools`: what it called. `return_p50`, `return_p90`: seconds after the end of the turn by which
    the session is back in half, and in nine of ten, of the cases seen; None where nothing is known. `weight`: how many
    cases that is, old ones counted for less. `ttl`: seconds for which the caller asks its prefix to be kept.
    `state` closed: it will not be back. released: nothing is to be kept for it any longer than for others. prefetch: it will be
    here soon; what lies on disk only is brought into memory.
    """

    session: str
    request_id: str
    tenant: str = ""
    state: Literal["waiting", "closed", "released", "prefetch"] = "waiting"
    tools: tuple[str, ...] = ()
    return_p50: float | None = None
    return_p90: float | None = None
    weight: float = 0.0
    ttl: float | None = None


class RetainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hints, in the order in which the turns ended; MAX_RETENTION_HINTS at most."""

    hints: tuple[RetentionHint, ...]


class RetainReply(msgspec.Struct, frozen=True):
    """How many sessions the replica now knows to wait."""

    waiting: int


class WaitingSession(msgspec.Struct, frozen=True):
    """A session between two turns, for `waited` seconds by now."""

    hint: RetentionHint
    waited: float


class WaitingSessions(msgspec.Struct, frozen=True):
    """Sessions that wait, the longest away first; some of them where there are many. `hints_total`: since the start."""

    sessions: tuple[WaitingSession, ...]
    hints_total: int


MAX_RETENTION_HINTS = 1000


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refusal. `code` is stable (docs/worker-protocol.md lists them), `message` is a sentence with the remedy,
    `field` the path of what is wrong (for a grammar: a JSON pointer into the structural tag)."""

    code: str
    message: str
    field: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker can do."""

    token_prompts: bool = True
    grammars: bool = True
    kv_events: bool = True
    logprobs: bool = True
    retention_hints: bool = False
    supersede: bool = False
    prompt_prefixes: bool = False
    resume: bool = False
    gather: bool = False


class StartupSeconds(msgspec.Struct, frozen=True):
    """What a start took, from the launch of the process on: loading (interpreter, weights, tokenizer), compiling kernels
    (or finding them compiled), and warming up (measuring memory, a first pass)."""

    load: float
    compile: float
    warm_up: float


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker is. `instance` is new at every start; `namespace` (hex) is not, as long as KV stays interchangeable.
    `adapters`: further models that it serves, LoRA adapters mostly. `vocab_size` 0: it does not say.
    `startup`: None for a worker that does not say."""

    protocol_version: int
    instance: str
    model: str
    namespace: str
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_concurrency: int
    adapters: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()
    simulated: bool = False
    startup: StartupSeconds | None = None


class TierStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tier below the device. What it holds, and `stored`, `evicted` and `healed` (damaged blocks thrown away), are of all
    who share it, `users` of them on this machine; the rest is this worker's: prompt tokens loaded from it, errors, seconds that
    a block takes, measured."""

    name: str
    blocks: int
    used_bytes: int
    max_bytes: int
    stored_blocks_total: int = 0
    evicted_blocks_total: int = 0
    healed_blocks_total: int = 0
    hit_tokens_total: int = 0
    errors_total: int = 0
    seconds_per_block: float = 0.0
    users: int = 1


class DrafterStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that one source guessed and what became of them. `drafts`: guesses that were verified, of one sequence in one step
    each. `accepted_per_position`: how many guesses came true at least up to their first, second, ... token."""

    name: str
    drafts_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    accepted_per_position_total: tuple[int, ...] = ()


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load and totals. Blocks: free + cached + referenced = num_blocks; free ones hold nothing, cached ones hold KV that
    nobody uses right now and can be evicted. Totals count from the start of the instance. `draining`: it shuts down, finishes
    what it has and takes nothing new. `loading`: sequences whose blocks are on their way from a tier; they count neither as
    running nor as waiting. `lost_blocks`: those that a session came back for and that had to be computed again.
    `drafted`, `accepted`, `forced` tokens: guessed, come true, left no choice about by a grammar; `drafts`: whole guesses,
    `drafters`: their parts by source. `mask_seconds`: what grammars took of the engine's thread.
    `prefetched_blocks`: brought from disk into memory before anybody asked; `useless_prefetches`: for which nobody asked within
    ten minutes. `fetched_blocks`: brought onto the device before their session was back; `useful_fetches` were still there when
    it was, `useless_fetches` had been given up, or it did not come within ten minutes.
    `held`: those of `waiting` that wait until sessions in progress leave room for theirs, with so many tokens of prompts and
    blocks that they will need; `sessions_in_progress`, `sessions_paused`: where sessions are scheduled (docs/offload.md).
    """

    instance: str
    running: int
    waiting: int
    waiting_prompt_tokens: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    steps_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    requests_total: int
    aborted_total: int
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    forced_tokens_total: int = 0
    decode_passes_total: int = 0
    mask_seconds_total: float = 0.0
    drafts: DrafterStats | None = None
    drafters: tuple[DrafterStats, ...] = ()
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    draining: bool = False
    loading: int = 0
    lost_blocks_total: int = 0
    prefetched_blocks_total: int = 0
    useless_prefetches_total: int = 0
    fetched_blocks_total: int = 0
    useful_fetches_total: int = 0
    useless_fetches_total: int = 0
    held: int = 0
    held_prompt_tokens: int = 0
    held_blocks: int = 0
    sessions_in_progress: int = 0
    sessions_paused: int = 0
    held_total: int = 0
    pauses_total: int = 0
    tiers: tuple[TierStats, ...] = ()
