"""The ledger of a conversation: the exact token ids that the engine saw and produced, message by message.

A turn sends the whole conversation again. What the gateway needs of the part it knows already is not its text but three things:
is it the same (a digest for every message), which ids did it have (four bytes a token), and where do its messages end. So
text is not kept, except for the few words of the generation prompt. Beside the ids stand the block hashes (one byte a
token), which the router and the replica's cache go by.

    tokens   | span 0 ........ | span 1 ... | span 2 ............ | tail    | pending |
             | system (tools)  | user       | assistant           | "<|im_start|>assistant\\n" | generated, not yet returned
    blocks   |----|----|----|----|----|----|----|----|----|----|

A *span* is the text that the chat template writes for one message, or for a few that it writes together (the results of
parallel calls). It begins at a special token, where text can be cut without changing a token on either side; its end is kept
in messages, in tokens and in bytes of the template's text, with a digest of that text. So a ledger can be compared with a
conversation that was rendered as a whole, span by span, whatever the template did to old messages.

The ids of a span are those of its text, or, for an assistant message that was generated here, the ids that were
generated: a tokenizer would often give others for the same text, and every block after them would have to be computed again.

Ledgers are immutable values. A turn makes a new one; a branch begins with `Ledger.cut`. Columns are `bytes`, packed
little-endian, so that a ledger is written and read without looking at its parts; token ids, the most of it, are in pieces that
a ledger shares with the one it goes on from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from prefix_cache.hashing import DIGEST_BYTES as BLOCK_BYTES
from prefix_cache.hashing import TOKEN_BYTES, joined_block_digests
from prefix_cache.packed_tokens import NO_TOKENS, PackedTokens
from sessions.digests import DIGEST_BYTES, NO_MEANING

_SPAN = struct.Struct("<IIQQ16s")
SPAN_BYTES = _SPAN.size
_OVERHEAD = 700
"""Bytes of a ledger's objects beside its columns."""


class Span(NamedTuple):
    """Where a span ends, counted from the beginning: in messages, token ids, and UTF-8 bytes of the template's text.

    `text_hash`: 64-bit xxh3 of the span's own text. `meaning`: of a message whose ids are generated ones,
    else NO_MEANING.
    """

    messages: int
    tokens: int
    text_bytes: int
    text_hash: int
    meaning: bytes = NO_MEANING

    @property
    def generated(self) -> bool:
        return self.meaning != NO_MEANING


_NOTHING = Span(0, 0, 0, 0)


