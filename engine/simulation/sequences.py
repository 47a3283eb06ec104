"""What a simulated engine knows of a request and of each of its choices."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from engine.block_table import BlockTable
from engine.core import RequestRefused
from engine.resuming import resumed_tokens
from engine.sampling import params
from engine.sampling.stopping import StopChecker, StopDecision
from engine.session_numbers import session_number
from engine.simulation.config import SimulationConfig
from gateway.workers.protocol import GenerateRequest, SamplingParams
from grammar.detokenizer import Detokenizer
from prefix_cache.chain_memory import ChainMemory
from prefix_cache.hashing import (
    TOKEN_BYTES,
    DigestChain,
    JoinedDigests,
    chain_digest,
    pack_tokens,
    root_digest,
    unpack_tokens,
)

_TOKEN = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked, and the digests of its prompt's full blocks."""

    request_id: str
    sampling: SamplingParams
    priority: int
    packed: bytes
    root: bytes
    digests: JoinedDigests
    max_total: int
    session: int = 0
    resumed: tuple[tuple[bool, tuple[int, ...]], ...] = ()
    """Of a request that another worker began, for each choice: whether it has ended there, else the ids it generated."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


def prepare(
    request: GenerateRequest, config: SimulationConfig, namespace: bytes, chains: ChainMemory, can_stop_at_text: bool
) -> Prepared:
    """Checks a request. Raises RequestRefused with the codes of docs/worker-protocol.md."""
    if request.grammar is not None and not config.accept_grammars:
        message = (
            "This replica is simulated and follows no grammar; start it with --sim-grammars ignore (turnkeep serve: "
            "--engine sim-grammars=ignore), or send none."
        )
        raise RequestRefused("unsupported_grammar", message, "grammar")
    sampling = request.sampling
    params.validate(sampling, vocab_size=config.vocab_size, max_model_len=config.max_model_len)
    if sampling.logprobs is not None:
        message = "This replica is simulated and has no probabilities; leave logprobs out."
        raise RequestRefused("unsupported", message, "sampling.logprobs")
    if sampling.stop and not can_stop_at_text:
        message = "This replica is simulated without a tokenizer and cannot see stop strings; give it a model with one."
        raise RequestRefused("unsupported", message, "sampling.stop")
    packed = _packed_prompt(request, config.vocab_size)
    prompt = len(packed) // TOKEN_BYTES
    if sampling.n > config.max_num_seqs:
        message = f"n is {sampling.n}, but this replica runs at most {config.max_num_seqs} choices at once; ask for fewer."
        raise RequestRefused("invalid_sampling", message, "sampling.n")
    resumed = resumed_tokens(request, config.vocab_size, greedy=sampling.temperature == 0.0)
    root = root_digest(namespace, request.cache_salt)
    session = session_number(request.tenant, request.session)
    return Prepared(
        request_id=request.request_id,
        sampling=sampling,
        priority=request.priority if config.scheduling == "priority" else 0,
        packed=packed,
        root=root,
        digests=chains.digests(packed, root, session),
        max_total=_max_total(prompt, sampling.max_tokens, config),
        session=session,
        resumed=tuple((choice.finished, tuple(ids)) for choice, ids in zip(request.resume, resumed, strict=True)),
    )


def _max_total(prompt: int, max_tokens: int | None, config: SimulationConfig) -> int:
    """Tokens of prompt and generation together. The KV of the token generated last is never needed."""
    if prompt >= config.max_model_len:
        message = (
            f"The prompt has {prompt} tokens; with one generated token the context holds {config.max_model_len}, so a prompt "
            f"may have {config.max_model_len - 1}. Shorten it."
        )
        raise RequestRefused("context_length_exceeded", message, "token_ids")
    capacity = config.num_blocks * config.block_size + 1
    wanted = min(config.max_model_len, max(capacity, prompt + 1) if max_tokens is None else prompt + max_tokens)
    blocks = -(-(wanted - 1) // config.block_size)
    if blocks > config.num_blocks:
        message = (
            f"The prompt of {prompt} tokens and {wanted - prompt} generated ones need {blocks} KV blocks of "
            f"{config.block_size} tokens, but this replica has {config.num_blocks} in all. Shorten the prompt, lower "
            "max_tokens, or give the replica more blocks."
        )
        raise RequestRefused("kv_capacity_exceeded", message, "token_ids" if max_tokens is None else "sampling.max_tokens")
    return wanted


def _packed_prompt(request: GenerateRequest, vocab_size: int) -> bytes:
    if (request.token_ids is None) == (request.packed_token_ids is None):
        message = "Give the prompt as token_ids or as packed_token_ids, exactly one of them."
        raise RequestRefused("invalid_request", message, "token_ids")
    field_name = "token_ids" if request.packed_token_ids is None else "packed_token_ids"
    try:
        packed = request.packed_token_ids if request.token_ids is None else pack_tokens(request.token_ids)
        ids = unpack_tokens(packed or b"")
    except (OverflowError, ValueError) as error:
        raise RequestRefused("invalid_token", f"{field_name}: {error}.", field_name) from error
    if not ids.size:
        raise RequestRefused("empty_prompt", "The prompt has no tokens; send at least one.", field_name)
    if int(ids.max()) >= vocab_size:
        position = int(ids.argmax())
        message = f"Token id {int(ids[position])} at position {position} is outside of the vocabulary of {vocab_size} tokens."
        raise RequestRefused("invalid_token", message, f"{field_name}[{position}]")
    return ids.tobytes()


@dataclass(slots=True)
class Request:
    """A request in the engine. Times are on the engine's clock."""

    prepared: Prepared
    arrived: float
    order: int
    sequences: list[Sequence] = field(default_factory=list)  # those that have not finished
    forked: bool = False
    held: list[Sequence] = field(default_factory=list)  # queued once the first has computed the prompt
    ended: list[tuple[int, StopDecision]] = field(default_factory=list)  # choices whose last known token was their last
    started_at: float | None = None
    announced: bool = False
    first_token_at: float | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0


