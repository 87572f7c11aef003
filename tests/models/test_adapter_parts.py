"""A rank's part of an adapter: all of A, and the rows of B for the outputs it computes; it reads no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.parts_ import loaded
from tests.models.make import make_checkpoint
from tests.models.make_adapters import DELTA, LINEARS, make_adapter, rewritten
from tests.models.reads import counted_reads
from unisono.distributed.gather import Ranks
from unisono.layers.formats.base import part_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.lora.adapters import WEIGHTS, AdapterLayers, AdapterLimits, attach_adapters, read_adapter
from unisono.models.lora.host_adapters import HeldAdapters, KeepAdapters, ReadAdapter, WriteAdapter
from unisono.types import CheckpointError

LIMITS = AdapterLimits(loaded=2, rank=8, kept=2)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3": ({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}, LINEARS),
    "qwen3_next": ({}, (*LINEARS[:4], "in_proj_qkvz", "in_proj_ba", "out_proj")),
    "qwen3_5_moe_text": ({}, (*LINEARS[:4], *DELTA)),
}


def attached(path: Path, ranks: Ranks) -> tuple[Any, AdapterLayers]:
    model = loaded(path, ranks)
    return model, attach_adapters(model, Checkpoint.open(path).family, LIMITS)


@pytest.fixture
def simple(tmp_path: Path) -> tuple[Path, Path]:
    """A base model and an adapter of it."""
    base = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, **FAMILIES["qwen3"][0])
    return base, make_adapter(tmp_path / "it", base)


@pytest.mark.parametrize("family", FAMILIES)
def test_b_is_divided_as_the_weight_that_it_is_added_to(family: str, tmp_path: Path) -> None:
    """Four ranks over two KV heads, too: then two ranks have the same rows of k and v."""
    sizes, targets = FAMILIES[family]
    base = make_checkpoint(tmp_path / "base", family, **sizes)
    adapter = make_adapter(tmp_path / "adapter", base, targets=targets)
    _, layers = attached(base, Ranks())
    whole, divided = read_adapter(adapter, layers), 0
    for ranks in (Ranks(0, 2), Ranks(1, 2), Ranks(3, 4)):
        model, layers = attached(base, ranks)
        mine = read_adapter(adapter, layers)
        assert (mine.digest, mine.rank) == (whole.digest, whole.rank)
        assert mine.parts.keys() == whole.parts.keys()
        for path, pairs in mine.parts.items():
            linear, expected = model.get_submodule(path), torch.cat([b for _, b in whole.parts[path]])
            cut = part_of(linear.weight)
            divided += cut is not None
            assert torch.equal(torch.cat([b for _, b in pairs]), expected if cut is None else cut.of(expected)), path
            assert all(torch.equal(a, other) for (a, _), (other, _) in zip(pairs, whole.parts[path], strict=True))
            room = linear.adapter
            assert room.a.shape == (2, 16 * len(pairs), linear.inputs)
            assert room.b.shape == (2, linear.outputs, 16)
        layers.write(1, mine)
    assert divided > 10


def test_each_rank_reads_only_its_share_of_lora_b(simple: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = simple
    _, layers = attached(base, Ranks(1, 2))
    bytes_read = counted_reads(monkeypatch)
    read_adapter(adapter, layers)
    sizes = {name: tensor.nbytes for name, tensor in load_file(adapter / WEIGHTS).items()}
    assert bytes_read[0] == sum(size if "lora_A" in name else size // 2 for name, size in sizes.items())


def test_each_rank_checks_its_own_part(simple: tuple[Path, Path]) -> None:
    base, adapter = simple
    tensors = load_file(adapter / WEIGHTS)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    tensors[name][-1] = float("nan")
    rewritten(adapter, tensors)
    read_adapter(adapter, attached(base, Ranks(0, 2))[1])
    for ranks in (Ranks(1, 2), Ranks()):
        with pytest.raises(CheckpointError, match=r"q_proj\.lora_B has weights that are NaN"):
            read_adapter(adapter, attached(base, ranks)[1])


def test_adapter_commands_track_held_weights(simple: tuple[Path, Path], tmp_path: Path) -> None:
    base, first = simple
    _, layers = attached(base, Ranks(1, 2))
    held, second = HeldAdapters(layers), make_adapter(tmp_path / "second", base, 2)
    digests = [read_adapter(each, layers).digest for each in (first, second)]
    for path, digest in zip((first, second), digests, strict=True):
        held.execute(ReadAdapter(str(path), digest))
    held.execute(WriteAdapter(0, digests[1]))
    (a, b), *_ = read_adapter(second, layers).parts["layers.0.mixer.o"]
    room = layers.layers["layers.0.mixer.o"]
    assert torch.equal(room.a[0, :4], a)
    assert torch.equal(room.b[0, :, :4], b)
    assert not room.b[1].any()
    make_adapter(first, base, 3)
    held.execute(ReadAdapter(str(first), digests[0]))  # it is held: nothing is read
    held.execute(KeepAdapters([digests[1]]))
    assert held.digests == {digests[1]}
    with pytest.raises(CheckpointError, match="has changed while it was loaded; load it again"):
        held.execute(ReadAdapter(str(first), digests[0]))
    with pytest.raises(CheckpointError, match="is no directory"):
        held.execute(ReadAdapter(str(tmp_path / "none"), digests[0]))
    assert held.digests == {digests[1]}
