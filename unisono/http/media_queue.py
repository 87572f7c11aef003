"""Images and videos of requests, loaded in threads while the event loop and the tokenizer continue.

A request releases its place of preparation (``overload.Turnstile``) while its items are loaded, and the items take
turns with those of other clients: a slow host or a large image of one client delays another by one item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from unisono.http.limits.overload import Ticket, Turnstile
from unisono.media.fetching.sources import LoadedMedia, MediaSource
from unisono.media.loader import MediaLoader

PLACES = 16
"""Items that are fetched or decoded at once; ``--media-processes`` of them are decoded."""


class MediaQueue:
    """Loads items by ``loader``."""

    def __init__(self, loader: MediaLoader) -> None:
        self._loader = loader
        self._turns = Turnstile(PLACES)
        self._threads = ThreadPoolExecutor(PLACES, "media")

    async def load(self, sources: Sequence[MediaSource], ticket: Ticket | None) -> list[LoadedMedia]:
        """Load a prompt's items. ticket: of its request. Raises BadRequest of the first wrong item."""
        if not sources:
            return []
        self._loader.check(sources)
        label, owner = "", ""
        if ticket is not None:
            ticket.step_aside()
            label, owner = ticket.client.label, ticket.client.name
        owned = [replace(one, owner=owner) for one in sources]
        loaded = await asyncio.gather(*(self._load(one, label) for one in owned), return_exceptions=True)
        found = []
        for one in loaded:
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        if ticket is not None and not ticket.take_turn():
            await ticket.turn()
        return found

    async def _load(self, source: MediaSource, label: str) -> LoadedMedia:
        await self._turns.wait(label)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._loader.load, source)
        finally:
            self._turns.leave()
