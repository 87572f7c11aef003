"""Pooling of a prompt's hidden states to one vector, by the checkpoint's configuration.

Checkpoints for embeddings carry sentence-transformers' files: ``modules.json`` lists the modules after the model, with
``1_Pooling/config.json`` and dense layers (``2_Dense``), ``config_sentence_transformers.json`` has the prompts of the
model card, and ``sentence_bert_config.json`` rules of texts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config.sentence_files import text_rules
from unisono.frontend.head_layers import ACTIVATIONS, HeadLayer, field_of, folded, layer_of, stored_tensors
from unisono.types import BadRequest, CheckpointError

MODES = {
    "cls_token": "cls", "cls": "cls", "max_tokens": "max", "max": "max", "mean_tokens": "mean", "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "mean_sqrt_len": "mean_sqrt_len", "weightedmean_tokens": "weightedmean",
    "weightedmean": "weightedmean", "lasttoken": "last",
}  # fmt: skip
"""sentence-transformers' names of the pooling modes, in the order in which the vectors of several are joined."""
MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
GENERATIVE = (
    "This checkpoint is generative: it has no 1_Pooling/config.json, so these are the normalised last hidden states of "
    "each text's last token, which nobody trained to be near for similar texts. Checkpoints meant for it are decoders "
    "with such a file, like Qwen3-Embedding."
)


