"""Experts as a block: a layer against float64, both ways to store them, shared experts that ride along and that do not,
formats, dummy weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.helpers import engine, prompts, tokens
from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from unisono.kernels.moe.plan import LEAD_PAIRS
from unisono.layers.experts import expert_counts, products_per_token
from unisono.layers.formats.base import Plain, Share, Slices
from unisono.layers.formats.experts import PLAIN_EXPERTS, PlainExperts, expert_format
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.config import checkpoint_name
from unisono.models.families.qwen3_moe import QWEN3_MOE
from unisono.models.load import tensor_files, weights
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import WEIGHTS
from unisono.models.load.weights import tensor_name, weight_targets
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig

HIDDEN = 40
PROMPT = [[5, 77, 200, 31, 9]]
SPEC = ExpertsSpec(num_experts=7, top_k=3, intermediate_size=24, shared_intermediate_size=24, shared_gate=True)
SPECS = {
    "shared-rides": SPEC,
    "shared-of-another-size": replace(SPEC, shared_intermediate_size=33),
    "shared-without-gate": replace(SPEC, shared_gate=False),
    "no-shared": replace(SPEC, shared_intermediate_size=0, shared_gate=False, normalize=False),
    "one-expert": replace(SPEC, num_experts=1, top_k=1),
    "all-experts": replace(SPEC, top_k=7, normalize=False),
}


def build(spec: ExpertsSpec, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    layer = spec.build(Builder(HIDDEN, 1e-5, dtype, "cpu", no_attention, 64, **options))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return layer


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [1, 9, LEAD_PAIRS + 3])
def test_layer_matches_float64(name, rows):
    spec = SPECS[name]
    layer = build(spec)
    rides = spec.shared_intermediate_size == spec.intermediate_size
    assert (layer.shared is None) == (rides or not spec.shared_intermediate_size)
    x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    norm = RMSNorm(HIDDEN, 1e-5, torch.float32, "cpu")
    total, normed = layer.project(layer(x), residual, norm)
    torch.testing.assert_close(total.double(), layer.reference(x.double()) + residual.double(), atol=2e-5, rtol=0)
    assert torch.equal(normed, norm(total))
    for row in (0, rows - 1):
        alone, _ = layer.project(layer(x[row : row + 1]), residual[row : row + 1], None)
        assert torch.equal(alone[0], total[row])


def test_products_per_token_counts_chosen_experts():
    """The engine compares a pass's products with its attention."""
    layer = build(SPEC)
    assert products_per_token(layer) == layer.router.numel() + 4 * 3 * 24 * HIDDEN
    assert products_per_token(torch.nn.ModuleList([layer, build(SPECS["one-expert"])])) == (
        layer.router.numel() + 4 * 3 * 24 * HIDDEN + 2 * HIDDEN + 2 * 3 * 24 * HIDDEN
    )


def test_names_of_experts_have_two_numbers():
    names = {"layers.*.feed_forward.experts.each.gate": "model.layers.*.mlp.experts.*.gate_proj"}
    module = "layers.31.feed_forward.experts.each.7.gate"
    assert checkpoint_name(names, module) == "model.layers.31.mlp.experts.7.gate_proj"
    assert tensor_name("a.gate_up_proj", "") == "a.gate_up_proj"
    assert tensor_name("a.gate_up_proj", "_scale_inv") == "a.gate_up_proj_scale_inv"
    assert tensor_name("a.down_proj", "weight") == "a.down_proj.weight"


def test_places_cover_every_element_once_in_either_form():
    layer = build(SPECS["shared-of-another-size"])
    for form in ("fused", "single"):
        found = list(weight_targets(layer, lambda module, kind, f=form: (".each." in module) == (f == "single")))
        assert {place.form for *_, place in found} == {"", form}
        for parameter in layer.parameters():
            parameter.zero_()
        for _, _, place in found:
            place.parameter.add_(1)
        assert all((parameter == 1).all() for parameter in layer.parameters())
    assert {module for module, *_ in found} >= {"router", "shared_gate", "shared.gate_up.up", "experts.each.6.down"}


def test_a_rank_reads_its_experts_only():
    stack = build(SPEC).stacks[0]
    part = type(stack)(8, HIDDEN, {"gate": 4, "up": 4}, True, torch.float32, "cpu", PLAIN_EXPERTS, Share(1, 4))
    assert part.weight.shape == (3, 8, HIDDEN)
    ((_, fused),) = part.fused()
    assert (fused.shape, fused.part, fused.parameter.shape) == ((8, 8, HIDDEN), Slices(0, ((2, 4),)), (2, 8, HIDDEN))
    assert {expert for expert, *_ in part.single()} == {2, 3}


# ---- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture
def directory(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "checkpoint")


def fuse(directory: Path) -> None:
    """Store the experts of every layer as two tensors."""
    tensors = load_file(directory / WEIGHTS)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{e}.{name}_proj.weight") for e in range(11)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{experts}.gate_up_proj"], tensors[f"{experts}.down_proj"] = torch.cat((gate, up), 1), down
    save_file(tensors, directory / WEIGHTS)


def test_fused_and_single_tensors_are_the_same_model(made, directory):
    assert "model.layers.0.mlp.experts.10.up_proj.weight" in load_file(made / WEIGHTS)
    fuse(directory)
    assert torch.equal(whole(load(directory), PROMPT)[0], whole(load(made), PROMPT)[0])


