"""``{"name": …, "parameters": {…}}`` as the whole answer, several of them separated by semicolons: Llama 3.1 to 3.3.

A ``<|python_tag|>`` may come first. Source: Meta's prompt formats of Llama 3.1, and its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono.text.tool_parsers.base import (
    BLANK,
    Format,
    FormatPart,
    JsonCall,
    ParserContext,
    SchemaPart,
    Tool,
    ToolCallParser,
)

TAG = "<|python_tag|>"


class LlamaCallParser(ToolCallParser):
    """Text that begins like a call and is none is content."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._call = JsonCall()
        self._body = ""
        self._begun = False

    def outside(self) -> bool:
        """Decide at the beginning whether the answer is a call; text after it is content."""
        blanks = self.held[: len(self.held) - len(self.held.lstrip())]
        self.held = self.held[len(blanks) :]
        self._body += blanks
        if (not self.held and not self.last) or self.awaits(TAG):
            return False
        if self.takes(TAG):
            self._body += TAG
            return True
        self.step = self._inside if self.held.startswith("{") else self._content
        return True

    def _inside(self) -> bool:
        if not self.held and not self.last:
            return False
        taken = self._call.feed(self.held)
        piece, self.held = self.held[:taken], self.held[taken:]
        if self._body or not self._begun:
            self._body += piece
        if not self._begun and self._call.name is not None:
            self._begun, self._body = True, ""
            self.begin_call(self._call.name)
        self.argue(self._call.take())
        if self._call.done and not self._call.broken:
            self.step = self._between
        elif self._call.broken or self.last:
            self.step = self._rest
        return self.step != self._inside

    def _between(self) -> bool:
        """Read another call, or ignore the rest."""
        if not self.skip(BLANK + ";,"):
            return False
        if not self.context.parallel:
            self.step = self.nothing
        elif self.held.startswith("{"):
            self._call, self._body, self._begun, self.step = JsonCall(), "", False, self._inside
        else:
            self.step = self._content
        return True

    def _rest(self) -> bool:
        if self._begun:
            self.argue(self.held)
            self.held = ""
            return False
        self.step = self._content
        return True

    def _content(self) -> bool:
        text, self.held, self._body = self._body + self.held, "", ""
        self.say(text)
        return False


class LlamaJson(Format):
    """Llama 3's JSON."""

    name = "llama3_json"
    marks = (TAG,)
    parser = LlamaCallParser
    between = "; "
    trigger = '{"name": "'

    def known_by(self, template: str) -> bool:
        return TAG in template or ('"parameters": ' in template and "<|eot_id|>" in template)

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f'{{"name": {json.dumps(tool.name)}, "parameters": ', SchemaPart(tool.parameters), "}"
