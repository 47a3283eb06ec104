"""Grammar sources to token masks. With the helper that tries them, the only file that imports xgrammar (and with it torch)."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xgrammar

from grammar.known_sources import KnownSources
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.lowering import UNWRITABLE, error_text, lower, parse_source
from grammar.probe import ProbeLost, Prober
from grammar.tools import GrammarRefused
from grammar.urgency import aside
from grammar.vocabulary import read_vocabulary

_BRIEF_MILLISECONDS = 20.0
"""Estimated compile time up to which a thread of its own is not worth it."""
_REFUSAL_BYTES = 1024
"""What a remembered refusal counts for in the cache."""


def allocate_bitmask(rows: int, vocab_size: int, *, pinned: bool = False) -> torch.Tensor:
    """An int32 CPU tensor [rows, ceil(vocab_size / 32)] with every token allowed (bit t of row r: token t may come next).
    pinned: in memory that a GPU reads without waiting."""
    return torch.full((rows, (vocab_size + 31) // 32), -1, dtype=torch.int32, pin_memory=pinned)


def only_tokens(bitmask: torch.Tensor) -> list[int | None]:
    """For each row of a bitmask, int32 [R, ceil(V / 32)], the one token that it allows; None where it allows another number."""
    # One large number a row: right behind a forward pass, when nothing is in the caches, NumPy takes ten times as long.
    packed, width = bitmask.numpy().tobytes(), 4 * bitmask.shape[1]
    tokens: list[int | None] = []
    for start in range(0, len(packed), width):
        row = int.from_bytes(packed[start : start + width], "little")
        tokens.append(row.bit_length() - 1 if row and not row & (row - 1) else None)
    return tokens


_UNWRITABLE = b"\xff" + UNWRITABLE.encode()
"""The bytes of special tokens: no text holds them (0xff is no UTF-8, the character after it is excluded from free text)."""


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """A vocabulary as XGrammar knows it, and the special tokens that a grammar may name."""

    info: xgrammar.TokenizerInfo
    specials: Mapping[str, int]


def tokenizer_info(tokenizer_json: Path | str, vocab_size: int, stop_token_ids: Sequence[int]) -> GrammarTokens:
    """XGrammar's view of a tokenizer.json, as `TokenizerInfo.from_huggingface` makes it, but with special tokens that no text
    matches: only a grammar that names one (a structural tag's `token`) allows it.

    `vocab_size` is the logits' width; ids without a token are never allowed.
    """
    vocabulary = read_vocabulary(tokenizer_json, vocab_size, stop_token_ids)
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.backend)
    stops = list(vocabulary.stop_token_ids)
    info = xgrammar.TokenizerInfo(
        vocabulary.tokens,
        vocab_type=metadata["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=stops,
        add_prefix_space=metadata["add_prefix_space"],
    )
    if vocabulary.specials:
        decoded = list(info.decoded_vocab)
        for token_id in vocabulary.specials.values():
            decoded[token_id] = _UNWRITABLE
        info = xgrammar.TokenizerInfo(
            decoded,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=stops,
            add_prefix_space=metadata["add_prefix_space"],
        )
    return GrammarTokens(info, vocabulary.specials)


def raw_compile(source: str, tokens: GrammarTokens, limits: GrammarLimits) -> xgrammar.CompiledGrammar:
    """Lowers and compiles one source with a compiler of its own: what a probe tries."""
    parsed = parse_source(source, limits)
    compiler = xgrammar.GrammarCompiler(tokens.info, max_threads=1, cache_enabled=False)
    return compiler.compile_structural_tag(lower(parsed, _to_ebnf, tokens.specials))


def _to_ebnf(schema: dict[str, Any] | bool) -> str:
    grammar = xgrammar.Grammar.from_json_schema(
        json.dumps(schema, ensure_ascii=False), any_whitespace=False, separators=(", ", ": "), strict_mode=True
    )
    return str(grammar)


class GrammarMatcher:
    """Where one generation stands in its grammar. Not thread-safe."""

    __slots__ = ("_matcher", "_textless")

    def __init__(self, matcher: xgrammar.GrammarMatcher, textless: frozenset[int]) -> None:
        self._matcher = matcher
        self._textless = textless

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Writes which tokens may come next into row `row` of an `allocate_bitmask` tensor.

        Once the grammar is terminated, that is every stop token: nothing else may follow.
        """
        if self._matcher.is_terminated():
            bitmask[row].zero_()
            for token_id in self._matcher.stop_token_ids:
                bit = 1 << (token_id % 32)
                bitmask[row, token_id // 32] |= bit - (1 << 32) if token_id % 32 == 31 else bit
            return
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token_id: int) -> bool:
        """Advances by one token. False, with the state unchanged, when the grammar does not allow it."""
        if token_id in self._textless or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        """Takes the last `count` accepted tokens back."""
        if count:
            self._matcher.rollback(count)

    def forced_text(self) -> str:
        """What the grammar forces next, however it is spelled; whole characters of it."""
        return str(self._matcher.find_jump_forward_string())

    def jump(self) -> list[int]:
        """Tokens that spell what the grammar forces next, as a model might not. [] where nothing is forced."""
        return [] if self._matcher.is_terminated() else list(self._matcher.find_jump_forward_tokens())

    def accepts_whole(self, text: str) -> bool:
        """Whether `text`, from here on, is a whole text of the grammar, however it is cut into tokens. Advances."""
        return bool(self._matcher.accept_string(text)) and self.is_completed()

    def is_terminated(self) -> bool:
        """True once a stop token was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        """True where the generation may end: what was accepted is a whole text of the grammar."""
        return bool(self._matcher.is_completed())

    def fork(self) -> GrammarMatcher:
        """An independent copy that stands at the same place (n > 1)."""
        return GrammarMatcher(self._matcher.fork(), self._textless)


class BatchFiller:
    """Fills the masks of many matchers in one call."""

    def __init__(self) -> None:
        # More threads than one wake up for longer than a mask takes.
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    def fill(self, matchers: Sequence[GrammarMatcher], bitmask: torch.Tensor, rows: Sequence[int]) -> None:
        """As `GrammarMatcher.fill_bitmask` of each, into its row. Raises for all where one of them fails, or has terminated."""
        if len(matchers) == 1:
            matchers[0].fill_bitmask(bitmask, rows[0])
            return
        self._batch.batch_fill_next_token_bitmask([matcher._matcher for matcher in matchers], bitmask, list(rows))


class CompiledGrammar:
    """A compiled grammar: immutable, shared between requests and threads."""

    __slots__ = ("_compiled", "_textless")

    def __init__(self, compiled: xgrammar.CompiledGrammar, textless: frozenset[int]) -> None:
        self._compiled = compiled
        self._textless = textless

    @property
    def memory_bytes(self) -> int:
        """About how much memory it holds."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        return GrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._textless)


class GrammarCompiler:
    """Compiles structural tags for one tokenizer, each source once, within limits. Thread-safe.

    `vocab_size` is the width of the model's logits, which may exceed the tokenizer's size; `stop_token_ids` end a
    generation and are allowed only where the grammar is complete. Compiled grammars and refusals are kept, least recently
    used first out, up to `limits.cache_entries` and `limits.cache_bytes`; XGrammar keeps parts that grammars share in as
    many bytes again. `known`: keeps sources for the next start (grammar.warming).
    """

    def __init__(
        self,
        tokenizer_json_path: Path | str,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        limits: GrammarLimits = DEFAULT_LIMITS,
        known: KnownSources | None = None,
    ) -> None:
        self._limits = limits
        self._known_sources = known
        self._closed = False
        tokens = tokenizer_info(tokenizer_json_path, vocab_size, stop_token_ids)
        info, self._specials = tokens.info, tokens.specials
        self._textless = frozenset(info.special_token_ids) - frozenset(info.stop_token_ids)
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=limits.compile_threads, cache_enabled=True, cache_limit_bytes=limits.cache_bytes
        )
        # What is large gains nothing from shared parts, and takes several times as long with them.
        self._uncached = xgrammar.GrammarCompiler(info, max_threads=limits.compile_threads, cache_enabled=False)
        self._prober = Prober(tokenizer_json_path, vocab_size, tuple(info.stop_token_ids), limits)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CompiledGrammar | GrammarRefused] = OrderedDict()
        self._known_bytes = 0
        self._running: dict[bytes, Future[CompiledGrammar | GrammarRefused]] = {}

    def compile(self, source: str) -> CompiledGrammar:
        """The compiled grammar of a structural tag's JSON text, from the cache where it was compiled before.

        Raises GrammarRefused when the source is not a structural tag, is over the limits, or takes too long. Whoever asks
        for a source that is being compiled waits for that one compilation.
        """
        key = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return _answer(known)
            running = self._running.get(key)
            if running is None:
                mine: Future[CompiledGrammar | GrammarRefused] = Future()
                self._running[key] = mine
        if running is not None:
            return _answer(running.result())
        begun = time.perf_counter()
        try:
            outcome = self._attempt(source)
        except BaseException as error:
            with self._lock:
                del self._running[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._running[key]
            self._remember(key, outcome)
        mine.set_result(outcome)
        if self._known_sources is not None and isinstance(outcome, CompiledGrammar):
            self._known_sources.compiled(source, (time.perf_counter() - begun) * 1000)
        return _answer(outcome)

    def _attempt(self, source: str) -> CompiledGrammar | GrammarRefused:
        try:
            parsed = parse_source(source, self._limits)
            compiler = self._compiler
            if not parsed.is_cheap(self._limits):
                problem = self._prober.problem_with(source)
                if problem is not None:
                    return GrammarRefused(f"The grammar {problem}.")
                compiler = self._uncached
            lowered = lower(parsed, _to_ebnf, self._specials)
            if parsed.milliseconds > _BRIEF_MILLISECONDS:
                compiled = aside(lambda: compiler.compile_structural_tag(lowered))
            else:
                compiled = compiler.compile_structural_tag(lowered)
        except ProbeLost as lost:
            raise GrammarRefused(f"The grammar {lost}.") from lost  # raised, so that it is not remembered
        except GrammarRefused as refused:
            return refused
        except RuntimeError as error:
            return GrammarRefused(f"The grammar cannot be compiled: {error_text(error)}.")
        return CompiledGrammar(compiled, self._textless)

    def _remember(self, key: bytes, outcome: CompiledGrammar | GrammarRefused) -> None:
        self._known[key] = outcome
        self._known_bytes += _size(outcome)
        while len(self._known) > self._limits.cache_entries or self._known_bytes > self._limits.cache_bytes:
            _, dropped = self._known.popitem(last=False)
            self._known_bytes -= _size(dropped)

    @property
    def closed(self) -> bool:
        return self._closed

    def start_probe(self) -> None:
        """Starts the process that tries what is not cheap, which takes seconds to load. Raises ProbeLost once closed."""
        self._prober.start()

    def close(self) -> None:
        """Ends the probe process, if one was started. Idempotent."""
        self._closed = True
        self._prober.close()


def _answer(outcome: CompiledGrammar | GrammarRefused) -> CompiledGrammar:
    if isinstance(outcome, GrammarRefused):
        raise GrammarRefused(outcome.message, tool=outcome.tool, pointer=outcome.pointer)
    return outcome


def _size(outcome: CompiledGrammar | GrammarRefused) -> int:
    return outcome.memory_bytes if isinstance(outcome, CompiledGrammar) else _REFUSAL_BYTES
