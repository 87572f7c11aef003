"""An impossible drafter ends the start with one line that names the error, and a status: 2 for a flag, 1 for a
checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.drafters.noisy import resized
from tests.engine.helpers import engine
from tests.engine.matrix import config_of
from unisono.cli.main import app
from unisono.types import ConfigError, SpeculativeConfig


def explain(target: Path | str, *flags: str) -> Any:
    small = ["--device", "cpu", "--max-num-seqs", "1", "--max-model-len", "64"]
    return CliRunner().invoke(app, ["explain", str(target), *small, *flags])


FLAGS: dict[str, str] = {
    '{"method": "crystal-ball"}': "'crystal-ball': unknown drafter. Supported: combined, dflash, dspark, eagle, eagle3",
    '{"method": "eagle"}': "'eagle' needs \"model\": the directory of a head",
    '{"method": "dflash"}': "'dflash' needs \"model\": the directory of a head",
    '{"method": "mtp_frozen"}': "'mtp_frozen' needs \"model\"",
    '{"method": "standalone"}': "'standalone' needs \"model\"",
    '{"method": "eagle", "model": 5}': '"model": 5 of the speculative config: give a directory',
    '{"method": "eagle", "model": ""}': "\"model\": '' of the speculative config",
    '{"method": "ngram", "model": "x"}': "\"model\": 'x': the method 'ngram' has no checkpoint",
    '{"method": "none", "model": "x"}': "\"model\": 'x': the method 'none' has no checkpoint",
    '{"method": "none", "beams": 4}': "'none' has no option 'beams'. It has none",
    '{"method": "eagle", "aux_layers": "input", "model": "x"}': "'eagle' has no option 'aux_layers'. Its options: ",
    '{"method": "eagle", "load_format": ["auto"], "model": "x"}': "load_format=['auto'] of the method 'eagle': choose",
    '{"method": "ngram", "num_speculative_tokens": 0}': "num_speculative_tokens=0: give a whole number from 1 to 15",
    '{"method": "ngram", "num_speculative_tokens": 16}': "num_speculative_tokens=16: give a whole number from 1 to 15",
    '{"method": "ngram", "num_speculative_tokens": "3"}': "num_speculative_tokens='3'",
    '{"method": "ngram", "num_speculative_tokens": null}': "num_speculative_tokens=None",
    '{"method": "ngram", "num_speculative_tokens": true}': "num_speculative_tokens=True",
    '{"method": "ngram", "num_speculative_tokens": 3.0}': "num_speculative_tokens=3.0",
    '{"method": 7}': "method=7: choose a drafter with --speculative-method",
    '{"num_speculative_tokens": 2}': "num_speculative_tokens=2: choose a drafter with --speculative-method",
    '{"method": "mtp", "num_speculative_tokens": 0}': "from 1 to 15, or the method none to draft",
    '{"model": "x"}': "model='x': choose a drafter",
    "{method}": "--speculative-config is not valid JSON",
    "[1]": "--speculative-config '[1]': give a JSON object",
}


@pytest.mark.parametrize("text", FLAGS)
def test_invalid_speculative_config_flags_raise(text: str) -> None:
    result = explain("tiny", "--speculative-config", text)
    assert (result.exit_code, FLAGS[text] in result.stderr) == (2, True), result.output
    assert sum(not line.endswith(" …") for line in result.stderr.splitlines()) == 1, "one line beside the stages"


def test_short_flags_alone() -> None:
    result = explain("tiny", "--num-speculative-tokens", "3")
    assert (result.exit_code, "num_speculative_tokens=3: choose a drafter" in result.stderr) == (2, True)


def refused(target: Path, method: str, model: Path) -> str:
    config = json.dumps({"method": method, "model": str(model)})
    result = explain(target, "--speculative-config", config)
    assert result.exit_code == 1, result.output
    assert sum(not line.endswith(" …") for line in result.stderr.splitlines()) == 1, "one line beside the stages"
    return result.stderr


def test_a_head_that_does_not_fit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = checkpoints["mistral"]
    config = config_of(target)
    eagle = make_eagle(tmp_path / "eagle", config).path
    mapped = make_eagle3(tmp_path / "eagle3", config, (2, 1, 3), aux=[2, 1, 3], draft_vocab=100).path
    assert "does not exist" in refused(target, "eagle", tmp_path / "nowhere")
    assert "made for another target" in refused(checkpoints["qwen3"], "eagle", eagle)
    assert "goes with the method eagle" in refused(target, "eagle3", eagle)
    assert "give the method eagle3" in refused(target, "eagle", mapped)
    assert "has no MTP modules" in refused(target, "mtp", eagle)
    assert "has keys of its own" in refused(target, "mtp_frozen", eagle)
    other = make_eagle3(tmp_path / "layers", config, (2, 1, 3), aux=[2, 1, 99]).path
    assert "the target has 3 layers" in refused(target, "eagle3", other)
    file = mapped / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "d2t": torch.arange(100).flip(0) * 2}, file)
    assert "d2t does not map" in refused(target, "eagle3", mapped)
    del weights["d2t"]
    save_file(weights, file)
    assert "tensor d2t is missing" in refused(target, "eagle3", mapped)
    whole = eagle / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:5000])
    assert "is truncated" in refused(target, "eagle", eagle)


def test_a_draft_vocabulary_that_does_not_map(qwen3: Path, tmp_path: Path) -> None:
    """A draft model with other tokens is a flag that cannot be honoured."""
    other = resized(qwen3, tmp_path / "other", 263)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"another vocabulary than the target: token id \d+ is '[ab]' there and '[ab]'"
    ):
        engine(qwen3, speculative=SpeculativeConfig("standalone", str(other)))


def test_refusals_come_before_the_target_is_loaded(qwen3: Path, tmp_path: Path) -> None:
    """Minutes of loading must not end in a typing error: here the target has no weights at all."""
    bare = Path(shutil.copytree(qwen3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    for method, words in (("crystal-ball", "Unknown drafter"), ("eagle", 'needs "model"')):
        with pytest.raises(ConfigError, match=words):
            engine(bare, speculative=SpeculativeConfig(method))
