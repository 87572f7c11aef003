"""tokenizer.json and tokenizer_config.json of the tokenizer in a GGUF file, as the ``tokenizers`` library reads them.

``tokenizer.ggml.model`` "gpt2" is byte-level BPE whose split ``tokenizer.ggml.pre`` names; "llama" is SentencePiece's
BPE, whose merges follow from the scores. Others are refused. Imports types and the header only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.config.gguf.header import GGUFHeader
from unisono.types import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of ``tokenizer.ggml.token_type`` with a meaning for the text."""

SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


@dataclass(frozen=True)
class Split:
    """Division of a text before merges. regex: of the parts; empty: GPT-2's, with ``digits`` one by one.

    whole: a part that is a token is one, whatever the merges. nfc: the text is normalised first.
    """

    regex: str = ""
    digits: bool = False
    whole: bool = False
    nfc: bool = False


_LLAMA3 = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole=True)
_QWEN2 = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", nfc=True)
_TEKKEN = Split(
    "|".join((*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")), whole=True
)

SPLITS: Mapping[str, Split] = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""By ``tokenizer.ggml.pre``."""


def files_of(header: GGUFHeader) -> dict[str, Any]:
    """The tokenizer's files by name: JSON values, and the text of templates. Raises CheckpointError."""
    tokens, kind = _tokens(header), header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level(header, tokens)
    elif kind == "llama":
        made = _sentence_piece(header, tokens)
    else:
        raise CheckpointError(
            f"{header.file}: tokenizer.ggml.model={str(kind)[:40]!r} is not supported; supported are gpt2 and llama. "
            "Give the checkpoint that it was made from, in safetensors."
        )
    names = {name: _special(header, tokens, name) for name in ("bos", "eos", "unknown", "padding")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.metadata.get(f"{header.architecture}.context_length"),
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "unk_token": names["unknown"] if kind == "llama" else None,
        "pad_token": names["padding"],
    }
    return {"tokenizer.json": made, "tokenizer_config.json": config, **_templates(header)}


def end_ids(header: GGUFHeader) -> list[int]:
    """Ids that end an answer: of the text, of a turn and of a message."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _templates(header: GGUFHeader) -> dict[str, str]:
    """Chat templates by file name: the default one and named ones, such as that for tools."""
    found, start = {}, "tokenizer.chat_template"
    for key, text in header.metadata.items():
        name = key.removeprefix(f"{start}.")
        if key == start and isinstance(text, str):
            found["chat_template.jinja"] = text
        elif key.startswith(f"{start}.") and isinstance(text, str) and name.replace("_", "").isalnum():
            found[f"additional_chat_templates/{name}.jinja"] = text
    return found


def _tokens(header: GGUFHeader) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(each, str) for each in tokens):
        raise CheckpointError(f"{header.file} has no tokens (tokenizer.ggml.tokens): it is no whole model.")
    return tokens


def _special(header: GGUFHeader, tokens: Sequence[str], name: str) -> str | None:
    """The special token with the file's id; None without one."""
    key = f"tokenizer.ggml.{name}_token_id"
    number = header.metadata.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(f"{header.file}: {key}={str(number)[:40]} is not the id of one of {len(tokens)} tokens.")
    return tokens[number]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Id of each token, the first one of a token that is listed twice."""
    found: dict[str, int] = {}
    for number, token in enumerate(tokens):
        found.setdefault(token, number)
    return found


def _added(header: GGUFHeader, tokens: Sequence[str], special: tuple[int, ...]) -> list[dict[str, Any]]:
    """Tokens that are matched in the text before it is split: those of the types ``special``, and the user's."""
    types = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{header.file}: tokenizer.ggml.token_type has {len(types)} of {len(tokens)} tokens.")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, "special": kind in special, **plain}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (*special, USER_DEFINED)
    ]


def _whole(header: GGUFHeader, tokens: Sequence[str], parts: Mapping[str, Any], adds_bos: bool) -> dict[str, Any]:
    """A tokenizer.json of these parts. adds_bos: a text begins with BOS unless the file says otherwise."""
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: dict[str, Any] = {}
    for name, before, default in (("bos", True, adds_bos), ("eos", False, False)):
        token = _special(header, tokens, name)
        if token is not None and header.metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            pieces.insert(0 if before else len(pieces), {"SpecialToken": {"id": token, "type_id": 0}})
            number = header.metadata[f"tokenizer.ggml.{name}_token_id"]
            specials[token] = {"id": token, "ids": [number], "tokens": [token]}
    post: dict[str, Any] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": specials}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": post if specials else None,
        **parts,
    }


def _byte_level(header: GGUFHeader, tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE, whose tokens are written in GPT-2's alphabet."""
    name = header.metadata.get("tokenizer.ggml.pre")
    split = SPLITS.get(str(name))
    if split is None:
        raise CheckpointError(
            f"{header.file}: tokenizer.ggml.pre={str(name)[:40]!r} is not supported; supported are "
            f"{', '.join(SPLITS)}. Give the checkpoint that it was made from, in safetensors."
        )
    merges = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{header.file} has no merges (tokenizer.ggml.merges): it is no whole model.")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split.regex}
    before: list[dict[str, Any]] = [level]
    if split.regex:
        pattern = {"Regex": split.regex}
        before.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    if split.digits:
        before.insert(0, {"type": "Digits", "individual_digits": True})
    parts = {
        "added_tokens": _added(header, tokens, (UNKNOWN, CONTROL)),
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
            **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": split.whole},
            "vocab": _vocabulary(tokens),
            "merges": merges,
        },
    }
    return _whole(header, tokens, parts, adds_bos=False)


def _sentence_piece(header: GGUFHeader, tokens: list[str]) -> dict[str, Any]:
    """SentencePiece's BPE with a token for each byte; spaces are written as ▁."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{header.file} has no scores of its tokens (tokenizer.ggml.scores).")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normal: list[dict[str, Any]] = [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special(header, tokens, "unknown")
    vocabulary = _vocabulary(tokens)
    parts = {
        "added_tokens": _added(header, tokens, (UNKNOWN, CONTROL)),
        "normalizer": {"type": "Sequence", "normalizers": normal},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None},
            **{"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
            "vocab": vocabulary,
            "merges": merges_of(vocabulary, scores),
        },
    }
    return _whole(header, tokens, parts, adds_bos=True)


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Pairs of tokens that SentencePiece joins, the best token first; among pairs of one token in the order of ids."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            left, right = vocabulary.get(token[:at]), vocabulary.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right, token[:at], token[at:]))
    return [[left, right] for *_, left, right in sorted(found)]
