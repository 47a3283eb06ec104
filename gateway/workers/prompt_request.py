"""A request on its way to a worker, before its prompt is put on the wire."""

from __future__ import annotations

import msgspec

from gateway.workers.protocol import GenerateRequest, PromptPrefix
from prefix_cache.packed_tokens import PackedTokens


class PromptRequest(GenerateRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A GenerateRequest whose prompt is shared with its session's ledger: `tokens` stand in for `packed_token_ids`, so that
    they are not copied for a worker that remembers most of them. It is not encoded as it is; `wired` makes what is."""

    tokens: PackedTokens | None = None


def prompt_of(request: GenerateRequest) -> PackedTokens | None:
    """The prompt of a request; None where it is not packed."""
    if isinstance(request, PromptRequest) and request.tokens is not None:
        return request.tokens
    return None if request.packed_token_ids is None else PackedTokens(request.packed_token_ids)


def wired(request: GenerateRequest, prefix: PromptPrefix | None = None) -> GenerateRequest:
    """The request as it is sent. `prefix`: the beginning of its prompt that the worker has."""
    if prefix is None and (not isinstance(request, PromptRequest) or request.tokens is None):
        return request
    tokens = prompt_of(request)
    if tokens is None:
        return request
    ids = tokens.whole() if prefix is None else tokens.part(prefix.tokens)
    if isinstance(request, PromptRequest):
        # A field that has its default is not written.
        return msgspec.structs.replace(request, tokens=None, packed_token_ids=ids, prefix=prefix)
    return msgspec.structs.replace(request, packed_token_ids=ids, prefix=prefix)
