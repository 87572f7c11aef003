"""What cannot be served is told within a second by every command, with the cause, and before torch is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config.configs import LLAMA_31_8B, write
from tests.http.conftest import ROOT
from unisono.cli.main import app
from unisono.config.catalog import bundled
from unisono.config.preflight.ranks import check_config_heads
from unisono.types import ConfigError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(bundled["tiny"], tmp_path / "copy"))


def edit(directory: Path, **fields: object) -> Path:
    return write(directory, json.loads((directory / "config.json").read_text()), **fields)


def told(*arguments: str) -> str:
    """Standard error of a command that is refused, on one line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code in (1, 2), result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output


# ---- directories ------------------------------------------------------------------------------------


def gguf(directory: Path) -> Path:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return directory


def gguf_file(directory: Path) -> Path:
    return gguf(directory) / "model-Q4_K_M.gguf"


def gguf_beside_config(directory: Path) -> Path:
    (directory / "model.safetensors").rename(directory / "model.gguf")
    return directory


def adapter(directory: Path) -> Path:
    shutil.rmtree(directory)
    directory.mkdir()
    config = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


def adapter_with_config(directory: Path) -> Path:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    return directory


def pickles(directory: Path) -> Path:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    return directory


def makers_own(directory: Path) -> Path:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "params.json").write_text("{}")
    (directory / "consolidated.safetensors").write_bytes(b"")
    return directory


def consolidated(directory: Path) -> Path:
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    return directory


def mlx(directory: Path) -> Path:
    return edit(directory, quantization={"group_size": 64, "bits": 4})


def mlx_of_today(directory: Path) -> Path:
    return edit(directory, quantization_config={"group_size": 64, "bits": 4})


def modelopt(directory: Path) -> Path:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    return directory


def old_gptq(directory: Path) -> Path:
    (directory / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false}')
    return directory


def bitsandbytes(directory: Path) -> Path:
    return edit(directory, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def three_bits(directory: Path) -> Path:
    return edit(directory, quantization_config={"quant_method": "gptq", "bits": 3})


def nvfp4(directory: Path) -> Path:
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4}}
    return edit(directory, quantization_config={"quant_method": "compressed-tensors", "config_groups": {"0": group}})


def lfs_pointer(directory: Path) -> Path:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return directory


def truncated(directory: Path) -> Path:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return directory


def missing_shard(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    shard = "model-00001-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard, "b": shard}}))
    return directory


def no_weights(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    return directory


def not_json(directory: Path) -> Path:
    (directory / "config.json").write_text('{"architectures": [')
    return directory


def the_config_itself(directory: Path) -> Path:
    return directory / "config.json"


def parent(directory: Path) -> Path:
    return directory.parent


def typing_error(directory: Path) -> Path:
    return directory.parent / "copyy"


def diffusers(directory: Path) -> Path:
    (directory / "config.json").rename(directory / "model_index.json")
    return directory


def draft_head(directory: Path) -> Path:
    return bundled["tiny-eagle3"]


def foreign(directory: Path) -> Path:
    return edit(directory, architectures=["Zamba2ForCausalLM"], model_type="zamba2")


CAUSES: dict[Callable[[Path], Path], tuple[str, ...]] = {
    gguf: ("GGUF", "model-Q4_K_M.gguf", "no config.json", "give the file itself"),
    gguf_file: ("truncated or no GGUF file",),
    gguf_beside_config: ("GGUF", "model.gguf", "neither model.safetensors"),
    adapter: ("is a LoRA adapter", "org/base", "--lora-modules NAME=PATH"),
    adapter_with_config: ("is a LoRA adapter", "org/base"),
    pickles: ("only pytorch_model.bin", "save_pretrained"),
    makers_own: ("no config.json", "params.json"),
    consolidated: ("only consolidated.safetensors", "the version for transformers"),
    mlx: ("quantised with MLX", "bits=4"),
    mlx_of_today: ("quantised with MLX", "bits=4"),
    modelopt: ("'modelopt' with quant_algo='W4A8_AWQ'", "NVFP4"),
    old_gptq: ("quantised with GPTQ", "quantize_config.json"),
    bitsandbytes: ("quant_method='bitsandbytes'", "unquantised"),
    three_bits: ("'gptq' with bits=3", "supported is 4 or 8"),
    nvfp4: ("compressed-tensors", "strategy and group_size"),
    lfs_pointer: ("Git LFS", "git lfs pull"),
    truncated: ("truncated", "Download it again"),
    missing_shard: ("model-00001-of-00002.safetensors is missing", "2 of 2 tensors"),
    no_weights: ("neither model.safetensors", "--load-format dummy"),
    not_json: ("config.json cannot be read as JSON",),
    the_config_itself: ("is a file", "give the directory"),
    parent: ("no config.json", "in its folder copy"),
    typing_error: ("does not exist", "did you mean copy?"),
    diffusers: ("diffusers pipeline",),
    draft_head: ("is a draft head", "--speculative-model"),
    foreign: ("'Zamba2ForCausalLM' is not supported", "LlamaForCausalLM"),
}


@pytest.mark.parametrize("change", CAUSES, ids=lambda change: change.__name__)
def test_the_cause_is_named(change: Callable[[Path], Path], tiny: Path) -> None:
    said = told("explain", str(change(tiny)))
    for words in CAUSES[change]:
        assert words in said


def test_a_model_as_an_adapter(tiny: Path) -> None:
    said = told("serve", str(tiny), "--enable-lora", "--lora-modules", f"one={bundled['tiny']}")
    assert "it holds a model, not an adapter" in said
    assert "one=/nowhere: it does not exist" in told(
        "chat", str(tiny), "--enable-lora", "--lora-modules", "one=/nowhere"
    )


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "compare"])
def test_commands_that_read_text_need_a_tokenizer(command: str, tiny: Path) -> None:
    for file in tiny.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in told(command, str(tiny))


