"""File names of a Hugging Face checkpoint: the files that are read, and the diagnosis of a directory without a model.

Both the Hub's listing and a local directory are judged by names here, so that a download takes only what is read, and
an error names the cause (GGUF, an adapter, ModelOpt, weights in pickles). Imports types only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unisono.types import CheckpointError

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NATIVE = "params.json"
NATIVE_WEIGHTS, NATIVE_INDEX = "consolidated.safetensors", "consolidated.safetensors.index.json"
"""Files of Mistral's own form; see ``config/mistral.py``."""
PICKLE = "pytorch_model.bin"
"""Weights of the first EAGLE heads, read as plain tensors. Models in this format are refused."""

ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
OLD_GPTQ_CONFIG = "quantize_config.json"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
"""A checkpoint with a tokenizer has at least one of these."""

SMALL = (
    CONFIG,
    "generation_config.json",
    MODELOPT_CONFIG,
    OLD_GPTQ_CONFIG,
    INDEX,
    *TOKENIZER_FILES,
    "merges.txt",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "1_Pooling/config.json",
    "[2-9]_Dense/config.json",
    "[2-9]_Dense/model.safetensors",
)
"""Files that are read beside the weights."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LFS = b"version https://git-lfs"
MOST_HEADER = 100_000_000
"""Largest header of a safetensors file in bytes; safetensors refuses longer ones."""

SHOWN = 4
"""File names that a message lists."""

GGUF = ".gguf"
"""Suffix of llama.cpp's files, one of which is a whole model."""

OTHER_FORMATS = {
    ".ggml": "GGML (llama.cpp)",
    ".onnx": "ONNX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".engine": "TensorRT",
}
"""Weight formats that are not supported, by file suffix."""


def small_files(names: Iterable[str]) -> list[str]:
    """The files among ``names`` that are read beside the weights."""
    return sorted(name for name in names if any(fnmatchcase(name, each) for each in SMALL))


def weight_names(names: Collection[str], index: Any, where: object) -> list[str]:
    """The weight files of a repository or directory that are read; empty if it has none.

    names: all files. index: the object of INDEX, if ``names`` has INDEX but not WEIGHTS. A directory without
    safetensors may have PICKLE, from which a draft head is read. Raises CheckpointError for an index without a
    weight_map.
    """
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        return sorted({*weight_map(index, where).values()})
    return [PICKLE] if PICKLE in names else []


def weight_map(index: Any, where: object) -> dict[str, Any]:
    """The map from tensor to file in an INDEX's object. Raises CheckpointError if it has none."""
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{where} has no weight_map: download it again.")
    return found


def names_in(directory: Path) -> list[str]:
    """The files of a directory and of its folders, one level deep, in the form of a repository's listing."""
    files = [f for f in directory.iterdir() if f.is_file()]
    folders = [f for f in directory.iterdir() if f.is_dir() and not f.is_symlink()]
    deeper: list[Path] = []
    for folder in folders:
        with suppress(OSError):
            deeper += [f for f in folder.iterdir() if f.is_file()]
    return sorted(f.relative_to(directory).as_posix() for f in (*files, *deeper))


def not_a_directory(file: Path) -> str:
    """The reason why a file's path is not a model, and the way out, as the end of a sentence."""
    suffix = file.suffix.lower()
    if suffix in OTHER_FORMATS:
        return f"is a file of {OTHER_FORMATS[suffix]}, which is not read: {_ORIGINAL}"
    if (file.parent / CONFIG).is_file():
        return f"is a file: give the directory that holds config.json, {file.parent}"
    return "is a file: give the directory that holds config.json"


_ORIGINAL = "give the checkpoint that it was made from, a directory or a hub id with config.json and safetensors"


def no_config(names: Collection[str], adapter: Any = None) -> str:
    """The reason why files without a config.json are not a model, as the end of a sentence.

    names: all files. adapter: the object of ADAPTER_CONFIG, if ``names`` has it.
    """
    if ADAPTER_CONFIG in names:
        return _adapter(adapter)
    plain = "has no config.json, so it is no Hugging Face checkpoint"
    if "model_index.json" in names:
        return f"{plain}: it is a diffusers pipeline (model_index.json)"
    if NATIVE in names:
        return (
            f"{plain}: {NATIVE} belongs to its maker's own format; give the version for transformers, with "
            "config.json, or for Mistral Large 3 and Mistral Small 4 a directory with these files"
        )
    inner = sorted({name.rpartition("/")[0] for name in names if name.endswith(f"/{CONFIG}")})
    if inner:
        return f"{plain}: {CONFIG} is in its folder {inner[0]}; give that"
    if others := _other_formats(names):
        return f"{plain}: it holds {others}"
    if any(name.endswith((".safetensors", *PICKLES)) for name in names):
        return f"{plain}: it holds weights alone; download the files beside them too"
    return plain


def adapter_alone(names: Collection[str], adapter: Any = None) -> str | None:
    """The refusal of a directory with a config.json and only an adapter's weights; None for others."""
    weights = [name for name in names if name.endswith((".safetensors", *PICKLES)) and "/" not in name]
    if ADAPTER_CONFIG in names and all(name.startswith("adapter_model") for name in weights):
        return _adapter(adapter)
    return None


def _adapter(config: Any) -> str:
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    base = base if isinstance(base, str) and base else "the model that it was trained for"
    kind = config.get("peft_type") if isinstance(config, dict) else None
    name = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({str(kind)[:40]})"
    return (
        f"is {name}, not a model ({ADAPTER_CONFIG}): serve its base model {base[:200]} and add --enable-lora "
        "--lora-modules NAME=PATH with this path"
    )


def no_weights(names: Collection[str]) -> str:
    """The reason why there are no weights to read, as the end of a sentence that names WEIGHTS and INDEX."""
    top = sorted(name for name in names if "/" not in name)
    if others := _other_formats(top):
        return f"; it holds {others}"
    pickles = [name for name in top if name.endswith(PICKLES)]
    if pickles:
        return (
            f", only {_listed(pickles)}: pickles may run code and are not read; give the revision with safetensors, "
            "or convert with transformers' save_pretrained"
        )
    if shards := [name for name in top if name.endswith(".safetensors")]:
        if all(name.startswith("consolidated") for name in shards):
            return f", only {_listed(shards)}, its maker's own format: give the version for transformers"
        return f", only {_listed(shards)}: shards need their index, {INDEX}; download it too"
    if any(name.endswith((".incomplete", ".aria2", ".part")) for name in names):
        return "; a download did not finish: run it again"
    return "; for random weights use --load-format dummy"


def _other_formats(names: Collection[str]) -> str:
    """Files in other weight formats, with the format's name and the way out; empty if there are none."""
    if found := sorted(name for name in names if name.lower().endswith(GGUF)):
        return f"GGUF files ({_listed(found)}): download one, if it is not here, and give the file itself as the model"
    for suffix, kind in OTHER_FORMATS.items():
        if found := sorted(name for name in names if name.lower().endswith(suffix)):
            return f"{kind} files ({_listed(found)}), which is not read: {_ORIGINAL}"
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file; none if its header cannot be read, which loading reports."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= MOST_HEADER else {}
        return [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    except (OSError, ValueError, RecursionError):
        return []


def read_object(file: Path, limit: int | None = 1 << 20) -> Any:
    """The JSON of a file; None if it cannot be read or has more than ``limit`` bytes."""
    try:
        if limit is not None and file.stat().st_size > limit:
            return None
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
