"""A made-up hybrid: Gated DeltaNet, attention, Gated DeltaNet; and the whole model in float64 without pages or passes.

The recurrence is that of ``transformers``, one token after the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu, softplus
from transformers import AutoConfig, PretrainedConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.gated_delta import GatedDeltaSpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec, MLPSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config
from unisono.models.families.llama import NAMES

ARCHITECTURE = "GatedForCausalLM"
HIDDEN, VOCAB, MLP, EPS, THETA, HEAD = 32, 131, 48, 1e-6, 10000.0, 16
KEYS, VALUES, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 16, 32, 4
CHANNELS = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
LAYERS, FULL = 3, 1


class GatedConfig(PretrainedConfig):
    model_type = "gated_made_up"


AutoConfig.register("gated_made_up", GatedConfig, exist_ok=True)


def read(hf_config: Any) -> DecoderConfig:
    layers = []
    for number in range(LAYERS):
        mixer: Any = GatedDeltaSpec(KEYS, VALUES, KEY_DIM, VALUE_DIM, TAPS)
        if number == FULL:
            mixer = AttentionSpec(2, 1, HEAD, RotarySpec.of(hf_config, HEAD))
        layers.append(LayerSpec(mixer, MLPSpec(MLP)))
    return read_decoder_config(hf_config, layers)


AT = "model.layers.*.linear_attn"
GATED = Family(
    read,
    {
        **NAMES,
        "layers.*.mixer": AT,
        "layers.*.mixer.in_proj.qkv": f"{AT}.in_proj_qkv",
        "layers.*.mixer.in_proj.z": f"{AT}.in_proj_z",
        "layers.*.mixer.in_proj.b": f"{AT}.in_proj_b",
        "layers.*.mixer.in_proj.a": f"{AT}.in_proj_a",
        "layers.*.mixer.conv": f"{AT}.conv1d",
        "layers.*.mixer.norm": f"{AT}.norm",
    },
)


def make_gated(directory: Path, seed: int = 0) -> Path:
    """Write a checkpoint with random weights."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.6 * torch.randn(rows, columns, generator=g) / columns**0.5

    w = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=g)}
    for number in range(LAYERS):
        at = f"model.layers.{number}."
        if number == FULL:
            sizes = {"q": 2 * HEAD, "k": HEAD, "v": HEAD}
            w |= {f"{at}self_attn.{name}_proj.weight": matrix(size, HIDDEN) for name, size in sizes.items()}
            w[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, 2 * HEAD)
        else:
            here, values = f"{at}linear_attn.", VALUES * VALUE_DIM
            sizes = {"qkv": CHANNELS, "z": values, "b": VALUES, "a": VALUES}
            w |= {f"{here}in_proj_{name}.weight": matrix(size, HIDDEN) for name, size in sizes.items()}
            w[f"{here}conv1d.weight"] = torch.randn(CHANNELS, 1, TAPS, generator=g) / 2
            w[f"{here}A_log"] = torch.log(torch.rand(VALUES, generator=g) * 15 + 1)
            w[f"{here}dt_bias"] = torch.randn(VALUES, generator=g) - 3
            w[f"{here}norm.weight"] = 1 + 0.2 * torch.randn(VALUE_DIM, generator=g)
            w[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, values)
        w |= {f"{at}mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
        w[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w[f"{at}{norm}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=g)
    w |= {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(w, directory / "model.safetensors")
    fields = {
        "architectures": [ARCHITECTURE], "model_type": "gated_made_up", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "rms_norm_eps": EPS, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": THETA,
        "num_attention_heads": 2, "num_hidden_layers": LAYERS, "eos_token_id": None, "dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


# ---- the reference ----------------------------------------------------------------------------------


def next_token(weights: dict[str, torch.Tensor], ids: list[int]) -> int:
    """The greedy token after ``ids``, in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for number in range(LAYERS):
        layer = {n.removeprefix(f"model.layers.{number}."): t for n, t in w.items() if f"layers.{number}." in n}
        y = _norm(x, layer["input_layernorm.weight"])
        mixed = _attend(layer, y) if number == FULL else gated_delta_net(layer, y)
        x = x + mixed @ layer["self_attn.o_proj.weight"].T
        y = _norm(x, layer["post_attention_layernorm.weight"])
        gate = silu(y @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return int((_norm(x[-1:], w["model.norm.weight"]) @ w["lm_head.weight"].T).argmax())


def gated_delta_net(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x [T, H] -> [T, Hv V], before the output projection."""
    u, z, b, a = (x @ w[f"linear_attn.in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    padded = torch.cat((u.new_zeros(TAPS - 1, CHANNELS), u)).T[None]
    conv = silu(torch.nn.functional.conv1d(padded, w["linear_attn.conv1d.weight"], groups=CHANNELS))[0].T
    keys = KEYS * KEY_DIM
    q, k = (conv[:, i * keys : (i + 1) * keys].view(-1, KEYS, KEY_DIM) for i in (0, 1))
    q, k = (t.repeat_interleave(VALUES // KEYS, 1) for t in (q, k))
    v = conv[:, 2 * keys :].view(-1, VALUES, VALUE_DIM)
    g = -w["linear_attn.A_log"].exp() * softplus(a + w["linear_attn.dt_bias"])
    o, _ = torch_recurrent_gated_delta_rule(
        q[None], k[None], v[None], g[None], b.sigmoid()[None], None, False, use_qk_l2norm_in_kernel=True
    )
    o = o[0].to(x.dtype)
    normed = _norm(o, w["linear_attn.norm.weight"])
    return (normed * silu(z.view(-1, VALUES, VALUE_DIM))).flatten(1)


def _attend(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD).transpose(0, 1) for name in ("q", "k", "v")
    )
    q, k, t = _rotate(q), _rotate(k), torch.arange(len(x))
    scores = (q @ k.mT * HEAD**-0.5).masked_fill(t[None, :] > t[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), -1) * sin


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors."""
    return load_file(directory / "model.safetensors")