class Sequence:
    """One choice: its tokens, the blocks that hold their KV, and how much of it has been computed."""

    def __init__(self, request: Request, index: int, config: SimulationConfig, detokenizer: Detokenizer | None) -> None:
        prepared = request.prepared
        sampling = prepared.sampling
        self.request = request
        self.index = index
        self.sort_key = (prepared.priority, request.order, index)
        self.packed = bytearray(prepared.packed)
        self.digests = DigestChain(prepared.digests.joined)
        self.table = BlockTable()
        self.computed = 0
        self.published = 0
        self.alive = True
        self.generated = 0
        greedy = sampling.temperature == 0.0
        seed = config.seed if sampling.seed is None else sampling.seed
        self.key = b"" if greedy else f"{seed} {index} ".encode()
        self.checker = StopChecker(
            sampling,
            config.eos_token_ids,
            None if detokenizer is None else detokenizer.fresh(),
            prompt_tokens=prepared.prompt_tokens,
            max_total=prepared.max_total,
        )
        self._block_bytes = config.block_size * TOKEN_BYTES

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def parent(self, block: int) -> bytes:
        """The digest before block number `block` of this sequence."""
        return self.digests[block - 1] if block else self.request.prepared.root

    def tail(self) -> bytes:
        """The packed tokens since the last full block."""
        return bytes(self.packed[len(self.digests) * self._block_bytes :])

    def append(self, token_id: int) -> StopDecision | None:
        """A generated token; its KV is computed by the next step. Why it was the last, if it was."""
        self.packed += _TOKEN.pack(token_id)
        self.generated += 1
        if len(self.packed) == (len(self.digests) + 1) * self._block_bytes:
            block = bytes(self.packed[-self._block_bytes :])
            self.digests.append(chain_digest(self.parent(len(self.digests)), block))
        return self.checker.append(token_id)
