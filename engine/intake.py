"""From a wire request to a `Request` that can be queued: every check, and all work that needs no step."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core import RequestRefused
from engine.request import ForbiddenTokenError, Request, Sequence, Status
from engine.resuming import replay, resumed_tokens
from engine.sampling.params import validate
from engine.sampling.state import GREEDY_BELOW, SamplingState
from engine.sampling.stopping import StopChecker, StopDecision
from engine.session_numbers import session_number
from gateway.workers.protocol import GenerateRequest
from grammar.compiler import CompiledGrammar
from grammar.detokenizer import Detokenizer
from grammar.tools import GrammarRefused
from prefix_cache.chain_memory import ChainMemory
from prefix_cache.hashing import BlockHash, DigestChain, pack_tokens, root_digest, unpack_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold: tokens of one sequence, blocks of the whole pool, choices that run at once."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Intake:
    """Prepares requests. Thread-safe as long as `compile_grammar` is.

    compile_grammar: None where the model has no tokenizer to compile for. detokenizer: an empty one, None likewise.
    """

    limits: Limits
    namespace: BlockHash
    chains: ChainMemory
    eos_token_ids: tuple[int, ...]
    caching: bool
    use_priority: bool
    compile_grammar: Callable[[str], CompiledGrammar] | None
    detokenizer: Detokenizer | None

    def prepare(self, wire: GenerateRequest) -> Request:
        """Raises RequestRefused."""
        limits, params = self.limits, wire.sampling
        prompt = _prompt(wire, limits.vocab_size)
        validate(params, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        if params.n > limits.max_num_seqs:
            raise RequestRefused(
                "invalid_sampling",
                f"n is {params.n}, but this engine runs at most {limits.max_num_seqs} choices at once; ask for fewer.",
                "sampling.n",
            )
        if params.stop and self.detokenizer is None:
            raise RequestRefused(
                "unsupported",
                "The model has no tokenizer, so stop strings cannot be found; use stop_token_ids.",
                "sampling.stop",
            )
        max_total = self._max_total(len(prompt), params.max_tokens)
        resumed = resumed_tokens(wire, limits.vocab_size, greedy=params.temperature < GREEDY_BELOW)
        grammar = self._grammar(wire.grammar)
        root = root_digest(self.namespace, wire.cache_salt)
        request = Request(
            request_id=wire.request_id,
            prompt=prompt,
            params=params,
            max_total=max_total,
            root=root,
            priority=wire.priority if self.use_priority else 0,
            session=session_number(wire.tenant, wire.session),
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # Choices other than the first learn their digests from it when they are forked off.
        joined = self.chains.digests(pack_tokens(prompt), root, request.session).joined if self.caching else b""
        for index in range(params.n):
            sequence = Sequence(
                request=request,
                index=index,
                sampling=SamplingState(params, prompt, seed, index, self.eos_token_ids),
                stops=StopChecker(
                    params,
                    self.eos_token_ids,
                    self.detokenizer.fresh() if self.detokenizer is not None and params.stop else None,
                    prompt_tokens=len(prompt),
                    max_total=max_total,
                ),
                matcher=None if grammar is None else grammar.matcher(),
                status=Status.UNFORKED,
                digests=DigestChain(joined if index == 0 else b""),
            )
            request.sequences.append(sequence)
        if resumed:
            _resume(request, wire, resumed)
        return request

    def _max_total(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens of prompt and generation together. The KV of the token generated last is never needed."""
        limits = self.limits
        if prompt_tokens >= limits.max_model_len:
            raise RequestRefused(
                "context_length_exceeded",
                f"The prompt has {prompt_tokens} tokens; with one generated token the context holds {limits.max_model_len}, so "
                f"a prompt may have {limits.max_model_len - 1}. Shorten it.",
                "token_ids",
            )
        capacity = limits.num_blocks * limits.block_size + 1
        if max_tokens is None:
            wanted = min(limits.max_model_len, max(capacity, prompt_tokens + 1))
        else:
            wanted = min(limits.max_model_len, prompt_tokens + max_tokens)
        needed = -(-(wanted - 1) // limits.block_size)
        if needed > limits.num_blocks:
            raise RequestRefused(
                "kv_capacity_exceeded",
                f"The prompt of {prompt_tokens} tokens and {wanted - prompt_tokens} generated ones need {needed} KV blocks of "
                f"{limits.block_size} tokens, but this engine has {limits.num_blocks} in all. Shorten the prompt, lower "
                "max_tokens, or give the engine more KV memory.",
                "sampling.max_tokens" if max_tokens is not None else "token_ids",
            )
        return wanted

    def _grammar(self, source: str | None) -> CompiledGrammar | None:
        if source is None:
            return None
        if self.compile_grammar is None:
            raise RequestRefused(
                "unsupported_grammar", "The model has no tokenizer, so grammars cannot be compiled.", "grammar"
            )
        try:
            return self.compile_grammar(source)
        except GrammarRefused as error:
            raise RequestRefused("invalid_grammar", error.message, error.pointer or "grammar") from error


def _resume(request: Request, wire: GenerateRequest, resumed: list[list[int]]) -> None:
    """Brings every choice to where it stood. The first that goes on leads; the others wait for the prompt's KV in the cache."""
    request.forked = True
    request.held = []
    for sequence, choice, token_ids in zip(request.sequences, wire.resume, resumed, strict=True):
        sequence.digests = request.sequences[0].digests.copy()
        sequence.resumed = len(token_ids)
        decision = replay(sequence.index, token_ids, functools.partial(_append, sequence))
        if choice.finished or decision is not None:
            sequence.status = Status.FINISHED
        else:
            request.held.append(sequence)
        if decision is not None:
            request.ended.append((sequence, decision))


def _append(sequence: Sequence, token_id: int) -> StopDecision | None:
    try:
        return sequence.append(token_id)
    except ForbiddenTokenError:
        raise RequestRefused(
            "invalid_resume",
            f"The grammar does not allow token {token_id}, number {len(sequence.output)} of choice {sequence.index}; resume "
            "with the grammar that the generation began with.",
            f"resume[{sequence.index}].packed_token_ids",
        ) from None


def _prompt(wire: GenerateRequest, vocab_size: int) -> npt.NDArray[np.uint32]:
    """The prompt as uint32 [P], P > 0, every id in the vocabulary."""
    if (wire.token_ids is None) == (wire.packed_token_ids is None):
        raise RequestRefused("invalid_request", "Send exactly one of token_ids and packed_token_ids.", "token_ids")
    if wire.packed_token_ids is not None:
        field = "packed_token_ids"
        try:
            prompt = unpack_tokens(wire.packed_token_ids)
        except ValueError as error:
            raise RequestRefused("invalid_request", f"packed_token_ids is cut off: {error}.", field) from error
    else:
        field = "token_ids"
        try:
            prompt = np.asarray(wire.token_ids, dtype=np.int64)
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestRefused("invalid_token", f"token_ids holds what is no token id: {error}.", field) from error
    if len(prompt) == 0:
        raise RequestRefused("empty_prompt", "The prompt has no tokens; send at least one.", field)
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if len(outside):
        index = int(outside[0])
        raise RequestRefused(
            "invalid_token",
            f"Token {int(prompt[index])} at index {index} is not in the vocabulary; ids are 0 to {vocab_size - 1}.",
            f"{field}[{index}]" if field == "token_ids" else field,
        )
    return prompt.astype(np.uint32, copy=False)
