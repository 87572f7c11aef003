"""MTP modules of hybrids: every draft is that of the formulas; random weights; what does not fit is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.proposals import GREEDY, mistakes, record
from tests.engine.helpers import engine, prompts, tokens
from tests.models.harness import load
from tests.models.hybrid_mtp import Case, forward, with_module
from tests.models.hybrids import fused, renamed
from tests.models.make import make_checkpoint
from tests.models.mtp_pass import open_modules, run
from unisono.config import catalog
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.kernels import linear, rms_norm
from unisono.layers.formats.base import FLOATS, PLAIN, StoredTensor
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError, SpeculativeConfig

FULL = pytest.mark.full
FAMILIES = ["qwen3_5_text", "qwen3_5_moe", pytest.param("qwen3_5", marks=FULL), pytest.param("qwen3_next", marks=FULL)]
FLAGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param) / "target", request.param, tokenizer=False)
    return with_module(path)


def spec(k: int = 3, **fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="mtp", num_speculative_tokens=k, **fields)


def check_forward(case: Case, path: Path) -> None:
    """The module in ``path``, over random hidden states, against the formulas."""
    target = load(path)
    checkpoint, (module,) = open_modules(path, target)
    assert checkpoint.depth == 1
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(target.config.vocab_size, (21,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(21, target.config.hidden_size, generator=generator)
    expected = forward(case.weights, case.config, target.embed.weight[ids.long()], hidden, torch.arange(21))
    got, logits = module.finish(run(module, ids, hidden))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(logits, expected @ target.lm_head.weight.T, atol=1e-4, rtol=0)


@torch.no_grad()
def test_forward_is_the_formulas(case: Case) -> None:
    check_forward(case, case.path)


@torch.no_grad()
def test_forward_with_fused_experts(case: Case, tmp_path: Path) -> None:
    if not any(".experts." in name for name in case.weights):
        pytest.skip("it has no experts")
    path = renamed(case.path, tmp_path / "fused", fused)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in load_file(path / WEIGHTS)
    check_forward(case, path)


def test_every_draft_is_the_formulas(case: Case) -> None:
    batch = prompts(3, 250, low=1, high=40, seed=3)
    with engine(case.path, **FLAGS) as llm:
        plain = tokens(llm, batch, GREEDY)
    texts = [p + t for p, t in zip(batch, plain, strict=True)]
    with engine(case.path, speculative=spec(), enforce_eager=True, max_num_batched_tokens=21, **FLAGS) as llm:
        seen = record(llm, texts)
        assert tokens(llm, batch, GREEDY) == plain
        assert llm.engine.counters.accept_length > 1.8
        assert tokens(llm, batch, GREEDY) == plain, "after prefix hits"
    assert mistakes(case, seen[::2]) == [0] * 3


# ---- random weights ---------------------------------------------------------------------------------


def config_alone(source: Path, directory: Path, modules: int) -> Path:
    raw = json.loads((source / "config.json").read_text())
    raw.get("text_config", raw)["mtp_num_hidden_layers"] = modules
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize(("modules", "what"), [(1, "1 of 1"), (2, "2 of 2")])
def test_random_modules_draft_for_random_weights(case: Case, modules: int, what: str, tmp_path: Path) -> None:
    """From config.json alone, the same drafts every time, and the text of the target alone."""
    path = config_alone(case.path, tmp_path / "shape", modules)
    flags: dict[str, Any] = {**FLAGS, "load_format": "dummy"}
    batch, drafted = prompts(2, 250, low=5, high=30, seed=1), []
    with engine(path, **flags) as llm:
        plain = tokens(llm, batch, GREEDY)
    for _ in range(2):
        with engine(path, **flags, speculative=spec(options={"load_format": "dummy"}), enforce_eager=True) as llm:
            seen = record(llm)
            assert tokens(llm, batch, GREEDY) == plain
            drafted.append(seen)
            found = {d["name"]: d["value"] for d in llm.engine.info()["decisions"]}
            assert found["draft modules"].startswith(what)
    assert drafted[0] == drafted[1]


def test_dummy_mtp_without_declared_modules_raises(case: Case, tmp_path: Path) -> None:
    config = Checkpoint.open(config_alone(case.path, tmp_path / "shape", 0)).config
    with pytest.raises(CheckpointError, match=r"declares no MTP modules \(mtp_num_hidden_layers\)"):
        MTPCheckpoint.open(tmp_path / "shape", config, dummy=True)


# ---- weight formats ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowScaled:
    """A stand-in for the quantised formats: a weight with an fp32 scale for each output."""

    name: str = "row-scaled"

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor(dtype, FLOATS), "weight_scale": StoredTensor(torch.float32, ("F32",), inputs=0)}

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored

    def linear(self, layer: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = linear(x, layer.weight, None, None) * layer.weight_scale
        return y if residual is None else y + residual

    def linear_norm(
        self, layer: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(layer, x, residual)
        return total, rms_norm(total, weight, eps)

    def prove(self, layer: Any) -> bool:
        return True

    def rehearse(self, layer: Any) -> None:
        pass


ROW_SCALED = RowScaled()


def read_row_scaled(config: dict[str, Any]) -> Any:
    return lambda module: ROW_SCALED if ".self_attn." in module or module == "mtp.fc" else PLAIN


@torch.no_grad()
def test_modules_in_the_checkpoints_weight_format(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and projection stored as half a weight with a scale of 2, as config.json declares."""

    def scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if name == "mtp.fc.weight" or re.search(r"self_attn\.._proj\.weight$", name):
                found |= {name: tensor / 2, f"{name}_scale": torch.full((len(tensor),), 2.0)}
        return found

    path = renamed(case.path, tmp_path / "scaled", scaled)
    with pytest.raises(CheckpointError, match=r"quantised weights that config\.json does not declare"):
        MTPCheckpoint.open(path, case.config)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "row-scaled"}
    (path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setitem(catalog.formats.entries, "row-scaled", f"{__name__}:read_row_scaled")  # type: ignore[arg-type]
    check_forward(case, path)


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mtp.fc.weight_scale_inv", "quantised weights"),
        ("mtp.layers.0.self_attn.q_proj.weight_scale_inv", "quantised weights"),
        ("mtp.layers.0.linear_attn.A_log", "linear attention"),
        ("mtp.embed_tokens.weight", "mtp.embed_tokens.weight .* is unexpected"),
        ("mtp.layers.0.mlp.gate.e_score_correction_bias", "e_score_correction_bias"),
    ],
)
def test_unsupported_mtp_tensors_are_named(name: str, words: str, case: Case, tmp_path: Path) -> None:
    path = renamed(case.path, tmp_path / "other", lambda t: t | {name: torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=words):
        MTPCheckpoint.open(path, Checkpoint.open(path).config)


def test_dedicated_embeddings_are_refused(case: Case, tmp_path: Path) -> None:
    path = config_alone(case.path, tmp_path / "other", 1)
    raw = json.loads((path / "config.json").read_text())
    raw.get("text_config", raw)["mtp_use_dedicated_embeddings"] = True
    (path / "config.json").write_text(json.dumps(raw))
    shutil.copy(case.path / WEIGHTS, path)
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings=True"):
        MTPCheckpoint.open(path, Checkpoint.open(path).config)


def test_experts_beside_a_target_without_are_refused(tmp_path: Path) -> None:
    sparse = with_module(make_checkpoint(tmp_path / "sparse", "qwen3_5_moe_text", tokenizer=False))
    dense = make_checkpoint(tmp_path / "dense", "qwen3_5_text", tokenizer=False)
    save_file({**load_file(dense / WEIGHTS), **sparse.weights}, dense / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"a mixture of experts .* has none, so nothing says how"):
        MTPCheckpoint.open(dense, Checkpoint.open(dense).config)
