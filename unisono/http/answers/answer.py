"""The life of one answer: its generations start, the reply is sent, and every end closes it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import Request
from fastapi.responses import Response

from unisono.cluster.engines import Placement
from unisono.http.answers.generation import Generation, start_all
from unisono.http.answers.writer import EventStream, Reply, until_disconnect
from unisono.http.errors import show
from unisono.http.observability.request_note import note
from unisono.http.service import CLIENT_GONE, Service
from unisono.types import BadRequest


@dataclass
class Answer:
    """One answer in progress.

    placement: routing hints. closed: called once the answer is sent, has failed, or has lost its client.
    """

    service: Service
    request: Request
    id: str
    placement: Placement
    closed: Callable[[], None] = lambda: None
    generations: list[Generation] = field(default_factory=list)

    def admit(self, generations: list[Generation]) -> None:
        """Take over the generations; the request's preparation is over."""
        notes = note(self.request.scope)
        if notes.ticket is not None:
            notes.ticket.turn_over()
            notes.ticket.resize(len(generations))
        client = None if notes.ticket is None else notes.ticket.client
        for generation in generations:
            generation.assign(notes.arrival, self.placement, client)
        self.generations = generations

    async def send(self, reply: Reply, generations: list[Generation], stream: bool | None) -> Response:
        """Start every generation and send the reply.

        Requests that the engine refuses get their status before any stream. Raises BadRequest for an id in use.
        """
        self.admit(generations)
        if self.id in self.service.running:
            raise BadRequest(f"request_id={show(self.id)} is running already; give another.", "request_id")
        self.service.running[self.id] = generations
        try:
            await start_all(generations)
            if stream:
                return EventStream(reply, note(self.request.scope), self.close)
            whole = await until_disconnect(self.request.receive, reply.whole())
        except BaseException:
            self.close()
            raise
        self.close()
        return (
            Response(status_code=CLIENT_GONE)
            if whole is None
            else Response(msgspec.json.encode(whole), media_type="application/json")
        )

    def close(self) -> None:
        """End the generations that still run, and trace the answer."""
        self.service.close(self.id, self.generations, self.request, note(self.request.scope).arrival)
        self.closed()
