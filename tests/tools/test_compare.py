"""``unisono compare``: the first differing token, and the layer and op that differ first, which a test breaks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forks import PROGRAMS
from unisono.config import catalog
from unisono.layers import mlp
from unisono.tools.compare.command import Side, compare
from unisono.types import ConfigError, SamplingParams

SMALL = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 128}
EAGER = SMALL | {"enforce_eager": True}
UNDRAFTED = EAGER | {"speculative_config": {"method": "none"}}
TEXT = ["Tom has 3 apples. He buys 4 more."]
GREEDY = SamplingParams(temperature=0, max_tokens=10, seed=0)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny`` with the attention output of its layer 3 turned round."""
    path = tmp_path_factory.mktemp("broken") / "tiny"
    shutil.copytree(catalog.bundled_path("tiny"), path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.self_attn.o_proj.weight"].neg_()
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_broken_weight_is_named(broken: Path) -> None:
    """From outside, with the short names of flags; a speculating side, so that passes have other shapes."""
    flags = json.dumps(EAGER)
    drafting = json.dumps(EAGER | {"speculative-method": "ngram", "max_num_batched_tokens": 16})
    command = ["-m", "unisono", "compare", "tiny", str(broken), "--a", flags, "--b", drafting]
    command += ["--prompt", TEXT[0], "--max-tokens", "6", "--json"]
    done = PROGRAMS.finished(*command, timeout=120)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    (one,) = told["found"]
    assert (told["prompts"], told["differ"]) == (1, 1)
    assert one["tokens"][0] != one["tokens"][1]
    assert one["traced"]
    op = one["op"]
    assert (op["place"], op["op"], op["position"]) == ("layers.3.mixer.o", "unisono.linear_norm", 0)
    assert op["largest"] > 0.01


def test_a_broken_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op without weights goes wrong in layer 5, for the fourth token on, and in B alone."""
    side: list[str] = []
    calls: list[int] = []
    kernel = mlp.gate_product

    def opened(self: Side, **more: Any) -> Any:
        side.append("A" if self.flags["seed"] == 0 else "B")
        calls.clear()
        return plain(self, **more)

    def wrong(x: torch.Tensor, *rest: Any) -> Any:
        if side[-1] == "B" and x.shape[0] >= 6:
            calls.append(x.shape[0])
            if len(calls) % 8 == 6:  # eight layers
                x = x.clone()
                x[3:, 7] += 4.0
        return kernel(x, *rest)

    plain = Side.open
    monkeypatch.setattr(Side, "open", opened)
    monkeypatch.setattr(mlp, "gate_product", wrong)
    sides = [Side("tiny", UNDRAFTED | {"seed": seed}) for seed in (0, 1)]
    (found,) = compare(*sides, TEXT, 0, GREEDY, trace_all=True)
    assert (found.op.place, found.op.op, found.op.position) == ("layers.5.feed_forward", "unisono.silu_mul", 3)
    assert (found.op.differing, found.op.elements) == (1, 576)
    assert f"of {found.op.place}, at position 3" in "\n".join(found.lines())


def test_speculation_and_chunks_change_no_bit_of_any_op() -> None:
    """The promise, op by op; what is said then."""
    sides = (
        Side("tiny", UNDRAFTED),
        Side.parse("--b", "tiny", json.dumps(EAGER | {"speculative_method": "ngram", "max_num_batched_tokens": 16})),
    )
    (found,) = compare(*sides, ["one two one two one two one two one two one"], 0, GREEDY, trace_all=True)
    assert found.index is None
    assert found.traced
    assert found.op is None
    assert found.ops > 50
    assert found.lines()[-1] == f"    {found.ops} ops of the model ran in both, with the same bits for every position"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "--a {: is not valid JSON"),
        ("[1]", "give a JSON object of flags"),
        ('{"speculative_method": 3}', "method"),
        ('{"model": "/no/such"}', "/no/such does not exist"),
    ],
)
def test_bad_flags(text: str, says: str) -> None:
    done = PROGRAMS.finished("-m", "unisono", "compare", "--a", text, timeout=60)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Side("tiny", {"nonsense": 1}).open()
