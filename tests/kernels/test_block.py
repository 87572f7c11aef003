"""Kernels of block drafters: convolution in a block, keys and values without queries, attention over whole blocks."""

import pytest
import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.drafters.block.model import WholeBlock
from unisono.kernels.attention import cpu as twin
from unisono.kernels.attention import paged
from unisono.kernels.cache.rotary import launch_rope_and_cache, rope_and_cache
from unisono.kernels.speculation.block_conv import block_conv, launch_block_conv

TWINS = pytest.mark.parametrize("is_twin", [False, True], ids=["kernel", "twin"])


@TWINS
@pytest.mark.parametrize(("taps", "size", "group", "width"), [(2, 48, 16, 4), (3, 1090, 10, 5), (2, 32, 32, 1)])
def test_convolution_stays_in_its_block(is_twin, taps, size, group, width, dtype, device, assert_close):
    device, conv = ("cpu", block_conv.cpu) if is_twin else (device, launch_block_conv)
    tokens, groups, first = 3 * width, size // group, taps * (size // group)
    x, base = torch.randn(tokens, size).to(device, dtype), torch.randn(taps, size).to(device, dtype)
    deltas = torch.randn(tokens, 2 * taps * groups).to(device, dtype)
    want = torch.zeros(tokens, size, dtype=torch.float64)
    for token in range(tokens):
        for tap in range(min(taps, token % width + 1)):
            own = deltas[token, first + tap * groups :][:groups].double().cpu().repeat_interleave(group)
            want[token] += (base[tap].double().cpu() + own) * x[token - tap].double().cpu()
    got = conv(x, deltas, base, width, group, first)
    assert_close(got, want)
    alone = conv(x[width : 2 * width].contiguous(), deltas[width : 2 * width], base, width, group, first)
    assert torch.equal(alone, got[width : 2 * width]), "other blocks change a block's bits"


@TWINS
def test_keys_and_values_without_queries(is_twin, dtype, device):
    """The bits of a pass with queries."""
    device, write = ("cpu", rope_and_cache.cpu) if is_twin else (device, launch_rope_and_cache)
    heads, kv_heads, dim, tokens = 4, 2, 32, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(device, dtype)
    norm, table = torch.randn(dim).to(device, dtype), torch.randn(20, dim).to(device)
    where = torch.tensor([3, 0, -1, 7, 9], device=device).int(), torch.tensor([19, 4, 0, 35, 17], device=device).int()
    caches = [torch.zeros(3, kv_heads, 16, dim, dtype=dtype, device=device) for _ in range(4)]
    write(qkv, norm, norm, 1e-5, table, *where, *caches[:2], heads, kv_heads)
    q = write(qkv[:, heads * dim :].contiguous(), norm, norm, 1e-5, table, *where, *caches[2:], 0, kv_heads)
    assert q.numel() == 0
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


class Kernels:
    """A backend of the Triton kernels, interpreted without a GPU, or of their twins."""

    capturable = True

    def __init__(self, is_twin: bool) -> None:
        ours, twins = (
            (paged.launch_attention_plan, paged.launch_attention),
            (twin.attention_plan_cpu, twin.attention_cpu),
        )
        self._plan, self._attend = twins if is_twin else ours

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        tokens, width = len(inputs.positions), inputs.width
        inputs.plan = *self._plan(inputs.slots, inputs.kv_len, None, tokens, width, 2, 40, 10**6, window), 40

    def forward(self, q, kv, inputs, options):
        return self._attend(
            q, kv.k, kv.v, inputs.page_table, inputs.positions, *inputs.plan, options.scale, options.window
        )


@TWINS
@pytest.mark.parametrize("window", [0, 40, 300])
def test_every_token_sees_the_whole_block(is_twin, window, device, assert_close):
    """Against dense attention in float64; a request that ends inside its block, and a row without a request."""
    device = "cpu" if is_twin else device
    width, heads, kv_heads, dim, lengths = 5, 4, 2, 16, [600, 5, 133, 0]
    pages = torch.randperm(160)[: 4 * 40].view(4, 40).int()
    k, v = (torch.randn(160, kv_heads, 16, dim) for _ in range(2))
    q = torch.randn(4 * width, heads, dim)
    kv_len = torch.tensor(lengths).int()
    positions = (kv_len[:, None] - width + torch.arange(width)).flatten().int()
    inputs = AttentionInputs(
        *(t.to(device) for t in (torch.arange(4).int(), positions, positions, kv_len, pages)), width=width
    )
    backend = WholeBlock(Kernels(is_twin))
    backend.plan(inputs, window)
    got = backend.forward(q.to(device), KV(k.to(device), v.to(device)), inputs, AttentionOptions(dim**-0.5, window))
    want = torch.zeros(4, width, heads, dim, dtype=torch.float64)
    for row, length in enumerate(lengths[:3]):
        keys, values = (
            t[pages[row].long()].transpose(1, 2).flatten(0, 1)[:length].double().repeat_interleave(2, 1) for t in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q.view(4, width, heads, dim)[row].double(), keys) * dim**-0.5
        if window:  # counted from the block's first token
            scores[:, :, : max(length - width - window + 1, 0)] = -torch.inf
        want[row] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    assert_close(got.view(4, width, heads, dim), want)
