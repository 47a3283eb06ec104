"""What both tiers of a machine promise, each against the same tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from offload.arena import HostArena
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from prefix_cache.worth import SUPERSEDED
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.offload.conftest import BLOCK

Make = Callable[..., HostArena | DiskStore]


@pytest.fixture(params=["arena", "disk"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.getfixturevalue(request.param)


def loaded(tier: HostArena | DiskStore, number: int) -> bool:
    """True when the block is there, whole; a wrong one is an error."""
    into = np.zeros(BLOCK, dtype=np.uint8)
    if not tier.load(digest_of(number), into):
        return False
    np.testing.assert_array_equal(into, payload_of(number, BLOCK))
    return True


def test_what_is_stored_is_loaded_byte_for_byte_by_every_sibling(make: Make) -> None:
    one, other = make(), make()
    numbers = list(range(5))
    assert one.store([outgoing(number, BLOCK) for number in numbers]) == [digest_of(number) for number in numbers]
    assert [loaded(other, number) for number in range(6)] == [True] * 5 + [False]
    assert other.prefix([digest_of(number) for number in (0, 1, 9, 2)]) == 2
    assert list(other.lacking([digest_of(number) for number in (0, 8, 9, 2)])) == [digest_of(8), digest_of(9)]
    assert other.store([outgoing(2, BLOCK)]) == [digest_of(2)]
    figures = other.figures()
    assert (figures.blocks, figures.stored, figures.used_bytes) == (5, 5, 5 * BLOCK)


def test_the_bound_holds_and_the_least_worth_goes(make: Make) -> None:
    tier = make(slots=4)
    tier.store([outgoing(number, BLOCK) for number in range(4)])
    assert loaded(tier, 0)
    tier.mark([digest_of(2)], SUPERSEDED)
    tier.store([outgoing(4, BLOCK)])
    assert [loaded(tier, number) for number in range(5)] == [True, True, False, True, True]
    tier.store([outgoing(number, BLOCK) for number in range(5, 25)])
    figures = tier.figures()
    assert figures.blocks == 4
    assert figures.used_bytes <= figures.max_bytes == 4 * 4096
    tier.check_integrity()


def test_a_block_overwritten_while_it_was_copied_is_not_kept(make: Make) -> None:
    tier = make()
    spoilt = outgoing(1, BLOCK)._replace(is_intact=lambda: False)
    assert tier.store([spoilt, outgoing(2, BLOCK)]) == [digest_of(2)]
    assert not loaded(tier, 1)
    assert tier.store([outgoing(1, BLOCK)]) == [digest_of(1)]
    assert loaded(tier, 1)
    tier.check_integrity()


def test_a_reader_whose_slot_is_taken_meanwhile_gets_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, sibling = make(slots=1), make(slots=1)
    tier.store([outgoing(1, BLOCK)])
    find = tier.table.find

    def overtaken(digest: bytes) -> object:
        place = find(digest)
        monkeypatch.setattr(tier.table, "find", find)
        sibling.store([outgoing(2, BLOCK)])
        return place

    monkeypatch.setattr(tier.table, "find", overtaken)
    assert not loaded(tier, 1)
    assert loaded(tier, 2)
    assert tier.figures().healed == 0


def test_evicting_and_storing_again(make: Make) -> None:
    tier = make()
    tier.store([outgoing(number, BLOCK) for number in range(3)])
    assert tier.evict([digest_of(0), digest_of(2), digest_of(7)]) == 2
    assert [loaded(tier, number) for number in range(3)] == [False, True, False]
    tier.check_integrity()


def test_other_models_have_other_blocks(make: Make) -> None:
    one, other = make(), make(key=digest_of(77))
    one.store([outgoing(1, BLOCK)])
    other.store([outgoing(2, BLOCK)])
    assert [loaded(one, number) for number in (1, 2)] == [True, False]
    assert [loaded(other, number) for number in (1, 2)] == [False, True]
    assert one.figures().blocks == other.figures().blocks == 1


def test_no_room_for_one_block_is_said(make: Make) -> None:
    with pytest.raises(TierUnavailable, match="but one block takes 4096; give it more"):
        make(slots=0)


def test_leaving_twice_is_leaving_once(make: Make) -> None:
    tier = make()
    tier.store([outgoing(1, BLOCK)])
    tier.close()
    tier.close()
