"""Pooling of a prompt's hidden states to one vector, by the checkpoint's configuration.

Checkpoints for embeddings carry sentence-transformers' files: ``modules.json`` lists the modules after the model, with
``1_Pooling/config.json`` and dense layers (``2_Dense``), and ``config_sentence_transformers.json`` has the prompts of
the model card.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.frontend.head_layers import ACTIVATIONS, HeadLayer, folded, layer_of, stored_tensors
from unisono.types import BadRequest

MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
"""sentence-transformers' names of the supported pooling modes."""
MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
GENERATIVE = (
    "This checkpoint is generative: it has no 1_Pooling/config.json, so these are the normalised last hidden states of "
    "each text's last token, which nobody trained to be near for similar texts. Checkpoints meant for it are decoders "
    "with such a file, like Qwen3-Embedding."
)


@dataclass(frozen=True)
class Pooling:
    """The pooling of a checkpoint.

    mode: ``last``, ``mean`` or ``cls`` (the first token). meant: the checkpoint is for embeddings. problem: the reason
    why its pooling is not supported, if it is not. layers: dense layers after it. prompts: beginnings of texts, by
    name. default_prompt: name of the one that texts get without a name; None: none. sizes: the only numbers of
    dimensions that embeddings may be cut to (``matryoshka_dimensions`` of config.json); empty: all.
    """

    mode: str = "last"
    meant: bool = False
    problem: str | None = None
    layers: tuple[HeadLayer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    sizes: tuple[int, ...] = ()

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
        most = len(self.layers[-1].weight) if self.layers else hidden
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
        """Texts, or one, with the prompt of this name before each. Without a name, token ids are left as they are.

        Raises BadRequest for an unknown name, and for token ids with a name.
        """
        before = self.beginning(name)
        if not before:
            return texts
        if isinstance(texts, str):
            return before + texts
        if isinstance(texts, Mapping) and isinstance(texts.get("prompt"), str):
            return {**texts, "prompt": before + texts["prompt"]}
        if isinstance(texts, Sequence) and texts and not all(isinstance(each, int) for each in texts):
            return [self.prompted(each, name) for each in texts]
        if name is not None:
            raise BadRequest(f"prompt_name={name!r} goes before texts: give texts, not token ids.", "prompt_name")
        return texts


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    """One vector [hidden] of states [tokens, hidden], both float32. mode: see :class:`Pooling`."""
    vector: np.ndarray | None = {"last": states[-1], "cls": states[0]}.get(mode)
    return states.mean(0, np.float64).astype(np.float32) if vector is None else vector


def pooling_of(directory: Path) -> Pooling:
    """The pooling of a checkpoint's configuration; the last token's state by default."""
    try:
        return _read(directory)
    except (OSError, ValueError) as error:
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
    named = {str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()}
    default = prompts.get("default_prompt_name")
    found = Pooling(prompts=named, default_prompt=default if default in named else None)
    if not (pooling / "config.json").is_file():
        return found
    config = _json(pooling / "config.json", dict)
    where = f"{pooling.name}/config.json"
    named_mode = config.get("pooling_mode")
    modes = [named_mode] if isinstance(named_mode, str) else []
    modes = modes or [
        key.removeprefix("pooling_mode_")
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(f"{where} asks for {modes}; one of {', '.join(MODES)} is supported")
    if config.get("include_prompt") is False and any(named.values()):
        raise ValueError(f"{where}: include_prompt=false, pooling without the tokens of a prompt, is not supported")
    layers = _dense_layers(dense, config.get("word_embedding_dimension"))
    model = directory / "config.json"
    sizes = _json(model, dict).get("matryoshka_dimensions") if model.is_file() else None
    return Pooling(
        MODES[modes[0]],
        True,
        None,
        layers,
        named,
        found.default_prompt,
        tuple(sizes) if isinstance(sizes, list) else (),
    )


def _dense_layers(directories: list[Path], inputs: Any) -> tuple[HeadLayer, ...]:
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
        size = len(layers[-1].weight) if layers else int(inputs or config.get("in_features") or 0)
        layers.append(layer_of(tensors, "linear", size, activation))
    return folded(layers)


def _json(file: Path, kind: type) -> Any:
    """The object or list of a file. Raises ValueError if it has none."""
    where = file.relative_to(file.parents[1]) if file.parent.name[:1].isdigit() else file.name
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{where} is not {'an object' if kind is dict else 'a list'}")
    return found


def encoded(vector: np.ndarray, form: str) -> list[float] | str:
    """A vector in JSON: numbers, or base64 of little-endian float32."""
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
