"""Head of a classifier, reranker or reward model: labels' scores of a prompt's pooled state.

The head is the checkpoint's ``score`` (one matrix, or the layers of a reward model), an encoder's ``classifier`` with
the layer before it, or rows of the LM head of the tokens that ``classifier_from_token`` of config.json names
(Qwen3-Reranker). It is applied on the CPU to one state at a time in float64, so that a score does not depend on the
other requests.

Shapes: L labels, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config.untrusted_files import read_json
from unisono.frontend.head_layers import (
    ACTIVATIONS,
    HeadLayer,
    HeadNorm,
    Stored,
    field_of,
    layer_of,
    read_stored,
    stored_tensors,
)
from unisono.frontend.pooling import pooled

CLASSIFIES = "ForSequenceClassification"
REWARDS, STEP_REWARDS = "ForRewardModel", "ForProcessRewardModel"
HEADS = (CLASSIFIES, REWARDS, STEP_REWARDS)
"""Ends of architectures with a head of labels."""
HEADLESS = (*HEADS, "Model")
"""Ends of architectures without an LM head."""
EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Tensors with a row for each token, those of the LM head first."""
STEP_TAG = "<extra_0>"
"""Token after each step of a process reward model's prompt (Qwen2.5-Math-PRM), if the request names no other."""
IDENTITY = "identity"


