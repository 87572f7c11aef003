"""Random small checkpoints of every family, written by transformers as a hub's are.

Weights are scaled so that logits spread over a few units, and biases and norms matter (transformers starts them at 0
and 1). ``fields.py`` has the sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from tests.models.fields import BOS, COMMON, END, FAMILIES, HYBRIDS, OTHER_CLASSES, PAD, PIXTRAL, SEEING, TOWERS
from tests.models.make_plain import ARCHITECTURES, write_plain
from tests.models.quantised_writers import experts_in_mxfp4

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = 261, 262, 263, 264
"""Special tokens of families with a tower, after the others."""
SEEING_VOCABULARY = 269

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    tower: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` into ``directory`` and return it.

    family: one of FAMILIES, HYBRIDS or SEEING, or another model type.
    overrides: fields of the family's transformers config, of its text model where it has several. tower: fields of its
    vision_config. max_shard_size: e.g. ``"100KB"`` makes an index and several shards. ``mxfp4`` among the fields: the
    experts are stored so. tokenizer: also save a byte-level
    one with a chat template (ids 0-255 are bytes).
    """
    fields = {**COMMON, **(FAMILIES | HYBRIDS | SEEING).get(family, {}), **overrides}
    mxfp4 = fields.pop("mxfp4", False)
    if family in TOWERS:
        fields = {**fields, "vocab_size": overrides.get("vocab_size", SEEING_VOCABULARY)}
        config = AutoConfig.for_model(
            family,
            text_config=fields,
            vision_config={**TOWERS[family], "out_hidden_size": fields["hidden_size"], **(tower or {})},
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    elif family in ARCHITECTURES:
        write_plain(Path(directory), family, fields, seed, dtype)
        if tokenizer:
            make_tokenizer().save_pretrained(directory)
        return Path(directory)
    elif family == "mistral3":
        tied = fields["tie_word_embeddings"]
        config = AutoConfig.for_model(family, text_config=fields, vision_config=PIXTRAL, tie_word_embeddings=tied)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    else:
        config = AutoConfig.for_model(family, **fields)
        kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM  # as transformers lists it
        model = kind.from_config(config, dtype=dtype)
    randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if family in OTHER_CLASSES:
        written = json.loads((Path(directory) / "config.json").read_text())
        (Path(directory) / "config.json").write_text(json.dumps({**written, "architectures": [OTHER_CLASSES[family]]}))
    if family == "kimi_linear":
        _mlps_by_their_name(Path(directory))
    if mxfp4:
        experts_in_mxfp4(Path(directory))
    if tokenizer:
        make_tokenizer(SPECIAL + VISION if family in TOWERS else SPECIAL).save_pretrained(directory)
    return Path(directory)


def _mlps_by_their_name(directory: Path) -> None:
    """Name the MLPs of a Kimi Linear as the hub does: transformers 5.24 writes them under the name of the experts."""
    for file in directory.glob("*.safetensors"):
        tensors = {
            re.sub(r"block_sparse_moe\.(gate|up|down)_proj\.", r"mlp.\1_proj.", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})


def make_tokenizer(special: tuple[str, ...] = SPECIAL) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte and the special tokens, SPECIAL first: encodes any text, needs no training."""
    bytes_to_ids = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_to_ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))  # before the wrapper does, so that they get 256, 257, … in order
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(special[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


BUFFERS = ("layer_scalar", "e_score_correction_bias", "expert_bias")
"""Buffers that are weights, by the ends of their names."""


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight, so that logits spread over a few units."""
    generator = torch.Generator().manual_seed(seed)
    buffers = ((name, each) for name, each in model.named_buffers() if name.endswith(BUFFERS))
    for name, parameter in (*model.named_parameters(), *buffers):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and parameter.dim() == 1:
            value = parameter.mean() + 0.2 * noise  # transformers starts norms at 1, zero-centred ones at 0
        elif name.endswith(("_proj_bias", "sinks", "router.bias")):
            value = 0.5 * noise
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            value = 1 + 0.2 * noise
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            value = 0.1 * noise
        elif name.endswith("A_log"):
            value = noise - 2.5  # states that remember tens of tokens
        elif parameter.dim() == 1:
            value = 0.3 * noise
        else:
            value = 1.5 * noise / parameter.shape[-1] ** 0.5
        parameter.copy_(value)
