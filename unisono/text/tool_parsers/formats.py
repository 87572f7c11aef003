"""The forms of tool calls by name, and which one a chat template asks for. A new form is one file and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.text.tool_parsers.base import Format
from unisono.text.tool_parsers.deepseek import DeepSeekV3, DeepSeekV31
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
    InternLM(), Hermes(), Pythonic(), LlamaJson(),
)  # fmt: skip
"""In the order in which a template is compared with them: the first that knows it is taken."""

ALIASES: Mapping[str, str] = {
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder",
    "llama3": "llama3_json", "llama4_json": "llama3_json",
    "glm": "glm45", "glm47": "glm45", "granite3": "granite", "llama4_pythonic": "pythonic", "llama4": "pythonic",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "gpt_oss": "openai", "gpt-oss": "openai",
}  # fmt: skip
"""Other names that vLLM and SGLang have for the same forms."""

NAMES: Mapping[str, Format] = {form.name: form for form in FORMATS}
DEFAULT = NAMES["hermes"]
"""Where the template knows no tools, and the server writes them."""


def format_named(name: str | None) -> Format | None:
    """The form of a name; None for None. Raises ConfigError that lists the names."""
    if name is None:
        return None
    form = NAMES.get(ALIASES.get(name, name))
    if form is None:
        names = ", ".join(sorted({*NAMES, *ALIASES}))
        raise ConfigError(
            f"--tool-call-parser {name!r} is unknown; choose one of {names}, or leave it out: the chat template's text "
            "says which one is meant."
        )
    return form


def format_of(template: str) -> Format | None:
    """The form that a chat template with this text asks for; None where none is known."""
    return next((form for form in FORMATS if form.known_by(template)), None)
