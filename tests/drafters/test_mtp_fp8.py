"""MTP modules that a published fp8 checkpoint stores in fp8, experts one by one: their forward, and the text.

The reference is the formulas of ``tests/models/hybrid_mtp.py`` in float64, with the weights that the blocks stand for
and with inputs that are quantised as the layout says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.helpers import engine, mixed_params, prompts, tokens
from tests.models.harness import load
from tests.models.hybrid_mtp import forward, with_module
from tests.models.hybrids import one_by_one, renamed
from tests.models.make import make_checkpoint
from tests.models.mtp_pass import open_modules, run
from tests.models.quantised import BLOCK_CONFIG, Layout, quantise
from tests.models.quantised_writers import by_token_and_group, fp8_blocks
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.layers.formats.base import PLAIN
from unisono.layers.formats.fp8 import ONLINE_FP8, BlockFp8
from unisono.layers.linear import Linear
from unisono.models.load.checkpoint import WEIGHTS
from unisono.types import CheckpointError, SpeculativeConfig

KEPT = ["lm_head", "embed_tokens", "linear_attn", "mtp.fc", "mlp.gate", "mlp.shared_expert_gate"]
SIZES = {
    "small": {},
    "blocks": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "head_dim": 64,
    },
}
BATCH = prompts(4, 250, low=1, high=40)
PARAMS = [replace(p, allowed_token_ids=tuple(range(40, 44))) for p in mixed_params(4, max_tokens=12)]
"""Few allowed tokens, so that a random module is right sometimes."""


def published(root: Path, family: str, sizes: dict[str, Any], kept: list[str], plain: tuple[str, ...] = ()) -> Any:
    """(directory, random module's plain weights, values of the weights in fp8 by their modules' names)."""
    sizes = {k: v for k, v in sizes.items() if "moe" in family or not re.search("moe|expert", k)}
    source = renamed(make_checkpoint(root / "fused", family, tokenizer=False, **sizes), root / "source", one_by_one)
    case = with_module(source)
    config = BLOCK_CONFIG | {"modules_to_not_convert": kept}
    layout = Layout(fp8_blocks("weight_scale_inv"), config, plain=("linear_attn", *plain))
    return root / "fp8", case, quantise(source, root / "fp8", layout)


class Quantised:
    """A weight in the formulas: ``x @ w.T`` quantises x first."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @property
    def T(self) -> Quantised:
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any, kwargs: Any = None) -> torch.Tensor:
        x, weight = args
        return by_token_and_group(x, 0) @ weight.values.T


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_text"])
@torch.no_grad()
def test_forward_is_the_formulas(family: str, size: str, tmp_path: Path) -> None:
    path, case, values = published(tmp_path, family, SIZES[size], KEPT)
    stored = load_file(path / WEIGHTS)
    single = "mtp.layers.0.mlp.experts.3.up_proj" if "moe" in family else "mtp.layers.0.mlp.up_proj"
    assert stored[f"{single}.weight"].dtype == torch.float8_e4m3fn
    assert f"{single}.weight_scale_inv" in stored
    target = load(path)
    _, (module,) = open_modules(path, target)
    formats = {name: part.format for name, part in module.named_modules() if isinstance(part, Linear)}
    assert {name: format for name, format in formats.items() if format is PLAIN}.keys() == {"project", "lm_head"}
    assert {formats[name] for name in ("layer.mixer.qkv", "layer.mixer.o")} == {BlockFp8()}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(target.config.vocab_size, (21,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(21, target.config.hidden_size, generator=generator)
    weights: dict[str, Any] = {name: weight.double() for name, weight in case.weights.items()}
    weights |= {f"{name}.weight": Quantised(each) for name, each in values.items() if name.startswith("mtp.")}
    embedding = target.embed.weight[ids.long()].double()
    want = forward(weights, case.config, embedding, hidden.double(), torch.arange(len(hidden)))
    got, _ = module.finish(run(module, ids, hidden))
    plain = forward(case.weights, case.config, embedding.float(), hidden, torch.arange(len(hidden)))
    assert (got - want).norm() / want.norm() < 4e-3
    assert (plain - want).norm() / want.norm() > 1e-2, "quantising changed nothing"


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_text"])
def test_the_text_is_the_one_without_drafts(family: str, tmp_path: Path) -> None:
    path, _, _ = published(tmp_path, family, {}, KEPT)
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4}
    with engine(path, **flags) as llm:
        want = tokens(llm, BATCH, PARAMS)
    for asked, head, fc in (("none", PLAIN, PLAIN), ("fp8", ONLINE_FP8, PLAIN)):
        spec = SpeculativeConfig("mtp", num_speculative_tokens=3, options={"draft_quantization": asked})
        with engine(path, speculative=spec, max_num_batched_tokens=21, **flags) as llm:
            assert tokens(llm, BATCH, PARAMS) == want
            assert llm.engine.counters.accept_length > 1.2
            module = llm.engine.worker.drafter.module
            assert (module.lm_head.format, module.project.format) == (head, fc)
            assert module.layer.mixer.o.format == BlockFp8()


def test_modules_to_not_convert_are_kept_plain(tmp_path: Path) -> None:
    """A block's MLP that the list names is plain; a list that is silent on mtp.fc means fp8, which is not there."""
    path, _, _ = published(tmp_path, "qwen3_5_text", {}, [*KEPT, "mtp.layers.0.mlp"], plain=("mtp.layers.0.mlp",))
    target = load(path)
    _, (module,) = open_modules(path, target)
    assert module.layer.feed_forward.down.format is PLAIN
    assert module.layer.mixer.o.format == BlockFp8()
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"].remove("mtp.fc")
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"tensor mtp\.fc\.weight_scale_inv .* is missing"):
        MTPCheckpoint.open(path, target.config)
