"""Admission under turns that come, wait, leave, run and end in any order."""

import asyncio

from admission_workers import Workers, ask
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.access.entries import PRIORITY_CLASSES
from gateway.admission.config import AdmissionConfig
from gateway.admission.controller import Admission
from gateway.turn import TurnError


class Admitting(RuleBasedStateMachine):
    """Turns come, wait, leave, run and end in any order. Workers never hold more than they take, whoever was let in comes to
    an end, and in the end nothing is held and nobody waits."""

    SLOTS, BLOCKS = 2, 50

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.workers = Workers(2, self.BLOCKS, self.SLOTS)
        self.admission = Admission(AdmissionConfig(queue_size=4, max_queued_tokens=1500), self.workers.rooms)
        self.tasks = {}
        self.granted = []
        self.running = []

    def turn_loop(self, rounds=6):
        async def rest():
            for _ in range(rounds):
                await asyncio.sleep(0)

        self.loop.run_until_complete(rest())
        for task in [task for task in self.tasks if task.done()]:
            asked = self.tasks.pop(task)
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self.granted.append((task.result(), asked))
            else:
                assert isinstance(error, TurnError)
                assert error.status in (429, 503)
                assert 1 <= error.retry_after <= 60

    def call(self, function):
        async def inside():
            function()

        self.loop.run_until_complete(inside())

    @rule(
        tenant=st.sampled_from("abc"),
        need=st.integers(1, 80),
        priority=st.sampled_from(PRIORITY_CLASSES),
        continuing=st.booleans(),
        tokens=st.integers(1, 600),
    )
    def come(self, tenant, need, priority, continuing, tokens):
        asked = ask(tenant, need, priority=priority, continuing=continuing, tokens=tokens)

        async def start():
            return asyncio.ensure_future(self.admission.admit(asked))

        self.tasks[self.loop.run_until_complete(start())] = asked
        self.turn_loop()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def leave(self, data):
        position = data.draw(st.integers(0, len(self.tasks) - 1))
        list(self.tasks)[position].cancel()
        self.turn_loop()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), fails=st.booleans())
    def place(self, data, fails):
        ticket, asked = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        if fails:
            self.call(ticket.release)
        else:
            name = self.workers.place(asked.needs[0], ticket._turn.booked[0][0])
            self.call(ticket.placed)
            self.running.append((ticket, name, asked.needs[0]))
        self.turn_loop()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        ticket, name, need = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.workers.end(name, need)
        self.call(ticket.release)
        self.turn_loop()

    @invariant()
    def bounds_hold(self):
        for held in self.workers.held.values():
            assert len(held) <= self.SLOTS
            assert sum(held) <= self.BLOCKS or len(held) == 1
        assert self.admission.in_flight == len(self.granted) + len(self.running)
        assert sum(self.admission.depths().values()) == len(self.tasks) <= 12
        assert self.admission.queued_tokens() == sum(asked.tokens for asked in self.tasks.values()) <= 1500
        booked = sorted(blocks for held in getattr(self.admission._queues.get("m"), "booked", {}).values() for blocks in held)
        assert booked == sorted(asked.needs[0] for _, asked in self.granted)
        if self.tasks:
            # Somebody waits only where something runs or is about to.
            assert self.granted or self.running

    def teardown(self):
        while self.granted or self.running:
            for ticket, asked in self.granted:
                name = self.workers.place(asked.needs[0], ticket._turn.booked[0][0])
                self.running.append((ticket, name, asked.needs[0]))
                self.call(ticket.placed)
            self.granted = []
            if self.running:
                ticket, name, need = self.running.pop()
                self.workers.end(name, need)
                self.call(ticket.release)
            self.turn_loop()
        still = list(self.tasks)
        for task in still:
            task.cancel()
        self.turn_loop()
        self.loop.close()
        assert not still, "they wait for nothing"
        assert self.admission.in_flight == 0
        assert self.admission.queued_tokens() == 0


TestAdmitting = Admitting.TestCase


TestAdmitting.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