@dataclass(frozen=True)
class Pooling:
    """The pooling of a checkpoint.

    mode: see :func:`pooled`. meant: the checkpoint is for embeddings. problem: the reason why its pooling is not
    supported, if it is not. layers: dense layers after it. prompts: beginnings of texts, by
    name. default_prompt: name of the one that texts get without a name; None: none. sizes: the only numbers of
    dimensions that embeddings may be cut to (``matryoshka_dimensions`` of config.json); empty: all. lower_case: texts
    are lowered.
    """

    mode: str = "last"
    meant: bool = False
    problem: str | None = None
    layers: tuple[HeadLayer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    sizes: tuple[int, ...] = ()
    lower_case: bool = False

    def pool(self, states: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
        """One vector [dimensions] of a prompt's hidden states [tokens, hidden], both float32."""
        vector = pooled(states, self.mode)
        if self.layers:
            wide = vector.astype(np.float64)
            for layer in self.layers:
                wide = layer(wide)
            vector = wide.astype(np.float32)
        if dimensions is not None:
            vector = vector[:dimensions]
        return vector / max(np.linalg.norm(vector), np.float32(1e-12)) if normalize else vector

    def check_dimensions(self, dimensions: int | None, hidden: int) -> None:
        """Raise BadRequest for a number of dimensions that an embedding cannot be cut to. hidden: the model's size."""
        most = len(self.layers[-1].weight) if self.layers else hidden * len(self.mode.split("+"))
        if dimensions is None:
            return
        if not 1 <= dimensions <= most:
            raise BadRequest(f"dimensions={dimensions} is out of range: this model has 1 to {most}.", "dimensions")
        if self.sizes and dimensions not in self.sizes:
            sizes = ", ".join(map(str, self.sizes))
            raise BadRequest(f"dimensions={dimensions}: this model was trained for {sizes}.", "dimensions")

    def beginning(self, name: str | None) -> str:
        """The text that the prompt of this name puts before each text. Raises BadRequest for an unknown name."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise BadRequest(f"prompt_name={name!r} is not one of this checkpoint's prompts: {known}.", "prompt_name")
        return self.prompts[name]

    def prompted(self, texts: Any, name: str | None) -> Any:
        """Texts, or one, with the prompt of this name before each, and lowered if the checkpoint's are. Without a name,
        token ids are left as they are.

        Raises BadRequest for an unknown name, and for token ids with a name.
        """
        before = self.beginning(name)
        if not before and not self.lower_case:
            return texts
        if isinstance(texts, str):
            return (before + texts).lower() if self.lower_case else before + texts
        if isinstance(texts, Mapping) and isinstance(texts.get("prompt"), str):
            return {**texts, "prompt": self.prompted(texts["prompt"], name)}
        if isinstance(texts, Sequence) and texts and not all(isinstance(each, int) for each in texts):
            return [self.prompted(each, name) for each in texts]
        if name is not None:
            raise BadRequest(f"prompt_name={name!r} goes before texts: give texts, not token ids.", "prompt_name")
        return texts


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    """One vector [hidden] of states [tokens, hidden], both float32.

    mode: ``cls`` (the first token), ``max``, ``mean``, ``mean_sqrt_len`` (the sum divided by the root of the number of
    tokens), ``weightedmean`` (by position, from 1 on) or ``last``; several with + between them are joined.
    """
    if "+" in mode:
        return np.concatenate([pooled(states, each) for each in mode.split("+")])
    if mode in ("last", "cls", "max"):
        return states[-1] if mode == "last" else states[0] if mode == "cls" else states.max(0)
    weights = np.arange(1.0, len(states) + 1) if mode == "weightedmean" else np.ones(len(states))
    total = (states * weights[:, None]).sum(0)
    divisor = len(states) ** 0.5 if mode == "mean_sqrt_len" else weights.sum()
    vector: np.ndarray = (total / divisor).astype(np.float32)
    return vector


def pooling_of(directory: Path) -> Pooling:
    """The pooling of a checkpoint's configuration; the last token's state by default."""
    try:
        return _read(directory)
    except (OSError, ValueError, CheckpointError) as error:
        return Pooling(meant=True, problem=str(error))


def _read(directory: Path) -> Pooling:
    """:func:`pooling_of`. Raises ValueError for a configuration that is not supported."""
    pooling, dense = directory / POOLING, []
    modules = _json(directory / MODULES, list) if (directory / MODULES).is_file() else []
    for module in modules:
        kind, path = (
            (str(module.get(name) or "") for name in ("type", "path")) if isinstance(module, dict) else ("", "")
        )
        name = kind.rpartition(".")[2]
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{MODULES} has a module outside the checkpoint: {path!r}")
        if name == "Pooling":
            pooling = directory / path
        elif name == "Dense":
            dense.append(directory / path)
        elif name not in ("Transformer", "Normalize"):
            raise ValueError(
                f"{MODULES} has a module {kind!r}; Transformer, Pooling, Dense and Normalize are supported"
            )
    prompts = _json(directory / PROMPTS, dict) if (directory / PROMPTS).is_file() else {}
    named = {str(name): str(text) for name, text in field_of(prompts, "prompts", dict, {}).items()}
    default = field_of(prompts, "default_prompt_name", str, "")
    lower = text_rules(directory).lower_case
    found = Pooling(prompts=named, default_prompt=default if default in named else None, lower_case=lower)
    if not (pooling / "config.json").is_file():
        return found
    config = _json(pooling / "config.json", dict)
    where = f"{pooling.name}/config.json"
    modes = _modes(config)
    if not modes or not {*modes} <= MODES.keys():
        raise ValueError(f"{where} asks for {modes}; supported are {', '.join(MODES)}")
    if config.get("include_prompt") is False and any(named.values()):
        raise ValueError(f"{where}: include_prompt=false, pooling without the tokens of a prompt, is not supported")
    joined = "+".join(dict.fromkeys(MODES[mode] for mode in sorted(modes, key=[*MODES].index)))
    inputs = field_of(config, "word_embedding_dimension", int, 0) * len(joined.split("+"))
    layers = _dense_layers(dense, inputs)
    model = directory / "config.json"
    sizes = _json(model, dict).get("matryoshka_dimensions") if model.is_file() else None
    return Pooling(
        joined,
        True,
        None,
        layers,
        named,
        found.default_prompt,
        tuple(sizes) if isinstance(sizes, list) else (),
        lower,
    )


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Names of the pooling modes of a configuration: one field with a name or a list, or a switch for each."""
    named = config.get("pooling_mode")
    if named is not None:
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on is True]


def _dense_layers(directories: list[Path], inputs: int) -> tuple[HeadLayer, ...]:
    """The dense layers of a checkpoint. inputs: values of the pooled state. Raises ValueError."""
    layers: list[HeadLayer] = []
    for directory in directories:
        config = _json(directory / "config.json", dict)
        activation = (
            str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
        )
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"{directory.name}/config.json: activation_function {activation!r}: supported are {known}")
        tensors = stored_tensors(directory)
        if not tensors:
            raise ValueError(f"{directory.name} has no model.safetensors")
        size = len(layers[-1].weight) if layers else inputs or field_of(config, "in_features", int, 0)
        layers.append(layer_of(tensors, "linear", size, activation))
    return folded(layers)


def _json(file: Path, kind: type) -> Any:
    """The object or list of a file. Raises ValueError if it has none."""
    where = file.relative_to(file.parents[1]) if file.parent.name[:1].isdigit() else file.name
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read: {str(error)[:300]}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{where} is not {'an object' if kind is dict else 'a list'}")
    return found


def encoded(vector: np.ndarray, form: str) -> list[float] | str:
    """A vector in JSON: numbers, or base64 of little-endian float32."""
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
