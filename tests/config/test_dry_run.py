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
    assert info["memory"]["states"] == (info["memory"]["requests"] + 2) * info["memory"]["state_request"] > 0
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
    (["--device-memory", "24GiB", "--device-capability", "89"], "--device-capability '89' is not valid"),
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


SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "load_format": "dummy"}


def card_plan(shape: str, memory: str, capability: str, *flags: str, **options: str) -> Any:
    """Plan a shape with random weights and MTP for a GPU. options: of the drafter."""
    card = "--device-memory", memory, "--device-capability", capability
    spec = json.dumps({**MTP, **options})
    return planned(str(SHAPES / shape), "--load-format", "dummy", "--speculative-config", spec, *card, *flags)


def test_a_27b_in_4_bits_with_mtp_fits_24_gib() -> None:
    result = card_plan("qwen3.8-27b-awq", "24GiB", "sm_89", draft_quantization="none")
    assert result.exit_code == 0, result.output
    info = json.loads(result.stdout)
    memory, decisions = info["memory"], {each["name"]: each for each in info["decisions"]}
    assert 16.5 * GIB < memory["weights"] < 17.5 * GIB
    hidden, mlp, heads, size = 5120, 17408, 24 * 256, 4 * 256
    module = 2 * hidden * hidden + 3 * hidden * mlp + hidden * (2 * heads + 2 * size) + heads * hidden
    assert 0 < memory["drafter"] - 2 * module < 1e6, "norms; embedding and LM head are the target's"
    assert memory["requests"] == int(decisions["max_num_seqs"]["value"]) == 4
    assert "170 MiB of recurrent state" in decisions["max_num_seqs"]["reason"]
    assert memory["pass_tokens"] == int(decisions["max_num_batched_tokens"]["value"]) == 512
    mlp_pass = 512 * 2 * (2 * mlp + mlp + 4 * hidden) + 2 * (2 * mlp) * hidden
    assert memory["pass"] == mlp_pass, "gate and up, their product, the residual stream; the unpacked weight"
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        assert [each["name"] for each in info["decisions"]].count(name) == 1
    assert 10_000 < memory["kv_tokens"] < 20_000
    assert decisions["kernels"]["value"] == "Triton"


def test_a_copy_of_the_lm_head_is_counted() -> None:
    shape, card = "qwen3.8-27b-awq", ("48GiB", "8.9")
    auto, none = (
        json.loads(card_plan(shape, *card, draft_quantization=each).stdout)["memory"] for each in ("auto", "none")
    )
    assert auto["drafter"] - none["drafter"] == 248320 * 5120
    assert auto["requests"] < none["requests"]
    older = json.loads(card_plan(shape, "48GiB", "8.6").stdout)["memory"]
    assert older["drafter"] == none["drafter"], "no products of e4m3"
    small = json.loads(card_plan(shape, "24GiB", "8.9").stdout)
    assert small["memory"]["drafter"] == none["drafter"], "the copy would take half of what weights leave"
    assert "takes 1212 MiB" in {each["name"]: each["reason"] for each in small["decisions"]}["draft_quantization"]


def test_lookup_drafters_take_no_memory() -> None:
    card = "--device-memory", "24GiB", "--speculative-method", "ngram"
    result = planned(str(SHAPES / "qwen3.8-27b-awq"), "--load-format", "dummy", *card)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["memory"]["drafter"] == 0


def test_states_that_do_not_fit_are_named() -> None:
    result = card_plan("qwen3.8-27b-awq", "24GiB", "8.9", "--max-num-seqs", "256")
    assert result.exit_code != 0
    assert "the state of 256 requests" in result.output
    assert "a lower --max-num-seqs" in result.output
    assert "17.8 GiB on each GPU, and" in card_plan("qwen3.8-27b-awq", "16GiB", "8.9").output


def test_large_cards_keep_the_usual_number_of_requests() -> None:
    for shape, memory in (("qwen3.5-35b-a3b", "139GiB"), ("qwen3.5-35b-a3b-fp8", "79GiB"), ("qwen3.5-9b", "79GiB")):
        info = json.loads(card_plan(shape, memory, "9.0").stdout)
        assert info["memory"]["requests"] == 256, shape
        assert info["memory"]["pass_tokens"] == 8192, shape


def test_numbers_that_the_user_set_stay() -> None:
    flags = "--max-num-batched-tokens", "2048", "--max-num-seqs", "2"
    memory = json.loads(card_plan("qwen3.8-27b-awq", "24GiB", "8.9", *flags).stdout)["memory"]
    assert (memory["requests"], memory["pass_tokens"]) == (2, 2048)
