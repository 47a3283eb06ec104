import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from prefix_cache import chain_memory
from prefix_cache.chain_memory import ChainMemory
from prefix_cache.hashing import joined_block_digests

ROOTS = (bytes(16), b"salt" * 4)


def prompt(*parts):
    return b"".join(bytes([part]) * 4 for part in parts)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(chain_memory, "_LEAST_BLOCKS", 2)


turns = st.tuples(
    st.integers(0, 3),  # session
    st.sampled_from(["go on", "go on", "rewrite", "shorten", "other root"]),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(0, 40),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(turns, max_size=40), st.sampled_from([600, 1500, 1 << 20]))
def test_digests_are_those_of_the_whole_prompt(history, max_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_memory, "_LEAST_BLOCKS", 2)
        memory = ChainMemory(2, max_bytes)
        sessions = dict.fromkeys(range(4), ())
        roots = dict.fromkeys(range(4), 0)
        for session, what, tokens, at in history:
            said = sessions[session]
            if what == "rewrite":
                said = said[:at] + said[at + 1 :]
            elif what == "shorten":
                said = said[:at]
            elif what == "other root":
                roots[session] = 1 - roots[session]
            said = sessions[session] = (*said, *tokens)
            root = ROOTS[roots[session]]
            assert memory.digests(prompt(*said), root, session).joined == joined_block_digests(prompt(*said), root, 2)
            assert memory._bytes == sum(map(chain_memory._size, memory._prompts.values())) <= max_bytes


def test_only_what_is_new_is_hashed(few, monkeypatch):
    hashed = []

    def counting(packed, root, block_size):
        hashed.append(len(packed))
        return joined_block_digests(packed, root, block_size)

    monkeypatch.setattr(chain_memory, "joined_block_digests", counting)
    memory = ChainMemory(2)
    said = list(range(21))
    for new in ([], [21, 22, 23], [24]):
        said += new
        memory.digests(prompt(*said), ROOTS[0], 7)
    assert hashed == [21 * 4, 4 * 4, 1 * 4]
    memory.digests(prompt(*said), ROOTS[0], 0)
    memory.digests(prompt(*said), ROOTS[0], 8)
    assert hashed[3:] == [25 * 4, 25 * 4], "nobody goes on from what another session said"


def test_sessions_that_were_here_longest_ago_are_forgotten(few):
    memory = ChainMemory(2, 3 * (512 + 32))
    for session in (1, 2, 3, 1, 4):
        memory.digests(prompt(1, 2, 3, 4), ROOTS[0], session)
    assert list(memory._prompts) == [3, 1, 4]


def test_many_threads_may_ask():
    memory = ChainMemory(2, 20_000)
    wrong = []

    def ask(number):
        for turn in range(40):
            said = prompt(*[number % 3] * (80 + 2 * turn))
            if memory.digests(said, ROOTS[0], number % 5 + 1).joined != joined_block_digests(said, ROOTS[0], 2):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert memory._bytes == sum(map(chain_memory._size, memory._prompts.values())) <= 20_000
