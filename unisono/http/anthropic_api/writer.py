"""Pieces of an answer to the content blocks and events of the Messages API, and its form of errors.

A :class:`MessageWriter` follows one answer: it maintains the current message, and makes the events that lead to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from unisono.http.answers.generation import OutputPiece
from unisono.http.errors import ApiError
from unisono.http.openai.responses import Usage

Event = dict[str, Any]

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
"""Finish reason of a generation -> ``stop_reason``; a stop string is ``stop_sequence``."""
ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""HTTP status -> error type; other 4xx are invalid_request_error, other 5xx api_error."""
KINDS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessageWriter:
    """One message. ``message`` is the object; ``new_id`` makes ids of tool calls."""

    def __init__(self, message: dict[str, Any], new_id: Callable[[str], str]) -> None:
        self.message = message
        self._new_id = new_id
        self._block: dict[str, Any] | None = None
        self._call = -1
        self._text: list[str] = []
        self._begun = False

    def feed(self, piece: OutputPiece, usage: Usage) -> list[Event]:
        """The events of a piece. The first one's begin with the message, so that no event precedes the first token."""
        events = self._begin(usage)
        for kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
            if text:
                events += self._open(kind)
                self._text.append(text)
                events.append(self._event("content_block_delta", delta={"type": KINDS[kind], kind: text}))
        for call in piece.tool_calls:
            if self._block is None or self._block["type"] != "tool_use" or self._call != call.index:
                events += self._close()
                self._call = call.index
                events += self._add({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._text.append(call.arguments)
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                events.append(self._event("content_block_delta", delta=delta))
        return events

    def end(self, finish: str, stop: str | None, usage: Usage) -> list[Event]:
        """The events that end the answer. stop: the stop string that ended it."""
        events = self._close()
        reason = "stop_sequence" if stop is not None else STOPS.get(finish, "end_turn")
        self.message |= {"stop_reason": reason, "stop_sequence": stop, "usage": worded(usage)}
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return [*events, {"type": "message_delta", "delta": delta, "usage": worded(usage)}, {"type": "message_stop"}]

    def _begin(self, usage: Usage) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return [{"type": "message_start", "message": {**self.message, "usage": worded(usage)}}]

    def _open(self, kind: str) -> list[Event]:
        """Begin a block of reasoning or text, unless one is open."""
        if self._block is not None and self._block["type"] == kind:
            return []
        block = (
            {"type": "thinking", "thinking": "", "signature": ""} if kind == "thinking" else {"type": kind, kind: ""}
        )
        return self._close() + self._add(block)

    def _add(self, block: dict[str, Any]) -> list[Event]:
        self._block, self._text = block, []
        return [self._event("content_block_start", content_block=block)]

    def _close(self) -> list[Event]:
        """End the open block."""
        block, text = self._block, "".join(self._text)
        if block is None:
            return []
        kind = block["type"]
        done = {**block, "input": _input(text)} if kind == "tool_use" else {**block, kind: text}
        events = [self._event("content_block_stop")]
        self.message["content"] = [*self.message["content"], done]
        self._block = None
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]), **fields}


def _input(text: str) -> Any:
    """A call's arguments; ``{"arguments": text}`` if the model wrote no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def worded(usage: Usage) -> dict[str, Any]:
    """Token counts; ``input_tokens`` excludes prompt tokens from the prefix cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def error_object(error: ApiError, request_id: str) -> dict[str, Any]:
    """An error in the form of this API."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
