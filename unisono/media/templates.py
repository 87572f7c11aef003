"""How a chat template takes pictures: as content parts, or as text that has their placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.types import BadRequest

Message = Mapping[str, Any]
PROBE = "probe_text"
KINDS = ("image", "video")


def has_media(messages: Sequence[Message]) -> bool:
    """Whether a conversation has pictures or videos."""
    return any(
        isinstance(part, Mapping) and part.get("type") in KINDS
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


@dataclass(frozen=True)
class MediaTemplate:
    """parts: whether the template writes lists of content parts. marks: what stands for an item in a text."""

    parts: bool = True
    marks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Mapping[str, str], start: str, render: Callable[[Sequence[Message]], str]) -> MediaTemplate:
        """Try what a template writes. tokens: the text of each kind's placeholder; start: of what opens a picture."""
        end = start.replace("start", "end")
        marks = {kind: f"{start}{token}{end}" for kind, token in tokens.items()}
        content = [{"type": "text", "text": PROBE}, {"type": "image"}]
        try:
            written = render([{"role": "user", "content": content}])
        except Exception:  # the checkpoint's code
            written = ""
        return cls(PROBE in written and tokens["image"] in written and "'type'" not in written, marks)

    def messages(self, messages: Sequence[Message], calls: bool) -> list[Message]:
        """A conversation as the template takes it. calls: whether it writes results of tools. Raises BadRequest."""
        return [self._message(message, f"messages[{i}]", calls) for i, message in enumerate(messages)]

    def _message(self, message: Message, where: str, calls: bool) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if self.parts and (message.get("role") != "tool" or calls):
            return message
        if not self.marks:
            raise BadRequest(f"{where}.content: this model's chat template takes no pictures.", f"{where}.content")
        texts = [self.marks[part["type"]] if part["type"] in KINDS else str(part.get("text", "")) for part in content]
        return {**message, "content": "\n".join(texts)}
