"""Prompts with a ``suffix``: the model fills in the text between two texts, by the infill tokens of its tokenizer.

A format is supported by a tokenizer that has all of its tokens. The texts are tokenized separately.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest

PREFIX, SUFFIX = "prefix", "suffix"


@dataclass(frozen=True)
class Infill:
    """One format.

    parts: tokens, with PREFIX and SUFFIX in the places of the texts. families: models with this format.
    """

    families: str
    parts: tuple[str, ...]

    @property
    def tokens(self) -> list[str]:
        return [part for part in self.parts if part not in (PREFIX, SUFFIX)]


FORMATS = (
    Infill(
        "Qwen2.5-Coder, Qwen3-Coder, CodeGemma",
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    ),
    Infill("StarCoder, StarCoder2, Granite", ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>")),
    Infill("SantaCoder", ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>")),
    Infill("DeepSeek-Coder", ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    Infill("CodeLlama", ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>")),
    Infill("Codestral", ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
    Infill("Seed-Coder", ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>")),
)
"""The formats of the families' model cards."""


def infill_prompt(tokenizer: Tokenizer, prefix: list[int], suffix: str, add_special_tokens: bool) -> list[int]:
    """Token ids of an infill prompt.

    prefix: token ids before the answer. suffix: text after it.

    add_special_tokens: begin with the tokens that the tokenizer puts before every text, such as BOS. Raises BadRequest
    if the tokenizer has no known infill tokens.
    """
    vocabulary = tokenizer.backend.get_vocab()
    form = next((form for form in FORMATS if all(token in vocabulary for token in form.tokens)), None)
    if form is None:
        known = "; ".join(form.families for form in FORMATS)
        raise BadRequest(
            "suffix needs a model that writes between two texts, and this tokenizer has the infill tokens of none of "
            f"them ({known}). Leave out suffix.",
            "suffix",
        )
    texts = {PREFIX: prefix, SUFFIX: tokenizer.encode(suffix, add_special_tokens=False)}
    ids = _leading(tokenizer) if add_special_tokens else []
    for part in form.parts:
        ids += texts[part] if part in texts else [vocabulary[part]]
    return ids


def _leading(tokenizer: Tokenizer) -> list[int]:
    """The BOS id, if the tokenizer begins every text with it; else empty."""
    bos = tokenizer.backend.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
