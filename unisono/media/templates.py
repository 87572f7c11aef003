"""Image support of a chat template: content parts, or text with placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.types import BadRequest

Message = Mapping[str, Any]
PROBE = "probe_text"
KINDS = ("image", "video")


def has_media(messages: Sequence[Message]) -> bool:
    """True if a conversation has images or videos."""
    return any(
        isinstance(part, Mapping) and part.get("type") in KINDS
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


@dataclass(frozen=True)
class MediaTemplate:
    """The image support of one template.

    parts: it renders lists of content parts. marks: the text of an item by kind.
    """

    parts: bool = True
    marks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Mapping[str, str], start: str, render: Callable[[Sequence[Message]], str]) -> MediaTemplate:
        """Probe a template. tokens: the text of each kind's placeholder. start: the text that opens an image; empty:
        the placeholder stands alone."""
        end = start.replace("start", "end")
        marks = {kind: f"{start}{token}{end}" for kind, token in tokens.items()}
        content = [{"type": "text", "text": PROBE}, {"type": "image"}]
        try:
            written = render([{"role": "user", "content": content}])
        except Exception:  # the checkpoint's code
            written = ""
        return cls(PROBE in written and tokens["image"] in written and "'type'" not in written, marks)

    def messages(self, messages: Sequence[Message], calls: bool) -> list[Message]:
        """A conversation in the form that the template accepts.

        calls: it renders results of tools. Raises BadRequest.
        """
        return [self._message(message, f"messages[{i}]", calls) for i, message in enumerate(messages)]

    def _message(self, message: Message, where: str, calls: bool) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if self.parts and (message.get("role") != "tool" or calls):
            return message
        if not self.marks:
            raise BadRequest(
                f"{where}.content: this model's chat template does not support images.", f"{where}.content"
            )
        texts = [self.marks[part["type"]] if part["type"] in KINDS else str(part.get("text", "")) for part in content]
        return {**message, "content": "\n".join(texts)}
