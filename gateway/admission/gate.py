"""What a turn passes between its prompt and its worker: the limits of its key, then admission. However it ends, what it was
given comes back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.access.entries import PriorityClass
from gateway.admission.buckets import Buckets
from gateway.admission.controller import Admission, Ask, Ticket
from gateway.admission.limits import Charge, RateLimits
from gateway.admission.rooms import Rooms, SomeRoom, needed_blocks, reserved_output
from gateway.admission.shared_buckets import SharedBuckets
from gateway.auth import Caller
from gateway.config import GatewayConfig
from gateway.histories.keeper import TurnHistory
from gateway.running import Usage
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import Prompt, SessionRef, Turn
from gateway.workers.protocol import WorkerInfo
from sessions.redis_link import RedisLink

log = logging.getLogger(__name__)

_SESSIONS = 100_000


class Pass:
    """A turn that was let in. `left` gives back its ticket and settles what it used; once, later calls do nothing. `headers`:
    what its answer should say of limits. `waited`: seconds."""

    def __init__(self, gate: Gate, ticket: Ticket, charge: Charge | None, prompts: int, headers: Mapping[str, str]) -> None:
        self._gate = gate
        self._ticket = ticket
        self._charge = charge
        self._single = prompts == 1
        self.headers = headers

    @property
    def waited(self) -> float:
        return self._ticket.waited

    def going(self) -> None:
        """Its prompts go to their workers now: a single one is on its worker's books before anything else happens."""
        if self._single:
            self._ticket.going()

    def gone(self) -> None:
        """They are all on their workers."""
        self._ticket.placed()

    def left(self, usage: Usage | None, *, began: bool = False) -> None:
        """It has ended with this use; None: nobody knows of any. Where it `began` nevertheless the estimate stays."""
        self._ticket.release()
        charge, self._charge = self._charge, None
        if charge is not None and not (usage is None and began):
            used = 0 if usage is None else max(usage.prompt_tokens - usage.cached_tokens, 0) + usage.completion_tokens
            self._gate._settle(charge, used)


class Gate:
    """One for a gateway."""

    def __init__(self, admission: Admission, limits: RateLimits) -> None:
        self.admission = admission
        self.limits = limits
        self._sessions: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._settling: set[asyncio.Task[None]] = set()

    def check(self, model: str, turn: Turn, priority: PriorityClass) -> None:
        """Before a prompt is made: raises TurnError for a first turn that would be turned away after that work."""
        if not self._looks_continuing(turn):
            self.admission.check(model, turn.session.tenant, priority)

    async def enter(
        self,
        caller: Caller,
        model: str,
        turn: Turn,
        priority: PriorityClass,
        prompts: Sequence[Prompt],
        history: TurnHistory | None,
        info: WorkerInfo,
    ) -> Pass:
        """Raises TurnError 429, 503."""
        output = reserved_output(turn.sampling, self.admission.config.output_reserve)
        tokens = sum([prompt.num_tokens for prompt in prompts])
        known = history.continuation.reused_tokens if history is not None else 0
        cost = float(max(tokens - known, 1) + output * len(prompts))
        charge, headers = await self.limits.tokens(caller, cost)
        ask = Ask(
            model,
            turn.session.tenant,
            tuple([needed_blocks(prompt.num_tokens, output, info) for prompt in prompts]),
            tokens,
            cost,
            priority,
            (history is not None and history.record is not None) or self._looks_continuing(turn),
        )
        try:
            ticket = await self.admission.admit(ask)
        except BaseException:
            if charge is not None:
                self._settle(charge, 0)
            raise
        self._remember(turn.session)
        return Pass(self, ticket, charge, len(prompts), headers)

    async def enter_opaque(self, caller: Caller, turn: Turn, priority: PriorityClass, tokens: int, *, continuing: bool) -> Pass:
        """The same for a turn that goes to its worker as it came, with a guess at its tokens."""
        cost = float(tokens)
        charge, headers = await self.limits.tokens(caller, cost)
        continuing = continuing or self._is_known(turn.session)
        try:
            ticket = await self.admission.admit(Ask(turn.model, turn.session.tenant, (0,), tokens, cost, priority, continuing))
        except BaseException:
            if charge is not None:
                self._settle(charge, 0)
            raise
        self._remember(turn.session)
        return Pass(self, ticket, charge, 1, headers)

    async def aclose(self) -> None:
        """Waits for what is being settled."""
        if self._settling:
            await asyncio.gather(*self._settling, return_exceptions=True)

    def _looks_continuing(self, turn: Turn) -> bool:
        """A conversation that has answers in it, or a session whose turn was let in before."""
        return has_answers(turn.messages) or self._is_known(turn.session)

    def _is_known(self, session: SessionRef) -> bool:
        return session.key is not None and (session.tenant, session.key) in self._sessions

    def _remember(self, session: SessionRef) -> None:
        if session.key is None:
            return
        name = (session.tenant, session.key)
        self._sessions[name] = None
        self._sessions.move_to_end(name)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def _settle(self, charge: Charge, used: float) -> None:
        task = asyncio.ensure_future(charge.settle(used))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


def has_answers(messages: Any) -> bool:
    """Whether a conversation was answered before."""
    if isinstance(messages, list | tuple):
        for message in messages:
            if isinstance(message, Mapping) and message.get("role") == "assistant":
                return True
    return False


def make_gate(
    config: GatewayConfig,
    telemetry: Telemetry,
    *,
    rooms: Rooms = lambda model: (),
    some_room: SomeRoom = lambda model: None,
    shared_limits: RedisLink | None = None,
) -> Gate:
    """`rooms`, `some_room`: what workers can take; without them every turn begins at once. `shared_limits`: where gateways
    count together what keys use."""
    buckets = Buckets()
    limits = RateLimits(buckets, SharedBuckets(shared_limits, buckets) if shared_limits is not None else None)
    gate = Gate(Admission(config.admission, rooms, some_room=some_room), limits)
    telemetry.watch_admission(gate.admission, limits)
    return gate
