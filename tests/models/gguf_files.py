"""Writes checkpoints of transformers as GGUF files with llama.cpp's ``gguf`` package, and says what their weights are.

Nothing here is shared with the package's reader: names, the order of rows, metadata and the values of blocks are
``gguf``'s or written from llama.cpp's converter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, TokenType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from gguf.quants import quantize as encode
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.models.make import CHAT_TEMPLATE, SPECIAL
from unisono import LLM, SamplingParams

BIG = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PROMPT = [random.Random(0).randrange(256) for _ in range(40)]


SCALES = {
    Type.Q2_K: {80: 5e-3, 82: 7.5e-3},
    Type.Q3_K: {108: 1.5e-3},
    Type.Q4_K: {0: 2e-4, 2: 1.5e-3},
    Type.Q5_K: {0: 1e-4, 2: 1.5e-3},
    Type.Q6_K: {208: 5e-5},
}
"""Places of the fp16 scales in blocks that ``gguf`` cannot write, and scales with which weights are around 0.06."""

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}


def blocks(weight: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """The bytes of a weight in a type; random ones where ``gguf`` has no writer."""
    if kind not in SCALES:
        return encode(weight, kind)
    generator = np.random.default_rng(seed)
    shape = quant_shape_to_byte_shape(weight.shape, kind)
    size = quant_shape_to_byte_shape((256,), kind)[0]
    made = generator.integers(0, 256, (weight.size // 256, size), dtype=np.uint8)
    for at, scale in SCALES[kind].items():
        numbers = (scale * generator.uniform(0.5, 1.5, len(made))).astype(np.float16)
        made[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return made.reshape(shape)


def rotated(rows: int, heads: int) -> np.ndarray:
    """Row of transformers' projection in each row of llama.cpp's: a head's halves alternate."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


@dataclass
class Tokens:
    """A vocabulary for the file: a byte each, special tokens, and what is given."""

    pre: str = "gpt-2"
    merges: Sequence[str] = ("a b",)
    more: Sequence[str] = ("ab", "<unused>")
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, *self.more]

    def write(self, writer: GGUFWriter) -> None:
        types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * len(self.more)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.all)
        writer.add_token_types(types)
        writer.add_token_merges(list(self.merges))
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        writer.add_pad_token_id(256)
        writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    source: Path,
    file: Path,
    kind: Type = Type.Q8_0,
    tokens: Tokens | None = None,
    keys: Mapping[str, Any] | None = None,
    rope_factors: Sequence[float] = (),
    kinds: Mapping[str, Type] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint with its matrices in ``kind``; returns the values of these in float64 by transformers' name.

    kinds: of single matrices, by llama.cpp's name. keys: of the metadata, without the architecture, in place of the
    written ones; None leaves one out.
    """
    config, stored = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    family = config["model_type"]
    writer = GGUFWriter(file, ARCHITECTURES.get(family, family))
    (tokens or Tokens()).write(writer)
    for name, value in {**metadata(config), **(keys or {})}.items():
        full = name if name.startswith(("general.", "split.", "tokenizer.")) else f"{writer.arch}.{name}"
        if isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    values: dict[str, torch.Tensor] = {}
    for number, (name, weight, sources) in enumerate(parts(stored)):
        array, order = weight.float().numpy(), None
        if family == "llama" and name.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            order = rotated(array.shape[0], heads)
            array = array[order]
        exact = array.ndim == 1 or "ffn_gate_inp" in name
        of = Type.F32 if exact else (kinds or {}).get(name, kind)
        raw = array if of == Type.F32 else array.astype(np.float16) if of == Type.F16 else blocks(array, of, number)
        writer.add_tensor(name, raw, raw_dtype=of)
        if not exact:
            value = dequantize(raw, of).astype(np.float64)
            if order is not None:
                unordered = np.empty_like(value)
                unordered[order] = value
                value = unordered
            for each, part in zip(sources, value if len(sources) > 1 else [value], strict=True):
                values[each.removesuffix(".weight")] = torch.from_numpy(part)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def values_of(file: Path) -> dict[str, torch.Tensor]:
    """Every weight of a Llama's file in float32, by transformers' name, read and dequantised by ``gguf``."""
    reader = GGUFReader(file)
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inside = {ours: theirs for theirs, ours in NAMES.items()}
    found = {}
    for tensor in reader.tensors:
        *layer, part, kind = tensor.name.split(".")
        name = f"model.layers.{layer[1]}.{inside[part]}.{kind}" if layer else f"{outside[part]}.{kind}"
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in ("attn_q", "attn_k"):
            count = reader.get_field(f"llama.attention.head_count{'_kv' * (part == 'attn_k')}").contents()
            unordered = np.empty_like(value)
            unordered[rotated(len(value), count)] = value
            value = unordered
        found[name] = torch.from_numpy(value.copy())
    return found


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    if config["model_type"] == "qwen3_moe":
        found["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        found["expert_used_count"] = config["num_experts_per_tok"]
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def parts(stored: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, list[str]]]:
    """(llama.cpp's name, tensor, transformers' names of its parts) of each tensor."""
    found, experts = [], {}
    for name, tensor in stored.items():
        inside = name.removeprefix("model.layers.")
        if inside == name:
            outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found.append((f"{outside[name.removesuffix('.weight')]}.weight", tensor, [name]))
            continue
        layer, _, rest = inside.partition(".")
        module, _, kind = rest.rpartition(".")
        if ".experts." in module:
            projection = module.rpartition(".")[2].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{projection}_exps.weight", []).append((name, tensor))
        else:
            found.append((f"blk.{layer}.{NAMES[module]}.{kind}", tensor, [name]))
    for name, each in experts.items():
        each.sort(key=lambda pair: int(pair[0].split(".experts.")[1].split(".")[0]))
        found.append((name, torch.stack([tensor for _, tensor in each]), [source for source, _ in each]))
    return found


@torch.no_grad()
def reference(directory: Path, values: dict[str, torch.Tensor], tokens: list[int] = PROMPT) -> torch.Tensor:
    """Logits in float64 of transformers' model with these weights in place of its own."""
    slow = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **slow)
    for name, value in values.items():
        fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        if ".experts." in name:
            path, _, rest = name.partition(".experts.")
            number, projection = rest.split(".")
            into = getattr(model.get_submodule(f"{path}.experts"), fused[projection])[int(number)]
            half = into.shape[0] // 2
            into = {"gate_proj": into[:half], "up_proj": into[half:], "down_proj": into}[projection]
        else:
            into = model.get_submodule(name).weight
        assert into.shape == value.shape
        into.copy_(value)
    return model(torch.tensor([tokens])).logits[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over that of ``want``."""
    return float((got.double() - want).norm() / want.norm())


def answers(path: Path, prompts: list[str], **flags: Any) -> list[list[int]]:
    """Sampled tokens of each prompt, from an engine with these flags."""
    with LLM(str(path), max_num_seqs=3, max_model_len=128, **flags) as llm:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
