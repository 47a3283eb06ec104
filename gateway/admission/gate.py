"""What a turn passes between its prompt and its worker: the limits of its key, then admission. However it ends, what it was
given comes back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from gateway.access.entries import PriorityClass
from gateway.admission.controller import Admission, Ask, Ticket
from gateway.admission.limits import Charge, RateLimits
from gateway.admission.rooms import blocks_needed, reserved_output
from gateway.auth import Caller
from gateway.histories.keeper import TurnHistory
from gateway.running import Usage
from gateway.turn import Prompt, SessionRef, Turn
from gateway.workers.protocol import WorkerInfo

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
            asyncio.get_running_loop().call_soon(self._ticket.placed)

    def gone(self) -> None:
        """They are all on their workers."""
        self._ticket.placed()

    def left(self, usage: Usage | None) -> None:
        """It has ended with this use; None: it never began."""
        self._ticket.release()
        charge, self._charge = self._charge, None
        if charge is not None:
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
        tokens = sum(prompt.num_tokens for prompt in prompts)
        known = history.continuation.reused_tokens if history is not None else 0
        cost = float(max(tokens - known, 1) + output * len(prompts))
        charge, headers = await self.limits.tokens(caller, cost)
        ask = Ask(
            model,
            turn.session.tenant,
            tuple(blocks_needed(prompt.num_tokens + output, info.block_size) for prompt in prompts),
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

    async def aclose(self) -> None:
        """Waits for what is being settled."""
        if self._settling:
            await asyncio.gather(*self._settling, return_exceptions=True)

    def _looks_continuing(self, turn: Turn) -> bool:
        """A conversation that has answers in it, or a session whose turn was let in before."""
        if any(message.get("role") == "assistant" for message in turn.messages):
            return True
        key = turn.session.key
        return key is not None and (turn.session.tenant, key) in self._sessions

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
