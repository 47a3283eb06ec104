"""The prompts that a replica was sent last, so that a session's next turn need not send its beginning again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import xxhash

from engine.core import RequestRefused
from gateway.workers.protocol import GenerateRequest

_TOKEN_BYTES = 4
_MIN_TOKENS = 1024


class PromptMemory:
    """Packed prompts by tenant and digest, at most `max_bytes` of them, least recently used forgotten first. Single-threaded.

    The digest is quick and no cryptographic one: somebody may find two prompts that have the same. Within a tenant that is
    their own affair; nobody is ever given what another tenant sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._prompts: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """Held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._prompts)

    def whole(self, request: GenerateRequest) -> GenerateRequest:
        """The request with all of its prompt, which is remembered. Raises RequestRefused `unknown_prefix`."""
        if request.prefix is not None:
            request = msgspec.structs.replace(request, packed_token_ids=self._joined(request), prefix=None)
        packed = request.packed_token_ids
        if packed is not None and request.session is not None and len(packed) % _TOKEN_BYTES == 0:
            self._remember(request.tenant, packed)
        return request

    def _joined(self, request: GenerateRequest) -> bytes:
        prefix = request.prefix
        if prefix is None or request.packed_token_ids is None:
            raise RequestRefused("invalid_request", "A prefix goes with packed_token_ids; send both, or token_ids.", "prefix")
        at = (request.tenant, prefix.digest)
        known = self._prompts.pop(at, None)
        if known is None or len(known) != prefix.tokens * _TOKEN_BYTES:
            if known is not None:
                self._prompts[at] = known
            raise RequestRefused("unknown_prefix", "This prompt's beginning is not remembered here; send all of it.", "prefix")
        # The longer one takes its place: a session goes on from its end.
        self._bytes -= len(known)
        return known + request.packed_token_ids

    def _remember(self, tenant: str, packed: bytes) -> None:
        if len(packed) < _MIN_TOKENS * _TOKEN_BYTES or len(packed) > self._max_bytes:
            return
        at = (tenant, xxhash.xxh3_128_digest(packed))
        if at in self._prompts:
            self._prompts.move_to_end(at)
            return
        self._prompts[at] = packed
        self._bytes += len(packed)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._prompts.popitem(last=False)[1])
