"""Block heads' config.json as third parties publish them: read, or refused with the cause. No weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.config.preflight.draft_method import draft_method
from unisono.drafters.block.checkpoint import open_block
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError

LAYERS = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
MASK, READ = 151669, [1, 9, 17, 25, 33]
ZLAB = {
    **LAYERS, "architectures": ["DFlashDraftModel"], "attention_dropout": 0.0, "block_size": 16, "dtype": "bfloat16",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 151643, "eos_token_id": 151645,
    "initializer_range": 0.02, "layer_types": ["full_attention"] * 5, "max_window_layers": 5, "rope_scaling": None,
    "num_target_layers": 36, "sliding_window": None, "use_cache": True, "use_sliding_window": False,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ},
}  # fmt: skip
"""z-lab/Qwen3-8B-DFlash-b16."""
DSPARK = {
    **{name: value for name, value in ZLAB.items() if name != "dflash_config"}, "architectures": ["Qwen3DSparkModel"],
    "block_size": 7, "mask_token_id": MASK, "target_layer_ids": READ, "markov_rank": 256, "markov_head_type": "vanilla",
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
    "block_size": 8, "draft_vocab_size": 32000, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 18, 33],
    "target_hidden_size": None, "tie_word_embeddings": False, "transformer_layer_config": LAYERS,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
}  # fmt: skip
INPUTS = (2, 10, 18, 26, 34)

READABLE: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "z-lab": (ZLAB, "dflash", INPUTS),
    "z-lab, ids by the code's rule": ({**ZLAB, "dflash_config": {"mask_token_id": MASK}}, "dflash", INPUTS),
    "z-lab, rope_parameters": (
        {**ZLAB, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}, "dflash",
        INPUTS,
    ),
    "z-lab, windows": (
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "use_swa": True, "swa_window_size": 1024}}, "dflash", INPUTS
    ),
    "DeepSeek's DSpark": (DSPARK, "dspark", INPUTS),
    "RadixArk's DSpark": ({**DSPARK, "architectures": ["DSparkDraftModel"]}, "dspark", INPUTS),
    "speculators": (SPECULATORS, "dflash", (2, 18, 33)),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({**ZLAB, "architectures": None}, r"architectures=\[None\] is not a block drafter"),
    "a mask of the tokenizer": ({**ZLAB, "dflash_config": {"target_layer_ids": READ}}, "has no mask_token_id"),
    "another target": ({**ZLAB, "vocab_size": 128256, "num_target_layers": 32}, "vocab_size is 128256, the target's"),
    "Domino": ({**ZLAB, "architectures": ["DominoDraftModel"]}, "DominoDraftModel.* is not a block drafter"),
    "speculators without ids": ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "must list the target layers"),
    "a projector": (
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "projector_type": "domino"}}, "projector_type='domino'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen3_8b() -> DecoderConfig:
    return Checkpoint.open(Path(__file__).parents[2] / "benchmarks" / "shapes" / "qwen3-8b").config


def written(directory: Path, raw: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps({name: v for name, v in raw.items() if v is not None}))
    return directory


@pytest.mark.parametrize("name", READABLE)
def test_read(name: str, qwen3_8b: DecoderConfig, tmp_path: Path) -> None:
    raw, method, inputs = READABLE[name]
    assert draft_method(raw) == method
    opened = open_block(written(tmp_path, raw), qwen3_8b, method, dummy=True)
    assert opened.settings.aux_layers == inputs
    assert opened.settings.mask_token == MASK
    assert opened.settings.max_drafts == {16: 15, 8: 7, 7: 7}[raw["block_size"]]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_cause(name: str, qwen3_8b: DecoderConfig, tmp_path: Path) -> None:
    raw, says = REFUSED[name]
    with pytest.raises(CheckpointError, match=says):
        open_block(written(tmp_path, raw), qwen3_8b, draft_method(raw) or "dflash", dummy=True)
