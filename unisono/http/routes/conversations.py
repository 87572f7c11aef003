"""OpenAI's Conversations API: items that responses continue (the field ``conversation`` of ``/v1/responses``)."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.http.errors import ApiError
from unisono.http.limits.fields import After, ConversationId, ItemId, PageSize
from unisono.http.openai.translation import checked
from unisono.http.request_body import load_object
from unisono.http.responses_api.body import to_items, to_messages
from unisono.http.responses_api.conversations import ConversationStore, StoredConversation
from unisono.http.responses_api.store import Item
from unisono.http.routes.common import clients_only, described, json_response, new_id, now, parsed_body
from unisono.http.service import Service

MOST_ITEMS = 20
"""Items that one request may add: OpenAI's limit."""


class ConversationBody(BaseModel):
    """Body of ``POST /v1/conversations``."""

    model_config = ConfigDict(strict=True)

    items: list[Any] | None = Field(None, description=f"a list of at most {MOST_ITEMS} items")
    metadata: dict[str, Any] | None = Field(None, description="an object of strings")


class MetadataBody(BaseModel):
    """Body of ``POST /v1/conversations/{conversation_id}``."""

    model_config = ConfigDict(strict=True)

    metadata: dict[str, Any] = Field(description="an object of strings")


class ItemsBody(BaseModel):
    """Body of ``POST /v1/conversations/{conversation_id}/items``."""

    model_config = ConfigDict(strict=True)

    items: list[Any] = Field(description=f"a list of 1 to {MOST_ITEMS} items")


def add(app: FastAPI, service: Service, store: ConversationStore) -> None:
    """Add the routes."""
    clients, workers = clients_only(service, stored=True), clients_only(service, works=True, stored=True)

    @app.post("/v1/conversations", dependencies=workers, **described("Begin a conversation.", ConversationBody))
    async def create(request: Request) -> Response:
        body = await parsed_body(
            request, lambda raw: checked(load_object(raw) if raw.strip() else {}, ConversationBody)
        )
        items = _items(body.items or [], service)
        made = StoredConversation(new_id("conv_"), service.keys.owner(request), now(), body.metadata or {}, items)
        store.put(made)
        return json_response(made.public())

    @app.get("/v1/conversations/{conversation_id}", dependencies=clients, **described("Read a conversation's data."))
    async def read(request: Request, conversation_id: ConversationId) -> Response:
        return json_response(store.get(conversation_id, service.keys.owner(request)).public())

    @app.post(
        "/v1/conversations/{conversation_id}",
        dependencies=workers,
        **described("Set a conversation's metadata.", MetadataBody),
    )
    async def update(request: Request, conversation_id: ConversationId) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), MetadataBody))
        found = store.get(conversation_id, service.keys.owner(request))
        found.metadata = body.metadata
        store.put(found)
        return json_response(found.public())

    @app.delete("/v1/conversations/{conversation_id}", dependencies=clients, **described("Forget a conversation."))
    async def delete(request: Request, conversation_id: ConversationId) -> Response:
        store.delete(conversation_id, service.keys.owner(request))
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    _add_items(app, service, store)


def _add_items(app: FastAPI, service: Service, store: ConversationStore) -> None:
    clients, workers = clients_only(service, stored=True), clients_only(service, works=True, stored=True)
    path = "/v1/conversations/{conversation_id}/items"

    @app.post(path, dependencies=workers, **described("Add items to a conversation.", ItemsBody))
    async def add_items(request: Request, conversation_id: ConversationId) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), ItemsBody))
        store.get(conversation_id, service.keys.owner(request))
        if not body.items:
            raise ApiError(400, "items is empty; give at least one item.", param="items")
        items = _items(body.items, service)
        store.append(conversation_id, items)
        return json_response(_listed(items, False))

    @app.get(path, dependencies=clients, **described("The items of a conversation."))
    async def list_items(
        request: Request,
        conversation_id: ConversationId,
        limit: PageSize = 20,
        order: Literal["asc", "desc"] = "desc",
        after: After = None,
    ) -> Response:
        items = store.get(conversation_id, service.keys.owner(request)).items
        return json_response(page_of(items, limit, order, after))

    @app.get(path + "/{item_id}", dependencies=clients, **described("An item of a conversation."))
    async def read_item(request: Request, conversation_id: ConversationId, item_id: ItemId) -> Response:
        return json_response(store.item(store.get(conversation_id, service.keys.owner(request)), item_id))

    @app.delete(path + "/{item_id}", dependencies=clients, **described("Take an item out of a conversation."))
    async def delete_item(request: Request, conversation_id: ConversationId, item_id: ItemId) -> Response:
        found = store.get(conversation_id, service.keys.owner(request))
        gone = store.item(found, item_id)
        found.items = [item for item in found.items if item is not gone]
        store.put(found)
        return json_response(found.public())


def page_of(items: list[Item], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of a list of items. after: the id before the first."""
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    return _listed(items[start : start + limit], start + limit < len(items))


def _listed(items: list[Item], more: bool) -> dict[str, Any]:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more}


def _items(value: list[Any], service: Service) -> list[Item]:
    """Items with ids, of types that a response can continue. Raises BadRequest and ApiError."""
    if len(value) > MOST_ITEMS:
        raise ApiError(400, f"items has {len(value)} entries; the limit is {MOST_ITEMS}.", param="items")
    items = to_items(value, new_id, lambda _: None, "items") if value else []
    ignored = service.hosted.request()
    to_messages(items, None, 0, "items", "items", ignored)
    service.hosted.tell(ignored)
    return items
