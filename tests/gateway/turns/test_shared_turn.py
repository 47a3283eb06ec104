"""SharedTurn by itself: whatever readers do, in whatever order, each sees one and the same sequence of events."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.choices import ChoiceDelta, ChoiceEnd
from gateway.turn import TurnError
from gateway.turns.kept_events import EventBudget
from gateway.turns.shared import Begun, SharedTurn
from grammar.deltas import TextDelta

TOTAL = 10**6


class Turn:
    """A RunningTurn that says `count` numbers, one whenever `go_on` is set, then fails with `error` if there is one."""

    def __init__(self, count, error=None, width=1):
        self.go_on = asyncio.Semaphore(0)
        self.count, self.error, self.width = count, error, width
        self.pulled = 0
        self.closed = 0
        self.settled = []
        self.complete = False

    async def start(self):
        return Begun(self)

    async def settle(self, begun, complete):
        assert begun.running is self
        self.settled.append(complete)

    async def started(self):
        pass

    async def events(self):
        for number in range(self.count):
            await self.go_on.acquire()
            self.pulled += 1
            yield ChoiceDelta(0, (TextDelta(str(number).rjust(self.width)),), (number,))
        if self.error is not None:
            raise self.error
        yield ChoiceEnd(0, "stop")
        self.complete = True

    async def aclose(self):
        self.closed += 1


def shared_turn(turn, *, max_bytes=10**5, keep=True, total=TOTAL):
    budget = EventBudget(total)
    return SharedTurn(turn.start, turn.settle, budget=budget, max_bytes=max_bytes, keep=keep), budget


async def read(reader, into):
    while await reader.wait():
        event = reader.take()
        if event is None:
            return
        into.append(event.token_ids[0] if isinstance(event, ChoiceDelta) else "end")


async def soon():
    for _ in range(5):
        await asyncio.sleep(0)


actions = st.lists(st.sampled_from(["join", "leave", "say", "cancel"]), max_size=30)


@settings(deadline=None, max_examples=150)
@given(count=st.integers(0, 8), plan=actions, seed=st.randoms(use_true_random=False), fails=st.booleans())
def test_every_reader_gets_the_whole_sequence_or_leaves(count, plan, seed, fails):
    async def scenario():
        turn = Turn(count, TurnError(502, "worker_lost", "gone") if fails else None)
        shared, budget = shared_turn(turn)
        readers = [(shared.read(), [])]
        heard = [readers[0][1]]
        tasks = [asyncio.create_task(read(*readers[0]))]
        ended = []
        for action in plan:
            if action == "say":
                turn.go_on.release()
            elif action == "join" and any(not task.done() for task in tasks):
                readers.append((shared.read(), []))
                heard.append(readers[-1][1])
                tasks.append(asyncio.create_task(read(*readers[-1])))
            elif action in ("leave", "cancel") and tasks:
                at = seed.randrange(len(tasks))
                task, (reader, seen) = tasks.pop(at), readers.pop(at)
                if action == "cancel":
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await reader.aclose()
                    assert seen in ([*range(len(seen))], [*range(count), "end"])
                else:
                    ended.append((task, reader, seen))
            await soon()
        for _ in range(count):
            turn.go_on.release()
        for task, (reader, seen) in [*zip(tasks, readers, strict=True), *((t, (r, s)) for t, r, s in ended)]:
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if fails:
                assert isinstance(result, TurnError)
                assert seen == [*range(count)]
            else:
                assert result is None
                assert seen == [*range(count), "end"]
            await reader.aclose()
        assert turn.closed == 1
        # Whoever heard the end, it is complete; the last one may have left while it was on its way.
        assert turn.settled == [turn.complete]
        assert turn.complete or not any("end" in seen for seen in heard)
        assert shared.readers == 0
        shared.forget()
        assert budget.free == TOTAL

    asyncio.run(scenario())


async def test_without_retries_nothing_is_kept():
    turn = Turn(1001)
    shared, budget = shared_turn(turn, keep=False)
    reader = shared.read()
    for number in range(1000):
        turn.go_on.release()
        assert await reader.wait()
        assert budget.free < TOTAL
        assert reader.take().token_ids == (number,)
        assert (shared.bytes, budget.free) == (0, TOTAL)
    await reader.aclose()


async def test_a_reader_that_takes_nothing_does_not_hold_up_the_worker_or_fill_the_memory():
    turn = Turn(1000, width=100)
    for _ in range(1000):
        turn.go_on.release()
    shared, budget = shared_turn(turn, max_bytes=10_000)
    fast, slow = shared.read(), shared.read()
    seen = []
    await read(fast, seen)
    assert seen == [*range(1000), "end"]
    assert not shared.whole
    assert shared.bytes <= 10_000
    assert await slow.wait()
    with pytest.raises(TurnError, match="more than 10000 bytes behind") as caught:
        slow.take()
    assert (caught.value.status, caught.value.code) == (503, "fell_behind")
    await fast.aclose()
    await slow.aclose()
    assert budget.free == TOTAL


async def test_one_reader_alone_is_never_too_slow():
    turn = Turn(500, width=100)
    shared, _ = shared_turn(turn)
    reader = shared.read()
    for _ in range(500):
        turn.go_on.release()
    # Little is pulled ahead of what it takes, so the worker waits for it; and it is always enough.
    behind = 0
    for number in range(500):
        assert await reader.wait()
        await soon()
        behind = max(behind, turn.pulled - number)
        assert turn.pulled >= min(number + 32, 500)
        assert reader.take().token_ids == (number,)
    assert behind == 64
    await reader.aclose()


async def test_all_turns_together_keep_no_more_than_their_budget():
    budget = EventBudget(12_000)
    turns = [Turn(20, width=100) for _ in range(5)]
    readers = []
    for turn in turns:
        shared = SharedTurn(turn.start, turn.settle, budget=budget, max_bytes=10**6, keep=True)
        readers.append(shared.read())
        for _ in range(20):
            turn.go_on.release()
        await read(readers[-1], [])
    whole = [reader.shared.whole for reader in readers]
    assert whole[0]
    assert not whole[-1]
    assert budget.free >= -500  # one event over, at most, before a turn gives up its own
    for reader in readers:
        await reader.aclose()
        reader.shared.forget()
    assert budget.free == 12_000


async def test_the_last_one_to_leave_while_it_starts_ends_the_start():
    never, cancelled = asyncio.Event(), asyncio.Event()

    async def start():
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    shared = SharedTurn(start, None, budget=EventBudget(1000), max_bytes=1000, keep=True)
    one, two = shared.read(), shared.read()
    waiting = asyncio.create_task(one.begun())
    await soon()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await one.aclose()
    assert not cancelled.is_set()
    await two.aclose()
    assert cancelled.is_set()
    assert shared.failed


async def test_a_ledger_is_written_also_when_the_last_reader_leaves_meanwhile():
    turn = Turn(1)
    turn.go_on.release()
    writing, go_on, written = asyncio.Event(), asyncio.Event(), []

    async def settle(begun, complete):
        writing.set()
        await go_on.wait()
        written.append(complete)

    shared = SharedTurn(turn.start, settle, budget=EventBudget(TOTAL), max_bytes=10**5, keep=True)
    reader = shared.read()
    seen = []
    task = asyncio.create_task(read(reader, seen))
    await asyncio.wait_for(writing.wait(), 5)
    assert not task.done()  # nobody hears of the end of the stream before it is written
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    leaving = asyncio.create_task(reader.aclose())
    await soon()
    go_on.set()
    await asyncio.wait_for(leaving, 5)
    assert written == [True]
    assert turn.closed == 1


async def test_an_answer_is_made_small_only_when_its_connections_are_closed():
    """The last reader may be torn away while it waits for that; what is let go of before would never be closed."""
    turn, order = Turn(1), []

    async def aclose():
        order.append("closed")

    turn.aclose, turn.release = aclose, lambda: order.append("released")
    shared, _ = shared_turn(turn)
    reader, seen = shared.read(), []
    turn.go_on.release()
    await read(reader, seen)
    leaving = asyncio.create_task(reader.aclose())
    await asyncio.sleep(0)  # it waits for the end now
    leaving.cancel()
    shared.slim()
    await asyncio.gather(leaving, return_exceptions=True)
    await soon()
    assert order == ["closed", "released"]
    assert shared.begun().running is turn
