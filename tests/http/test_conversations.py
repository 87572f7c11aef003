"""OpenAI's conversations, and inputs that are shortened to fit: through the openai package against the fake engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.http.conftest import Server
from unisono.http.errors import ApiError
from unisono.http.responses_api.body import since, turns
from unisono.http.responses_api.conversations import ConversationStore, StoredConversation

WHOLE = {"ignore_eos": True, "skip_special_tokens": False}


def shown(server: Server, **body: Any) -> str:
    """The answer, which repeats the rendered prompt."""
    return server.openai.responses.create(model="fake", extra_body=WHOLE, **body).output_text


def test_responses_continue_a_conversation(server: Server) -> None:
    client = server.openai.conversations
    begun = client.create(metadata={"a": "b"}, items=[{"type": "message", "role": "developer", "content": "be brief"}])
    assert begun.id.startswith("conv_")
    assert begun.metadata == {"a": "b"}
    first = server.openai.responses.create(model="fake", input="one", conversation=begun.id)
    assert first.conversation is not None
    assert first.conversation.id == begun.id
    text = shown(server, input="two", conversation={"id": begun.id}, max_output_tokens=130)
    turns = ["system\nbe brief", "user\none", f"assistant\n{first.output_text}", "user\ntwo"]
    assert text.startswith("".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)[: len(text)])
    items = client.items.list(begun.id, order="asc").data
    assert [item.role for item in items] == ["developer", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert items[2].id == first.output[0].id


def test_conversations_are_read_updated_and_deleted(server: Server) -> None:
    client = server.openai.conversations
    begun = client.create()
    added = client.items.create(begun.id, items=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert [item.content for item in added.data] == ["a", "b"]  # type: ignore[union-attr]
    assert added.data[0].id is not None
    assert client.items.retrieve(added.data[0].id, conversation_id=begun.id).content == "a"  # type: ignore[union-attr]
    client.items.delete(added.data[0].id, conversation_id=begun.id)
    page = client.items.list(begun.id, limit=1)
    assert ([item.content for item in page.data], page.has_more) == (["b"], False)  # type: ignore[union-attr]
    assert client.update(begun.id, metadata={"x": "y"}).metadata == {"x": "y"}
    assert client.retrieve(begun.id).metadata == {"x": "y"}
    assert client.delete(begun.id).deleted
    for call in (client.retrieve, client.delete):
        with pytest.raises(openai.NotFoundError, match=begun.id):
            call(begun.id)
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.items.retrieve("msg_x", conversation_id=client.create().id)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ("", {"items": [3]}, "items[0]"),
        ("", {"items": [{"role": "user", "content": "a"}] * 21}, "items"),
        ("", {"metadata": 3}, "metadata"),
        ("", {"itms": []}, "itms"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
    ],
)
def test_bad_bodies(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    if path:
        path = f"/{server.openai.conversations.create().id}{path}"
    answer = server.http.post(f"/v1/conversations{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_answer_that_was_cut_off_by_its_client_is_not_added(server: Server) -> None:
    begun = server.openai.conversations.create()
    stream = server.openai.responses.create(
        model="fake", input="abc", conversation=begun.id, stream=True, max_output_tokens=400, extra_body=WHOLE
    )
    next(iter(stream))
    stream.close()
    assert server.openai.conversations.items.list(begun.id).data == []


def test_the_oldest_turns_make_room(server: Server) -> None:
    """The model's context is 512 tokens, of a byte each."""
    turns = [{"role": "user", "content": f"{i}" * 90} for i in range(8)]
    answers = [{"role": "assistant", "content": f"answer {i}"} for i in range(8)]
    items: list[Any] = [one for pair in zip(turns, answers, strict=True) for one in pair]
    items = [{"role": "developer", "content": "be brief"}, *items, {"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError, match="context"):
        server.openai.responses.create(model="fake", input=items)
    response = server.openai.responses.create(
        model="fake", input=items, truncation="auto", max_output_tokens=100, extra_body=WHOLE
    )
    assert response.truncation == "auto"
    assert response.output_text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
    assert response.usage is not None
    kept = response.usage.input_tokens
    assert 512 - 100 - 150 < kept <= 512 - 100  # no more went than had to
    assert len(server.openai.responses.input_items.list(response.id, limit=100).data) == len(items)
    short = server.openai.responses.create(model="fake", input="hi", truncation="auto")
    assert short.output_text == "user\nhi"


def test_truncation_drops_complete_turns() -> None:
    call, output = {"type": "function_call"}, {"type": "function_call_output"}
    system, one, two, said = (
        {"type": "message", "role": role, "content": text}
        for role, text in (("system", "s"), ("user", "1"), ("user", "2"), ("assistant", "a"))
    )
    items = [system, one, call, output, said, two]

    def shortened(given: list[Any]) -> list[list[Any]]:
        return [since(given, start) for start in turns(given)]

    assert shortened([one, said, *items[1:]]) == [items[1:], [two]]
    assert shortened(items) == [[system, two]]
    assert shortened([one]) == []


def test_the_store_is_bounded() -> None:
    store = ConversationStore(most=2, max_bytes=400)
    for name in "abc":
        store.put(StoredConversation(name, "me", 0, {}))
    with pytest.raises(ApiError, match="room"):
        store.get("a", "me")
    with pytest.raises(ApiError):
        store.get("b", "somebody else")
    store.append("b", [{"content": "x" * 300}])
    assert len(store) == 2
    store.append("c", [{"content": "x" * 300}])
    assert len(store) == 1
    store.append("c", [{"content": "x" * 300}])  # beyond the whole store
    assert len(store) == 0
    store.append("gone", [{}])
