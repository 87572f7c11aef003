"""``--kv-offload-dir`` with several ranks: each has files of its own, of the same parts, and no byte depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.helpers import engine, prompts
from tests.engine.host_files import HOST, run_with_files
from unisono.kv.prefix_tree import page_digest
from unisono.types import ConfigError

PROMPT = prompts(1, 250, low=150, high=151, seed=9)[0]


@pytest.mark.parametrize(
    ("model", "ranks"), [("tiny", 2), *(pytest.param("tiny-hybrid", n, marks=pytest.mark.full) for n in (2, 4))]
)
def test_files_of_ranks_outlive_the_engine(model: str, ranks: int, tmp_path: Path) -> None:
    """What is damaged on one rank is removed on all; what is gone on one is so at the start."""
    alone, _ = run_with_files(tmp_path / "alone", PROMPT, model)
    directory, second = tmp_path / "ranks", page_digest(page_digest(b"", tuple(PROMPT[:16])), tuple(PROMPT[16:32]))
    own = ""
    steps = [(None, 0, 0), (None, 9, 0), (_change, 9, 1), (Path.unlink, 1, 0)]
    for damage, read, bad in steps if model != "tiny" else steps[:1] + steps[2:]:
        if damage is not None:
            damage(max(folder for folder in directory.iterdir() if str(folder) != own) / f"0-{second.hex()}.kv")
        answer, figures = run_with_files(directory, PROMPT, model, tensor_parallel_size=ranks)
        own = figures["directory"]  # rank 0's
        assert answer == alone
        assert figures["files_bad"] == bad
        assert figures["files_read"] >= read - bad
        assert figures["cached"] == (0 if read == 0 else 144) if damage is None else figures["cached"] <= 16
        names = [{path.name for path in folder.iterdir()} for folder in directory.iterdir()]
        assert len(names) == ranks
        assert all(each == names[0] for each in names)
        assert all(name.endswith(".kv") for name in names[0])


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_the_budget_is_of_all_ranks(tmp_path: Path) -> None:
    budget = 10.5 * (128 * 1024 + 100) / (1 << 30)
    _, figures = run_with_files(tmp_path, PROMPT, kv_offload_dir_gb=budget, tensor_parallel_size=2)
    assert 0 < figures["file_bytes"] <= budget * (1 << 30)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= budget * (1 << 30)


def test_unusable_offload_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-offload-dir /proc/nowhere"):
        engine("tiny", tensor_parallel_size=2, enforce_eager=True, kv_offload_dir="/proc/nowhere", **HOST)
