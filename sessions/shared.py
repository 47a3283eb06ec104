"""What several gateways share through one Redis: ledgers and tool gaps. The one place that puts the parts together."""

from __future__ import annotations

from collections.abc import Mapping

from sessions.gaps.model import GapConfig, ToolGapModel
from sessions.gaps.shared import SharedGaps
from sessions.memory_store import MemoryLedgerStore
from sessions.redis_link import RedisConfig, RedisLink
from sessions.redis_store import RedisLedgerStore


class SharedSessions:
    """A store of ledgers, and tool gaps kept in step once `share_gaps` was called. `aclose` it after the last turn."""

    def __init__(self, config: RedisConfig, local: MemoryLedgerStore) -> None:
        """Connects when it is first used. Raises ValueError for a URL that cannot be used."""
        self._link = RedisLink(config)
        self.store = RedisLedgerStore(local, self._link)
        self._gaps: SharedGaps | None = None

    def share_gaps(self, model: ToolGapModel, config: GapConfig) -> None:
        """Begins to exchange what gateways saw of tools; once, on the event loop."""
        self._gaps = SharedGaps(model, self._link, config)
        self._gaps.start()

    @property
    def link(self) -> RedisLink:
        """The connection, for what else gateways share."""
        return self._link

    @property
    def up(self) -> bool:
        """Whether Redis is in use now."""
        return self._link.up

    @property
    def calls(self) -> Mapping[tuple[str, str], int]:
        """How many calls ended how, by (operation, result)."""
        return self._link.calls

    @property
    def events(self) -> Mapping[str, int]:
        """What happened to entries (RedisLedgerStore)."""
        return self.store.events

    @property
    def unsaved(self) -> int:
        """Sessions whose last write waits for Redis."""
        return self.store.unsaved

    async def aclose(self) -> None:
        """Passes on what is left, for a second or two at most; idempotent."""
        if self._gaps is not None:
            await self._gaps.aclose()
        await self.store.aclose()
