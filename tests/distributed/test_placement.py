"""Experts in another order on the ranks: the same bytes, balanced loads, files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.distributed.parts_ import loaded
from tests.distributed.requests_ import ROOMY, differing, run
from tests.engine.helpers import engine
from tests.models.make import make_checkpoint
from unisono.cli.main import app
from unisono.config.expert_placement import balanced, busiest_share, read_placement, tokens_in
from unisono.distributed.gather import Ranks
from unisono.layers.formats.base import part_of
from unisono.types import ConfigError

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6, "num_hidden_layers": 3}
LAYER = "layers.1.feed_forward"
ORDER = (5, 0, 3, 1, 4, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "glm4_moe_lite", **HEADS)


def test_the_busiest_experts_are_apart() -> None:
    tokens = [100, 90, 10, 8, 6, 4, 2, 0]
    order = balanced(tokens, 4)
    assert sorted(order) == list(range(8))
    assert [set(order[at : at + 2]) for at in range(0, 8, 2)] == [{0, 7}, {1, 6}, {2, 5}, {3, 4}]
    assert busiest_share(tokens, order, 4) < busiest_share(tokens, range(8), 4)
    with pytest.raises(ConfigError, match="8 experts cannot be divided among 3 ranks"):
        balanced(tokens, 3)


@pytest.mark.parametrize("format", ["auto", "dummy"])
def test_a_rank_holds_its_experts(format: Any, path: Path) -> None:
    one = dict(loaded(path, Ranks(), load_format=format).named_parameters())
    for index in (0, 1):
        ranks = Ranks(index, 2, whole_experts=True, placement=((LAYER, ORDER),))
        decoder = loaded(path, ranks, load_format=format)
        for name, parameter in decoder.named_parameters():
            cut = part_of(parameter)
            assert torch.equal(parameter, one[name] if cut is None else cut.of(one[name])), name
        ids = decoder.layers[1].feed_forward.physical_ids.tolist()
        assert [ids[expert] for expert in ORDER] == list(range(6))
        assert ids[6] == 6, "padding is no expert's"
        gate_up = decoder.layers[1].feed_forward.stacks[0].weight
        mine = one[f"{LAYER}.experts.gate_up.weight"][list(ORDER[3 * index : 3 * index + 3])]
        assert torch.equal(gate_up[:3], mine)


def test_orders_change_no_byte(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text(json.dumps({LAYER: ORDER}))
    alone = run(path, 1, 6, captures=1)
    found = run(path, 2, 6, captures=1, enable_expert_parallel=True, expert_placement=str(file), **ROOMY)
    assert differing(alone, found) == 0


def test_the_command_places_what_an_engine_counted(path: Path, tmp_path: Path) -> None:
    with engine(path) as llm:
        llm.generate([list(range(3, 60))])
        (tmp_path / "info.json").write_text(json.dumps({"engine": {"info": llm.engine.info()}}, default=str))
    out = tmp_path / "order.json"
    result = CliRunner().invoke(app, ["place-experts", str(tmp_path / "info.json"), "--ranks", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"{LAYER}: " in result.output
    assert LAYER in dict(read_placement(str(out)))


@pytest.mark.parametrize("tokens", [3, [1, "2"], [1, -1], [1, None]], ids=str)
def test_counts_that_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="expert_tokens of layer must be a list of counts, not "):
        tokens_in({"engine": {"info": {"expert_tokens": {"layer": tokens}}}})


REFUSED = {
    "no permutation": ({LAYER: [0, 0, 1]}, "must be a list with each expert's number once"),
    "no numbers": ({LAYER: [False, True]}, "must be a list with each expert's number once"),
    "another layer": ({"layers.9.feed_forward": list(ORDER)}, r"the model has no experts at layers\.9\.feed_forward"),
    "another number": ({LAYER: [1, 0]}, "it orders 2 experts of a layer with 6"),
}


def placed(file: Path) -> Ranks:
    """The first of two ranks that hold experts in the order of a file."""
    return Ranks(0, 2, whole_experts=True, placement=read_placement(str(file)))


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, path: Path, tmp_path: Path) -> None:
    content, says = REFUSED[case]
    (tmp_path / "order.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        loaded(path, placed(tmp_path / "order.json"))


def test_whole_experts_are_needed(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--expert-placement places whole experts: add --enable-expert-parallel"):
        engine(path, tensor_parallel_size=2, expert_placement=str(tmp_path / "order.json"))


@pytest.mark.parametrize("flags", [{"expert_placement": "order.json"}, {"enable_dp_attention": True}])
def test_several_ranks_are_needed(flags: dict[str, Any], path: Path) -> None:
    with pytest.raises(ConfigError, match="divide a model among GPUs: give --tensor-parallel-size"):
        engine(path, **flags)
