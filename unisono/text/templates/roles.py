"""Sequences of roles that a checkpoint's chat template accepts.

Templates differ: some take one system message, and only as the first message; some take none; some demand that user and
assistant alternate. Others silently drop a later system message. Agents such as Codex and Claude Code send several
system messages, and messages of one role in a row. :class:`RoleTemplate` probes the template once, by rendering short
conversations, and rewrites a conversation only if the template could not render it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
RenderMessages = Callable[[Sequence[Message]], str]
"""A template: messages to text. Raises any exception to refuse them."""

PARTING = "\n\n"
"""Text between the contents of merged messages."""
SYSTEM = "system"
TEXTS = ("probe_one", "probe_two", "probe_three", "probe_four")


@dataclass(frozen=True)
class RoleTemplate:
    """The sequences of roles that a template can render.

    system: a leading system message. later: system messages after the first message. repeats: two messages of the user,
    or of the assistant, in a row.
    """

    system: bool = True
    later: bool = True
    repeats: bool = True

    @classmethod
    def of(cls, render: RenderMessages) -> RoleTemplate:
        """Render probe conversations. A template that cannot render one user message is left alone."""

        def shows(*roles: str) -> bool:
            texts = TEXTS[: len(roles)]
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            try:
                written = render(messages)
            except Exception:  # the checkpoint's code
                return False
            return all(text in written for text in texts)

        if not shows("user"):
            return cls()
        return cls(
            system=shows(SYSTEM, "user"),
            later=shows("user", "assistant", SYSTEM, "user"),
            repeats=shows("user", "user") and shows("user", "assistant", "assistant", "user"),
        )

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation in the form that the template accepts.

        System messages in unsupported places move to the beginning; if the template takes none, they are put before the
        first message of the user. Neighbours of one role are merged for a template that demands alternation.
        """
        if not self.later and any(message.get("role") == SYSTEM for message in messages[1:]):
            messages = with_one_system_message(messages)
        if not self.system:
            messages = [{**one, "role": "user"} if one.get("role") == SYSTEM else one for one in messages]
            messages = _first_user_merged(messages)
        return messages if self.repeats else _alternating(messages)


def merged_leading(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with its leading system messages merged."""
    count = next((i for i, message in enumerate(messages) if message.get("role") != SYSTEM), len(messages))
    if count < 2:
        return messages
    return [_merged(messages[:count]), *messages[count:]]


def with_one_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with all its system messages merged into one, at the beginning."""
    systems = [message for message in messages if message.get("role") == SYSTEM]
    if not systems:
        return messages
    return [_merged(systems), *(message for message in messages if message.get("role") != SYSTEM)]


def _first_user_merged(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with its first two messages merged if both are the user's."""
    if len(messages) > 1 and messages[0].get("role") == messages[1].get("role") == "user":
        return [_merged(messages[:2]), *messages[2:]]
    return messages


def _alternating(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with adjacent messages of the user, or of the assistant, merged."""
    groups: list[list[Message]] = []
    for message in messages:
        role = message.get("role")
        if groups and role in ("user", "assistant") and groups[-1][-1].get("role") == role:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_merged(group) for group in groups]


def _merged(messages: Sequence[Message]) -> Message:
    """Messages of one role merged: contents and reasoning joined, calls concatenated. Empty contents add nothing."""
    if len(messages) == 1:
        return messages[0]
    merged = dict(messages[0])
    merged["content"] = _joined([message.get("content") for message in messages])
    reasoning = [text for message in messages if (text := message.get("reasoning_content"))]
    if reasoning:
        merged["reasoning_content"] = PARTING.join(reasoning)
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    if calls:
        merged["tool_calls"] = calls
    return merged


def _joined(contents: Sequence[Any]) -> Any:
    """Merged contents: text, or a list of parts if any of them is a list. None if all are None."""
    if any(isinstance(content, list) for content in contents):
        lists = [one if isinstance(one, list) else [{"type": "text", "text": one}] for one in contents if one]
        return [part for parts in lists for part in parts]
    if all(content is None for content in contents):
        return None
    return PARTING.join(content for content in contents if content)
