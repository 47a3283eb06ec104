"""A thousand random corruptions of the tiers' bytes and books: not one wrong block is given back, and all of it heals."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from offload.arena import HostArena
from offload.disk_records import RECORD_BYTES, pack_record
from offload.disk_store import DiskStore
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.offload.conftest import BLOCK

SLOTS = 16
BLOCKS = 12
FOREIGN, OTHER_CODEC = digest_of(77), digest_of(78)


def flip_bits(content: bytearray, random: random.Random) -> None:
    for _ in range(random.randint(1, 8)):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def flip_in_data(place: Path, random: random.Random, saved: Path) -> None:
    content = bytearray((place / "data").read_bytes())
    flip_bits(content, random)
    (place / "data").write_bytes(content)


def flip_in_records(place: Path, random: random.Random, saved: Path) -> None:
    content = bytearray((place / "records").read_bytes())
    flip_bits(content, random)
    (place / "records").write_bytes(content)


def truncate(place: Path, random: random.Random, saved: Path) -> None:
    path = place / random.choice(("data", "data", "records", "about"))
    content = path.read_bytes()
    path.write_bytes(content[: random.randrange(len(content))])


def swap_blocks(place: Path, random: random.Random, saved: Path) -> None:
    content = bytearray((place / "data").read_bytes())
    first, second = random.sample(range(BLOCKS), 2)
    one, two = slice(first * 4096, (first + 1) * 4096), slice(second * 4096, (second + 1) * 4096)
    content[one], content[two] = content[two], content[one]
    (place / "data").write_bytes(content)


def swap_records(place: Path, random: random.Random, saved: Path) -> None:
    content = bytearray((place / "records").read_bytes())
    first, second = random.sample(range(BLOCKS), 2)
    one = slice(first * RECORD_BYTES, (first + 1) * RECORD_BYTES)
    two = slice(second * RECORD_BYTES, (second + 1) * RECORD_BYTES)
    content[one], content[two] = content[two], content[one]
    (place / "records").write_bytes(content)


def forged_record(place: Path, random: random.Random, saved: Path) -> None:
    """Whole in itself, and wrong: another block's name, or a length or checksum of its own."""
    slot = random.randrange(BLOCKS)
    record = pack_record(slot, digest_of(random.randrange(BLOCKS)), random.getrandbits(64), random.randint(0, 9000), 0, 1e9)
    content = bytearray((place / "records").read_bytes())
    content[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
    (place / "records").write_bytes(content)


def stale_index(place: Path, random: random.Random, saved: Path) -> None:
    shutil.copy(saved / "records", place / "records")


def stale_data(place: Path, random: random.Random, saved: Path) -> None:
    shutil.copy(saved / "data", place / "data")


def foreign_namespace(place: Path, random: random.Random, saved: Path) -> None:
    """Of another model, or of another codec, which has blocks of the same names and length."""
    for name in random.choice((("data",), ("records",), ("data", "records"))):
        shutil.copy(place.parent / random.choice((FOREIGN, OTHER_CODEC)).hex() / name, place / name)


def zeroed(place: Path, random: random.Random, saved: Path) -> None:
    """What a loss of power leaves of pages that were not written yet."""
    path = place / random.choice(("data", "records"))
    content = bytearray(path.read_bytes())
    start = random.randrange(len(content)) // 512 * 512
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


KINDS = (
    flip_in_data,
    flip_in_records,
    truncate,
    swap_blocks,
    swap_records,
    forged_record,
    stale_index,
    stale_data,
    foreign_namespace,
    zeroed,
)


def sound_blocks(tier: HostArena | DiskStore) -> list[int]:
    """Which blocks are given back; every one must be right."""
    found = []
    into = np.empty(BLOCK, dtype=np.uint8)
    for number in range(3 * BLOCKS):
        into[:] = 0
        if tier.load(digest_of(number), into):
            assert np.array_equal(into, payload_of(number, BLOCK)), f"block {number} is wrong"
            found.append(number)
    return found


def test_a_thousand_corruptions_on_disk_give_no_wrong_block(disk: Callable[..., DiskStore], tmp_path: Path) -> None:
    chance = random.Random(2)
    foreign = disk(slots=SLOTS, key=FOREIGN)
    foreign.store([outgoing(number + 2 * BLOCKS, BLOCK) for number in range(BLOCKS)])
    other = disk(slots=SLOTS, key=OTHER_CODEC)
    other.store([outgoing(number, BLOCK)._replace(payload=payload_of(number + 50, BLOCK)) for number in range(BLOCKS)])
    saved = tmp_path / "saved"
    hit = dict.fromkeys(KINDS, 0)
    store = disk(slots=SLOTS)
    for round_ in range(1000):
        # A history of its own: what was saved is older than what is damaged.
        first = chance.randrange(BLOCKS)
        store.store([outgoing((first + number) % BLOCKS, BLOCK) for number in range(BLOCKS)])
        if round_ % 10 == 0:
            shutil.copytree(store.place, saved, dirs_exist_ok=True)
            store.evict([digest_of(number) for number in chance.sample(range(BLOCKS), 6)])
            store.store([outgoing(number + BLOCKS, BLOCK) for number in range(6)])
            store.evict([digest_of(number + BLOCKS) for number in range(6)])
            store.store([outgoing(number, BLOCK) for number in range(BLOCKS)])
        kind = KINDS[round_ % len(KINDS)]
        reopened = chance.random() < 0.5
        if reopened:
            store.close()
        before = store.place
        kind(before, chance, saved)
        if reopened:
            store = disk(slots=SLOTS)
        healed_before = store.figures().healed
        known = store.table.count()
        sound = sound_blocks(store)
        assert store.figures().healed - healed_before == known - len(sound), "what is damaged is counted, once"
        hit[kind] += len(sound) < BLOCKS
        store.check_integrity()
        assert sound_blocks(store) == sound
        store.store([outgoing(number, BLOCK) for number in range(BLOCKS)])
        assert sound_blocks(store)[:BLOCKS] == list(range(BLOCKS)), "what was damaged can be stored again"
    assert all(count > 5 for count in hit.values()), f"a kind of damage that did none tests nothing: {hit}"


def damage_slot(tier: HostArena, foreign: HostArena, number: int, kind: str, chance: random.Random) -> None:
    """Damages what the arena has of a block."""
    place, theirs = tier.table.find(digest_of(number)), foreign.table.find(digest_of(number))
    other = tier.table.find(digest_of((number + 1 + chance.randrange(BLOCKS - 1)) % BLOCKS))
    assert place is not None
    assert theirs is not None
    assert other is not None
    content = tier.slot(place)
    if kind == "bit":
        content[chance.randrange(BLOCK)] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        content[chance.randrange(BLOCK) :] = 0
    elif kind == "swapped":
        content[:] = tier.slot(other)
    elif kind == "stale":
        # The books name a block that was here once, and another one lies here now.
        content[:] = payload_of(number + 1000, BLOCK)
    elif kind == "foreign":
        # The same block of another codec, whole, with the checksum that it has there.
        content[:] = foreign.slot(theirs)
        tier.table.columns.at_checksum[place.slot] = theirs.checksum
    elif kind == "checksum":
        tier.table.columns.at_checksum[place.slot] ^= 1 << chance.randrange(64)
    else:
        tier.table.columns.at_length[place.slot] ^= 1 << chance.randrange(12)


def test_a_thousand_corruptions_in_memory_give_no_wrong_block(arena: Callable[..., HostArena]) -> None:
    chance = random.Random(3)
    tier, sibling, foreign = arena(slots=SLOTS), arena(slots=SLOTS), arena(slots=SLOTS, key=FOREIGN)
    # Whose blocks have the same names, and other bytes.
    foreign.store([outgoing(number, BLOCK)._replace(payload=payload_of(number + 50, BLOCK)) for number in range(BLOCKS)])
    kinds = ("bit", "cut", "swapped", "stale", "foreign", "checksum", "length")
    for round_ in range(1000):
        tier.store([outgoing(number, BLOCK) for number in range(BLOCKS)])
        number = chance.randrange(BLOCKS)
        damage_slot(tier, foreign, number, kinds[round_ % len(kinds)], chance)
        healed = sibling.figures().healed
        assert sound_blocks(sibling) == [block for block in range(BLOCKS) if block != number]
        assert sibling.figures().healed == healed + 1
        tier.check_integrity()
