"""Rope and cache write: against float64 and transformers, kernel against twin, exact in any batch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.kernels.rope_cases import EPS, PAGE, PAGES, make_case
from unisono.kernels import rope_and_cache
from unisono.kernels.cache.rotary import launch_rope_and_cache, rope_and_cache_cpu
from unisono.kernels.norm.rms_norm import rms_norm
from unisono.layers.rotary import rotary_table
from unisono.types import ConfigError


def reference(case):
    """q, k, v [T, heads, D] in float64, straight from the definition (complex rotation, one plane at a time)."""
    table, half = case.table.double().cpu(), case.table.shape[1] // 2
    angles = torch.complex(table[:, :half], table[:, half:])[case.positions.long().cpu().clamp(min=0)]
    heads = case.qkv.double().cpu().unflatten(1, (case.heads + 2 * case.kv_heads, -1))
    q, k, v = heads.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    out = []
    for x, weight in zip((q, k), case.norms, strict=True):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double().cpu()
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * angles[:, None]
        out.append(torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1))
    return *out, v


OPS = [launch_rope_and_cache, rope_and_cache_cpu]
DIMS = [(128, 128), (64, 32), (24, 24), (80, 80), (96, 96), (256, 64)]  # head_dim, rot_dim


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("norm", [True, False, torch.float32], ids=["norm", "no norm", "fp32 norm"])
@pytest.mark.parametrize(("head_dim", "rot_dim"), DIMS)
def test_matches_float64_and_writes_only_its_slots(op, head_dim, rot_dim, norm, dtype, device, assert_close):
    case = make_case(head_dim, rot_dim, norm, dtype, "cpu" if op is rope_and_cache_cpu else device)
    q, k_cache, v_cache = case.run(op)
    want_q, want_k, want_v = reference(case)
    pages, offsets = case.slots // PAGE, case.slots % PAGE
    assert_close(q, want_q)
    assert_close(k_cache[pages, :, offsets], want_k)
    assert torch.equal(v_cache[pages, :, offsets].double().cpu(), want_v)
    for cache in (k_cache, v_cache):
        cache[pages, :, offsets] = torch.nan
        assert cache.isnan().all(), "written outside slot_mapping"


@pytest.mark.parametrize("norm", [True, False])
def test_kernel_matches_twin(norm, dtype, device):
    case = make_case(64, 64, norm, dtype, device)
    twin = dataclasses.replace(
        case, **{f: getattr(case, f).cpu() for f in ("qkv", "table", "positions", "slots")},
        norms=tuple(None if w is None else w.cpu() for w in case.norms),
    )  # fmt: skip
    atol = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 6e-2}[dtype]
    for mine, theirs in zip(case.run(launch_rope_and_cache), twin.run(rope_and_cache_cpu), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=atol, rtol=atol, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (24, 16)])
def test_tokens_are_exact(op, head_dim, rot_dim, dtype, device, assert_rows_exact):
    case = make_case(head_dim, rot_dim, True, dtype, "cpu" if op is rope_and_cache_cpu else device)

    def q_k_v(index):
        q, k_cache, v_cache = case.run(op, index)
        pages, offsets = case.slots[index] // PAGE, case.slots[index] % PAGE
        return torch.cat([q, k_cache[pages, :, offsets], v_cache[pages, :, offsets]], dim=1)

    assert_rows_exact(q_k_v, torch.arange(9, device=case.qkv.device))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rot_dim", [24, 8])
def test_head_norms_in_fp32_round_once_before_the_rotation(op, rot_dim, dtype, device):
    """Heads whose norm was computed in fp32 and rounded, and are then rotated without a norm."""
    case = make_case(24, rot_dim, torch.float32, dtype, "cpu" if op is rope_and_cache_cpu else device)
    heads = case.qkv.unflatten(1, (case.heads + 2 * case.kv_heads, -1)).cpu()
    q, k, v = heads.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    q, k = (rms_norm.cpu(x.float(), w.cpu(), EPS).to(dtype) for x, w in zip((q, k), case.norms, strict=True))
    apart = dataclasses.replace(
        case, qkv=torch.cat((q, k, v), dim=1).flatten(1).to(case.qkv.device), norms=(None, None)
    )
    mine, theirs = case.run(op), apart.run(op)
    if op is rope_and_cache_cpu:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))
    else:  # the kernel sums a head's squares in another order
        differ = [(a.nan_to_num() != b.nan_to_num()).float().mean() for a, b in zip(mine, theirs, strict=True)]
        assert max(differ) < (0.9 if dtype is torch.float32 else 0.02)


def test_op_declares_what_it_mutates():
    case = make_case(24, 24, True, torch.float32, "cpu")
    want = case.run(rope_and_cache_cpu)
    for mine, theirs in zip(case.run(rope_and_cache), want, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    schema = torch.ops.unisono.rope_and_cache.default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write][:2] == ["k_cache", "v_cache"]


ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_table_is_transformers(kind):
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=4, rope_theta=5e5, rope_scaling=ROPES[kind], max_position_embeddings=256
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(256)[None])
    table = rotary_table(config, 24, 256, "cpu")
    assert table.dtype is torch.float32
    assert torch.equal(table, torch.cat((cos[0, :, :12], sin[0, :, :12]), dim=-1))


def test_table_reads_older_configs():
    config = LlamaConfig(hidden_size=96, num_attention_heads=4, rope_theta=5e5)
    old = SimpleNamespace(rope_theta=5e5, rope_scaling=None)
    assert torch.equal(rotary_table(old, 24, 32, "cpu"), rotary_table(config, 24, 32, "cpu"))


def test_partial_rotation_makes_a_narrower_table():
    parameters = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert rotary_table(SimpleNamespace(rope_parameters=parameters), 64, 8, "cpu").shape == (8, 32)


def test_unsupported_scaling_is_refused_with_the_supported():
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, "rope_type": "ntk"})
    supported = "default, .*llama3, .*longrope, .*proportional, .*yarn"
    with pytest.raises(ConfigError, match=f"'ntk' is not supported; supported are {supported}"):
        rotary_table(config, 64, 8, "cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("norm", [False, torch.float32])
def test_gates_behind_query_heads_are_passed_over(op, norm, dtype, device):
    """The same bits as without gates, wherever they stand."""
    case = make_case(32, 16, norm, dtype, "cpu" if op is rope_and_cache_cpu else device)
    case.table = case.table.to(case.qkv.device)
    want = case.run(op)
    q, kv = case.qkv[:, : 4 * 32].unflatten(1, (4, 32)), case.qkv[:, 4 * 32 :]
    gated = torch.cat((torch.stack((q, torch.full_like(q, torch.nan)), 2).flatten(1), kv), 1)
    caches = [case.qkv.new_empty(PAGES, 2, PAGE, 32).fill_(torch.nan) for _ in "kv"]
    got = op(gated, *case.norms, EPS, case.table, case.positions, case.slots, *caches, 4, 2)
    for one, other in zip((got, *caches), want, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