def test_ranks(tiny: Path) -> None:
    assert "8 query heads over 2 KV heads" in told("serve", str(tiny), "--tensor-parallel-size", "3")
    hybrid = told("serve", "tiny-hybrid", "--tensor-parallel-size", "64")
    assert "cannot be divided among 64 ranks" in hybrid


def test_heads_of_mamba2_among_ranks() -> None:
    for heads, groups in (("mamba_num_heads", "n_groups"), ("mamba_n_heads", "mamba_n_groups")):
        fields = {heads: 6, groups: 2}
        with pytest.raises(ConfigError, match="6 heads over 2 groups, which cannot be divided among 4"):
            check_config_heads(fields, 4)
        check_config_heads(fields, 2)
        check_config_heads({**fields, "layer_types": ["attention"]}, 4)


def test_ranks_without_gpus(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's directory says how many GPUs there can be; CUDA_VISIBLE_DEVICES hides some."""
    for number in range(3):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.setattr("unisono.config.preflight.ranks.GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "3 are visible here" in told("explain", str(tiny), "--tensor-parallel-size", "4")
    assert "2 are visible here" in told("explain", str(tiny), "--tensor-parallel-size", "4", "--device", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "1 is visible here" in told("explain", str(tiny), "--tensor-parallel-size", "2")


# ---- every command ----------------------------------------------------------------------------------

COMMANDS = (
    "serve {}", "generate {}", "chat {}", "explain {}", "explain --dry-run {}", "eval {}", "compare {}",
    "compare tiny {}", "serve tiny --speculative-method standalone --speculative-model {}", "bench latency --model {}",
    "bench throughput --model {}", "bench serve --model {}", "bench exact --model {}",
    "train-draft eagle3 --target {} --data /dev/null --out /nowhere",
)  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_report_unsupported_models_without_importing_torch(line: str, tmp_path: Path) -> None:
    foreign = write(tmp_path / "c", LLAMA_31_8B, architectures=["Zamba2ForCausalLM"], model_type="zamba2")
    arguments = line.format(foreign).split()
    code = f"import sys, unisono.cli.main; sys.argv[1:] = {arguments!r}\ntry: unisono.cli.main.app()\n"
    code += "finally: print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "'Zamba2ForCausalLM' is not supported" in done.stderr
    assert (done.returncode, done.stdout.strip()) == (1, "[]")
