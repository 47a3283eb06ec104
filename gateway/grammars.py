"""Turns to grammar sources: each once for all turns that ask for the same, and as strict as its worker can compile."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from gateway.models import ServedModel
from gateway.turn import Turn, TurnError
from grammar.formats.tags import Schemas
from grammar.limits import DEFAULT_LIMITS
from grammar.lowering import parse_source
from grammar.schemas.ladder import LAST_RUNG
from grammar.tools import GrammarRefused, Unenforced

_SPARED_MILLISECONDS = 250.0
"""A list that takes too long to compile does so because of some tools; those estimated below this are hardly among them."""


@dataclass(frozen=True, slots=True)
class GrammarPlan:
    """`source`: of the grammar, None for any text. `unenforced`: what it does not hold, to be checked in what was generated.
    `rung`: of the ladder (grammar.schemas.ladder), which is gone down twice: for what is heavy first, then for all."""

    source: str | None
    unenforced: tuple[Unenforced, ...] = ()
    rung: int = 0


class GrammarPlans:
    """Plans by what they are made of: an agent sends the same tools every turn, and making a grammar of them costs more than
    all the rest of a prompt. Bounded; safe to use from several threads."""

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[bytes, GrammarPlan] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, model: ServedModel, turn: Turn) -> GrammarPlan:
        """The plan of a turn. Raises TurnError 400 that names the tool and a JSON pointer into its schema."""
        plan = self.known(model, turn)
        if plan is None:
            plan = make_plan(model, turn)
            self._keep(_key(model, turn), plan)
        return plan

    def known(self, model: ServedModel, turn: Turn) -> GrammarPlan | None:
        """The plan where it was made before, or takes no making."""
        if not turn.tools and turn.response_format.kind == "text" and turn.thinking is None:
            return make_plan(model, turn)
        key = _key(model, turn)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def below(self, model: ServedModel, turn: Turn, refused: str, rung: int, refusals: int = 1) -> GrammarPlan | None:
        """A plan that asks less of a worker than the grammar that it refused, which was of this rung: for this turn and those
        to come. None where less of the schemas would make no difference.

        A refusal may have taken a worker half a second. So what was heavy is followed by what is estimated to take at most
        half as long, and after two refusals by what is cheap: a caller does not wait for a trial on every rung.
        """
        most = _cost(refused) / 2
        for lower in range(rung + 1, 2 * LAST_RUNG + 1):
            plan = make_plan(model, turn, lower)
            if plan.source == refused:
                continue
            cost = _cost(plan.source)
            if cost and (cost > most or refusals > 1) and lower < 2 * LAST_RUNG:
                continue
            self._keep(_key(model, turn), plan)
            return plan
        return None

    def _keep(self, key: bytes, plan: GrammarPlan) -> None:
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._bytes -= _size(known)
            self._known[key] = plan
            self._bytes += _size(plan)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._known.popitem(last=False)[1])


def _key(model: ServedModel, turn: Turn) -> bytes:
    """Equal for turns that get the same grammar. What cannot be written as JSON is equal to nothing."""
    try:
        written = msgspec.json.encode((model.name, turn.tools, turn.tool_choice, turn.response_format, turn.thinking))
    except (TypeError, ValueError, RecursionError):
        return os.urandom(16)
    return hashlib.blake2b(written, digest_size=16).digest()


def _cost(source: str | None) -> float:
    """Estimated milliseconds of what a worker does not compile without a trial; 0 for what is cheap."""
    if source is None:
        return 0.0
    try:
        parsed = parse_source(source, DEFAULT_LIMITS)
    except GrammarRefused:
        return float("inf")
    return 0.0 if parsed.is_cheap(DEFAULT_LIMITS) else parsed.milliseconds


def _size(plan: GrammarPlan) -> int:
    return 200 + 4 * len(plan.source or "") + 200 * len(plan.unenforced)


def make_plan(model: ServedModel, turn: Turn, rung: int = 0) -> GrammarPlan:
    """The grammar of a turn from this rung of the ladder on. Raises TurnError 400 that names the tool and a JSON pointer."""
    if rung <= LAST_RUNG:
        schemas = Schemas(DEFAULT_LIMITS, rung, spared_milliseconds=_SPARED_MILLISECONDS)
    else:
        schemas = Schemas(DEFAULT_LIMITS, rung - LAST_RUNG)
    try:
        source = model.tool_format.structural_tag(
            turn.tools, turn.tool_choice, turn.response_format, thinking=turn.thinking, schemas=schemas
        )
    except RecursionError as error:
        raise TurnError(
            400,
            "invalid_schema",
            "A schema among the tools or in response_format is nested too deeply. Flatten it.",
            param="tools",
        ) from error
    except GrammarRefused as refused:
        raise TurnError(400, "invalid_schema", refused.message, param=_param(turn, refused)) from refused
    return GrammarPlan(source, schemas.unenforced(), rung)


def _param(turn: Turn, refused: GrammarRefused) -> str:
    where = refused.pointer or ""
    of_all_tools = turn.response_format.kind == "text" or len(turn.tools) > DEFAULT_LIMITS.max_tools
    if refused.tool is None and refused.pointer is None and of_all_tools:
        return "tools"
    if refused.tool is not None:
        position = next((i for i, tool in enumerate(turn.tools) if tool.name == refused.tool), None)
        if position is None:
            return "tools"
        place = "name" if refused.pointer is None else f"parameters{where}"
        return f"/tools/{position}/function/{place}"
    if turn.response_format.field is not None:
        return turn.response_format.field
    return f"/response_format/json_schema/schema{where}" if refused.pointer is not None else "response_format"
