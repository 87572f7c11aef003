"""Responses that can be read, continued, cancelled and deleted by their id, in a bounded store."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unisono.http.errors import ApiError, show

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
"""Size of the store, bytes of JSON. Items of earlier turns count with each response that continues them."""

Item = dict[str, Any]


@dataclass
class StoredResponse:
    """A response. items: of the conversation, up to this response's input. owner: see ``auth.owner``."""

    response: dict[str, Any]
    items: list[Item]
    owner: str
    size: int = field(default=0)

    @property
    def conversation(self) -> list[Item]:
        """The items with which a response that continues this one begins."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses in memory, bounded by an LRU policy. A restart forgets all."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or its newer state. One that is larger than the whole store is dropped."""
        key = stored.response["id"]
        self.forget(key)
        stored.size = len(msgspec.json.encode([stored.response, stored.items]))
        self._stored[key] = stored
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self.forget(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """The response of this id. Raises ApiError (404) if there is none, or another client's."""
        found = self._stored.get(response_id)
        if found is None or found.owner != owner:
            message = (
                f"There is no response {show(response_id)}; it was never stored (store=false), was deleted, or made "
                "room for newer ones."
            )
            raise ApiError(404, message, "not_found_error", param=param, code="response_not_found")
        self._stored.move_to_end(response_id)
        return found

    def ended(self, response_id: str, owner: str, param: str) -> StoredResponse:
        """The ended response of this id. Raises ApiError (404, or 409 if it has not ended)."""
        found = self.get(response_id, owner, param)
        if found.response["status"] in ("queued", "in_progress"):
            message = f"The response {show(response_id)} is {found.response['status']}; wait for its end or cancel it."
            raise ApiError(409, message, "conflict_error", param=param, code="response_in_progress")
        return found

    def item(self, item_id: str, owner: str) -> Item | None:
        """The item of this id in the newest response that has it."""
        for stored in reversed(self._stored.values()):
            if stored.owner == owner:
                for item in reversed(stored.conversation):
                    if item.get("id") == item_id:
                        return item
        return None

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response. Raises ApiError (404)."""
        self.get(response_id, owner)
        self.forget(response_id)

    def forget(self, response_id: str) -> None:
        """Forget a response if there is one."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
