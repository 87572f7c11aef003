"""The tool-call formats by name, and the format of a chat template. A new format is one file and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.text.tool_parsers.base import Format
from unisono.text.tool_parsers.deepseek import DeepSeekV3, DeepSeekV31
from unisono.text.tool_parsers.gemma4 import Gemma4
from unisono.text.tool_parsers.glm45 import Glm45
from unisono.text.tool_parsers.granite import Granite
from unisono.text.tool_parsers.harmony import Harmony
from unisono.text.tool_parsers.hermes import Hermes
from unisono.text.tool_parsers.internlm import InternLM
from unisono.text.tool_parsers.kimi_k2 import KimiK2
from unisono.text.tool_parsers.llama3_json import LlamaJson
from unisono.text.tool_parsers.mistral import Mistral, MistralArgs
from unisono.text.tool_parsers.pythonic import Pythonic
from unisono.text.tool_parsers.qwen3_coder import QwenCoder
from unisono.types import ConfigError

FORMATS: Sequence[Format] = (
    Harmony(), DeepSeekV3(), DeepSeekV31(), KimiK2(), MistralArgs(), Mistral(), QwenCoder(), Glm45(), Granite(),
    InternLM(), Gemma4(), Hermes(), Pythonic(), LlamaJson(),
)  # fmt: skip
"""In the order of comparison with a template: the first match is taken."""

ALIASES: Mapping[str, str] = {
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder",
    "llama3": "llama3_json", "llama4_json": "llama3_json",
    "glm": "glm45", "glm47": "glm45", "granite3": "granite", "llama4_pythonic": "pythonic", "llama4": "pythonic",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "gpt_oss": "openai", "gpt-oss": "openai",
}  # fmt: skip
"""Other names of vLLM and SGLang for the same formats."""

NAMES: Mapping[str, Format] = {form.name: form for form in FORMATS}
DEFAULT = NAMES["hermes"]
"""The format in which the server writes tools for a template that does not support them."""


def format_named(name: str | None) -> Format | None:
    """The format ``name``; None for None. Raises ConfigError with the list of names."""
    if name is None:
        return None
    form = NAMES.get(ALIASES.get(name, name))
    if form is None:
        names = ", ".join(sorted({*NAMES, *ALIASES}))
        raise ConfigError(
            f"--tool-call-parser {name!r} is unknown; choose one of {names}, or leave it out: the chat template's text "
            "determines it."
        )
    return form


def format_of(template: str) -> Format | None:
    """The format of a chat template with this text; None if unknown."""
    return next((form for form in FORMATS if form.known_by(template)), None)
