"""The layer tail of several ranks in one launch each: programs of all ranks on threads, against one rank's ops."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine, Pointer, Stuck
from tests.kernels.layer_weights import random_layer
from unisono.kernels import hopper
from unisono.kernels.gemm import divided_tail, layer_tail, persistent
from unisono.kernels.gemm import divided_tail_gluon as gluon
from unisono.kernels.gemm import layer_tail_gluon as products
from unisono.kernels.gemm.divided_tail import DividedTailWeights, Regions
from unisono.kernels.gemm.layer_tail import LayerTailWeights, Made

MODULES = (gluon, products, persistent, hopper)


class Address:
    """An address in a rank's region."""

    def __init__(self, region: torch.Tensor, at: int = 0) -> None:
        self.region, self.at = region, at

    def __add__(self, by: int) -> Address:
        return Address(self.region, self.at + int(by))

    def to(self, kind: Any) -> Pointer:
        memory = self.region[self.at :]
        return Pointer(memory[: len(memory) // 8 * 8].view(kind.element_ty))


class Ranks(Machine):
    """Launches of one kernel on several GPUs at once, with arguments of each rank."""

    def run_ranks(self, kernel: Any, arguments: list[dict[str, Any]]) -> None:
        flat = [{k: Pointer(v.view(-1)) if isinstance(v, torch.Tensor) else v for k, v in a.items()} for a in arguments]
        with self._patched():
            threads = [self._thread(kernel.fn, each, number) for each in flat for number in range(self.programs)]
            for thread in threads:
                thread.join()
        self.copies.close()
        if self.errors:
            raise self.errors[0]

    def _language(self) -> types.SimpleNamespace:
        language = super()._language()
        plain = language.load

        def load(pointer: Pointer, *args: Any, volatile: bool = False, **options: Any) -> Any:
            if volatile:  # a poll
                if self.errors:
                    raise Stuck("another program failed")
                threading.Event().wait(0.0005)
            return plain(pointer, *args, **options)

        language.load = load
        language.multiple_of = lambda pointer, _: pointer
        language.pointer_type = lambda kind: types.SimpleNamespace(element_ty=kind)
        return language


class Addresses(Pointer):
    """Entries of the table of addresses."""

    def __init__(self, entries: list[Address], at: int = 0) -> None:
        self.tensor, self.at = entries, at  # type: ignore[assignment]

    def __add__(self, by: Any) -> Addresses:
        return Addresses(self.tensor, self.at + int(by))  # type: ignore[arg-type]


def parts_of(weights: LayerTailWeights, ranks: int) -> list[DividedTailWeights]:
    """Each rank's parts of a layer's weights."""

    def rows(weight: torch.Tensor, rank: int) -> torch.Tensor:
        return weight.chunk(ranks)[rank].contiguous()

    found = []
    for rank in range(ranks):
        gate, up = weights.gate_up.chunk(2)
        following = None if weights.following is None else rows(weights.following, rank)
        part = LayerTailWeights(
            rows(weights.o, rank), torch.cat((rows(gate, rank), rows(up, rank))), rows(weights.down, rank),
            weights.o_norm, weights.eps, weights.next_norm, weights.next_eps, following,
            None if weights.bias is None or following is None else rows(weights.bias, rank),
        )  # fmt: skip
        found.append(DividedTailWeights(part, ranks))
    return found


class Simulation:
    """Ranks whose regions and counters go on from launch to launch."""

    def __init__(self, ranks: int, programs: int) -> None:
        self.ranks, self.programs = ranks, programs
        self.regions = [torch.zeros(gluon.REGION_BYTES, dtype=torch.uint8) for _ in range(ranks)]
        self.counters = [torch.zeros(32, dtype=torch.int64) for _ in range(ranks)]
        self.given_up = torch.zeros(8, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weights: LayerTailWeights, seed: int) -> list[Made]:
        """Each rank's outputs."""
        table = Addresses([*map(Address, self.regions), Address(self.given_up)])
        launches, outputs = [], []
        for rank, t in enumerate(parts_of(weights, self.ranks)):
            arguments, made_here = self.launch(x.chunk(self.ranks, 1)[rank].contiguous(), residual, t, rank, table)
            launches.append(arguments)
            outputs.append(made_here)
        Ranks(MODULES, self.programs, seed).run_ranks(gluon.divided_tail_kernel, launches)
        return outputs

    def launch(
        self, x: torch.Tensor, residual: torch.Tensor, t: DividedTailWeights, rank: int, table: Addresses
    ) -> tuple[dict[str, Any], Made]:
        """(arguments of a rank's launch, its outputs)."""
        rows, (h, q, i, f), tail = x.shape[0], t.sizes, t.parts
        n1, out, n2, product = (torch.full((rows, n), float("nan")).to(x.dtype) for n in (h, h, h, f))
        tiles = divided_tail.tiles_of(t, self.programs)
        regions = Regions(self.regions[rank], torch.empty(0), rank, self.ranks)
        inputs = regions.rows(gluon.AT_INPUTS.value, rows, q, x.dtype)
        gated = regions.rows(gluon.AT_GATED.value, rows, i, x.dtype)

        def boxes(tensor: torch.Tensor, tile: int) -> Descriptor:
            return Descriptor(tensor, [persistent.box_of(tile), products.STEP])

        operands = {"x_desc": inputs, "n1_desc": n1, "act_desc": gated, "n2_desc": n2}
        descriptors = {name: boxes(tensor, 8) for name, tensor in operands.items()}
        following = tail.following if tail.following is not None else tail.down
        arguments = {
            **descriptors, "o_desc": boxes(tail.o, tiles.h), "gate_up_desc": boxes(tail.gate_up, tiles.i),
            "down_desc": boxes(tail.down, tiles.h), "next_desc": boxes(following, tiles.f), "inputs": x,
            "residual": residual, "o_norm": tail.o_norm, "next_norm": tail.next_norm,
            "next_bias": residual if tail.bias is None else tail.bias, "n1": n1, "out": out, "n2": n2,
            "product": product, "counters": self.counters[rank], "addresses": table, "eps": tail.eps,
            "next_eps": tail.next_eps, "M": rows, "Q": q, "H": h, "I": i, "F": f, "HAS_BIAS": tail.bias is not None,
            "FOLLOWED": f > 0, "RANK": rank, "RANKS": self.ranks, "OVERLAP": True,
            **divided_tail.constants(layer_tail.Blocks(8, 1, 2), tiles, h, q, self.ranks),
        }  # fmt: skip
        return arguments, (out, n2, product if f else product.view(-1))


SIZES = {  # ranks, rows, h, q, i, f, programs
    "two ranks": (2, 3, 128, 64, 192, 96, 3),
    "four ranks": (4, 1, 128, 128, 256, 64, 2),
    "the last layer": (2, 4, 64, 128, 128, 0, 4),
    "one program": (2, 1, 64, 64, 64, 64, 1),
}


def compare(got: list[Made], whole: Made, ranks: int) -> None:
    """Compare each rank's outputs with one GPU's."""
    out, normed, product = whole
    for rank, (mine, mine_normed, mine_product) in enumerate(got):
        torch.testing.assert_close(mine, out, rtol=0, atol=0.02)
        torch.testing.assert_close(mine_normed, normed, rtol=0, atol=0.02)
        if len(product):
            expected = product.chunk(ranks, 1)[rank]
            torch.testing.assert_close(mine_product, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", SIZES)
def test_simulated_ranks_match_one_gpu(case: str, bias: bool) -> None:
    ranks, rows, h, q, i, f, programs = SIZES[case]
    simulation = Simulation(ranks, programs)
    for seed in range(3):  # counters and regions go on from launch to launch
        x, residual, weights = random_layer(rows, h, q, i, f, torch.float16, bias=bias)
        compare(simulation(x, residual, weights, seed), layer_tail.layer_tail(x, residual, weights), ranks)
    assert not any((counters % programs).any() for counters in simulation.counters)
    for region in simulation.regions:
        signals, arrivals = region[:1024].view(torch.int64).view(2, -1)
        assert set(signals.tolist()) == {0, 3 * ranks}
        assert set(arrivals.tolist()) == {0, 3 * programs}


BREAKS = {
    "no wait for other ranks": (gluon, "wait_for_ranks", lambda *_: None),
    "inputs are not sent": (gluon, "_send_rows", lambda *_: None),
    "all stores go to one rank": (gluon, "_array", lambda table, _, at, like: (table.tensor[0] + at).to(like.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("broken", BREAKS)
def test_simulation_detects_a_broken_exchange(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, weights = random_layer(3, 128, 128, 192, 96, torch.float16)
    monkeypatch.setattr("tests.kernels.gluon_threads.LIMIT", 0.3)
    monkeypatch.setattr(*BREAKS[broken])
    simulation = Simulation(2, 3)
    with pytest.raises((Stuck, AssertionError)):
        compare(simulation(x, residual, weights, 0), layer_tail.layer_tail(x, residual, weights), 2)


def test_ranks_that_have_given_up_do_not_wait() -> None:
    """A rank whose peer never launches ends once the ranks have given up."""
    simulation = Simulation(2, 2)
    simulation.given_up[0] = 1
    x, residual, weights = random_layer(1, 64, 64, 64, 64, torch.float16)
    table = Addresses([*map(Address, simulation.regions), Address(simulation.given_up)])
    part = parts_of(weights, 2)[0]
    arguments, _ = simulation.launch(x.chunk(2, 1)[0].contiguous(), residual, part, 0, table)
    Ranks(MODULES, 2, 0).run_ranks(gluon.divided_tail_kernel, [arguments | {"LOOKS": 2}])


def test_weights_that_no_kernel_divides() -> None:
    _, _, weights = random_layer(1, 128, 128, 192, 96, torch.float16)
    parts = parts_of(weights, 2)
    assert divided_tail.divides(parts[0])
    assert not divided_tail.divides(DividedTailWeights(parts[0].parts, 3))
    _, _, last = random_layer(1, 128, 128, 192, 0, torch.float16, normed=False)
    assert not divided_tail.divides(parts_of(last, 2)[0])
