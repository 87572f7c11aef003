"""Conversations that responses continue: items under an id, in a bounded store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unisono.http.errors import ApiError, show
from unisono.http.responses_api.store import Item

MAX_CONVERSATIONS = 10_000
MAX_BYTES = 256 * 2**20
"""Size of the store, bytes of JSON."""


@dataclass
class StoredConversation:
    """One conversation. owner: see ``auth.owner``. created_at: seconds since 1970."""

    id: str
    owner: str
    created_at: int
    metadata: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    size: int = 0

    def public(self) -> dict[str, Any]:
        """The conversation in the form of OpenAI's API."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ConversationStore:
    """Conversations in memory, bounded by an LRU policy. A restart forgets all."""

    def __init__(self, most: int = MAX_CONVERSATIONS, max_bytes: int = MAX_BYTES) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._kept: OrderedDict[str, StoredConversation] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, conversation: StoredConversation) -> None:
        """Store a conversation, or its newer state. One that is larger than the whole store is dropped."""
        self._drop(conversation.id)
        conversation.size = len(msgspec.json.encode([conversation.items, conversation.metadata]))
        self._kept[conversation.id] = conversation
        self._bytes += conversation.size
        while self._bytes > self._max_bytes or len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))

    def get(self, conversation_id: str, owner: str, param: str | None = None) -> StoredConversation:
        """The conversation of this id. Raises ApiError (404) if there is none, or another client's."""
        found = self._kept.get(conversation_id)
        if found is None or found.owner != owner:
            message = f"There is no conversation {show(conversation_id)}; it was deleted, or made room for newer ones."
            raise ApiError(404, message, "not_found_error", param=param, code="conversation_not_found")
        self._kept.move_to_end(conversation_id)
        return found

    def append(self, conversation_id: str, items: Sequence[Item]) -> None:
        """Append items, unless the conversation was deleted meanwhile."""
        if (found := self._kept.get(conversation_id)) is not None:
            found.items = [*found.items, *items]
            self.put(found)

    def item(self, conversation: StoredConversation, item_id: str) -> Item:
        """An item of a conversation. Raises ApiError (404)."""
        for item in conversation.items:
            if item.get("id") == item_id:
                return item
        message = f"The conversation {show(conversation.id)} has no item {show(item_id)}."
        raise ApiError(404, message, "not_found_error", code="item_not_found")

    def delete(self, conversation_id: str, owner: str) -> None:
        """Forget a conversation. Raises ApiError (404)."""
        self.get(conversation_id, owner)
        self._drop(conversation_id)

    def _drop(self, conversation_id: str) -> None:
        kept = self._kept.pop(conversation_id, None)
        if kept is not None:
            self._bytes -= kept.size
