"""What the grammars of a step allow at each of its rows.

There are two times for it. When a token has been taken, the mask behind it says whether the grammar leaves a choice at all. A
token that is forced goes into the next pass for nothing, so this mask is made at once, for all sequences together; mostly it
takes a microsecond. Whatever is not needed to know what to compute is made by a thread beside the forward pass: the masks
behind guessed tokens, masks that have taken long (long counted strings), and with them the table that the sampler reads.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from engine.beside import Beside
from engine.choosing_rows import Choosing
from engine.request import Sequence
from grammar.compiler import BatchFiller, allocate_bitmask, only_tokens

SLOW_SECONDS = 200e-6
"""A mask that takes longer is made beside the next pass from then on, until it takes less again."""

_FEW_ROWS = 32
"""So many rows that only have to be copied are not worth waking a thread for."""


@dataclass(slots=True)
class Filled:
    """`bitmask`: int32 [R, ceil(V / 32)], R the rows of all that are chosen, in their order; None without a grammar among
    them. `broken`: what went wrong, by the place of a choosing sequence."""

    bitmask: torch.Tensor | None = None
    broken: dict[int, Exception] = field(default_factory=dict)


class StepMasks:
    """Belongs to the engine thread; between `begin` and `take` the matchers of the step belong to the thread beside it."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """device: where the logits lie. For a GPU masks are made in pinned memory, which is copied without waiting."""
        self.seconds = 0.0
        """What masks have taken of the engine thread's time, waiting for them included."""
        self.seconds_beside = 0.0
        """What they have taken beside forward passes."""
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._pinned = torch.device(device).type == "cuda"
        self._batch = BatchFiller()
        self._thread: Beside[Filled] = Beside("masks")
        self._filled: Filled | None = Filled()  # None: by the thread

    def begin(self, wanted: SequenceOf[Choosing]) -> None:
        """Just before the pass that computes their rows. `take` must follow."""
        self.take()  # of a step that came to no end
        began = time.perf_counter()
        with_grammar = [one for one in wanted if one.sequence.matcher is not None]
        if with_grammar:
            only_copies = all(one.draft is None and one.sequence.next_mask is not None for one in with_grammar)
            if only_copies and sum(len(one.rows) for one in wanted) <= _FEW_ROWS:
                self._filled = self._fill(wanted)
            else:
                self._filled = None
                self._thread.begin(functools.partial(self._beside, wanted))
        self.seconds += time.perf_counter() - began

    def take(self) -> Filled:
        """What `begin` began, once it is there. A second call gets nothing."""
        began = time.perf_counter()
        filled, self._filled = self._filled, Filled()
        if filled is None:
            filled = self._thread.take()
        self.seconds += time.perf_counter() - began
        return filled

    def ahead(self, sequences: SequenceOf[Sequence]) -> list[int | None]:
        """For each running sequence the one token that its grammar allows next; None where it allows more, or where its masks
        take long. Masks are kept for the step that needs them."""
        began = time.perf_counter()
        tokens: list[int | None] = [None] * len(sequences)
        quick = [index for index, sequence in enumerate(sequences) if not sequence.slow_mask and sequence.broken is None]
        if quick:
            bitmask = torch.empty((len(quick), self._words), dtype=torch.int32)
            asked = [sequences[index] for index in quick]
            self._fill_together(asked, bitmask, range(len(asked)))
            for row, (index, token) in enumerate(zip(quick, only_tokens(bitmask), strict=True)):
                sequence = sequences[index]
                if sequence.broken is None:
                    tokens[index] = token
                    sequence.next_mask = bitmask[row] if token is None else None
        self.seconds += time.perf_counter() - began
        return tokens

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.close()

    def _beside(self, wanted: SequenceOf[Choosing]) -> Filled:
        began = time.perf_counter()
        try:
            return self._fill(wanted)
        finally:
            self.seconds_beside += time.perf_counter() - began

    def _fill(self, wanted: SequenceOf[Choosing]) -> Filled:
        bitmask = allocate_bitmask(sum(len(one.rows) for one in wanted), self._vocab_size, pinned=self._pinned)
        at = 0
        together: list[tuple[Sequence, int]] = []
        for one in wanted:
            sequence, start = one.sequence, at
            at += len(one.rows)
            if sequence.matcher is None or sequence.broken is not None:
                continue
            if sequence.next_mask is not None:
                bitmask[start] = sequence.next_mask
            elif sequence.slow_mask:
                self._fill_slow(sequence, bitmask, start)
            else:
                together.append((sequence, start))
            if one.draft is not None:
                _fill_behind(sequence, one.draft.tokens, bitmask, start + 1)
        if together:
            self._fill_together([sequence for sequence, _ in together], bitmask, [row for _, row in together])
        broken = {index: one.sequence.broken for index, one in enumerate(wanted) if one.sequence.broken is not None}
        return Filled(bitmask, broken)

    def _fill_together(self, sequences: SequenceOf[Sequence], bitmask: torch.Tensor, rows: SequenceOf[int]) -> None:
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        began = time.perf_counter()
        try:
            self._batch.fill(matchers, bitmask, rows)
        except Exception:  # noqa: BLE001 - one of them; which one is found out below
            for sequence, row in zip(sequences, rows, strict=True):
                self._fill_slow(sequence, bitmask, row)
            return
        if time.perf_counter() - began > SLOW_SECONDS * len(sequences):
            for sequence in sequences:  # by themselves next time: who is quick comes back
                sequence.slow_mask = True

    def _fill_slow(self, sequence: Sequence, bitmask: torch.Tensor, row: int) -> None:
        if sequence.matcher is None:
            return
        began = time.perf_counter()
        try:
            sequence.matcher.fill_bitmask(bitmask, row)
        except Exception as error:  # noqa: BLE001 - fails this request alone, when its next token is chosen
            sequence.broken = error
        sequence.slow_mask = time.perf_counter() - began > SLOW_SECONDS


def _fill_behind(sequence: Sequence, tokens: SequenceOf[int], bitmask: torch.Tensor, row: int) -> None:
    """The masks behind each of these tokens, which the grammar allows, from `row` on."""
    matcher = sequence.matcher
    if matcher is None:
        return
    accepted = 0
    try:
        for token in tokens:
            if not matcher.accept(token):
                raise RuntimeError(f"token {token} was guessed against the grammar; this is a bug")
            accepted += 1
            matcher.fill_bitmask(bitmask, row)
            row += 1
    except Exception as error:  # noqa: BLE001 - as above
        sequence.broken = error
    finally:
        matcher.rollback(accepted)
