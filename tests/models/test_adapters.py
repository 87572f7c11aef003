"""PEFT directories: what is read of them, and each way in which one can be wrong."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kernels.launches import launches
from tests.models.count_launches import DENSE
from tests.models.harness import Session, load
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter, merged, rewritten
from unisono.kernels.lora.adapters import AdapterPlan
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.lora.adapters import CONFIG, WEIGHTS, AdapterLayers, AdapterLimits, attach_adapters, read_adapter
from unisono.types import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("adapters") / "base", "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def layers(base: Path) -> AdapterLayers:
    return attach_adapters(load(base), Checkpoint.open(base).family, AdapterLimits(loaded=1, rank=8, kept=1))


def configured(**change: Any) -> Callable[[Path], object]:
    def apply(adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps(config | change))

    return apply


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        rewritten(adapter, tensors)

    return apply


def put(name: str, *shape: int, value: float = 0.0) -> Callable[[Path], object]:
    return stored(lambda tensors: tensors.update({name: torch.full(shape, value)}))


def pickled(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({}))


def outside(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter.parent / "elsewhere")
    (adapter / WEIGHTS).symlink_to(adapter.parent / "elsewhere")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "shape": (put(A, 4, 83), f"{Q}.lora_A has shape [4, 83]; rank 4 and the base model's layer ask for [4, 84]"),
    "shape of B": (put(A.replace("_A", "_B"), 281, 4), "lora_B has shape [281, 4]"),
    "rank": (configured(r=5), "rank 5 and the base model's layer ask for [5, "),
    "rank above the limit": (configured(r=9), "has rank 9; --max-lora-rank is 8. Raise it"),
    "missing base module": (put(A.replace("layers.0", "layers.9"), 4, 84), "the base model has no linear layer"),
    "half of a pair": (stored(lambda tensors: tensors.pop(A)), f"{Q} has no lora_A: the file is incomplete"),
    "a layer is missing": (
        stored(lambda t: [t.pop(name) for name in list(t) if Q in name]),
        "names layers.0.self_attn.q_proj, and there are no tensors of it (1 of 21",
    ),
    "NaN": (put(A, 4, 84, value=float("nan")), "lora_A has weights that are NaN or infinite"),
    "whole numbers": (stored(lambda t: t.update({A: t[A].int()})), "is of type I32; F32, F16, BF16 are read"),
    "pickle": (pickled, "only adapter_model.bin, a pickle, which may run code"),
    "no file": (lambda adapter: (adapter / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "truncated": (lambda adapter: (adapter / WEIGHTS).write_bytes(b"abc"), "is truncated or no safetensors file"),
    "a link out": (outside, "is a link out of the checkpoint"),
    "no config": (lambda adapter: (adapter / CONFIG).unlink(), f"has no {CONFIG}"),
    "config no JSON": (lambda adapter: (adapter / CONFIG).write_text("{"), "cannot be read as JSON"),
    "no rank": (configured(r=None), "r=None must be a number from 1 on"),
    "alpha": (configured(lora_alpha="much"), "lora_alpha=much must be a number"),
    "pattern": (configured(rank_pattern={"(": 3}), "rank_pattern has '(', which is no pattern"),
    "kind": (configured(peft_type="IA3"), "peft_type='IA3' is not supported; LORA is"),
    "DoRA": (configured(use_dora=True), "use_dora=True is not supported: DoRA scales"),
    "DoRA's vectors": (put(f"base_model.model.{Q}.lora_magnitude_vector", 280), "DoRA scales whole columns"),
    "modules_to_save": (configured(modules_to_save=["lm_head"]), "modules_to_save=['lm_head'] is not supported"),
    "bias": (configured(bias="all"), "train with bias='none'"),
    "fan_in_fan_out": (configured(fan_in_fan_out=True), "weights are stored [outputs, inputs]"),
    "PiSSA": (configured(init_lora_weights="pissa_niter_4"), "changes the base weights, too"),
    "embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 3), "adapters of embeddings"),
    "head": (put("base_model.model.lm_head.lora_A.weight", 4, 84), "adapters of the LM head are not supported"),
    "experts": (
        put("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", 4, 84),
        "of experts are not",
    ),
    "another tensor": (put("base_model.model.norm.weight", 3), "it is no tensor of a low-rank product"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_unreadable_adapters_raise(kind: str, base: Path, layers: AdapterLayers, tmp_path: Path) -> None:
    spoil, says = WRONG[kind]
    adapter = make_adapter(tmp_path / "adapter", base)
    read_adapter(adapter, layers)  # it was right before
    spoil(adapter)
    with pytest.raises(CheckpointError) as error:
        read_adapter(adapter, layers)
    assert says in str(error.value)


def test_a_directory_that_is_none(layers: AdapterLayers, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        read_adapter(tmp_path / "none", layers)


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.", "model.language_model.", ""])
def test_names_of_other_exports(prefix: str, base: Path, layers: AdapterLayers, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base)
    expected = read_adapter(adapter, layers).parts
    tensors = load_file(adapter / WEIGHTS)
    rewritten(adapter, {name.replace("base_model.model.model.", prefix): t for name, t in tensors.items()})
    for path, parts in read_adapter(adapter, layers).parts.items():
        for got, wanted in zip(parts, expected[path], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", ["q_proj"]])
def test_target_modules_in_each_form(targets: Any, base: Path, layers: AdapterLayers, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, targets=["q_proj"], change={"target_modules": targets})
    parts = read_adapter(adapter, layers).parts
    assert list(parts) == [f"layers.{number}.mixer.qkv" for number in range(3)]
    assert [part is None for part in parts["layers.0.mixer.qkv"]] == [False, True, True]


def test_the_digest_is_of_the_files_and_the_place(base: Path, layers: AdapterLayers, tmp_path: Path) -> None:
    one = read_adapter(make_adapter(tmp_path / "one", base, 1), layers).digest
    assert read_adapter(tmp_path / "one", layers).digest == one
    assert read_adapter(make_adapter(tmp_path / "same", base, 1), layers).digest != one
    assert read_adapter(make_adapter(tmp_path / "one", base, 2), layers).digest != one


def test_the_merge_oracle_is_peft_s(base: Path, tmp_path: Path) -> None:
    """The merged weights that other tests compare with are those that PEFT itself makes."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapter = make_adapter(tmp_path / "adapter", base, rank=4, ranks={"o_proj": 2}, change={"use_rslora": True})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, adapter, torch_device="cpu").merge_and_unload().state_dict()
    ours = load_file(merged(base, adapter, tmp_path / "merged") / "model.safetensors")
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-5)


