"""gpt-oss beyond parity: the published config, drafts, what stays packed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine, prompts, tokens
from tests.models.harness import load, whole
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from unisono.models.families.gpt_oss import read
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig

SHAPE = Path(__file__).parents[2] / "benchmarks/shapes/gpt-oss-20b"
PROMPT = [7 * i % 251 for i in range(40)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


def test_the_published_config() -> None:
    """The quantization_config of openai/gpt-oss-20b, as in the benchmarks."""
    checkpoint = Checkpoint.open(SHAPE)
    config = checkpoint.config
    assert config.windows == (128, 0) * 12
    first, experts = config.layers[0].mixer, config.layers[0].feed_forward
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.sink, first.o_bias) == (64, 8, 64, True, True)
    assert (experts.num_experts, experts.top_k, tuple(experts.kind.gate)) == (32, 4, (1.702, 7.0, False))
    formats = {name: checkpoint.format_of_module(f"layers.3.{name}").name for name in ("mixer.qkv.q", "mixer.o")}
    assert set(formats.values()) == {"plain"}
    assert checkpoint.format_of_module("layers.3.feed_forward.experts.down").name == "MXFP4"
    theirs = AutoConfig.from_pretrained(SHAPE)
    assert theirs.rope_parameters["rope_theta"] == 150000
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, device=torch.device("cpu"))
    table = first.rotary.table(3, "cpu")
    torch.testing.assert_close(table[2], torch.cat(((2 * frequencies).cos(), (2 * frequencies).sin())) * factor)
    assert factor > 1.3


@torch.no_grad()
def test_plain_experts_as_large_as_the_hidden_state(tmp_path: Path) -> None:
    """As published: inputs and outputs are as many, so that a tensor's shape does not tell how it lies."""
    directory = make_checkpoint(tmp_path, "gpt_oss", mxfp4=False, intermediate_size=96, max_shard_size="100KB")
    (logits,) = whole(load(directory), [PROMPT])
    theirs = reference(directory)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)


def test_drafts_chunks_and_scarce_pages_change_nothing(made: Path, tmp_path: Path) -> None:
    batch = prompts(5, 250, seed=3)
    batch[0] = batch[0][:8] * 8  # something that n-grams find, longer than the window
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    with engine(made) as llm:
        plain = tokens(llm, batch, params)
    config = Checkpoint.open(made).config
    head = make_eagle3(tmp_path / "head", config, (1, 2, 3), aux=[1, 2, 3], draft_vocab=150).path
    for spec, flags in (
        (SpeculativeConfig("ngram", num_speculative_tokens=3), {"max_num_batched_tokens": 16}),
        (SpeculativeConfig("suffix", num_speculative_tokens=2), {"max_model_len": 96, "num_pages": 9}),
        (SpeculativeConfig("eagle3", str(head), 3), {}),
    ):
        with engine(made, speculative=spec, **flags) as llm:
            assert tokens(llm, batch, params) == plain, spec.method
            assert llm.engine.counters.drafted_tokens > 0
            if "num_pages" in flags:
                assert llm.engine.scheduler.preemptions > 0


def test_weights_stay_packed(made: Path) -> None:
    decoder = load(made)
    up, down = decoder.layers[1].feed_forward.stacks
    assert (up.weight_blocks.dtype, tuple(up.weight_blocks.shape)) == (torch.uint8, (5, 2 * 64, 96 // 2))
    assert tuple(down.weight_scales.shape) == (5, 96, 64 // 32)
    stored = load_file(made / "model.safetensors")
    blocks = stored["model.layers.1.mlp.experts.gate_up_proj_blocks"].flatten(-2)
    assert torch.equal(up.weight_blocks[:, :64], blocks[:, 0::2]), "gate has every second row"
    assert torch.equal(up.weight_blocks[:, 64:], blocks[:, 1::2])
    assert torch.equal(down.bias, stored["model.layers.1.mlp.experts.down_proj_bias"])


def test_dummy_weights(made: Path) -> None:
    (logits,) = whole(load(made, load_format="dummy"), [PROMPT])
    assert logits.isfinite().all()
    scales = load(made, load_format="dummy").layers[0].feed_forward.stacks[0].weight_scales
    assert 110 < int(scales.min()) <= int(scales.max()) < 125


def change(directory: Path, **fields: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_scales_that_are_not_numbers_are_refused(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"a scale that is NaN \(255\)"):
        load(directory)


def test_a_missing_bias_is_named(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    del stored["model.layers.2.mlp.experts.gate_up_proj_bias"]
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj_bias \[5, 128\] is missing"):
        load(directory)


def test_unsupported_gpt_oss_sizes_and_formats_raise(directory: Path, tmp_path: Path) -> None:
    change(directory, intermediate_size=72)
    with pytest.raises(CheckpointError, match="MXFP4 experts with 72 inputs: they must be a multiple of 32"):
        load(directory)
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", mxfp4=False)
    with pytest.raises(CheckpointError, match=r"not supported where experts have biases.*plain weights and MXFP4 are"):
        load(plain, quantization="fp8")


def test_a_config_without_the_slope_is_read() -> None:
    """transformers 5.17 keeps the slope of the gate in the model's code, not in its config."""
    config = AutoConfig.from_pretrained(SHAPE)
    del config.swiglu_alpha
    assert read(config) == read(AutoConfig.from_pretrained(SHAPE))
