"""MTP modules of DeepSeek's layout: a decoder layer more than the model has, with the norms and projection around it.
Those of Nemotron-H: two layers of one block each.

transformers writes the layers' tensors and computes the reference; only the parts around them are added here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.fields import HYBRIDS
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_mtp import norm
from tests.models.plain_decoder import PlainDecoder
from unisono.models.load.checkpoint import WEIGHTS


@dataclass(frozen=True)
class LayerMTP:
    """A checkpoint with one module. model: transformers' decoder of all its layers, the module's block last.

    around: the weights around the block. layers: of the block. eps: of the norms.
    """

    path: Path
    model: Any
    around: dict[str, torch.Tensor]
    eps: float
    layers: int = 1

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens [T], hidden [T, H] that predicted them) -> the module's normed output [T, H]."""
        eps, plain = self.eps, isinstance(self.model, PlainDecoder)
        embedded = self.model.embedded(tokens).float() if plain else self.model.model.get_input_embeddings()(tokens)
        embedded = norm(embedded, self.around["enorm"], eps)
        x = torch.cat((embedded, norm(hidden, self.around["hnorm"], eps)), dim=1) @ self.around["eh_proj"].T
        if plain:
            out = self.model.layer(x.double(), self.model.config["num_hidden_layers"] - 1).float()
            return norm(out, self.around["norm"], eps)
        base = self.model.model
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        angles = base.rotary_emb(x[None], positions) if hasattr(base, "rotary_emb") else None
        out = x[None]
        for layer in base.layers[-self.layers :]:
            out = layer(out, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            out = out[0] if isinstance(out, tuple) else out
        return norm(out.view_as(x), self.around["norm"], eps)


def _around(hidden: int) -> dict[str, torch.Tensor]:
    """Random weights around a block."""
    generator = torch.Generator().manual_seed(7)
    found = {name: 1 + 0.2 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm", "norm")}
    found["eh_proj"] = 1.5 * torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    return found


def make_layer_mtp(directory: Path, family: str, **overrides: Any) -> LayerMTP:
    """A random checkpoint of ``family`` whose layer behind the last one is an MTP module's block."""
    path = make_checkpoint(directory, family, **overrides)
    raw = json.loads((path / "config.json").read_text())
    layers, hidden = raw["num_hidden_layers"] - 1, raw["hidden_size"]
    model = reference(path)
    around, eps = _around(hidden), raw["rms_norm_eps"]
    tensors = load_file(path / WEIGHTS)
    names = {"norm": "final_layernorm" if family == "bailing_moe" else "shared_head.norm"}
    tensors |= {f"model.layers.{layers}.{names.get(name, name)}.weight": tensor for name, tensor in around.items()}
    save_file(tensors, path / WEIGHTS)
    raw["num_hidden_layers"], raw["num_nextn_predict_layers"] = layers, 1
    for by_layer in ("layer_types", "mlp_layer_types"):
        if raw.get(by_layer):
            raw[by_layer] = raw[by_layer][:layers]
    (path / "config.json").write_text(json.dumps(raw))
    return LayerMTP(path, model, around, eps)


def make_nemotron_mtp(directory: Path, feed_forward: str = "moe", **overrides: Any) -> LayerMTP:
    """A random Nemotron-H whose last two layers, attention and ``feed_forward``, are an MTP module's block."""
    kinds = list(overrides.pop("layers_block_type", HYBRIDS["nemotron_h"]["layers_block_type"]))
    block = ["full_attention", feed_forward]
    path = make_checkpoint(directory, "nemotron_h", layers_block_type=kinds + block, **overrides)
    raw, model = json.loads((path / "config.json").read_text()), reference(path)
    around = _around(raw["hidden_size"])
    tensors = {}
    for name, tensor in load_file(path / WEIGHTS).items():
        for number in (0, 1):
            name = name.replace(f"backbone.layers.{len(kinds) + number}.", f"mtp.layers.{number}.")
        tensors[name] = tensor
    names = {"norm": "1.final_layernorm"}
    tensors |= {f"mtp.layers.{names.get(name, f'0.{name}')}.weight": tensor for name, tensor in around.items()}
    save_file(tensors, path / WEIGHTS)
    raw |= {"layers_block_type": kinds, "num_nextn_predict_layers": 1, "mtp_layers_block_type": block}
    raw |= {"num_hidden_layers": len(kinds)}
    (path / "config.json").write_text(json.dumps(raw))
    return LayerMTP(path, model, around, raw["layer_norm_epsilon"], len(block))