def test_a_layer_adds_it_before_the_residual(base: Path, tmp_path: Path) -> None:
    """With a residual, with a norm and with neither; rows of no adapter, and other passes, are as without."""
    decoder = load(base)
    layers = attach_adapters(decoder, Checkpoint.open(base).family, AdapterLimits(loaded=1, rank=8, kept=1))
    weights = read_adapter(make_adapter(tmp_path / "it", base, size=1.0), layers)
    layers.write(0, weights)
    linear, norm = decoder.layers[0].mixer.o, decoder.layers[0].feed_forward_norm
    x, residual = torch.randn(5, linear.inputs), torch.randn(5, linear.outputs)
    plain = linear(x)
    (a, b), *_ = weights.parts["layers.0.mixer.o"]
    has = torch.tensor([True, False, True, True, False])
    wanted = torch.where(has[:, None], plain.double() + x.double() @ a.double().t() @ b.double().t(), plain.double())
    with layers.rows.seeing({5: AdapterPlan(torch.where(has, 0, 1).int(), 1)}):
        y, total = linear(x), linear(x, residual)
        fused, normed = linear.then_norm(x, residual, norm)
        assert torch.equal(linear.then_norm(x, residual, None)[0], total)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[~has], plain[~has])
    assert torch.equal(total, y + residual)
    assert torch.equal(fused, total)
    assert torch.equal(normed, norm(total))
    assert torch.equal(linear(x), plain)


# ---- launches ---------------------------------------------------------------------------------------


def launches_with(path: Path, rows: int, adapted: bool, rank: int = 8, quantization: str | None = None) -> Counter[str]:
    """Launches on a GPU of a pass of one request's ``rows`` tokens, as a round if there is one."""
    decoder = load(path, quantization=quantization)
    layers = attach_adapters(decoder, Checkpoint.open(path).family, AdapterLimits(loaded=2, rank=rank, kept=2))
    session = Session(decoder, 1, 128)
    step = {0: list(range(rows))}

    def run() -> None:
        plan = AdapterPlan(torch.zeros(rows, dtype=torch.int32), 2, len(layers.layers))
        with layers.rows.seeing({rows: plan} if adapted else {}):
            session.round(1, step) if rows == 1 else session.extend(step)

    return launches(run)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", tokenizer=False, num_hidden_layers=3, **DENSE)


@pytest.mark.parametrize("rows", [1, 32])
def test_adapters_take_no_launch_in_small_passes(dense: Path, rows: int) -> None:
    """Counters are set to 0 once a pass; that is all. Four products a layer are the other kernel, in three layers."""
    plain, found = (launches_with(dense, rows, adapted) for adapted in (False, True))
    assert found["_adapted_linear_kernel"] == 12
    assert found["new_zeros"] == 1
    changed = {"_adapted_linear_kernel": 12, "new_zeros": 1}
    assert found - plain == Counter(changed)
    assert (plain - found).total() == 12
    assert not {name for name in plain if "adapt" in name}


@pytest.mark.parametrize(
    ("rows", "options", "more"),
    [
        (33, {}, {"_adapter_shrink_kernel": 4, "_adapter_expand_kernel": 3}),
        (65, {"rank": 50}, {"_adapter_shrink_kernel": 4, "_adapter_sum_kernel": 4, "_adapter_expand_kernel": 3}),
        (1, {"rank": 70}, {"_adapter_shrink_kernel": 4, "_adapter_sum_kernel": 4, "_adapter_expand_kernel": 4}),
        (1, {"quantization": "fp8"}, {"_adapter_shrink_kernel": 4, "_adapter_expand_kernel": 3}),
    ],
    ids=["prompt", "prompt, rank 50", "round, rank 70", "round of fp8 weights"],
)
def test_launches_of_their_own_elsewhere(dense: Path, rows: int, options: dict, more: dict[str, int]) -> None:
    """Per layer four launches of shrink; expanding the gates and SiLU are one, up to rank 64. Once: the sort, in
    three."""
    plain, found = (launches_with(dense, rows, adapted, **options) for adapted in (False, True))
    added = {name: 3 * count for name, count in more.items()}
    gates = 3 if more["_adapter_expand_kernel"] == 3 else 0
    added |= {"_adapter_silu_kernel": gates} if gates else {}
    sort = dict.fromkeys(("_count_kernel", "_starts_kernel", "_place_kernel"), 1)
    assert {name: count for name, count in (found - plain).items() if "adapter" in name} == added
    assert {name: count for name, count in (found - plain).items() if name in sort} == sort
    assert found.total() - plain.total() == sum(added.values()) + 3 - gates
