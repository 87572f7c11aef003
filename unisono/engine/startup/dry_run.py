"""``explain --dry-run``: decisions and memory of an engine, without starting one.

The model is built on the meta device, so sizes are those of the real modules and their declared state; no weight is
read and no pass runs. Values that only a start measures (activations, graphs, proofs of kernels) are marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.engine.scheduling.default_drafts import with_default_drafts
from unisono.engine.startup.memory import CPU_KV_BYTES
from unisono.engine.startup.model_size import (
    CONTEXT_BYTES,
    STATES_BESIDE,
    PassBytes,
    StateBytes,
    drafter_bytes,
    file_bytes,
    fitting_drafts,
    fitting_sizes,
    left_of,
    module_bytes,
    on_meta,
    round_width,
)
from unisono.kernels.attention.latent import check_shared_memory
from unisono.kernels.cards import LEAST, SHARED, card_kernels
from unisono.models.blocks.latent_attention import LatentAttention
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.tower import make_tower
from unisono.types import ConfigError

GIB = 1 << 30

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|GB)", re.IGNORECASE)
CAPABILITY = re.compile(r"(\d+)\.(\d)|sm_(\d+)(\d)a?")
LEAST_CAPABILITY = 8, 0
"""Compute capability from which bfloat16 products exist."""


def card(memory: str | None, capability: str | None, device: str = "auto") -> Hardware | None:
    """A GPU that need not be here, to plan for; None: the machine's own.

    memory: such as "24GiB" or "24GB". capability: such as "8.9" or "sm_89", by default 9.0. device: ``--device``.
    Raises ConfigError.
    """
    if memory is None:
        if capability is not None:
            raise ConfigError("--device-capability is of the GPU of --device-memory: give both.")
        return None
    size = SIZE.fullmatch(memory.strip())
    number = CAPABILITY.fullmatch(capability or "9.0")
    if size is None or number is None:
        flag = f"--device-memory {memory!r}" if size is None else f"--device-capability {capability!r}"
        raise ConfigError(f"{flag} is not valid: write --device-memory 24GiB --device-capability 8.9.")
    found = int(number[1] or number[3]), int(number[2] or number[4])
    if found < LEAST_CAPABILITY:
        raise ConfigError(f"--device-capability {capability}: kernels need a GPU of compute capability 8.0 or later.")
    if device == "cpu":
        raise ConfigError("--device cpu: --device-memory plans for a GPU; leave one of them out.")
    total = int(float(size[1]) * (GIB if size[2].lower() == "gib" else 10**9))
    name = f"a GPU of {memory.strip()}, compute capability {found[0]}.{found[1]}"
    return Hardware(torch.device("cuda", 0), name, total, None, found)


def dry_run(
    config: EngineConfig, directory: Path, weight_bytes: int | None = None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """Return the decisions and the memory of an engine with these flags, as JSON-ready data.

    directory: the model's, as ``preflight`` found it. weight_bytes: size of the weight files on a hub, if they are not
    downloaded; None: read them in ``directory``. hardware: the GPU to plan for; None: that of ``--device``. Raises
    CheckpointError and ConfigError as a start would, as far as files tell.
    """
    hardware = hardware or Hardware.detect(config.device)
    checkpoint = Checkpoint.open(directory, config.quantization, config.hf_overrides)
    resolved = resolve(config, hardware, checkpoint)
    here = weight_bytes is None and config.load_format != "dummy"
    if here:
        resolved = with_default_drafts(resolved, checkpoint)
    model = on_meta(checkpoint, resolved)
    state = StateBytes.of(model.state_specs(), round_width(resolved))
    weights = module_bytes(model) + _tower_bytes(checkpoint, resolved)
    drafter = drafter_bytes(resolved, checkpoint, model, hardware)
    largest = PassBytes.of(model)
    if resolved.device.type == "cuda":
        resolved, drafter = fitting_drafts(resolved, weights, drafter, model, hardware)
        resolved = fitting_sizes(resolved, weights + drafter, state, largest, hardware.total_bytes)
    decisions = [*resolved.explain()["decisions"]]
    if hardware.capability is not None and resolved.device.type == "cuda":
        if any(isinstance(layer.mixer, LatentAttention) for layer in model.layers):
            check_shared_memory(SHARED.get(hardware.capability, LEAST))
        value, why = card_kernels(hardware.capability)
        decisions.append({"name": "kernels", "value": value, "reason": why})
    spec = resolved.speculative
    method, reason = checkpoint.quantization.decision()
    return {
        "model": {
            "directory": str(directory),
            "architecture": checkpoint.config.architecture,
            "layers": checkpoint.config.num_layers,
            "vocabulary": checkpoint.config.vocab_size,
            "context": checkpoint.config.max_positions,
            "dtype": str(resolved.dtype).removeprefix("torch."),
            "weights": f"{method} ({reason})",
            "drafter": _drafter(resolved) if here or spec is not None else "known once the weights are here",
            "files": weight_bytes if weight_bytes is not None else file_bytes(directory) if here else 0,
        },
        "memory": _memory(resolved, weights, drafter, state, largest, hardware.total_bytes),
        "decisions": decisions,
    }


def _tower_bytes(checkpoint: Checkpoint, config: ResolvedConfig) -> int:
    """Bytes of the vision tower's weights, which are not quantised."""
    vision = checkpoint.config.vision
    if vision is None:
        return 0
    builder = Builder(vision.tower.width, NORM_EPS, config.dtype, "meta", no_attention, 0)
    return module_bytes(make_tower(vision, builder))