@dataclass(frozen=True)
class Classifier:
    """layers: of the head before the last one. weight [L, H] and bias [L], float64. labels: their names.

    activation: "softmax" over labels, "sigmoid" of each, or "identity" (regression). mode: pooling of a prompt's
    states, "last", "cls" or "mean". step_tag: id of the token after each step of a process reward model's prompt; None
    for others.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    labels: tuple[str, ...]
    activation: str
    layers: tuple[HeadLayer, ...] = ()
    mode: str = "last"
    step_tag: int | None = None

    def scores(
        self, state: np.ndarray, use_activation: bool = True, returned: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """state [H] float32 -> scores [L] float32. returned: the only labels that count, by number; None: all."""
        found = state.astype(np.float64)
        for layer in self.layers:
            found = layer(found)
        found = self.weight @ found
        found = found if self.bias is None else found + self.bias
        found = found if returned is None else found[list(returned)]
        if use_activation and self.activation == "softmax":
            found = np.exp(found - found.max())
            found /= found.sum()
        elif use_activation and self.activation == "sigmoid":
            found = 1 / (1 + np.exp(-found))
        return found.astype(np.float32)

    def of_prompt(self, states: np.ndarray, use_activation: bool = True) -> np.ndarray:
        """states [tokens, H] float32 of a prompt -> scores [L] float32 of the prompt."""
        return self.scores(pooled(states, self.mode), use_activation)


def classifier_of(
    directory: Path, overrides: Mapping[str, Any], token_id: Callable[[str], int | None]
) -> Classifier | None:
    """The head of a checkpoint; None for one without a head.

    overrides: ``--hf-overrides``. token_id: id of a token of the vocabulary. Raises ValueError naming the field or the
    tensor that is wrong, and CheckpointError for a config.json without an object.
    """
    config = {**read_json(directory / "config.json"), **overrides}
    tokens = config.get("classifier_from_token")
    if tokens:
        return _from_tokens(directory, tokens, config, token_id)
    architecture = str((field_of(config, "architectures", list, []) or [""])[0])
    if not architecture.endswith(HEADS):
        return None
    tensors, hidden = stored_tensors(directory), field_of(config, "hidden_size", int, 0)
    encoder = next((read for name, read in ENCODERS.items() if architecture == f"{name}{CLASSIFIES}"), None)
    layers, last, mode = (_rewarding if encoder is None else encoder)(tensors, hidden, config)
    if f"{last}.weight" not in tensors:
        raise ValueError(f"the checkpoint has no tensor {last}.weight; set classifier_from_token with --hf-overrides")
    head = layer_of(tensors, last, len(layers[-1].weight) if layers else hidden)
    labels = _labels(config, len(head.weight))
    step_tag = None
    if architecture.endswith(STEP_REWARDS):
        step_tag = token_id(STEP_TAG)
    activation = _activation(architecture, config, len(labels))
    return Classifier(head.weight, head.bias, labels, activation, layers, mode, step_tag)


def _activation(architecture: str, config: Mapping[str, Any], labels: int) -> str:
    """The activation of labels: that of the checkpoint's cross-encoder, or by the kind of problem."""
    of_encoder = config.get("sentence_transformers")
    named = of_encoder.get("activation_fn") if isinstance(of_encoder, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named:
        name = str(named).rpartition(".")[2].lower()
        if name not in (IDENTITY, "sigmoid", "softmax"):
            raise ValueError(
                f"the activation of labels {str(named)[:80]!r}: supported are Identity, Sigmoid and Softmax"
            )
        return name
    kind = config.get("problem_type")
    if kind == "regression" or architecture.endswith(REWARDS):
        return IDENTITY
    return "sigmoid" if labels == 1 or kind == "multi_label_classification" else "softmax"


# ---- layers of heads: (layers before the last, name of the last, pooling) ----------------------------

Read = tuple[tuple[HeadLayer, ...], str, str]


def _rewarding(tensors: Mapping[str, Stored], hidden: int, config: Mapping[str, Any]) -> Read:
    """A decoder's head: ``score``, or two layers with ReLU between them (reward models of Qwen2)."""
    if "score.0.weight" in tensors:
        return (layer_of(tensors, "score.0", hidden, "relu"),), "score.2", "last"
    return (), "score", "last"


def _of_bert(tensors: Mapping[str, Stored], hidden: int, config: Mapping[str, Any]) -> Read:
    return (layer_of(tensors, "bert.pooler.dense", hidden, "tanh"),), "classifier", "cls"


def _of_roberta(tensors: Mapping[str, Stored], hidden: int, config: Mapping[str, Any]) -> Read:
    return (layer_of(tensors, "classifier.dense", hidden, "tanh"),), "classifier.out_proj", "cls"


def _of_modernbert(tensors: Mapping[str, Stored], hidden: int, config: Mapping[str, Any]) -> Read:
    mode, activation = config.get("classifier_pooling", "cls"), str(config.get("classifier_activation", "gelu"))
    if mode not in ("cls", "mean"):
        raise ValueError(f"classifier_pooling={str(mode)[:80]!r} must be 'cls' or 'mean'")
    if activation not in ACTIVATIONS:
        raise ValueError(f"classifier_activation={activation[:80]!r}: supported are {', '.join(ACTIVATIONS)}")
    if "head.norm.weight" not in tensors:
        raise ValueError("the checkpoint has no tensor head.norm.weight")
    bias = read_stored(*tensors["head.norm.bias"]) if "head.norm.bias" in tensors else None
    norm = HeadNorm(read_stored(*tensors["head.norm.weight"]), bias, field_of(config, "norm_eps", float, 1e-5))
    return (layer_of(tensors, "head.dense", hidden, activation, norm),), "classifier", str(mode)


ENCODERS: Mapping[str, Callable[[Mapping[str, Stored], int, Mapping[str, Any]], Read]] = {
    "Bert": _of_bert,
    "ModernBert": _of_modernbert,
    "Roberta": _of_roberta,
    "XLMRoberta": _of_roberta,
}
"""Readers of the heads of encoders, by the beginning of their architectures."""


def _from_tokens(
    directory: Path, tokens: Any, config: Mapping[str, Any], token_id: Callable[[str], int | None]
) -> Classifier:
    """The head of a generative reranker. Two tokens, no and yes: the softmax over both is a sigmoid of one label."""
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"classifier_from_token={str(tokens)[:80]} must be a list of tokens, ['no', 'yes']")
    ids = [token_id(token) for token in tokens]
    if None in ids:
        raise ValueError(f"classifier_from_token: {tokens[ids.index(None)]!r} is not one token of this vocabulary")
    tensors = stored_tensors(directory)
    name = next((name for name in EMBEDDINGS if name in tensors), None)
    if name is None:
        raise ValueError(f"the checkpoint has none of {', '.join(EMBEDDINGS)}")
    rows = np.stack([read_stored(*tensors[name], row=int(i or 0)) for i in ids])
    if len(tokens) == 2:
        return Classifier(rows[1:] - rows[:1], None, (tokens[1],), "sigmoid")
    return Classifier(rows, None, tuple(tokens), "softmax" if len(tokens) > 1 else "sigmoid")


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Names of the labels: ``id2label`` of config.json, or transformers' defaults."""
    names = config.get("id2label")
    names = names if isinstance(names, Mapping) else {}
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))
