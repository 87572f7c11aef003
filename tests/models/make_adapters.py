"""Random adapters as PEFT saves them, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unisono.models.load.checkpoint import WEIGHTS
from unisono.models.lora.adapters import CONFIG
from unisono.models.lora.adapters import WEIGHTS as ADAPTER

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
"""Projections of attention and feed-forward, and of Gated DeltaNet."""


def base_tensors(base: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whatever number of files it has."""
    return {name: t for file in sorted(base.glob("model*.safetensors")) for name, t in load_file(file).items()}


def make_adapter(
    directory: Path,
    base: Path,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = LINEARS,
    size: float = 0.5,
    change: Mapping[str, Any] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> Path:
    """Write a random adapter. size: of its products, compared with the weights. change: of its config.

    ranks: by part of a module's name, where it is not ``rank``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base_tensors(base).items():
        module = name.removesuffix(".weight")
        other = module.startswith("mtp.") or "vision_tower" in module
        if module.rpartition(".")[2] not in targets or weight.dim() != 2 or other:
            continue
        r = next((value for part, value in (ranks or {}).items() if part in module), rank)
        outputs, inputs = weight.shape
        a, b = torch.randn(r, inputs, generator=generator), torch.randn(outputs, r, generator=generator)
        scale = size * weight.float().std() / (alpha / r * math.sqrt(r))
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b * scale
    assert tensors, "no module has such a name"
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none",
        "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "rank_pattern": dict(ranks or {}), "alpha_pattern": {}, "init_lora_weights": True, "inference_mode": True,
        "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", **(change or {}),
    }  # fmt: skip
    (directory / CONFIG).write_text(json.dumps(config))
    save_file(tensors, directory / ADAPTER)
    return directory


def rewritten(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The adapter with other tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / ADAPTER)
    return directory


def merged(base: Path, adapter: Path, directory: Path) -> Path:
    """A copy of the checkpoint, in fp32, with the adapter in its weights: W + scaling · B · A."""
    config, given = json.loads((adapter / CONFIG).read_text()), load_file(adapter / ADAPTER)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in base_tensors(base).items()}
    for name, a in given.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = given[name.replace("lora_A", "lora_B")]
        alpha = next((v for k, v in config["alpha_pattern"].items() if re.search(k, module)), config["lora_alpha"])
        scaling = alpha / (math.sqrt(a.shape[0]) if config["use_rslora"] else a.shape[0])
        tensors[f"{module}.weight"] += scaling * (b.double() @ a.double()).float()
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})
    return directory
