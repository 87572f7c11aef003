"""``explain --dry-run``: decisions and bytes, with the right numbers from the checkpoint's own sizes; no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.config.configs import LLAMA_31_8B, PUBLISHED, write
from unisono.cli.main import app
from unisono.config.catalog import bundled
from unisono.config.preflight.model import overridden

GIB = 1 << 30


def explained(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--dry-run", "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def tensor_bytes(directory: Path) -> int:
    """Bytes of the one weights file without its header."""
    data = (directory / "model.safetensors").read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "unisono.engine.worker.runner.Runner.__init__", lambda *given: pytest.fail("an engine was started")
    )


def test_a_bundled_model() -> None:
    info = explained("tiny", "--dtype", "bfloat16", "--max-model-len", "1000", "--max-num-seqs", "3")
    memory, model = info["memory"], info["model"]
    assert memory["weights"] == model["files"] == tensor_bytes(bundled["tiny"])
    assert memory["kv_token"] == 2 * 8 * 2 * 64 * 2  # keys and values, layers, KV heads, head size, bytes
    assert memory["kv_request"] == 1000 * memory["kv_token"]
    assert (memory["requests"], memory["states"]) == (3, 0)
    assert memory["kv_tokens"] == GIB // memory["kv_token"]
    assert model["drafter"] == "eagle3 (tiny-eagle3), k = 3"
    assert memory["drafter"] == tensor_bytes(bundled["tiny-eagle3"])
    assert {row["name"] for row in info["decisions"]} >= {"speculative", "max_num_batched_tokens"}


def test_flags_change_the_plan() -> None:
    plain = explained("tiny", "--dtype", "bfloat16", "--speculative-method", "none")
    assert (plain["model"]["drafter"], plain["memory"]["drafter"]) == ("none", 0)
    fp8 = explained("tiny", "--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert fp8["model"]["weights"].startswith("fp8")
    assert fp8["memory"]["weights"] < 0.6 * plain["memory"]["weights"]
    assert fp8["memory"]["kv_token"] < 0.6 * plain["memory"]["kv_token"]
    two = explained("tiny", "--dtype", "bfloat16", "--tensor-parallel-size", "2")
    assert two["memory"]["kv_token"] * 2 == plain["memory"]["kv_token"]
    assert two["memory"]["weights"] < plain["memory"]["weights"]
    short = explained("tiny", "--hf-overrides", '{"max_position_embeddings": 64}')
    assert short["model"]["context"] == 64


def test_overrides_merge_objects_within_objects() -> None:
    raw = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": [1, 2], "g": 4}
    changed = overridden(raw, {"a": {"c": {"d": 5}}, "f": [6], "g": {"h": 7}})
    assert changed == {"a": {"b": 1, "c": {"d": 5, "e": 3}}, "f": [6], "g": {"h": 7}}
    assert raw["a"]["c"]["d"] == 2


def test_a_hybrid() -> None:
    info = explained("tiny-hybrid", "--dtype", "bfloat16")
    config = json.loads((bundled["tiny-hybrid"] / "config.json").read_text())
    text = config.get("text_config", config)
    full = text["layer_types"].count("full_attention")
    assert info["memory"]["kv_token"] == 2 * full * text["num_key_value_heads"] * text["head_dim"] * 2
    assert info["memory"]["states"] == info["memory"]["requests"] * info["memory"]["state_request"] > 0
    assert info["model"]["drafter"] == "mtp, k = 3"
    both = info["memory"]["weights"] + info["memory"]["drafter"]
    assert both == pytest.approx(tensor_bytes(bundled["tiny-hybrid"]), rel=1e-3)  # some are kept in float32


def test_large_models_from_their_configs(tmp_path: Path) -> None:
    """Without weights, as ``--load-format dummy`` takes them."""
    llama = explained(str(write(tmp_path / "l", LLAMA_31_8B)), "--load-format", "dummy", "--dtype", "bfloat16")
    assert llama["memory"]["weights"] == 8_030_261_248 * 2  # parameters of Llama 3.1 8B
    assert llama["memory"]["kv_token"] == 2 * 32 * 8 * 128 * 2
    directory = write(tmp_path / "q", PUBLISHED["Qwen3-Coder-30B-A3B"])
    experts = explained(str(directory), "--load-format", "dummy", "--dtype", "bfloat16")
    assert experts["memory"]["weights"] == pytest.approx(30_532_122_624 * 2, rel=1e-3)


def test_tables() -> None:
    result = CliRunner().invoke(app, ["explain", "tiny", "--dry-run", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for words in ("Qwen3ForCausalLM", "keys and values of a token", "eagle3 (tiny-eagle3), k = 3", "Decisions"):
        assert words in result.output


def planned(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments, "--dry-run", "--json"])


def test_a_plan_for_a_gpu_that_is_not_here() -> None:
    result = planned("tiny", "--device-memory", "24GiB", "--device-capability", "8.9", "--max-num-seqs", "4")
    assert result.exit_code == 0, result.output
    info = json.loads(result.stdout)
    memory = info["memory"]
    assert memory["device"] == 24 * GIB
    assert 0 < memory["kv_left"] < 24 * GIB - memory["weights"]
    assert memory["kv_tokens"] == memory["kv_left"] // memory["kv_token"]
    (device,) = [each for each in info["decisions"] if each["name"] == "device"]
    assert "24GiB, compute capability 8.9" in device["reason"]
    (kernels,) = [each for each in info["decisions"] if each["name"] == "kernels"]
    assert kernels["value"] == "Triton"
    assert "99 KiB of shared memory" in kernels["reason"]


@pytest.mark.parametrize(("arguments", "says"), [
    (["--device-memory", "24"], "--device-memory '24' is not valid"),
    (["--device-memory", "24GiB", "--device-capability", "sm_89"], "--device-capability 'sm_89' is not valid"),
    (["--device-memory", "24GiB", "--device-capability", "7.5"], "compute capability 8.0 or later"),
    (["--device-memory", "24GiB", "--device", "cpu"], "--device cpu"),
    (["--device-capability", "8.9"], "give both"),
    (["--device-memory", "0.001GiB"], "leaves no room"),
    (["--device-memory", "24GiB", "--device-capability", "8.6", "--kv-cache-dtype", "fp8"], "e4m3 needs 8.9"),
])  # fmt: skip
def test_infeasible_plans_are_refused(arguments: list[str], says: str) -> None:
    result = planned("tiny", *arguments)
    assert result.exit_code != 0
    assert says in result.output
