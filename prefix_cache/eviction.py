"""Eviction order: which cached block nobody uses right now is given up first.

A policy only orders block ids. The pool tells it when blocks become evictable, when they are used again, and asks for the
next ones to give up; what a block holds and who refers to it are the pool's business. A session of 100k tokens has thousands of
blocks, all of which come, go and are marked together: so everything is said of many blocks at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.int32]
"""Distinct blocks, in an order that means something."""


class EvictionPolicy(Protocol):
    """An order over evictable blocks. Of several blocks named at once each is taken in the order in which they are named, as
    if they were named one by one."""

    def add_all(self, blocks: BlockIds) -> None:
        """`blocks` became evictable: their last users have left them and they can still be found. None is in the order yet."""

    def remove_all(self, blocks: BlockIds) -> None:
        """`blocks` are in use again, or no longer worth keeping. Raises KeyError when one is not in the order."""

    def supersede_all(self, blocks: BlockIds) -> None:
        """`blocks`, which are in the order, will not be asked for again: they come before all others. Of several, the one named
        last comes first. Raises KeyError when one is not in the order."""

    def mark_all(self, blocks: BlockIds, standing: int, expected: float, session: int) -> None:
        """What `blocks` are worth while nobody uses them (prefix_cache.worth), whether they are in the order yet or not.
        `expected`: when they will be used, or until when they are pinned. `session`: who says so, 0 for nobody; what two of
        them have marked is shared. A policy may ignore it."""

    def forget_all(self, blocks: BlockIds) -> None:
        """`blocks` hold something else from now on: no mark means them any more."""

    def pop_all(self, count: int) -> list[int]:
        """Takes out and returns the blocks to give up first, `count` of them or as many as there are."""

    def pop_below(self, count: int, expected: float) -> list[int]:
        """As `pop_all`, but only blocks that are worth less than those of a session that is expected back at `expected`. A
        policy that knows no sessions has none."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """The evictable blocks, the one to give up first coming first."""


def listed(blocks: BlockIds) -> Sequence[int]:
    """As Python integers, which dictionaries and lists are faster with."""
    return blocks.tolist() if isinstance(blocks, np.ndarray) else blocks


class LRUPolicy:
    """Least recently used first, where a block was last used when its last user left it.

    An OrderedDict and not a dict: taking the first key of a dict again and again walks over the holes that the keys taken
    before have left, which is quadratic.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add_all(self, blocks: BlockIds) -> None:
        self._order.update(dict.fromkeys(listed(blocks)))

    def remove_all(self, blocks: BlockIds) -> None:
        deque(map(self._order.pop, listed(blocks)), maxlen=0)

    def supersede_all(self, blocks: BlockIds) -> None:
        for block in listed(blocks):
            self._order.move_to_end(block, last=False)

    def mark_all(self, blocks: BlockIds, standing: int, expected: float, session: int) -> None:
        """Recency is all that counts here."""

    def forget_all(self, blocks: BlockIds) -> None:
        """There are no marks."""

    def pop_all(self, count: int) -> list[int]:
        return [self._order.popitem(last=False)[0] for _ in range(min(count, len(self._order)))]

    def pop_below(self, count: int, expected: float) -> list[int]:
        return []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
