"""A made-up family: full attention, a recurrence, attention with a window and another head size, the recurrence again.

Three kinds of state, two window groups, two head sizes. The recurrence is written in plain PyTorch over
:class:`unisono.kv.recurrent_pass.RecurrentPass`; :func:`next_token` is the whole model in float64, without pages or
passes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from unisono.attention.context import ForwardContext
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import PAGE_SIZE, Recurrent, Remembered
from unisono.kv.store import RecurrentView
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec, MLPSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config
from unisono.models.families.llama import NAMES
from unisono.models.load.build import Builder

ARCHITECTURE = "MixedForCausalLM"
HIDDEN, VOCAB, MLP, STATE, WINDOW, EPS, THETA = 24, 263, 40, 12, 21, 1e-5, 10000.0
HEADS = {0: (4, 2, 12), 2: (2, 1, 16)}
"""Layer -> query heads, KV heads, head size. The second one has the window."""
LAYERS = 4


class MixedConfig(PretrainedConfig):
    model_type = "mixed"


AutoConfig.register("mixed", MixedConfig, exist_ok=True)


class DecaySpec:
    """The recurrence h = a h + (1 - a) u, o = W h, with a = 1 / (1 + exp(-A x)) and u = U x."""

    def build(self, builder: Builder) -> Decay:
        return Decay(builder)


class Decay(nn.Module):
    """A mixer whose state is a tail."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.both = builder.linear("both", builder.hidden_size, {"a": STATE, "u": STATE})
        self.o = builder.linear("o", STATE, builder.hidden_size)

    def state_specs(self) -> Recurrent:
        return Recurrent({"h": ((STATE,), torch.float32)}, {"inputs": Remembered((2 * STATE,), torch.float32)})

    def forward(self, x: torch.Tensor, context: ForwardContext, state: RecurrentView) -> torch.Tensor:
        """x [T, H] -> [T, STATE], or of the last tokens."""
        assert context.recurrent is not None
        raw = self.both(x).float()
        inputs = torch.cat((1 / (1 + (-raw[:, :STATE]).exp()), raw[:, STATE:]), dim=1)
        out = scan(inputs, context, context.recurrent, state)
        return out if context.last_tokens is None else context.last_tokens.select(out)

    def advance(self, context: ForwardContext, state: RecurrentView) -> None:
        assert context.recurrent is not None
        scan(state.inputs["inputs"].new_empty((0, 2 * STATE)), context, context.recurrent, state)

    def project(self, y: torch.Tensor, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.o.then_norm(y, residual, norm)


def scan(inputs: torch.Tensor, context: ForwardContext, recurrent: RecurrentPass, state: RecurrentView) -> torch.Tensor:
    """The recurrence over a pass: remembered inputs first, then the pass's own; inputs [T, 2 STATE] -> [T, STATE]."""
    home, ring_home = state.snapshot["h"], state.inputs["inputs"]
    rows, ring, first = recurrent.rows.long(), ring_home.shape[1], recurrent.first
    active = first >= 0
    h = snapshot = home.index_select(0, rows)
    memory = ring_home.index_select(0, rows)
    for step in range(ring):
        at = recurrent.since + step
        h = torch.where((active & (at < first))[:, None], decay(h, remembered(memory, at % ring)), h)
        snapshot = torch.where((active & (at < first) & (at + 1 == recurrent.until))[:, None], h, snapshot)
    tokens = len(inputs)
    if context.query_start is None:
        begin, steps = torch.arange(len(rows), device=rows.device) * (tokens // len(rows)), tokens // len(rows)
        end = begin + steps
    else:
        begin, end, steps = context.query_start[:-1].long(), context.query_start[1:].long(), tokens
    out = inputs.new_zeros((tokens + 1, STATE))  # the spare row takes what rows without a token write
    for step in range(steps):
        token = (begin + step).clamp_max(tokens - 1)
        at = first + step
        real = active & (begin + step < end) & (context.positions.index_select(0, token) == at)
        new = inputs.index_select(0, token)
        h = torch.where(real[:, None], decay(h, new), h)
        out = out.index_copy(0, torch.where(real, token, tokens), h)
        snapshot = torch.where((real & (at + 1 == recurrent.until))[:, None], h, snapshot)
        place = at.clamp_min(0) % ring
        kept = torch.where(real[:, None], new, remembered(memory, place))
        memory = memory.scatter(1, _index(memory, place), kept[:, None])
    home.index_copy_(0, rows, snapshot)
    ring_home.index_copy_(0, rows, memory)
    return out[:tokens]


def remembered(memory: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """memory [R, ring, n], place [R] -> [R, n]."""
    return memory.gather(1, _index(memory, place))[:, 0]


def _index(memory: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return place.long()[:, None, None].expand(-1, 1, memory.shape[2])


def decay(h: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """One token: every operation is by element, so its bits depend on nothing else."""
    a, u = inputs[:, :STATE], inputs[:, STATE:]
    return a * h + (1 - a) * u


def read(hf_config: Any) -> DecoderConfig:
    layers = []
    for number in range(LAYERS):
        mixer: Any = DecaySpec()
        if number in HEADS:
            heads, kv_heads, dim = HEADS[number]
            window = WINDOW if number == 2 else 0
            mixer = AttentionSpec(heads, kv_heads, dim, RotarySpec.of(hf_config, dim), window=window)
        layers.append(LayerSpec(mixer, MLPSpec(MLP)))
    return read_decoder_config(hf_config, layers)


MIXED = Family(
    read,
    {
        **NAMES,
        "layers.*.mixer.both.a": "model.layers.*.decay.a",
        "layers.*.mixer.both.u": "model.layers.*.decay.u",
    },
)


def make_mixed(directory: Path, seed: int = 0) -> Path:
    """Write a checkpoint with random weights."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.6 * torch.randn(rows, columns, generator=generator) / columns**0.5

    w = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        if i in HEADS:
            heads, kv_heads, dim = HEADS[i]
            sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
            w |= {f"{at}self_attn.{name}_proj.weight": matrix(size, HIDDEN) for name, size in sizes.items()}
            w[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, heads * dim)
        else:
            w |= {f"{at}decay.{name}.weight": matrix(STATE, HIDDEN) for name in ("a", "u")}
            w[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, STATE)
        w |= {f"{at}mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
        w[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w[f"{at}{norm}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
    w["model.norm.weight"] = torch.ones(HIDDEN)
    w["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(w, directory / "model.safetensors")
    fields = {
        "architectures": [ARCHITECTURE], "model_type": "mixed", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "rms_norm_eps": EPS, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": THETA,
        "num_attention_heads": 4, "num_hidden_layers": LAYERS, "eos_token_id": None, "dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


# ---- the reference ----------------------------------------------------------------------------------


def next_token(weights: dict[str, torch.Tensor], ids: list[int]) -> int:
    """The greedy token after ``ids``, in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        layer = {name.removeprefix(f"model.layers.{i}."): t for name, t in w.items() if f"layers.{i}." in name}
        x = x + _mix(layer, i, _norm(x, layer["input_layernorm.weight"]))
        y = _norm(x, layer["post_attention_layernorm.weight"])
        gate = nn.functional.silu(y @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return int((_norm(x[-1:], w["model.norm.weight"]) @ w["lm_head.weight"].T).argmax())


def _mix(w: dict[str, torch.Tensor], number: int, x: torch.Tensor) -> torch.Tensor:
    if number not in HEADS:
        a, u = (x @ w["decay.a.weight"].T).sigmoid(), x @ w["decay.u.weight"].T
        h, out = torch.zeros(STATE, dtype=torch.float64), []
        for t in range(len(x)):
            h = a[t] * h + (1 - a[t]) * u[t]
            out.append(h)
        return torch.stack(out) @ w["self_attn.o_proj.weight"].T
    heads, kv_heads, dim = HEADS[number]
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, dim).transpose(0, 1) for name in ("q", "k", "v")
    )
    q, k = _rotate(q), _rotate(k).repeat_interleave(heads // kv_heads, 0)
    v = v.repeat_interleave(heads // kv_heads, 0)
    t = torch.arange(len(x))
    seen = t[None, :] <= t[:, None]
    if number == 2:
        seen = seen & (t[None, :] > t[:, None] - WINDOW)
    scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T


def _rotate(x: torch.Tensor) -> torch.Tensor:
    dim = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors."""
    return load_file(directory / "model.safetensors")


assert PAGE_SIZE == 16  # the tests' prompts and windows are chosen around it
