"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from unisono.text.tool_parsers.base import Tool
from unisono.types import BadRequest
from unisono.types.excerpts import show

MAX_TOOLS = 128
"""Tools of one request: OpenAI's limit."""
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
CHOICES = ("auto", "none", "required")

Mode = Literal["auto", "required"]


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    definitions: definitions in the template's form. mode: ``required`` if at least one call of ``callable`` must come.
    parallel: several calls are allowed.
    """

    definitions: Sequence[Mapping[str, Any]]
    callable: Sequence[Tool]
    mode: Mode
    parallel: bool

    @property
    def strict(self) -> bool:
        """True if the arguments of any tool must satisfy its schema."""
        return any(tool.strict for tool in self.callable)


def tool_use(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The tools of a body's fields; None if no tool may be called. Raises BadRequest with the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(
                f"tool_choice={show(choice)} needs tools; give them, or leave out tool_choice.", "tool_choice"
            )
        return None
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are taken.", "tools")
    value = [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    known = {one["function"]["name"]: _tool(one["function"]) for one in value}
    if len(known) < len(value):
        names = [one["function"]["name"] for one in value]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"tools has {twice!r} twice; give each function a name of its own.", "tools")
    mode, chosen = _choice(choice, known)
    if mode is None:
        return None
    named = isinstance(choice, dict) and choice.get("type") == "function"  # that function is called once
    return ToolUse(value, [known[name] for name in chosen], mode, parallel is not False and not named)


def _definition(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        _refuse(where, tool, 'it must be {"type": "function", "function": {…}}; this server runs no tools of its own')
    function = tool.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function", function, "it must be an object with a name and parameters")
    name = function.get("name")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        rule = "it must be 1 to 128 letters, digits, or any of _ - . : /"
        _refuse(f"{where}.function.name", name, rule)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        _refuse(f"{where}.function.parameters", parameters, "it must be a JSON schema, an object")
    if parameters and parameters.get("type", "object") != "object":
        _refuse(f"{where}.function.parameters.type", parameters["type"], "arguments are an object")
    if not isinstance(function.get("description", ""), (str, type(None))):
        _refuse(f"{where}.function.description", function["description"], "it must be a string")
    if not isinstance(function.get("strict"), (bool, type(None))):
        _refuse(f"{where}.function.strict", function["strict"], "it must be true or false")
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    kept.setdefault("parameters", {"type": "object", "properties": {}})
    written = {"type": "function", "function": kept | ({"strict": True} if function.get("strict") else {})}
    return written


def _tool(function: Mapping[str, Any]) -> Tool:
    return Tool(function["name"], function["parameters"], bool(function.get("strict")))


def _choice(choice: Any, known: Mapping[str, Tool]) -> tuple[Mode | None, Sequence[str]]:
    """(mode, names); mode is None if nothing may be called."""
    if choice is None or choice == "auto":
        return "auto", list(known)
    if choice == "none":
        return None, []
    if choice == "required":
        return "required", list(known)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_known(choice, known)]
    if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode in ("auto", "required") and isinstance(tools, list) and tools:
            return mode, list(dict.fromkeys(_known(one, known) for one in tools))
    rule = '{"type": "function", "function": {"name": "…"}}'
    _refuse("tool_choice", choice, f"it must be one of {', '.join(CHOICES)}, or {rule}")


def _known(choice: Any, known: Mapping[str, Tool]) -> str:
    """The function that a choice names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        _refuse("tool_choice", choice, 'a function is chosen by {"type": "function", "function": {"name": "…"}}')
    if name not in known:
        _refuse("tool_choice", choice, f"tools has no function {name!r}; it has {', '.join(known)[:200]}")
    return name


def _refuse(where: str, value: Any, why: str) -> NoReturn:
    raise BadRequest(f"{where}={show(value)} is not valid: {why}.", where)
