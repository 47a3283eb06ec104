"""Which tokens a block holds, for telling those who do not hash as we do. The engine itself knows digests only."""

from __future__ import annotations

from collections import OrderedDict

from engine.server.stream import RequestStream
from gateway.workers.protocol import Chunk, GenerateRequest, Tokens
from prefix_cache.hashing import TOKEN_BYTES, BlockHash, chain_digest, iter_block_digests, pack_tokens, root_digest

_MAX_ROOTS = 10_000
_MAX_OPEN = 65_536


class _Tail:
    """The end of a choice's sequence that fills no block yet."""

    __slots__ = ("packed", "parent")

    def __init__(self, parent: BlockHash, packed: bytes) -> None:
        self.parent = parent
        self.packed = bytearray(packed)


class TokenBook:
    """Digest -> packed tokens of a block, for what was asked for and generated lately: at most `max_blocks`. An observer of an
    `EngineThread`; single-threaded."""

    def __init__(self, namespace: BlockHash, block_size: int, max_blocks: int) -> None:
        self._namespace = namespace
        self._block_size = block_size
        self._step = block_size * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[BlockHash, bytes] = OrderedDict()
        self._roots: OrderedDict[BlockHash, str | None] = OrderedDict({namespace: None})
        self._open: OrderedDict[str, dict[int, _Tail]] = OrderedDict()
        self._prompts: dict[str, _Tail] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def tokens(self, digest: BlockHash) -> bytes | None:
        """Packed token ids of a block; None for one that is not known (any more)."""
        return self._blocks.get(digest)

    def is_root(self, digest: BlockHash) -> bool:
        """Whether a digest stands before first blocks."""
        return digest in self._roots

    def salt(self, root: BlockHash) -> str | None:
        """The cache salt of a root."""
        return self._roots.get(root)

    def began(self, request: GenerateRequest) -> None:
        """A request is about to be queued, its prompt whole."""
        packed = request.packed_token_ids
        if packed is None:
            packed = pack_tokens(request.token_ids or ())
        root = root_digest(self._namespace, request.cache_salt)
        self._roots[root] = request.cache_salt or None
        self._roots.move_to_end(root)
        while len(self._roots) > _MAX_ROOTS:
            self._roots.popitem(last=False)
        parent, start = root, 0
        for digest in iter_block_digests(packed, root, self._block_size):
            self._keep(digest, packed[start : start + self._step])
            parent, start = digest, start + self._step
        self._prompts[request.request_id] = _Tail(parent, packed[start:])
        self._open[request.request_id] = {}
        for index, choice in enumerate(request.resume):
            self._generated(request.request_id, index, choice.packed_token_ids)
        while len(self._open) > _MAX_OPEN:
            old, _ = self._open.popitem(last=False)
            self._prompts.pop(old, None)

    def forget(self, request_id: str) -> None:
        """A request was refused, or has ended."""
        self._open.pop(request_id, None)
        self._prompts.pop(request_id, None)

    # An observer of the engine's thread

    def step_ended(self, seconds: float) -> None:
        pass

    def chunk_arrived(self, stream: RequestStream, chunk: Chunk, at: float) -> None:
        if isinstance(chunk, Tokens):
            self._generated(stream.request_id, chunk.index, pack_tokens(chunk.token_ids))

    def request_ended(self, stream: RequestStream, at: float) -> None:
        self.forget(stream.request_id)

    def _generated(self, request_id: str, index: int, packed: bytes) -> None:
        choices = self._open.get(request_id)
        if choices is None:
            return
        tail = choices.get(index)
        if tail is None:
            prompt = self._prompts[request_id]
            tail = choices[index] = _Tail(prompt.parent, bytes(prompt.packed))
        tail.packed += packed
        while len(tail.packed) >= self._step:
            block = bytes(tail.packed[: self._step])
            del tail.packed[: self._step]
            tail.parent = chain_digest(tail.parent, block)
            self._keep(tail.parent, block)

    def _keep(self, digest: BlockHash, packed: bytes) -> None:
        self._blocks[digest] = packed
        self._blocks.move_to_end(digest)
        if len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
