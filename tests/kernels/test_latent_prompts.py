"""Latent attention of long prompts on Hopper: its logic, as threads, and its proof; the GPU proves its bits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.latent_requests import PAGE, Rows
from tests.kernels.launches import forget
from unisono.attention.triton import TritonAttention
from unisono.kernels import hopper, overlap
from unisono.kernels.attention import gluon, gluon_latent, gluon_latent_rounds, gluon_rounds, hopper_latent
from unisono.kernels.attention.cpu import SPLIT, attention_plan_cpu
from unisono.kernels.attention.paged import KEYS
from unisono.kernels.attention.triton_kernels import LOG2_E

LATENT, ROPE, CHUNK = 128, 16, 16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def attended(rows: Rows, spans: list[tuple[int, int]], tile: int, blocks: int, seed: int) -> torch.Tensor:
    """Outputs [T, Hq · L] of the tokens start … end - 1 of each row, and of two tokens of padding."""
    ints = {"dtype": torch.int32}
    q = torch.cat([each[a:b] for each, (a, b) in zip(rows.q, spans, strict=True)]).half()
    q = torch.cat((q, torch.randn(2, *q.shape[1:]).half()))
    positions = torch.cat([*(torch.arange(a, b) for a, b in spans), torch.tensor([-1, -1])]).to(**ints)
    starts = torch.tensor([0, *torch.tensor([b - a for a, b in spans]).cumsum(0)], **ints)
    where = torch.arange(len(spans), **ints), torch.tensor([b for _, b in spans], **ints), starts
    work, count, _ = attention_plan_cpu(*where, len(q), tile, blocks, 0, 1, 0)
    out = torch.full((len(q), rows.heads * LATENT), torch.nan).half()
    parts = -(-tile // (8 // (rows.heads // blocks)))
    boxes = Descriptor(rows.cache.half().view(-1, LATENT + ROPE), [16, CHUNK])
    machine = Machine([gluon_latent, gluon_rounds, gluon, hopper], len(work) * parts * blocks * 2, seed)
    machine.run(
        gluon_latent.latent_prompt_kernel, q_ptr=q, desc=boxes,
        table_ptr=rows.table, positions_ptr=positions, work_ptr=work, count_ptr=count, out_ptr=out,
        max_pages=rows.table.shape[1], scale=0.2 * LOG2_E.value,
        HEADS=rows.heads, BLOCKS=blocks, LATENT=LATENT, ROPE=ROPE, PAGE=PAGE, PARTS=parts, KEYS=KEYS, SPLIT=SPLIT,
        ROWS=8, CHUNK=CHUNK, VALUES=4, STAGES=2, ADDS=0, WEIGHS=0,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("heads", "blocks", "tile"), [(3, 1, 5), (8, 2, 2)])
def test_prompts_as_threads(heads, blocks, tile, assert_close):
    """Tiles with a part that has no token, several blocks of heads, splits with and without masks, padding."""
    torch.manual_seed(heads)
    rows = Rows([530, 17, 70], heads, torch.device("cpu"), LATENT, ROPE)
    rows.q, rows.keys = ([x.half().float() for x in each] for each in (rows.q, rows.keys))
    spans = [(519, 530), (0, 17), (62, 70)]
    want = torch.cat([rows.expected(row, span) for row, span in enumerate(spans)])
    for seed in range(2):
        out = attended(rows, spans, tile, blocks, seed)
        assert_close(out[:-2], want)
        assert (out[-2:] == 0).all()


def attended_round(
    rows: Rows, width: int, blocks: int, share: int, partials: int, programs: int, seed: int, first: int
):
    """Outputs [T, Hq · L] of the last ``width`` tokens of each row, and of a row of padding."""
    ints = {"dtype": torch.int32}
    kv_len = [*rows.lengths, 0]
    positions = torch.cat([torch.arange(n - width, n) if n else torch.full((width,), -1) for n in kv_len]).to(**ints)
    q = torch.cat([*(each[-width:] for each in rows.q), torch.randn(width, rows.heads, LATENT + ROPE)]).half()
    where = torch.arange(len(kv_len), **ints), torch.tensor(kv_len, **ints), None
    work, count, arrivals = attention_plan_cpu(*where, len(q), width, blocks, partials, share, 0)
    out = torch.full((len(q), rows.heads * LATENT), torch.nan).half()
    state, acc = (torch.full((partials, width, rows.heads, size), torch.nan) for size in (2, LATENT))
    boxes = Descriptor(rows.cache.half().view(-1, LATENT + ROPE), [16, CHUNK])
    machine = Machine([gluon_latent_rounds, gluon_latent, gluon_rounds, gluon, hopper, overlap], programs, seed)
    machine.run(
        gluon_latent_rounds.latent_round_kernel, q_ptr=q, desc=boxes, table_ptr=rows.table, positions_ptr=positions,
        work_ptr=work, count_ptr=count, arrivals_ptr=arrivals, state_ptr=state, acc_ptr=acc, out_ptr=out,
        tokens=len(q), max_pages=rows.table.shape[1], scale=0.2 * LOG2_E.value,
        HEADS=rows.heads, BLOCKS=blocks, LATENT=LATENT, ROPE=ROPE, PAGE=PAGE, TOKENS=width,
        PARTS=-(-width // (8 // (rows.heads // blocks))), KEYS=KEYS, SPLIT=SPLIT, ROWS=8, CHUNK=CHUNK, VALUES=4,
        STAGES=2, FIRST=first, ADDS=0, WEIGHS=0, OVERLAP=True,
    )  # fmt: skip
    assert not arrivals.any(), "the next layer's counters"
    return out


@pytest.mark.parametrize(("heads", "blocks", "width", "first"), [(3, 1, 1, 0), (8, 2, 4, 0), (3, 1, 3, 1)])
def test_rounds_as_threads(heads, blocks, width, first, assert_close):
    """Whole tiles and cut ones, items for no program and for several, a request that sees nothing."""
    torch.manual_seed(heads + width)
    rows = Rows([700, 20, 257], heads, torch.device("cpu"), LATENT, ROPE)
    rows.q, rows.keys = ([x.half().float() for x in each] for each in (rows.q, rows.keys))
    want = torch.cat([rows.expected(row, (n - width, n), first) for row, n in enumerate(rows.lengths)])
    for seed, (programs, share, partials) in enumerate(((4, 1, 64), (6, 10**6, 64), (30, 12, 8))):
        out = attended_round(rows, width, blocks, share, partials, programs, seed, first)
        assert_close(out[:-width], want)
        assert (out[-width:] == 0).all()


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
@pytest.mark.parametrize("heads", [20, 32, 128])
def test_prompts_on_hopper_have_the_bits_of_other_kernels(heads, monkeypatch):
    launched = []
    for name in ("launch_latent_prompt", "launch_latent_round"):
        launch = getattr(hopper_latent, name)
        monkeypatch.setattr(
            hopper_latent, name, lambda *args, name=name, launch=launch: launched.append(name) or launch(*args)
        )
    forget(monkeypatch, hopper_latent.exact_latent_attention)
    forget(monkeypatch, hopper_latent.exact_latent_rounds)
    backend = TritonAttention(heads, max(1, heads // 32), "cuda")
    chosen = backend.prove(hopper_latent.WIDTH, torch.bfloat16)
    assert {kernel for kernel, _ in chosen.values()} == {"gluon-sm90"}
    assert len({*launched}) == 2


def test_supported_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    card = torch.device("cuda")
    assert hopper_latent.suits(20, 1, 576, torch.bfloat16, card)
    assert not hopper_latent.suits(20, 1, 576, torch.bfloat16, torch.device("cpu"))
    assert not hopper_latent.suits(20, 1, 576, torch.float32, card)
    assert not hopper_latent.suits(20, 1, 320, torch.bfloat16, card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not hopper_latent.suits(20, 1, 576, torch.bfloat16, card)


def test_without_hopper_latents_have_one_kernel():
    backend = TritonAttention(20, 1, "cpu")
    chosen = backend.prove(hopper_latent.WIDTH, torch.bfloat16)
    assert {kernel for kernel, _ in chosen.values()} == {"triton"}
    assert all("16-bit" in reason for _, reason in chosen.values())


@pytest.mark.parametrize(("heads", "blocks"), [(16, 1), (20, 1), (128, 4)])
def test_proof_inputs_fill_tiles_and_have_nan_in_masked_places_only(heads, blocks):
    """Tiles are walked whole, as where the kernel serves; a difference to what serves otherwise is seen."""
    device, off = torch.device("cpu"), 0.0
    proof = heads, blocks, 8, torch.float16, device
    backend = TritonAttention(heads, blocks, "cpu")
    backend.processors = 132  # an H200's

    def read(q, cache, table, kv_len, query_start, positions):
        assert len(q) * heads >= 64 * backend.processors
        assert backend._tile_tokens(len(q)) * heads // blocks > 96
        seen = [cache[table[row].long()].flatten(0, 2)[:n] for row, n in enumerate(kv_len.tolist())]
        return torch.cat(seen).float() + off * hopper_latent.exact_latent_attention.serves(proof)

    try:
        assert hopper_latent._same_bits(read, *proof)
        off = 1.0
        assert not hopper_latent._same_bits(read, *proof)
    finally:
        hopper_latent.exact_latent_attention.serving.pop(proof, None)


@pytest.mark.parametrize(("heads", "blocks"), [(20, 1), (128, 4)])
def test_proof_inputs_of_rounds_have_nan_in_masked_places_only(heads, blocks):
    device, off, widths = torch.device("cpu"), 0.0, []
    proof = heads, blocks, 8, torch.float16, device

    def read(q, cache, table, kv_len, width):
        assert len(q) == width * len(kv_len)
        widths.append(width)
        seen = [cache[table[row].long()].flatten(0, 2)[:n] for row, n in enumerate(kv_len.tolist())]
        return torch.cat(seen).float() + off * hopper_latent.exact_latent_rounds.serves(proof)

    try:
        assert hopper_latent._same_rounds(read, *proof)
        assert {*widths} == {1, 4}
        off = 1.0
        assert not hopper_latent._same_rounds(read, *proof)
    finally:
        hopper_latent.exact_latent_rounds.serving.pop(proof, None)
