"""Hosted tools: those that an API's provider runs, such as web search, code interpreters and MCP servers.

This server runs no tools. It refuses a request with a hosted one; with ``--ignore-hosted-tools`` it leaves the tool
out, counts it and logs a warning, for agents that always send some (Codex, Claude Code).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.http.errors import show
from unisono.types import BadRequest

logger = logging.getLogger(__name__)

FLAG = "--ignore-hosted-tools"
TYPES = frozenset(
    {"web_search", "file_search", "code_interpreter", "computer", "computer_use", "image_generation", "mcp",
     "local_shell", "shell", "apply_patch", "custom", "tool_search", "namespace",
     "web_fetch", "code_execution", "bash", "text_editor", "memory", "tool_search_tool_regex", "tool_search_tool_bm25",
     "mcp_toolset"}
)  # fmt: skip
"""Tool types of OpenAI's and Anthropic's APIs, without versions. Arguments of OpenAI's ``custom`` are not JSON."""
VERSION = re.compile(r"(_preview)?(_\d{4}_\d{2}_\d{2}|_\d{8})?$")
"""Suffix of a type: ``web_search_preview_2025_03_11``, ``web_search_20250305``."""
ITEMS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "computer_call", "computer_call_output",
     "image_generation_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
     "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
     "apply_patch_call_output", "tool_search_call", "tool_search_output"}
)  # fmt: skip
"""Items of hosted tools in a conversation of responses."""
BLOCKS = frozenset(
    {"server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
     "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
     "mcp_tool_use", "mcp_tool_result"}
)  # fmt: skip
"""Content blocks of hosted tools in Anthropic's messages."""


def hosted_type(kind: Any) -> str | None:
    """The type of a hosted tool without its version; None for every other value."""
    bare = VERSION.sub("", kind) if isinstance(kind, str) else ""
    return bare if bare in TYPES else None


@dataclass
class Ignored:
    """Parts left out of one request.

    allowed: the server leaves out hosted tools; otherwise it refuses them.

    tools: types of the tools as in the request. counted: types without versions, of tools, items and blocks.
    """

    allowed: bool = False
    tools: dict[str, None] = field(default_factory=dict)
    counted: dict[str, None] = field(default_factory=dict)

    def tool(self, kind: Any, where: str) -> bool:
        """True if a tool of this type is left out. Raises BadRequest for a hosted tool that is not allowed."""
        if (bare := hosted_type(kind)) is None:
            return False
        self._check(where, kind)
        self.tools[kind] = self.counted[bare] = None
        return True

    def part(self, kind: Any, where: str) -> bool:
        """True if an item or block of this type is left out. Raises BadRequest like :meth:`tool`."""
        if not isinstance(kind, str) or kind not in ITEMS | BLOCKS:
            return False
        self._check(where, kind)
        self.counted[kind] = None
        return True

    def other(self, kind: str, where: str) -> None:
        """Leave out a field's use of hosted tools. Raises BadRequest if that is not allowed."""
        self._check(where, kind)
        self.counted[kind] = None

    def functions(self, tools: Sequence[Any]) -> list[Any]:
        """A chat body's tools without hosted ones. Raises BadRequest."""
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
        return [one for i, one in enumerate(tools) if not self.tool(kinds[i], f"tools[{i}].type")]

    def no_tools(self, choice: Any) -> BadRequest:
        """The error for a tool_choice that needs tools if none is left."""
        left = f" beside {', '.join(self.tools)}, which this server leaves out ({FLAG})" if self.tools else ""
        return BadRequest(f"tool_choice={show(choice)} needs tools{left}; give functions.", "tool_choice")

    def _check(self, where: str, kind: str) -> None:
        if self.allowed:
            return
        raise BadRequest(
            f'{where}="{kind}" is not supported: this server runs no tools of its own. Give functions, or start the '
            f"server with {FLAG}, which leaves such tools out.",
            where,
        )


@dataclass
class HostedTools:
    """The server's rule for hosted tools.

    ignore: leave them out. count: called with the type of one that was left out.
    """

    ignore: bool = False
    count: Callable[[str], None] = lambda kind: None
    _warned: set[str] = field(default_factory=set)

    def request(self) -> Ignored:
        """A record for one request."""
        return Ignored(self.ignore)

    def tell(self, ignored: Ignored) -> None:
        """Count the parts left out of a request, and log the first of each type."""
        for kind in ignored.counted:
            self.count(kind)
        if new := [kind for kind in ignored.counted if kind not in self._warned]:
            self._warned.update(new)
            logger.warning(
                "Left out of a request (%s): %s. The metric ignored_tools_total counts them; this is logged once for "
                "each type.",
                FLAG,
                ", ".join(new),
            )
