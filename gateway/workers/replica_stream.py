"""The answer of a replica to a request for generation: chunks, one JSON value a line."""

from __future__ import annotations

from collections import deque

import msgspec

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.exchange import BrokenExchangeError, Connection
from gateway.workers.ndjson import MAX_LINE_BYTES
from gateway.workers.protocol import Chunk, Done, Failed

_CHUNKS: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)
_END_OF_BODY_SECONDS = 0.5


class ReplicaStream:
    """A `ChunkStream`. At most one read's worth of chunks and an unfinished line are held."""

    def __init__(self, connection: Connection, url: str, max_line: int = MAX_LINE_BYTES) -> None:
        """`connection`: the head of the answer is here, and nothing of its body was read."""
        self._max_line = max_line
        self._connection = connection
        self._url = url
        self._chunks: deque[Chunk] = deque()
        self._partial = bytearray()
        self._bad: WorkerUnavailableError | None = None
        self._ended = False
        self._given_back = False

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        while not self._chunks:
            await self._read()
        chunk = self._chunks.popleft()
        self._ended = type(chunk) is Done or type(chunk) is Failed
        return chunk

    def close(self) -> None:
        # Once given back it belongs to another request.
        if not self._given_back:
            self._connection.close()

    async def finish(self) -> None:
        if not self._ended or self._chunks or self._partial.strip() or self._bad is not None:
            self.close()
            return
        # The end of the body comes right behind the last chunk.
        self._connection.release(within=_END_OF_BODY_SECONDS)
        self._given_back = True

    async def _read(self) -> None:
        """More chunks. Raises WorkerUnavailableError; what came before the trouble is given out first."""
        if self._bad is not None:
            raise self._bad
        try:
            data = await self._connection.read()
        except BrokenExchangeError as error:
            self.close()
            raise WorkerUnavailableError(f"the stream of worker {self._url} broke off: {error}", reached=True) from error
        if not data:
            self._connection.close()
            if self._partial.strip():
                self._decode(bytes(self._partial))
                self._partial.clear()
                self._bad = self._bad or self._cut()
                return
            raise self._cut()
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            if self._partial:
                head = bytes(self._partial) + head
                self._partial.clear()
            self._partial += tail
            self._decode(head)
        else:
            self._partial += data
        if len(self._partial) > self._max_line:
            self._trouble(f"sent a line longer than {self._max_line} bytes")

    def _decode(self, lines: bytes) -> None:
        try:
            self._chunks.extend(_CHUNKS.decode_lines(lines))
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        for line in lines.split(b"\n"):
            try:
                if line.strip():
                    self._chunks.append(_CHUNKS.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._trouble(f"sent a line that is not of the protocol: {error}")
                return

    def _trouble(self, what: str) -> None:
        self._bad = WorkerUnavailableError(f"the stream of worker {self._url} {what}", reached=True)
        self.close()

    def _cut(self) -> WorkerUnavailableError:
        return WorkerUnavailableError(f"the stream of worker {self._url} ended in the middle", reached=True)
