"""What has come of a request so far, whoever generated it: what another worker must know to go on, and what the whole took."""

from __future__ import annotations

from array import array

from gateway.workers.protocol import Done, Finished, ResumedChoice, SamplingParams, Tokens, WorkerInfo
from prefix_cache.hashing import pack_tokens

_MAX_TOKEN_ID = 2**32 - 1


class ImplausibleError(Exception):
    """A worker sent what no answer to the request can contain. The message goes on after the worker's name."""


class Progress:
    """The generated ids of every choice and which of them have ended. Memory: four bytes a token, bounded by `max_tokens`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._ids = [array("I") for _ in range(sampling.n)]
        self._finished = [False] * sampling.n
        self._max_tokens = sampling.max_tokens
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._before = 0  # tokens that came from workers that were lost
        self.generated = 0
        """Tokens of all choices."""

    @property
    def complete(self) -> bool:
        """Every choice has ended, whether or not the worker lived to say what it took."""
        return all(self._finished)

    def tokens(self, chunk: Tokens, worker: WorkerInfo | None = None, prompt_tokens: int = 0) -> None:
        """More tokens of a choice, from a worker like this. Raises ImplausibleError, and nothing of them is taken in."""
        index, token_ids = chunk.index, chunk.token_ids
        # The common case of `_open_choice`, without a call: this is done for every chunk of every stream.
        ids = self._ids[index] if 0 <= index < len(self._ids) and not self._finished[index] else self._open_choice(index)
        length = len(ids) + len(token_ids)
        if self._max_tokens is not None and length > self._max_tokens:
            raise ImplausibleError(f"generates more than the {self._max_tokens} tokens that it was asked for")
        if chunk.logprobs and len(chunk.logprobs) != len(token_ids):
            raise ImplausibleError(f"sent {len(chunk.logprobs)} log-probabilities for {len(token_ids)} tokens")
        vocab_size = _MAX_TOKEN_ID + 1
        if worker is not None:
            vocab_size = worker.vocab_size or vocab_size
            if prompt_tokens + length > worker.max_model_len:
                raise ImplausibleError(f"generates more than its context of {worker.max_model_len} tokens holds")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ImplausibleError(f"sent token id {token_id}, which is not in the vocabulary")
        ids.extend(token_ids)
        self.generated += len(token_ids)

    def finished(self, chunk: Finished) -> None:
        """A choice has ended. Raises ImplausibleError."""
        self._open_choice(chunk.index)
        self._finished[chunk.index] = True

    def resume(self) -> tuple[ResumedChoice, ...]:
        """What another worker is told; nothing while there is nothing to tell."""
        if not self.generated and not any(self._finished):
            return ()
        return tuple(
            ResumedChoice(finished=True) if finished else ResumedChoice(packed_token_ids=pack_tokens(ids))
            for ids, finished in zip(self._ids, self._finished, strict=True)
        )

    def lost(self, prefill_seconds: float, decode_seconds: float) -> None:
        """The worker is lost. What it spent, as seen from here, is part of what the whole took."""
        self._before = self.generated
        self._prefill_seconds += prefill_seconds
        self._decode_seconds += decode_seconds

    def done(self, last: Done, cached_tokens: int) -> Done:
        """What the whole took, given what the last worker says of its part and what the first had cached."""
        if not self._before:
            return last
        return Done(
            prompt_tokens=last.prompt_tokens,
            completion_tokens=self._before + last.completion_tokens,
            cached_tokens=cached_tokens,
            queue_seconds=last.queue_seconds,
            prefill_seconds=self._prefill_seconds + last.prefill_seconds,
            decode_seconds=self._decode_seconds + last.decode_seconds,
            preemptions=last.preemptions,
        )

    def done_without_a_word(self, prompt_tokens: int, cached_tokens: int) -> Done:
        """The same where the worker was lost between the end of the last choice and its own account."""
        return Done(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=cached_tokens,
            queue_seconds=0.0,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            preemptions=0,
        )

    def _open_choice(self, index: int) -> array[int]:
        if not 0 <= index < len(self._ids):
            raise ImplausibleError(f"answered with choice {index}, which nobody asked for")
        if self._finished[index]:
            raise ImplausibleError(f"went on with choice {index} after its end")
        return self._ids[index]
