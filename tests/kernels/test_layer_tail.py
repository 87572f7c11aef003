"""Everything of a layer after its mixer in one launch: against the separate ops, on threads and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine, Stuck
from unisono.kernels import hopper
from unisono.kernels.gemm import layer_tail as tail
from unisono.kernels.gemm import layer_tail_gluon as gluon
from unisono.kernels.gemm import persistent as staying


def made(rows: int, h: int, q: int, i: int, f: int, dtype: torch.dtype, device: str = "cpu", bias: bool = False,
         normed: bool = True):  # fmt: skip
    """Random rows x [M, Q] and residual [M, H], and the weights of a layer."""
    generator = torch.Generator(device).manual_seed(rows + h)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def weight(n: int, k: int) -> torch.Tensor:
        return (random(n, k) * k**-0.5).to(dtype)

    weights = weight(h, q), weight(2 * i, h), weight(h, i), random(h)
    end = (random(h), 1e-5) if normed else ()
    after = {"following": weight(f, h), "bias": random(f) if bias else None} if f else {}
    return random(rows, q), random(rows, h), tail.LayerTailWeights(*weights, 1e-6, *end, **after)


SIZES = {  # rows, h, q, i, f, programs, EACH, STAGES
    "one row": (1, 128, 64, 192, 96, 3, 1, 2),
    "more programs than tiles": (3, 64, 128, 64, 64, 5, 1, 3),
    "a part of a group at the end": (5, 192, 320, 448, 256, 6, 2, 2),
    "the last layer": (7, 128, 128, 256, 0, 8, 2, 3),
    "as many rows as programs": (4, 128, 64, 96, 32, 4, 1, 2),
    "one program": (1, 64, 64, 64, 64, 1, 1, 2),
    "many tiles of other sizes": (2, 320, 192, 352, 736, 3, 1, 3),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", SIZES)
def test_simulated_programs_match_the_reference(case: str, bias: bool) -> None:
    rows, h, q, i, f, programs, each, stages = SIZES[case]
    counters = torch.zeros(32, dtype=torch.int64)
    for seed in range(3):  # counters go on from launch to launch
        x, residual, weights = made(rows, h, q, i, f, torch.float16, bias=bias, normed=f > 0 or not bias)
        got = on_threads(x, residual, weights, programs, each, stages, counters, seed)
        for mine, expected in zip(got, tail.layer_tail(x, residual, weights), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0.02)
    assert not (counters % programs).any()


def on_threads(x, residual, weights, programs, each, stages, counters, seed):
    """The kernel's outputs."""
    rows, (h, q), i = x.shape[0], weights.o.shape, weights.down.shape[1]
    f = 0 if weights.following is None else weights.following.shape[0]
    widths = (h, h, i, h, h if weights.next_norm is not None else 0, f)
    total, n1, act, out, n2, product = (torch.full((rows, n), float("nan")).to(x.dtype) for n in widths)
    tiles = tail.LayerTailTiles.of(h, i, f, programs)

    def boxes(tensor: torch.Tensor, tile: int) -> Descriptor:
        return Descriptor(tensor, [tail.box_of(tile), tail.STEP])

    Machine((gluon, staying, hopper), programs, seed).run(
        gluon.layer_tail_kernel,
        x_desc=boxes(x, 8), n1_desc=boxes(n1, 8), act_desc=boxes(act, 8), n2_desc=boxes(n2, 8),
        o_desc=boxes(weights.o, tiles.h), gate_up_desc=boxes(weights.gate_up, tiles.i),
        down_desc=boxes(weights.down, tiles.h), next_desc=boxes(weights.following if f else weights.down, tiles.f),
        residual=residual, o_norm=weights.o_norm, next_norm=weights.o_norm if not widths[4] else weights.next_norm,
        next_bias=total if weights.bias is None else weights.bias, total=total, n1=n1, act=act, out=out, n2=n2,
        product=product, counters=counters, eps=weights.eps, next_eps=weights.next_eps,
        M=rows, Q=q, H=h, I=i, F=f, HAS_BIAS=weights.bias is not None, NORMED=widths[4] > 0, FOLLOWED=f > 0,
        OVERLAP=True, **tail._constants(tail.Blocks(8, each, stages), tiles, h),
    )  # fmt: skip
    return out, n2 if widths[4] else n2.view(-1), product if f else product.view(-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("norm", [torch.bfloat16, torch.float32], ids=["", "fp32 norms"])
@pytest.mark.parametrize("size", [(4096, 4096, 12288, 6144), (2560, 4096, 9728, 0), (2048, 512, 1600, 200)])
def test_bits_on_the_gpu(size: tuple[int, ...], norm: torch.dtype, device: str) -> None:
    """Those of the separate kernels, again and again."""
    h, q, i, f = size
    _, _, plain = made(1, h, q, i, f, torch.bfloat16, device, bias=f > 0)
    plain = dataclasses.replace(plain, o_norm=plain.o_norm.to(norm), next_norm=plain.next_norm.to(norm))
    assert tail.suits(plain)
    assert tail.prove(plain)
    for each in (1, 2, 8):
        x, residual, _ = made(5, h, q, i, f, torch.bfloat16, device)
        got = tail.launch_layer_tail(x, residual, plain, tail.Blocks.of(5, each))
        assert all(map(torch.equal, got, tail._apart(x, residual, plain)))


def test_tiles_of_an_8b_model_on_an_h200() -> None:
    """Outputs of a program at most: 97 % of the work is even."""
    assert tail.LayerTailTiles.of(4096, 12288, 6144, 132) == tail.LayerTailTiles(h=32, i=32, f=48)


def test_one_engine_per_device_claims_persistent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner: ...

    device, first, second = torch.device("cuda", 7), Owner(), Owner()
    monkeypatch.delenv("UNISONO_STAYING_LAUNCHES", raising=False)
    assert staying.claim_device(device)
    monkeypatch.setenv("UNISONO_STAYING_LAUNCHES", "0")
    assert not staying.claim_device(device)
    monkeypatch.delenv("UNISONO_STAYING_LAUNCHES")
    for owner, may in ((first, True), (second, False), (first, True)):
        with staying.claimed_by(owner):
            assert staying.claim_device(device) is may
    staying.release(first)
    with staying.claimed_by(second):
        assert staying.claim_device(device)
    del owner, second
    with staying.claimed_by(first):
        assert staying.claim_device(device), "an owner that is gone has nothing"
    staying.release(first)


BREAKS = {
    "nothing is loaded": (staying, "load_product", lambda *_: 0),
    "stages are overwritten": (staying, "_wait_free", lambda *_: None),
    "stores are not waited for": (gluon, "wait", lambda *_: None),
    "a program does not say that it has stored": (staying, "arrive", lambda counter: 1),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_simulation_detects_broken_synchronisation(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls of the first test."""
    x, residual, weights = made(3, 192, 320, 448, 256, torch.float16)
    monkeypatch.setattr("tests.kernels.gluon_threads.LIMIT", 0.3)
    monkeypatch.setattr(*BREAKS[broken])

    def compared() -> None:
        got = on_threads(x, residual, weights, 5, 1, 2, torch.zeros(32, dtype=torch.int64), 0)
        torch.testing.assert_close(got[2], tail.layer_tail(x, residual, weights)[2], rtol=0, atol=0.02)

    with pytest.raises((Stuck, AssertionError)):
        compared()
