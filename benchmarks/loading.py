"""How fast a checkpoint is loaded: GB/s of ``models/loader.load_model`` from the page cache onto the device.

    python -m benchmarks.loading --at /dev/shm                    Qwen3.5-35B-A3B in fp8, 8 layers
    python -m benchmarks.loading --config DIR --layers 4          another config.json, with its shapes and formats
    python -m benchmarks.loading --readers 2 4 8 16               by the number of threads that read
    python -m benchmarks.loading --tiny                           a small one on the CPU, to try this file

Writes a checkpoint with the config's shapes and formats and random bytes, in shards, experts one by one where they are
quantised (as published); loads it several times, and removes it. Prints a Markdown table; *open*: seconds until the
headers are read and the places known, within the whole. The progress is the one that ``serve`` shows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.layers.formats.base import WeightTarget
from unisono.models.blocks.decoder import Decoder
from unisono.models.load import weights
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import INDEX, Checkpoint
from unisono.models.load.loader import checkpoint_names, load_model
from unisono.models.load.tensor_files import DTYPES

SHAPES = Path(__file__).parent / "shapes"
SHARD, BLOCK = 4 << 30, 1 << 24
FINITE = 0xBF
"""Bits of random bytes that are kept: without the others no number of any format is infinite or NaN."""
TINY = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128, "num_experts": 8, "vocab_size": 1000}


class Published:
    """What names a checkpoint holds: of experts that are quantised the single ones, else the fused ones."""

    def __init__(self, single: bool) -> None:
        self.single = single

    def __contains__(self, name: str) -> bool:
        return ".experts." in name and self.single == (re.search(r"\.experts\.\d+\.", name) is not None)


def cut(config: Path, directory: Path, layers: int, changes: Mapping[str, Any]) -> None:
    """Write a config.json with fewer layers."""
    raw = json.loads((config / "config.json").read_text())
    text = raw.get("text_config", raw)
    text.update({name: value for name, value in changes.items() if name in text}, num_hidden_layers=layers)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    (directory / "config.json").write_text(json.dumps(raw))


def wanted_of(checkpoint: Checkpoint) -> dict[str, WeightTarget]:
    """The tensors that the checkpoint must hold, by name; no memory is taken."""
    c = checkpoint.config
    builder = Builder(
        c.hidden_size, c.rms_eps, torch.bfloat16, "meta", no_attention, 1, checkpoint.format_of_module,
        c.zero_centered_norms,
    )  # fmt: skip
    single = checkpoint.quantization.method is not None
    return checkpoint_names(Decoder(c, builder), checkpoint.family, Published(single))  # type: ignore[arg-type]


def stored_dtype(name: str, place: WeightTarget) -> str:
    return "BF16" if "BF16" in place.accepts else place.accepts[0]


def shards(wanted: Mapping[str, WeightTarget]) -> Iterator[dict[str, WeightTarget]]:
    """The tensors in parts of about SHARD bytes."""
    shard: dict[str, WeightTarget] = {}
    held = 0
    for name, place in wanted.items():
        if held > SHARD:
            yield shard
            shard, held = {}, 0
        shard[name] = place
        held += nbytes(name, place)
    yield shard


def nbytes(name: str, place: WeightTarget) -> int:
    return torch.Size(place.shape).numel() * DTYPES[stored_dtype(name, place)].itemsize


def write_shard(file: Path, shard: Mapping[str, WeightTarget], noise: bytes) -> int:
    """A safetensors file of ``noise``, repeated; returns its bytes of tensors."""
    header, end = {}, 0
    for name, place in shard.items():
        start, end = end, end + nbytes(name, place)
        shape = list(place.shape)
        header[name] = {"dtype": stored_dtype(name, place), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, BLOCK):
            out.write(noise[: min(BLOCK, end - start)])
    return end


def write(directory: Path, wanted: Mapping[str, WeightTarget]) -> int:
    """All shards and their index; returns the bytes of tensors."""
    noise = (torch.randint(256, (BLOCK,), dtype=torch.uint8) & FINITE).numpy().tobytes()
    parts, total, weight_map = list(shards(wanted)), 0, {}
    for number, shard in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        total += write_shard(directory / file, shard, noise)
        weight_map |= dict.fromkeys(shard, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def load(directory: Path, device: str) -> tuple[float, float]:
    """(seconds until the first tensor is in place, seconds of the whole)."""
    first: list[float] = []
    shown = 0.0

    def progress(stage: str, share: float) -> None:
        nonlocal shown
        first.append(time.perf_counter())
        if share >= min(1, shown + 0.1):
            shown = share
            print(f"{stage} {share:.0%}", end=" " if share < 1 else "\n", flush=True)

    started = time.perf_counter()
    checkpoint = Checkpoint.open(directory)
    model = load_model(
        checkpoint, attention=no_attention, dtype=torch.bfloat16, device=device, max_positions=64, progress=progress
    )
    if device == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    del model
    return first[0] - started, ended - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=SHAPES / "qwen3.5-35b-a3b-fp8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--at", type=Path, help="where to write; by default where temporary files go")
    parser.add_argument("--readers", type=int, nargs="+", help="threads that read; by default what the loader has")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.tiny else "cuda"
    directory = Path(tempfile.mkdtemp(dir=given.at, prefix="loading-"))
    try:
        cut(given.config, directory, given.layers, TINY if given.tiny else {})
        wanted = wanted_of(Checkpoint.open(directory))
        started = time.perf_counter()
        total = write(directory, wanted)
        print(f"{total / 1e9:.2f} GB in {len(wanted)} tensors, written in {time.perf_counter() - started:.1f} s")
        default = weights.READERS if given.tiny else weights.GPU_READERS
        rows = []
        for readers in given.readers or [default]:
            weights.READERS = weights.GPU_READERS = readers
            for run in range(given.runs):
                first, seconds = load(directory, device)
                rows.append([readers, run + 1, f"{first:.2f}", f"{seconds:.2f}", f"{total / seconds / 1e9:.2f}"])
    finally:
        shutil.rmtree(directory)
    print("\n| threads | run | open, s | load, s | GB/s |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
