"""Eviction order: which cached block nobody uses right now is given up first.

A policy only orders block ids. The pool tells it when a block becomes evictable, when it is used again, and asks for the
next one to give up; what a block holds and who refers to it are the pool's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over evictable blocks. Every operation is O(1), or O(log n) where an order needs it."""

    def add(self, block: int) -> None:
        """`block` became evictable: its last user has left it and it can still be found. It is not in the order yet."""

    def remove(self, block: int) -> None:
        """`block` is in use again, or no longer worth keeping. Raises KeyError when it is not in the order."""

    def supersede(self, block: int) -> None:
        """`block`, which is in the order, will not be asked for again: it comes before all others. Of several, the one named
        last comes first. Raises KeyError when it is not in the order."""

    def mark(self, block: int, standing: int, expected: float, session: int) -> None:
        """What `block` is worth while nobody uses it (prefix_cache.worth), whether it is in the order yet or not. `expected`:
        when it will be used, or until when it is pinned. `session`: who says so, 0 for nobody; what two of them have marked is
        shared. A policy may ignore it."""

    def forget(self, block: int) -> None:
        """`block` holds something else from now on: no mark means it any more."""

    def pop(self) -> int:
        """Takes out and returns the block to give up first. Raises KeyError when there is none."""

    def pop_below(self, expected: float) -> int | None:
        """As `pop`, but only a block that is worth less than those of a session that is expected back at `expected`; None when
        there is none such. A policy that knows no sessions has none."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """The evictable blocks, the one to give up first coming first."""


class LRUPolicy:
    """Least recently used first, where a block was last used when its last user left it.

    An OrderedDict and not a dict: taking the first key of a dict again and again walks over the holes that the keys taken
    before have left, which is quadratic.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def supersede(self, block: int) -> None:
        self._order.move_to_end(block, last=False)

    def mark(self, block: int, standing: int, expected: float, session: int) -> None:
        """Recency is all that counts here."""

    def forget(self, block: int) -> None:
        """There are no marks."""

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def pop_below(self, expected: float) -> int | None:
        return None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