class Generated(msgspec.Struct, frozen=True, array_like=True):
    """One answer of the model that its client has not sent back yet.

    `token_ids`: packed, without the token that ended it. `meaning`: sessions.digests.meaning_digest of the message as it was
    returned. `reasoning`: whether the ids hold a thinking region, which templates may strip. `cut`: it was ended in the
    middle, so that the ids may end within a call or a thinking region.
    """

    meaning: bytes
    token_ids: bytes
    reasoning: bool = False
    cut: bool = False


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation as it was last sent, and what was generated then.

    `context`: digest of all that shapes the prompt beside the messages (model, template, tools, template variables).
    `root`: parent hash of the first block (namespace and cache salt). `messages`: exact digests, joined. `spans`: packed
    `Span`s; the last may end before the last message, where the template's text could not be cut. `tokens`: ids of
    the prompt, `blocks`: joined hashes of its full blocks. `tail`: the text after the last span. `pending`: the
    answers, one for each choice. `generated_tokens`: how many of `tokens` the model generated. `reasoned`: some span's ids hold
    reasoning. `odd`: a user says what the template looks for in texts (gateway.histories.stability), None: nobody has looked.
    `worker`: where it ran, as its gateway named it, and `worker_instance`: by its own id; `used_at`: Unix
    seconds.
    """

    context: bytes
    root: bytes
    block_size: int
    messages: bytes = b""
    spans: bytes = b""
    tokens: PackedTokens = NO_TOKENS
    blocks: bytes = b""
    tail: str = ""
    pending: tuple[Generated, ...] = ()
    generated_tokens: int = 0
    reasoned: bool = False
    odd: bool | None = None
    worker: str = ""
    worker_instance: str = ""
    used_at: float = 0.0

    @property
    def num_messages(self) -> int:
        return len(self.messages) // DIGEST_BYTES

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_spans(self) -> int:
        return len(self.spans) // SPAN_BYTES

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest of the pending answers."""
        return max([len(item.token_ids) for item in self.pending], default=0) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        columns = len(self.messages) + len(self.spans) + self.tokens.held_bytes + len(self.blocks) + 4 * len(self.tail)
        return columns + sum(len(item.token_ids) + 160 for item in self.pending) + _OVERHEAD

    def span(self, position: int) -> Span:
        """The span at `position`; -1 is the last. Raises IndexError."""
        count = self.num_spans
        if not -count <= position < count:
            raise IndexError(f"the ledger has {count} spans, not one at {position}")
        return Span(*_SPAN.unpack_from(self.spans, position % count * SPAN_BYTES))

    def iter_spans(self) -> Iterator[Span]:
        """All spans, in order."""
        return map(Span._make, _SPAN.iter_unpack(self.spans))

    def spans_within(self, messages: int) -> int:
        """How many spans lie within the first `messages` messages."""
        low, high = 0, self.num_spans
        while low < high:
            middle = (low + high) // 2
            if _SPAN.unpack_from(self.spans, middle * SPAN_BYTES)[0] <= messages:
                low = middle + 1
            else:
                high = middle
        return low

    def end_of(self, spans: int) -> Span:
        """Where the first `spans` spans end, of which there are as many; all zero for none."""
        return Span._make(_SPAN.unpack_from(self.spans, (spans - 1) * SPAN_BYTES)) if spans else _NOTHING

    def generated_within(self, spans: int) -> int:
        """How many of the tokens of the first `spans` spans the model generated."""
        return self.generated_tokens if spans == self.num_spans else _generated(self.spans[: spans * SPAN_BYTES])

    def extended(self, spans: int, ids: Iterable[bytes]) -> tuple[PackedTokens, bytes]:
        """The first `spans` spans' ids with `ids` (packed) after them, and the hashes of all their blocks, which are copied
        once: of a long conversation that is 100 kilobytes."""
        kept = self.end_of(spans).tokens
        tokens = self.tokens.extended(kept, ids)
        known = kept // self.block_size
        parent = self.blocks[(known - 1) * BLOCK_BYTES : known * BLOCK_BYTES] if known else self.root
        fresh = tokens.part(known * self.block_size)
        shared = memoryview(self.blocks)[: known * BLOCK_BYTES]
        return tokens, b"".join((shared, joined_block_digests(fresh, parent, self.block_size)))

    def cut(self, spans: int) -> Ledger:
        """The ledger of the first `spans` spans: what a branch shares."""
        end = self.end_of(spans)
        tokens, blocks = self.extended(spans, ())
        return msgspec.structs.replace(
            self,
            messages=self.messages[: end.messages * DIGEST_BYTES],
            spans=self.spans[: spans * SPAN_BYTES],
            tokens=tokens,
            blocks=blocks,
            tail="",
            pending=(),
            generated_tokens=self.generated_within(spans),
            odd=self.odd if end.messages == self.num_messages else None,
        )


def pack_spans(spans: Iterable[Span]) -> bytes:
    """The inverse of `Ledger.iter_spans`."""
    return b"".join([_SPAN.pack(*span) for span in spans])


def text_digest(text: bytes) -> int:
    """Of a span's text in UTF-8."""
    return xxhash.xxh3_64_intdigest(text)


def common_messages(left: bytes, right: bytes) -> int:
    """How many messages two conversations share from the beginning; both are joined digests."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // DIGEST_BYTES
    low, high = 0, size // DIGEST_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if left[low * DIGEST_BYTES : middle * DIGEST_BYTES] == right[low * DIGEST_BYTES : middle * DIGEST_BYTES]:
            low = middle
        else:
            high = middle
    return low


def common_blocks(left: bytes, right: bytes) -> int:
    """How many blocks two prompts share from the beginning; both are joined block hashes. Hashes are chained, so the prefix
    is shared up to the last equal one."""
    low, high = 0, min(len(left), len(right)) // BLOCK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * BLOCK_BYTES, middle * BLOCK_BYTES)
        if left[at] == right[at]:
            low = middle
        else:
            high = middle - 1
    return low


def extend_blocks(blocks: bytes, tokens: PackedTokens, root: bytes, block_size: int) -> bytes:
    """Block hashes of `tokens`, of which `blocks` are the first: only new blocks are hashed."""
    known = len(blocks) // BLOCK_BYTES
    parent = blocks[-BLOCK_BYTES:] if blocks else root
    fresh = tokens.part(known * block_size)
    return blocks + joined_block_digests(fresh, parent, block_size)


def _generated(spans: bytes) -> int:
    total = start = 0
    for _, tokens, _, _, meaning in _SPAN.iter_unpack(spans):
        if meaning != NO_MEANING:
            total += tokens - start
        start = tokens
    return total
