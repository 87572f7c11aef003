"""Pieces of an answer to the items and events of the Responses API.

A :class:`ResponseWriter` follows one answer: it maintains the current response object, and makes the events that lead
to it. A whole answer is the object at the end, so a stream and a whole answer cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from unisono.http.answers.generation import OutputPiece
from unisono.http.errors import ApiError
from unisono.http.openai.responses import TokenReport, Usage

Event = dict[str, Any]
Item = dict[str, Any]

ENDS = {"length": "incomplete", "abort": "cancelled"}
"""Finish reason of a generation -> status of a response; any other is ``completed``."""
EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "cancelled": "response.incomplete"}


class ResponseWriter:
    """One response.

    ``response`` is the object; ``new_id`` makes ids of items from a prefix.

    reports: text carries log-probabilities.
    """

    def __init__(self, response: dict[str, Any], reports: bool, new_id: Callable[[str], str]) -> None:
        self.response = response
        self._reports, self._new_id = reports, new_id
        self._sequence = 0
        self._item: Item | None = None
        self._call = -1  # number of the open tool call
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []
        self._begun = False

    # ---- the answer's way ------------------------------------------------------------------------

    def feed(self, piece: OutputPiece) -> list[Event]:
        """The events of a piece.

        The first one's begin with the response itself, so that no event precedes the first token.
        """
        events = self._begin()
        if piece.reasoning:
            events += self._open("reasoning")
            events.append(self._delta(piece.reasoning, "response.reasoning_text.delta", content_index=0))
        elif self._reports and piece.reports:
            self._waiting += _logprobs(piece.reports)  # their text may come with a later piece
        if piece.text:
            events += self._open("message")
            logprobs, self._waiting = self._waiting, []
            self._logprobs += logprobs
            place = {"content_index": 0, "logprobs": logprobs}
            events.append(self._delta(piece.text, "response.output_text.delta", **place))
        for call in piece.tool_calls:
            events += self._open_call(call)
            if call.arguments:
                events.append(self._delta(call.arguments, "response.function_call_arguments.delta"))
        return events

    def end(self, finish: str, usage: Usage) -> list[Event]:
        """The events that end the answer."""
        status = ENDS.get(finish, "completed")
        wordless = not self.response["output"] and self._item is None
        events = self._open("message") if wordless else []
        events += self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": self._usage(usage)}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        elif finish == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(EVENTS[status], response=self._copy())]

    def fail(self, error: ApiError) -> list[Event]:
        """The events of an error that ended the answer."""
        events = self._begin()
        events += self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        return [*events, self._event("response.failed", response=self._copy())]

    # ---- items -----------------------------------------------------------------------------------

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        self.response["status"] = "in_progress"
        return [
            self._event("response.created", response=self._copy()),
            self._event("response.in_progress", response=self._copy()),
        ]

    def _open(self, kind: str) -> list[Event]:
        """Begin an item of reasoning or text, unless one is open."""
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "message":
            item: Item = {"id": self._new_id("msg_"), "type": "message", "role": "assistant", "content": []}
            part = self._text_part("", [])
        else:
            item = {"id": self._new_id("rs_"), "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events += self._add(item)
        events.append(self._event("response.content_part.added", content_index=0, part=part, **self._place()))
        return events

    def _open_call(self, call: Any) -> list[Event]:
        if self._item is not None and self._item["type"] == "function_call" and self._call == call.index:
            return []
        events = self._close("completed")
        self._call = call.index
        item = {"id": self._new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        return events + self._add({**item, "arguments": ""})

    def _add(self, item: Item) -> list[Event]:
        self._item = {**item, "status": "in_progress"}
        self._text, self._logprobs = [], []
        index = len(self.response["output"])
        return [self._event("response.output_item.added", output_index=index, item=self._item)]

    def _close(self, status: str) -> list[Event]:
        """End the open item."""
        item = self._item
        if item is None:
            return []
        text, place = "".join(self._text), self._place()
        if item["type"] == "function_call":
            done = {**item, "arguments": text}
            name = item["name"]
            events = [
                self._event("response.function_call_arguments.done", arguments=text, name=name, **place),
            ]
        else:
            is_text = item["type"] == "message"
            part = self._text_part(text, self._logprobs) if is_text else {"type": "reasoning_text", "text": text}
            extra = {"logprobs": self._logprobs} if is_text else {}
            kind = "response.output_text.done" if is_text else "response.reasoning_text.done"
            events = [
                self._event(kind, content_index=0, text=text, **extra, **place),
                self._event("response.content_part.done", content_index=0, part=part, **place),
            ]
            done = {**item, "content": [part]}
        done["status"] = status
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item=done))
        self.response["output"] = [*self.response["output"], done]
        self._item = None
        return events

    # ---- events ----------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _delta(self, text: str, kind: str, **fields: Any) -> Event:
        self._text.append(text)
        return self._event(kind, delta=text, **fields, **self._place())

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"])}

    def _text_part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _copy(self) -> dict[str, Any]:
        """A copy of the response for an event, which must not change later."""
        return dict(self.response)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _logprobs(reports: Sequence[TokenReport]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of output_text."""
    found = []
    for report in reports:
        own, *top = report.alternatives()
        found.append({**msgspec.to_builtins(own), "top_logprobs": [msgspec.to_builtins(one) for one in top]})
    return found
