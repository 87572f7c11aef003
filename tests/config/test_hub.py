"""Downloads from a hub: config.json first, then only files that are read, and one-line errors that name the cause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.config.configs import LLAMA_31_8B, write
from tests.config.fake_hub import COMMIT, FakeHub, fake_hub
from tests.http.conftest import ROOT
from unisono.config.catalog import bundled

BESIDE = (
    "consolidated.safetensors", "original/consolidated.00.pth", "original/params.json", "pytorch_model.bin",
    "model.gguf", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "README.md", "modeling_tiny.py",
    "model-00009-of-00009.safetensors", "training_args.bin", "metal/model.bin",
)  # fmt: skip
"""Files of a repository that are not read."""


def shards(directory: Path) -> Path:
    """The bundled model with its weights in a shard that an index names."""
    shutil.copytree(bundled["tiny"], directory)
    weights = directory / "model-00001-of-00001.safetensors"
    (directory / "model.safetensors").rename(weights)
    data = weights.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    index = {"weight_map": {name: weights.name for name in header if name != "__metadata__"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    repositories = tmp_path / "repositories"
    small = shutil.copytree(bundled["tiny"], repositories / "small")
    sharded = shards(repositories / "sharded")
    for name in BESIDE:
        for directory in (small, sharded):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(b"not read")
    foreign = write(
        repositories / "foreign",
        LLAMA_31_8B,
        architectures=["Zamba2ForCausalLM"],
        model_type="zamba2",
    )
    renamed = write(repositories / "renamed", LLAMA_31_8B, residual_multiplier=0.2)
    for directory in (foreign, renamed):
        (directory / "model.safetensors").write_bytes(b"weights")
        (directory / "tokenizer.json").write_text("{}")
    adapter = repositories / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    gguf = repositories / "gguf"
    gguf.mkdir()
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    pickles = write(repositories / "pickles", LLAMA_31_8B)
    (pickles / "pytorch_model.bin").write_bytes(b"weights")
    known = {f"owner/{directory.name}": directory for directory in repositories.iterdir()}
    with fake_hub(known, tmp_path / "home") as hub:
        yield hub


def resolve(name: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """``catalog.find_directory`` of a name in a process of its own; its standard output is the directory."""
    code = (
        "import sys; from unisono.config import catalog\n"
        f"try: print(catalog.find_directory({name!r}))\nexcept Exception as error: sys.exit(str(error))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def explain(name: str, hub: FakeHub) -> str:
    """Standard error of ``unisono explain NAME``, which must be refused without torch."""
    code = (
        f"import sys, unisono.cli.main; sys.argv[1:] = ['explain', {name!r}]\ntry: unisono.cli.main.app()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=hub.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (1, "False"), done.stderr
    return done.stderr


def test_a_hub_id_is_downloaded_once(hub: FakeHub) -> None:
    first = resolve("owner/small", hub.environment)
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert (directory / "config.json").read_bytes() == (bundled["tiny"] / "config.json").read_bytes()
    assert hub.downloaded[0] == "owner/small/config.json"
    count = len(hub.asked)
    again = resolve("owner/small", hub.environment)
    assert (again.stdout, len(hub.asked)) == (first.stdout, count)  # from the cache, without a question
    assert resolve("owner/small", {**hub.environment, "HF_HUB_OFFLINE": "1"}).stdout == first.stdout
    for file in directory.glob("*.safetensors"):
        file.unlink()  # a download that was cut off
    assert resolve("owner/small", hub.environment).stdout == first.stdout
    assert list(directory.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["small", "sharded"])
def test_only_files_that_are_read_are_downloaded(hub: FakeHub, name: str) -> None:
    done = resolve(f"owner/{name}", hub.environment)
    assert done.returncode == 0, done.stderr
    got = {file.removeprefix(f"owner/{name}/") for file in hub.downloaded}
    assert not got & {*BESIDE}
    weights = {"model.safetensors"}
    if name == "sharded":
        weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert got >= {"config.json", "tokenizer.json", "tokenizer_config.json", *weights}
    assert len(hub.downloaded) == len(got)


def test_a_dry_run_downloads_no_weights(hub: FakeHub) -> None:
    command = [sys.executable, "-m", "unisono", "explain", "owner/sharded", "--dry-run", "--json", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=hub.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"]["architecture"] == "Qwen3ForCausalLM"
    assert told["model"]["files"] == (bundled["tiny"] / "model.safetensors").stat().st_size
    assert hub.downloaded[0] == "owner/sharded/config.json"
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("name", "says"),
    [("foreign", "'Zamba2ForCausalLM' is not supported"), ("renamed", "residual_multiplier=0.2")],
)
def test_refused_model_downloads_only_its_config(hub: FakeHub, name: str, says: str) -> None:
    assert says in explain(f"owner/{name}", hub)
    assert hub.downloaded == [f"owner/{name}/config.json"]
    assert says in explain(f"owner/{name}", hub)  # from the cache
    assert len(hub.downloaded) == 1


@pytest.mark.parametrize(
    ("name", "says", "downloaded"),
    [
        ("adapter", ("LoRA adapter", "org/base", "--lora-modules NAME=PATH"), ["adapter_config.json"]),
        ("gguf", ("GGUF", "model-Q4_K_M.gguf"), []),
        ("pickles", ("only pytorch_model.bin", "save_pretrained"), ["config.json"]),
        ("absent", ("the hub has no such checkpoint",), []),
        ("small@v9", ("no revision 'v9'",), []),
    ],
)
def test_unsupported_hub_checkpoints_are_refused_with_reason(
    hub: FakeHub, name: str, says: tuple[str, ...], downloaded: list[str]
) -> None:
    told = explain(f"owner/{name}", hub)
    for words in says:
        assert words in told
    assert [file.split("/", 2)[2] for file in hub.downloaded] == downloaded


def test_offline_errors_name_the_nearest_id_of_the_cache(hub: FakeHub) -> None:
    assert resolve("owner/small", hub.environment).returncode == 0
    offline = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    told = resolve("owner/smalll", offline).stderr
    assert "HF_HUB_OFFLINE is set" in told
    assert "'owner/small': did you mean that?" in told
    snapshot = hub.home / "hub" / "models--owner--small" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    told = resolve("owner/small", offline).stderr
    assert "without its weights" in told
    assert "HF_HUB_OFFLINE is set" in told


def test_a_hub_that_does_not_answer(hub: FakeHub) -> None:
    started = time.monotonic()
    gone = resolve("owner/small", {**hub.environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "the download failed" in gone.stderr
    assert "owner/small" in gone.stderr
    assert time.monotonic() - started < 60
