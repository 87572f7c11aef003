"""Broken and hostile checkpoints: a clear error soon, no code run, and a signal ends a start at any time."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import hostile
from tests.models.harness import load
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import INDEX, WEIGHTS
from unisono.text.tokenizer import Tokenizer
from unisono.types import CheckpointError, ConfigError

LIMIT = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "llama")


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Each ends within LIMIT seconds, or is interrupted."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read(directory: Path) -> None:
    """All that a start reads of a checkpoint."""
    load(directory)
    Tokenizer.load(directory)


def test_the_directory_itself_is_good(directory: Path) -> None:
    read(directory)


@pytest.mark.parametrize("name", hostile.HOSTILE)
def test_a_hostile_checkpoint_is_refused(directory: Path, name: str) -> None:
    hostile.HOSTILE[name](directory)
    if name.startswith("index") and (directory / WEIGHTS).exists():
        (directory / WEIGHTS).unlink()
    with pytest.raises((CheckpointError, ConfigError)) as error:
        read(directory)
    assert len(str(error.value)) < 1200
    assert str(directory) in str(error.value) or "config.json" in str(error.value)


def test_links_within_the_hubs_cache_are_read(made: Path, tmp_path: Path) -> None:
    """As huggingface_hub lays them: snapshots/<revision>/<file> -> ../../blobs/<hash>."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(made, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    read(snapshot)


def test_links_within_the_directory_are_read(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "weights")
    (directory / WEIGHTS).symlink_to("weights")
    read(directory)


def fuzz(made: Path, where: Path, count: int, seed: int) -> int:
    chance, refused = random.Random(seed), 0
    for i in range(count):
        directory = Path(shutil.copytree(made, where / str(i)))
        what = hostile.garble(directory, chance)
        signal.alarm(LIMIT)
        try:
            read(directory)
        except (CheckpointError, ConfigError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        shutil.rmtree(directory)
    return refused


def test_a_short_fuzz(made: Path, tmp_path: Path) -> None:
    assert fuzz(made, tmp_path, 40, seed=1) > 10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_long_fuzz(made: Path, tmp_path: Path, seed: int) -> None:
    fuzz(made, tmp_path, 300, seed)


def test_pickles_are_not_read(directory: Path, tmp_path: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="neither"):
        read(directory)
    assert not (directory / INDEX).exists()


def test_a_signal_ends_a_start_that_hangs(directory: Path, tmp_path: Path) -> None:
    """Whatever it hangs in: here reading a tokenizer never ends, in a thread."""
    import subprocess

    code = (
        "import sys, time; from pathlib import Path; from unisono.http import server; "
        "from unisono.text.tokenizer import Tokenizer; "
        "Tokenizer.load = lambda path: time.sleep(1000); "
        "from tests.http.fake_engine import FakeConfig; "
        "print('starting', flush=True); "
        "server.serve(FakeConfig(), server.ServerSettings(Path(sys.argv[1]), ('m',), port=0, "
        "engine='tests.http.fake_engine:FakeEngine'))"
    )
    signal.alarm(60)
    process = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.stdout.close()
