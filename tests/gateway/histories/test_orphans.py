"""Which blocks a rewritten history leaves behind."""

import msgspec

from gateway.histories.orphans import orphaned_blocks
from prefix_cache.hashing import block_digests, pack_tokens
from prefix_cache.packed_tokens import NO_TOKENS, PackedTokens
from sessions.ledger import Generated, extend_blocks
from tests.sessions.ledgers import ROOT, a_ledger


def blocks(*ids):
    return b"".join(block_digests(pack_tokens(ids), ROOT, 4))


def with_tokens(ledger, *ids):
    packed = PackedTokens(pack_tokens(ids))
    return msgspec.structs.replace(ledger, tokens=packed, blocks=extend_blocks(b"", packed, ROOT, 4))


OLD = a_ledger(["a", "b", "c", "d", "e", "f"])  # ids 0 to 17, three a message: four full blocks
NEW = with_tokens(OLD, *range(6), *range(50, 60))


def test_what_only_the_old_history_had_is_orphaned():
    assert orphaned_blocks(OLD, NEW, [], 0) == blocks(*range(18))[16:]


def test_answers_that_did_not_come_back_go_with_it_once():
    answers = tuple(Generated(bytes([at]) * 16, pack_tokens(range(100 * at, 100 * at + 8))) for at in (1, 2))
    old = msgspec.structs.replace(OLD, pending=answers)
    expected = blocks(*range(18))[16:]
    for at in (1, 2):
        expected += blocks(*range(18), *range(100 * at, 100 * at + 8))[64:]
    assert orphaned_blocks(old, NEW, [], 0) == expected


def test_what_others_have_stays():
    other = with_tokens(OLD, *range(12), 70)
    assert orphaned_blocks(OLD, NEW, [other], 0) == blocks(*range(18))[48:]
    assert orphaned_blocks(OLD, NEW, [], 2) == blocks(*range(18))[32:]
    assert orphaned_blocks(OLD, OLD, [], 0) == b""


def test_the_first_message_stays_whoever_has_it():
    nobody = msgspec.structs.replace(OLD, tokens=NO_TOKENS, blocks=b"")
    assert orphaned_blocks(OLD, nobody, [], 0) == blocks(*range(18))[16:]
