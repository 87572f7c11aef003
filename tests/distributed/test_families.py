"""Families with states, norms or routers of their own in the engine: drafts, prefix hits, pages, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.requests_ import ROOMY, differing, run, spec
from tests.models.make import make_checkpoint
from tests.models.make_layer_mtp import make_layer_mtp, make_nemotron_mtp

COUNT = 6
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "minimax_m2": {},
    "bailing_moe": {},
    "lfm2_moe": {"vocab_size": 264},
    "granitemoehybrid": {"vocab_size": 264, "mamba_n_groups": 1},  # the ranks share a group
    "nemotron_h": {"vocab_size": 264},
    "kimi_linear": {"vocab_size": 264},
}


def same(path: Path, alone: dict[str, Any], **flags: Any) -> dict[str, Any]:
    found = run(path, count=COUNT, captures=1, **{"ranks": 1, **flags})
    assert differing(alone, found) == 0
    return found


@pytest.fixture(scope="module", params=SIZES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **SIZES[request.param])
    return path, run(path, 1, COUNT, captures=1)


def test_drafts_and_chunks_change_nothing(case: tuple[Path, dict[str, Any]]) -> None:
    path, alone = case
    assert alone["preemptions"] > 0
    same(path, alone, speculative=spec("ngram", num_speculative_tokens=3))
    assert same(path, alone, **ROOMY | {"max_num_batched_tokens": 16})["hits"] > 0


def test_two_ranks_change_nothing(case: tuple[Path, dict[str, Any]]) -> None:
    same(*case, ranks=2)


def test_a_module_of_latent_attention_changes_nothing(tmp_path: Path) -> None:
    made = make_layer_mtp(tmp_path, "glm4_moe_lite", **SIZES["glm4_moe_lite"], num_hidden_layers=3)
    alone = run(made.path, 1, COUNT, captures=1, speculative=spec("none"))
    found = same(made.path, alone, speculative=spec("mtp", num_speculative_tokens=3))
    assert found["replays"] > 0


def test_a_module_of_ling_changes_nothing(tmp_path: Path) -> None:
    """Packed projections of a module, whole experts on two ranks, and prefix hits."""
    made = make_layer_mtp(tmp_path, "bailing_moe", num_hidden_layers=3)
    alone = run(made.path, 1, COUNT, captures=1, speculative=spec("none"))
    found = same(made.path, alone, **ROOMY, speculative=spec("mtp", num_speculative_tokens=3))
    assert found["replays"] > 0
    assert found["hits"] > 0
    more = {"ranks": 2, "enable_expert_parallel": True}
    same(made.path, alone, **more, speculative=spec("mtp", num_speculative_tokens=2))


def test_a_module_of_nemotron_changes_nothing(tmp_path: Path) -> None:
    made = make_nemotron_mtp(tmp_path, **SIZES["nemotron_h"], moe_latent_size=24)
    alone = run(made.path, 1, COUNT, captures=1, speculative=spec("none"))
    found = same(made.path, alone, **ROOMY, speculative=spec("mtp", num_speculative_tokens=3))
    assert found["replays"] > 0
    assert found["hits"] > 0
    same(made.path, alone, ranks=2, speculative=spec("mtp", num_speculative_tokens=2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("glm4_moe", {"num_attention_heads": 4, "num_key_value_heads": 2}), ("nemotron_h", SIZES["nemotron_h"])],
)
def test_replicated_experts_with_scores_write_the_same_bytes(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, **sizes)
    same(path, run(path, 1, COUNT, captures=1), ranks=2, enable_expert_parallel=True)