@pytest.mark.parametrize("form", ["fused", "single"])
def test_a_missing_expert_is_named(directory, form):
    if form == "fused":
        fuse(directory)
    tensors = load_file(directory / WEIGHTS)
    name = "model.layers.1.mlp.experts." + ("down_proj" if form == "fused" else "3.up_proj.weight")
    del tensors[name]
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"tensor {name} .* is missing"):
        load(directory)


def test_several_threads_read_the_same_model(made, directory, monkeypatch):
    want = whole(load(made), PROMPT)[0]
    monkeypatch.setattr(tensor_files, "PIECE", 1000)
    shares = []
    with torch.inference_mode():
        decoder = load(directory, progress=lambda stage, share: shares.append(share))
        assert torch.equal(whole(decoder, PROMPT)[0], want)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    broken = lambda self, stored: 1 / 0  # noqa: E731
    monkeypatch.setattr(weights.WeightTarget, "fill", broken)
    with pytest.raises(ZeroDivisionError):
        load(directory)


def test_dummy_weights(made):
    first, again, other = (load(made, load_format="dummy", seed=seed) for seed in (0, 0, 1))
    stacks = [decoder.layers[1].feed_forward.stacks[0].weight for decoder in (first, again, other)]
    assert torch.equal(stacks[0], stacks[1])
    assert not torch.equal(stacks[0], stacks[2])
    assert 0.019 < stacks[0].std() < 0.021
    assert not whole(first, PROMPT)[0].isnan().any()


def test_dense_layers_follow_the_config(made, directory):
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    (directory / "config.json").write_text(json.dumps(config))
    layers = load(directory, load_format="dummy").layers
    assert [hasattr(layer.feed_forward, "stacks") for layer in layers] == [False, True, False, False, False, True]


def test_every_name_of_a_family_is_a_place(made):
    """A name that no module asks for is a typing error."""
    named = {ours: ours for ours in QWEN3_MOE.names}
    asked = set()
    for form in ("fused", "single"):
        found = weight_targets(load(made), lambda module, kind, f=form: (".each." in module) == (f == "single"))
        asked |= {checkpoint_name(named, module) for module, *_ in found}
    dense = {f"layers.*.feed_forward.{name}" for name in ("gate_up.gate", "gate_up.up", "down")}
    assert {ours.replace("*", "0") for ours in set(named) - dense} <= asked


def test_invalid_expert_specs_raise():
    for change, words in (
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 4096}, "1 to 1024"),
        ({"top_k": 8}, "num_experts_per_tok=8: it must be 1 to num_experts=7"),
        ({"intermediate_size": 0}, "moe_intermediate_size=0"),
        ({"activation": "gelu"}, "supported are silu, gelu_pytorch_tanh"),
    ):
        with pytest.raises(CheckpointError, match=words):
            replace(SPEC, **change)


# ---- formats ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubled(Plain):
    """Weights that are stored as half of what they are."""

    name: str = "doubled"

    @property
    def experts(self):
        return DOUBLED


@dataclass(frozen=True)
class DoubledExperts(PlainExperts):
    def read(self, kind, stored):
        return stored * 2


DOUBLED = DoubledExperts("doubled")


def test_a_format_of_another_package_stores_experts():
    format = Doubled()
    assert expert_format(format) is DOUBLED
    layer = build(SPEC, format=lambda module: format)
    assert layer.shared is None, "an expert of the same format rides along"
    for _, _, place in weight_targets(layer):
        place.fill(torch.ones(place.shape))
    assert {float(stack.weight.unique()) for stack in layer.stacks} == {2.0}
    assert float(layer.router.unique()) == 1.0
    apart = build(SPEC, format=lambda module: format if ".each." in module else Plain())
    assert apart.shared is not None, "the shared expert is stored in another format"


def test_unsupported_expert_formats_raise():
    with pytest.raises(CheckpointError, match="'odd' are not supported"):
        build(SPEC, format=lambda module: Plain("odd"))
    with pytest.raises(CheckpointError, match="gate doubled, up doubled, down plain"):
        build(SPEC, format=lambda module: Plain() if module.endswith("down") else Doubled())


# ---- the engine -------------------------------------------------------------------------------------


def test_drafts_graphs_and_batches_change_nothing(made):
    batch = prompts(6, 250, seed=3)
    batch[0] = batch[0][:8] * 6  # something that n-grams find
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]
    with engine(made) as llm:
        plain = tokens(llm, batch, params)
        counted = expert_counts(llm.engine.worker.model)
        load = llm.engine.info()["experts"]
    assert [row["layer"] for row in load] == ["layers.0", "layers.1", "layers.2"]
    read = sum(len(prompt) + 23 for prompt in batch)  # of each answer the last token is never computed
    assert [row["choices"] for row in load[:2]] == [3 * read, 3 * read]
    assert load[2]["choices"] < 3 * read, "the last layer computes of prompts the last tokens alone"
    assert load[0]["max / mean"] == round(max(counted["layers.0.feed_forward"]) * 11 / (3 * read), 2)
    for flags in ({}, {"enforce_eager": True, "max_num_seqs": 3}, {"max_num_batched_tokens": 16}):
        spec = SpeculativeConfig("ngram", num_speculative_tokens=3)
        with engine(made, speculative=spec, **flags) as llm:
            assert tokens(llm, batch, params) == plain
            assert tokens(llm, batch[2:3], params[2:3]) == plain[2:3]
            assert llm.engine.counters.accepted_tokens > 0
