"""A worker's stream, held to the protocol: garbage is a failure of the worker, never a part of an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gateway.workers.base import ChunkStream, WorkerUnavailableError
from gateway.workers.protocol import Chunk, Done, Failed, Finished, GenerateRequest, Started, Tokens


class CheckedStream:
    """A `ChunkStream` that passes on what the protocol allows, and otherwise drops the connection and raises
    WorkerUnavailableError: tokens beyond `max_tokens` of a choice, ids outside of the vocabulary (`vocab_size`; 0: not known),
    choices that were not asked for or have ended, log-probabilities that do not match, an end before all choices have ended.
    """

    def __init__(self, stream: ChunkStream, url: str, *, choices: int, max_tokens: int, vocab_size: int) -> None:
        self._stream = stream
        self._url = url
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._left: list[int | None] = [max_tokens] * choices
        self._begun = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await anext(self._stream)
        wrong = self._wrong(chunk)
        if wrong is not None:
            self.close()
            raise WorkerUnavailableError(f"the stream of worker {self._url} makes no sense: {wrong}", reached=True)
        return chunk

    def close(self) -> None:
        self._stream.close()

    async def finish(self) -> None:
        await self._stream.finish()

    def _wrong(self, chunk: Chunk) -> str | None:
        match chunk:
            case Tokens():
                return self._wrong_tokens(chunk)
            case Finished():
                if not 0 <= chunk.index < len(self._left):
                    return f"choice {chunk.index} was not asked for"
                if self._left[chunk.index] is None:
                    return f"choice {chunk.index} ended twice"
                self._left[chunk.index] = None
            case Started():
                if self._begun:
                    return "it began twice"
                if chunk.cached_tokens < 0 or chunk.cached_tokens > chunk.prompt_tokens:
                    return f"{chunk.cached_tokens} of {chunk.prompt_tokens} prompt tokens are said to be cached"
                self._begun = True
            case Done():
                if any(left is not None for left in self._left):
                    return "it ended before all of its choices did"
            case Failed():
                pass
        return None

    def _wrong_tokens(self, chunk: Tokens) -> str | None:
        if not 0 <= chunk.index < len(self._left):
            return f"choice {chunk.index} was not asked for"
        left = self._left[chunk.index]
        if left is None:
            return f"choice {chunk.index} went on after its end"
        if len(chunk.token_ids) > left:
            return f"choice {chunk.index} has more than {self._max_tokens} tokens"
        if chunk.logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            return f"{len(chunk.logprobs)} logprobs came for {len(chunk.token_ids)} tokens"
        if min(chunk.token_ids, default=0) < 0 or (self._vocab_size and max(chunk.token_ids, default=0) >= self._vocab_size):
            return f"a token id outside of the vocabulary of {self._vocab_size}"
        self._left[chunk.index] = left - len(chunk.token_ids)
        return None


def room_for(request: GenerateRequest, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that a choice may have at most."""
    room = max(max_model_len - prompt_tokens, 0)
    asked = request.sampling.max_tokens
    return room if asked is None else min(asked, room)
