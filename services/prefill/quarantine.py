"""Source memory of ended hand-offs whose writes have not certainly stopped. Knows who to ask again; never reuses a page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.transfer.handoff import HandoffKey
from services.prefill.handoff import Handoff

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
"""For one question to an engine or a peer; the next one follows a moment later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One hand-off that may still read its source."""

    handoff: Handoff
    free: Callable[[], None]
    """Gives the source back."""
    asking: asyncio.Lock


class Quarantine:
    """A page that an engine may still read is in here, and leaves when the engine says that it has stopped or the peer is
    proven gone; never because time has passed."""

    def __init__(
        self,
        is_peer_gone: Callable[[Handoff], Awaitable[bool]],
        *,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_peer_gone = is_peer_gone
        self._on_left = on_left
        self._held: dict[HandoffKey, Quarantined] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_pages(self) -> int:
        return len(
            {page for held in tuple(self._held.values()) for page in held.handoff.source.page_ids}
        )

    def hold(self, handoff: Handoff, free: Callable[[], None]) -> None:
        """Keep a source; `free` is called once."""
        logger.error(
            "request %s: a write to %s does not stop; %d pages are in quarantine",
            handoff.key.request_id,
            handoff.peer,
            len(handoff.source.page_ids),
        )
        self._held[handoff.key] = Quarantined(handoff=handoff, free=free, asking=asyncio.Lock())

    async def ask_all(self) -> None:
        """Ask for every write again. Called every second or so; takes a few seconds at most."""
        await asyncio.gather(*(self.has_stopped(key) for key in list(self._held)))

    async def has_stopped(self, key: HandoffKey) -> bool:
        """Ask for one write; its source is free when this returns True, as it is for keys that are not here."""
        held = self._held.get(key)
        if held is None:
            return True
        async with held.asking:
            if key not in self._held:
                return True
            has_stopped = await held.handoff.stop(timeout_s=ASK_TIMEOUT_S)
            if not has_stopped and not await self._is_peer_gone(held.handoff):
                return False
            del self._held[key]
        held.free()
        self._on_left()
        logger.warning(
            "request %s: %s; its pages leave quarantine",
            key.request_id,
            "its write has stopped" if has_stopped else f"{held.handoff.peer} is gone",
        )
        if has_stopped:
            await held.handoff.abort("its write has stopped at last")
        return True