def _drafter(config: ResolvedConfig) -> str:
    spec = config.speculative
    if spec is None or spec.method == "none":
        return "none"
    return f"{spec.method}{f' ({spec.model})' if spec.model else ''}, k = {spec.num_speculative_tokens}"


def _memory(
    config: ResolvedConfig, weights: int, drafter: int, state: StateBytes, largest: PassBytes, device_bytes: int
) -> dict[str, Any]:
    """Return the bytes of each part on a device of ``device_bytes``, and the tokens of context that fit in the rest."""
    requested = config.requested
    found: dict[str, Any] = {
        "weights": weights,
        "drafter": drafter,
        "kv_token": state.token,
        "kv_request": config.max_model_len * state.token,
        "state_request": state.request,
        "requests": config.max_num_seqs,
        "states": (config.max_num_seqs + STATES_BESIDE) * state.request,
        "pass": largest.of_tokens(config.max_num_batched_tokens),
        "pass_tokens": config.max_num_batched_tokens,
    }
    if config.device.type == "cpu":
        total, left, why = None, CPU_KV_BYTES, f"at most {CPU_KV_BYTES >> 20} MiB of KV cache on a CPU"
    else:
        total = device_bytes
        left = left_of(config, weights + drafter, total) - found["states"] - found["pass"]
        why = "beside CUDA and a prompt pass, both estimated; before graphs and snapshots"
    found |= {"device": total, "kv_left": max(0, left), "kv_left_why": why}
    found["kv_tokens"] = max(0, left) // max(1, found["kv_token"]) if state.token else 0
    if total is not None and left <= 0:
        requests = f", the state of {config.max_num_seqs} requests {found['states'] / GIB:.1f} GiB"
        states = requests if found["states"] and config.max_num_seqs > 1 else ""
        raise ConfigError(
            f"the weights take {(weights + drafter) / GIB:.1f} GiB on each GPU{states}, and --gpu-memory-utilization "
            f"{requested.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves no room for keys and values: use "
            f"{'a lower --max-num-seqs, ' if states else ''}--tensor-parallel-size, --quantization fp8 or a larger GPU."
        )
    return found


def rows(info: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return the tables that ``explain --dry-run`` prints: title -> (name, value)."""
    memory, model = info["memory"], info["model"]
    shown = [(name, f"{value / GIB:.2f} GiB" if name == "files" else str(value)) for name, value in model.items()]
    parts = [
        ("weights on a device", _size(memory["weights"])),
        ("drafter", _size(memory["drafter"])),
        ("keys and values of a token", f"{memory['kv_token']} bytes"),
        ("of a request with the whole context", _size(memory["kv_request"])),
    ]
    if memory["state_request"]:
        parts.append(
            (f"recurrent state of {memory['requests']} requests, padding and a snapshot", _size(memory["states"]))
        )
    if memory["device"] is not None:
        parts.append((f"activations of {memory['pass_tokens']} prompt tokens, estimated", _size(memory["pass"])))
        parts.append(("CUDA and its libraries, estimated", _size(CONTEXT_BYTES)))
    parts.append(("left for keys and values", f"{_size(memory['kv_left'])} ({memory['kv_left_why']})"))
    parts.append(("tokens that fit", str(memory["kv_tokens"])))
    return {"Model": shown, "Memory": parts}


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"
