"""The ledgers of sessions: found before a turn is rendered, written when it is answered.

A turn that names a session goes on from the branch of it that it shares most with. One that names none is recognised by its
prefix: it goes on from the longest conversation of its tenant that it extends. A session that is new, or that rewrote its
history, begins with what it shares with its parent or with a conversation it extends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.choices import ChoiceState
from gateway.config import SessionsConfig
from gateway.histories.builder import HistoryBuilder
from gateway.histories.continuing import PromptTooLongError
from gateway.histories.matching import Match, TurnText
from gateway.histories.orphans import orphaned_blocks
from gateway.histories.pending import Said, pending_from
from gateway.models import ServedModel
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import SessionRef, Turn, TurnError
from gateway.workers.protocol import WorkerInfo
from grammar.arguments import arguments_object
from prefix_cache.hashing import DIGEST_BYTES, root_digest
from sessions.continuation import Continuation
from sessions.digests import prefix_names
from sessions.ledger import Ledger, common_blocks
from sessions.records import SessionRecord
from sessions.store import LedgerStore

log = logging.getLogger(__name__)

_ATTEMPTS = 4
_THINKING = "<think>"
AUTOMATIC = "auto-"
"""Begins the keys of sessions that are known by their prefix alone."""


@dataclass(slots=True)
class TurnHistory:
    """One turn's part in its session, from `HistoryKeeper.open` to `HistoryKeeper.close`. `record`: as it was found, None for
    a new session. `position`: of the branch that the turn goes on from, None when it is none of the record's. `foreign`: the
    key of the other session that lent its beginning. `epoch`: of its key when it began (sessions.store)."""

    tenant: str
    key: str
    model: str
    session: SessionRef
    record: SessionRecord | None
    continuation: Continuation
    position: int | None = None
    foreign: str | None = None
    named: bool = True
    epoch: str = ""
    closed: bool = False

    @property
    def who(self) -> SessionRef:
        """The session as it is known by now: one that the request did not name has the key it is kept under."""
        if self.named:
            return self.session
        return dataclasses.replace(self.session, key=self.key, source="prefix")


class Answered(msgspec.Struct, frozen=True):
    """What became of a turn. `choices`: as they were returned; `called`: tools. () and None for one that failed. `worker`,
    `instance`: where it ran. `missed`: it reused less than its predecessor left."""

    choices: Sequence[ChoiceState] = ()
    worker: str = ""
    instance: str = ""
    missed: bool = False
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    called: tuple[str, ...] | None = None


class HistoryKeeper:
    """Sessions of one gateway. Use on one event loop."""

    def __init__(
        self,
        store: LedgerStore,
        models: Sequence[ServedModel],
        config: SessionsConfig,
        executor: Executor,
        *,
        inline_characters: int,
        supersede: Callable[[str, bytes], None],
        telemetry: Telemetry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`supersede` is told (model, joined block hashes) of blocks that a session will not use again."""
        self.store = store
        self._config = config
        self._executor = executor
        self._inline_characters = inline_characters
        self._supersede = supersede
        self._telemetry = telemetry
        self._stages = telemetry.stages
        telemetry.watch_sessions(store.stats)
        self._clock = clock
        self._builders = {
            model.name: HistoryBuilder(model, restore_reasoning=config.restore_reasoning, check_every=config.check_every)
            for model in models
        }
        for name, builder in self._builders.items():
            if builder.cutter.refusal is not None:
                log.warning("Prompts of %s are tokenised whole on every turn: %s.", name, builder.cutter.refusal)

    def warm_up(self) -> None:
        """Tries the templates, which takes a fraction of a second each; the first turn would pay for it otherwise."""
        for builder in self._builders.values():
            builder.warm_up()

    async def open(self, model: ServedModel, turn: Turn, info: WorkerInfo) -> TurnHistory:
        """The prompt of a turn, from the ledgers of its session. Raises TurnError 400: template or context."""
        builder = self._builders[model.name]
        with self._stages.spent("ledger"):
            text = builder.describe(turn)
        root = root_digest(bytes.fromhex(info.namespace), turn.cache_salt)
        tenant = turn.session.tenant
        named = turn.session.key is not None
        key = turn.session.key or await self._recognised(tenant, text)
        record = await self.store.get(tenant, key) if key is not None else None
        epoch = "" if key is None else record.epoch if record is not None else self.store.epoch(tenant, key)
        with self._stages.spent("ledger"):
            match = None if record is None else builder.match(text, record.branches, root, turn.messages)
        foreign = None
        if match is None:
            foreign, match = await self._lent(builder, turn, text, root, key)
        if not turn.messages:
            raise TurnError(400, "invalid_request", "messages: at least one message is needed.", param="messages")

        def build() -> Continuation:
            with self._stages.spent("ledger"):
                return builder.build(turn, text, match, root=root, block_size=info.block_size, max_tokens=info.max_model_len)

        try:
            if builder.is_quick(turn, text, match, self._inline_characters):
                made = build()
            else:
                made = await asyncio.get_running_loop().run_in_executor(self._executor, build)
        except PromptTooLongError as error:
            raise too_long(model, f"at least {error.tokens}", info) from error
        except ValueError as error:
            raise TurnError(400, "invalid_request", f"messages: {error}.", param="messages") from error
        if made.ledger.num_tokens == 0:
            raise TurnError(
                400, "empty_prompt", "messages: the prompt has no tokens; at least one is needed.", param="messages"
            )
        if made.ledger.num_tokens >= info.max_model_len:
            raise too_long(model, str(made.ledger.num_tokens), info)
        history = TurnHistory(
            tenant=tenant,
            key=key if key is not None else AUTOMATIC + secrets.token_hex(8),
            model=model.name,
            session=turn.session,
            record=record,
            continuation=made,
            position=match.position if match is not None and foreign is None else None,
            foreign=foreign,
            named=named,
            epoch=epoch,
        )
        await self._report(history)
        self._telemetry.continued(history.continuation)
        return history

    async def close(self, history: TurnHistory, answered: Answered) -> bool:
        """Writes what the turn was and what was generated. Once a turn; later calls do nothing. False when its session was
        deleted meanwhile, and nothing is to be kept of it."""
        if history.closed:
            return True
        history.closed = True
        made = history.continuation
        now = self._clock()
        answers = [said for choice in answered.choices if (said := _answer(choice)) is not None]
        ledger = msgspec.structs.replace(
            made.ledger,
            pending=pending_from(made.ledger, answers),
            worker=answered.worker,
            worker_instance=answered.instance,
            used_at=now,
        )
        # Mostly nobody else has written it since the turn began: the own copy says what to replace, and storing finds out.
        record = await self.store.peek(history.tenant, history.key)
        for attempt in range(_ATTEMPTS):
            if attempt:
                record = await self.store.get(history.tenant, history.key)
            epoch = record.epoch if record is not None else self.store.epoch(history.tenant, history.key)
            if epoch not in ("", history.epoch):
                return False
            if await self.store.put(self._updated(history, record, ledger, answered, now)):
                return True
        log.debug("session %s: others wrote it all the time; this turn's ledger is left out", history.key)
        return True

    async def fork(self, tenant: str, key: str, new_key: str) -> SessionRecord | None:
        """A session that begins where another is. None when there is no such session. Raises TurnError 409 when the new key
        is taken."""
        record = await self.store.get(tenant, key)
        if record is None:
            return None
        now = self._clock()
        blocks = max((len(ledger.blocks) // DIGEST_BYTES for ledger in record.branches), default=0)
        forked = SessionRecord(
            tenant=tenant,
            key=new_key,
            model=record.model,
            source="fork",
            parent=key,
            correlation=record.correlation,
            created_at=now,
            used_at=now,
            branches=record.branches,
            shared_blocks=blocks,
        )
        taken = await self.store.get(tenant, new_key) is not None
        forked = msgspec.structs.replace(forked, epoch=self.store.epoch(tenant, new_key))
        if taken or not await self.store.put(forked):
            raise TurnError(
                409, "session_exists", f"There is a session '{new_key[:128]}' already; choose another id.", param="session_id"
            )
        await self._share(tenant, key, blocks)
        return forked

    async def forget(self, tenant: str, key: str) -> bool:
        """Closes a session: its ledgers go, and workers may give up the blocks that only it had. False when there is none."""
        record = await self.store.get(tenant, key)
        if record is None or not await self.store.delete(tenant, key):
            return False
        for position, ledger in enumerate(record.branches):
            # What branches share is told of once.
            others = record.branches[:position]
            empty = msgspec.structs.replace(ledger, blocks=b"", pending=())
            orphaned = orphaned_blocks(ledger, empty, others, record.shared_blocks)
            if orphaned:
                self._supersede(record.model, orphaned)
        return True

    # Inside

    async def _recognised(self, tenant: str, text: TurnText) -> str | None:
        return await self.store.recognise(tenant, prefix_names(text.digests, text.context))

    async def _lent(
        self, builder: HistoryBuilder, turn: Turn, text: TurnText, root: bytes, key: str | None
    ) -> tuple[str | None, Match | None]:
        """What another session of the tenant lends: the parent, or one that the turn extends."""
        tenant = turn.session.tenant
        for other in (turn.session.parent, None):
            name = other if other is not None else await self._recognised(tenant, text)
            if name is None or name == key:
                continue
            record = await self.store.get(tenant, name)
            match = None if record is None else builder.match(text, record.branches, root, turn.messages)
            if match is not None:
                return name, match
        return None, None

    async def _report(self, history: TurnHistory) -> None:
        """Tells of blocks that the turn orphans, and of those that two sessions share from now on."""
        made, record = history.continuation, history.record
        old = made.predecessor
        if old is None:
            return
        if history.foreign is not None:
            await self._share(history.tenant, history.foreign, common_blocks(old.blocks, made.ledger.blocks))
            return
        if made.divergence is None or record is None or record.resumed or history.position != 0:
            return
        others = [branch for at, branch in enumerate(record.branches) if at != history.position]
        orphaned = orphaned_blocks(old, made.ledger, others, record.shared_blocks)
        if orphaned:
            history.continuation = msgspec.structs.replace(made, orphaned=orphaned)
            self._supersede(history.model, orphaned)

    async def _share(self, tenant: str, key: str, blocks: int) -> None:
        for _ in range(_ATTEMPTS):
            record = await self.store.get(tenant, key)
            if record is None or record.shared_blocks >= blocks:
                return
            shared = msgspec.structs.replace(record, shared_blocks=blocks, version=record.version + 1)
            if await self.store.put(shared):
                return

    def _updated(
        self, history: TurnHistory, record: SessionRecord | None, ledger: Ledger, answered: Answered, now: float
    ) -> SessionRecord:
        made = history.continuation
        if record is None:
            shared = made.predecessor.blocks if history.foreign is not None and made.predecessor is not None else b""
            record = SessionRecord(
                tenant=history.tenant,
                key=history.key,
                model=history.model,
                version=0,
                epoch=history.epoch,
                named=history.named,
                source=history.session.source if history.named else "prefix",
                parent=history.session.parent,
                correlation=history.session.correlation,
                created_at=now,
                shared_blocks=common_blocks(ledger.blocks, shared),
            )
        kept = [branch for branch in record.branches if not _is_prefix(branch, ledger)]
        return msgspec.structs.replace(
            record,
            model=history.model,
            version=record.version + 1,
            used_at=now,
            branches=tuple([ledger, *kept][: self._config.max_branches]),
            called=answered.called,
            resumed=record.resumed or bool(history.position),
            turns=record.turns + 1,
            prompt_tokens=record.prompt_tokens + ledger.num_tokens,
            cached_tokens=record.cached_tokens + answered.cached_tokens,
            generated_tokens=record.generated_tokens + answered.completion_tokens,
            reused_tokens=record.reused_tokens + made.reused_tokens,
            spliced_tokens=record.spliced_tokens + made.spliced_tokens,
            tokenised_tokens=record.tokenised_tokens + made.tokenised_tokens,
            misses=record.misses + answered.missed,
            superseded_blocks=record.superseded_blocks + len(made.orphaned) // DIGEST_BYTES,
            prefill_seconds=record.prefill_seconds + answered.seconds[0],
            decode_seconds=record.decode_seconds + answered.seconds[1],
        )


def too_long(model: ServedModel, count: str, info: WorkerInfo, field: str = "messages") -> TurnError:
    """A prompt that the context does not hold."""
    return TurnError(
        400,
        "context_length_exceeded",
        f"The prompt has {count} tokens, and the context of '{model.name}' holds {info.max_model_len}, of which at least one "
        "is for the answer. Shorten the conversation.",
        param=field,
    )


def _is_prefix(branch: Ledger, ledger: Ledger) -> bool:
    """Whether `ledger` has all of `branch` and goes on from there, so that nothing is lost with it."""
    return branch.root == ledger.root and branch.context == ledger.context and ledger.messages.startswith(branch.messages)


def _answer(choice: ChoiceState) -> Said | None:
    """A choice as the message that its client got, and the ids without what ended it. None where they are not the same: the
    text of a stop string, and what follows it, was generated and not returned."""
    if choice.finish_reason is None or isinstance(choice.stop_reason, str):
        return None
    ids = choice.token_ids
    if choice.ended_by_token and ids:
        ids = ids[:-1]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text)}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": arguments_object("".join(call.arguments))}} for call in choice.calls
        ]
    # Words that a limit ended are words; a tag that a template looks for may have been left open.
    words = choice.plain and _THINKING not in message["content"]
    cut = not words and (choice.finish_reason == "length" or not all(call.complete for call in choice.calls))
    return Said(message, ids, cut)
