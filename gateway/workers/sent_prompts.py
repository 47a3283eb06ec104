"""What a worker has been sent: so that the next turn of a session sends only what is new.

An agent's turn begins with all of the one before. At 100,000 tokens that is 400 kB, which cost both sides more than the rest
of the exchange. A worker that remembers prompts (`Capabilities.prompt_prefixes`) is given the digest of the beginning instead,
and says `unknown_prefix` when it has forgotten; then it is sent whole. The digest stands for the very bytes, so nothing hangs
on both sides remembering the same.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.workers.prompt_request import prompt_of, wired
from gateway.workers.protocol import GenerateRequest, PromptPrefix

_MIN_TOKENS = 1024
"""Shorter beginnings are sent again: looking them up costs as much."""

Session = tuple[str, str]


class SentPrompts:
    """Length and digest of the last prompt of each session, of one worker. At most `capacity` sessions, least recently used
    forgotten first. Single-threaded."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._sent: OrderedDict[Session, PromptPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def shortened(self, request: GenerateRequest) -> GenerateRequest:
        """The request without the beginning that the worker knows; itself where it knows none."""
        session = _session(request)
        known = self._sent.get(session) if session is not None else None
        tokens = prompt_of(request) if known is not None else None
        if tokens is None or known is None:
            return request
        if known.tokens > len(tokens) or tokens.digest(known.tokens) != known.digest:
            return request
        return wired(request, known)

    def accepted(self, request: GenerateRequest) -> None:
        """The worker has this prompt now. `request`: whole."""
        session = _session(request)
        tokens = prompt_of(request) if session is not None else None
        if tokens is None or session is None or len(tokens) < _MIN_TOKENS:
            return
        self._sent[session] = PromptPrefix(len(tokens), tokens.digest(len(tokens)))
        self._sent.move_to_end(session)
        if len(self._sent) > self._capacity:
            self._sent.popitem(last=False)

    def forgotten(self, request: GenerateRequest) -> None:
        """The worker does not know this session's last prompt any more."""
        session = _session(request)
        if session is not None:
            self._sent.pop(session, None)


def _session(request: GenerateRequest) -> Session | None:
    return None if request.session is None else (request.tenant, request.session)
