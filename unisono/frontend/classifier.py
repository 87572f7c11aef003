"""Head of a classifier, reranker or reward model: labels' scores of a prompt's pooled state.

The head is the checkpoint's ``score`` matrix, or rows of the LM head of the tokens that ``classifier_from_token`` of
config.json names (Qwen3-Reranker). It is applied on the CPU to one state at a time in float64, so that a score does not
depend on the other requests.

Shapes: L labels, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HEADER_BYTES = 8
"""Length of the field with the size of a safetensors header."""
KINDS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in KINDS.items()}
CLASSIFIES = "ForSequenceClassification"
HEADLESS = (CLASSIFIES, "Model")
"""Ends of architectures without an LM head."""
EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Tensors with a row for each token, those of the LM head first."""


@dataclass(frozen=True)
class Classifier:
    """weight [L, H] and bias [L], float64. labels: their names.

    activation: "softmax" over labels, "sigmoid" of each, or "identity" (regression).
    """

    weight: np.ndarray
    bias: np.ndarray | None
    labels: tuple[str, ...]
    activation: str

    def scores(self, state: np.ndarray, use_activation: bool = True) -> np.ndarray:
        """state [H] float32 -> scores [L] float32."""
        found: np.ndarray = self.weight @ state.astype(np.float64)
        found = found if self.bias is None else found + self.bias
        if use_activation and self.activation == "softmax":
            found = np.exp(found - found.max())
            found /= found.sum()
        elif use_activation and self.activation == "sigmoid":
            found = 1 / (1 + np.exp(-found))
        return found.astype(np.float32)


def classifier_of(
    directory: Path, overrides: Mapping[str, Any], token_id: Callable[[str], int | None]
) -> Classifier | None:
    """The head of a checkpoint; None for one without a head.

    overrides: ``--hf-overrides``. token_id: id of a token of the vocabulary. Raises ValueError naming the field or the
    tensor that is wrong.
    """
    config = {**json.loads((directory / "config.json").read_text(encoding="utf-8")), **overrides}
    tokens = config.get("classifier_from_token")
    if tokens:
        return _from_tokens(directory, tokens, config, token_id)
    if not str((config.get("architectures") or [""])[0]).endswith(CLASSIFIES):
        return None
    tensors = _headers(directory)
    if "score.weight" not in tensors:
        raise ValueError("the checkpoint has no tensor score.weight; set classifier_from_token with --hf-overrides")
    weight = _read(*tensors["score.weight"])
    bias = _read(*tensors["score.bias"]) if "score.bias" in tensors else None
    hidden = config.get("hidden_size")
    if weight.ndim != 2 or weight.shape[1] != hidden or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"score.weight has shape {list(weight.shape)}; the hidden size is {hidden}")
    labels = _labels(config, len(weight))
    kind = config.get("problem_type")
    activation = "sigmoid" if len(weight) == 1 or kind == "multi_label_classification" else "softmax"
    return Classifier(weight, bias, labels, "identity" if kind == "regression" else activation)


def _from_tokens(
    directory: Path, tokens: Any, config: Mapping[str, Any], token_id: Callable[[str], int | None]
) -> Classifier:
    """The head of a generative reranker. Two tokens, no and yes: the softmax over both is a sigmoid of one label."""
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"classifier_from_token={str(tokens)[:80]} must be a list of tokens, ['no', 'yes']")
    ids = [token_id(token) for token in tokens]
    if None in ids:
        raise ValueError(f"classifier_from_token: {tokens[ids.index(None)]!r} is not one token of this vocabulary")
    tensors = _headers(directory)
    name = next((name for name in EMBEDDINGS if name in tensors), None)
    if name is None:
        raise ValueError(f"the checkpoint has none of {', '.join(EMBEDDINGS)}")
    rows = np.stack([_read(*tensors[name], row=int(i or 0)) for i in ids])
    if len(tokens) == 2:
        return Classifier(rows[1:] - rows[:1], None, (tokens[1],), "sigmoid")
    return Classifier(rows, None, tuple(tokens), "softmax" if len(tokens) > 1 else "sigmoid")


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Names of the labels: ``id2label`` of config.json, or transformers' defaults."""
    names = config.get("id2label")
    names = names if isinstance(names, Mapping) else {}
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))


def _headers(directory: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """(file, dtype, shape, offset in bytes) of each tensor of a checkpoint."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(HEADER_BYTES), "little")
            header = json.loads(opened.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start = HEADER_BYTES + length + tensor["data_offsets"][0]
                found[name] = (file, tensor["dtype"], tuple(tensor["shape"]), start)
    return found


def _read(file: Path, dtype: str, shape: tuple[int, ...], start: int, row: int | None = None) -> np.ndarray:
    """A tensor, or one row of it, in float64. Raises ValueError for a dtype that is not floating-point."""
    if dtype not in DTYPES:
        raise ValueError(f"{file.name}: a tensor of dtype {dtype} is no head: {', '.join(DTYPES)} are read")
    kind, count = DTYPES[dtype], int(np.prod(shape, dtype=np.int64))
    if row is not None:
        count = int(np.prod(shape[1:], dtype=np.int64))
        start, shape = start + row * count * kind.itemsize, shape[1:]
    with file.open("rb") as opened:
        opened.seek(start)
        values = np.frombuffer(opened.read(count * kind.itemsize), kind)
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64).reshape(shape)
