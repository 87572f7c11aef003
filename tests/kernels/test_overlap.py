"""Kernels that may be on the device before their turn: they touch nothing until it is."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest
import torch

from tests.kernels.kernel_source import functions, name_of, overlapped_kernels

activation, linear, norm, overlap = (
    import_module(f"unisono.kernels.{name}") for name in ("norm.activation", "gemm.linear", "norm.rms_norm", "overlap")
)
HARMLESS = {"program_id", "num_programs", "arange", "minimum", "maximum", "to", "cdiv", "block_of"}


def calls(statement: ast.stmt) -> list[str]:
    return [name_of(node) for node in ast.walk(statement) if isinstance(node, ast.Call)]


def test_layer_kernels_are_declared_overlapped() -> None:
    assert overlapped_kernels() == {
        "_linear_kernel", "_add_kernel", "_rms_norm_kernel", "_silu_mul_kernel", "_sigmoid_gate_kernel",
        "_relu_squared_kernel",
        "_rope_and_cache_kernel",
        "attention_kernel", "round_attention_kernel", "wide_round_attention_kernel",
        "_conv_round_kernel", "_conv_prompt_kernel", "_conv_keep_kernel", "_prepare_kernel",
        "_round_kernel", "_walk_kernel", "walk_kernel", "_remember_chunk_kernel", "_gated_norm_kernel",
        "_quantize_kernel", "_fp8_linear_kernel", "fp8_rows_kernel", "_int4_linear_kernel", "_unpack_kernel",
        "packed_rows_kernel", "packed_experts_kernel",
        "_fp8_gate_up_kernel", "_fp8_down_kernel", "_integer_gate_up_kernel", "_integer_down_kernel",
        "_mxfp4_gate_up_kernel", "_mxfp4_down_kernel", "_nvfp4_gate_up_kernel", "_nvfp4_down_kernel",
        "_nvfp4_linear_kernel", "_nvfp4_decode_kernel", "_int8_weight_kernel", "_int8_decode_kernel",
        "_quantize_int8_kernel", "_int8_linear_kernel", "_int8_gate_up_kernel", "_int8_down_kernel",
        "_choose_kernel", "_count_kernel", "_starts_kernel", "_place_kernel", "_gate_up_kernel",
        "_down_kernel", "_combine_kernel",
        "_add_positions_kernel", "_axial_rotary_kernel", "_segment_attention_kernel", "_layer_norm_kernel",
        "_gelu_kernel",
        "_adapter_shrink_kernel", "_adapter_sum_kernel", "_adapter_expand_kernel", "_adapter_silu_kernel",
        "_adapted_linear_kernel", "_gather_kernel", "_gather_norm_kernel", "_silu_gather_kernel", "layer_tail_kernel",
        "_add_normed_kernel", "_beside_norms_kernel", "_beside_sum_kernel", "_soft_cap_kernel",
        "_choose_scored_kernel", "_joint_norm_kernel", "_head_product_kernel", "_rotate_latent_kernel",
        "_latent_queries_kernel", "latent_kernel", "latent_round_kernel",
        "_short_round_kernel", "_short_prompt_kernel", "_mamba_round_kernel", "_mamba_prompt_kernel", "merge_kernel",
        "_gated_group_norm_kernel",
        "kimi_prepare_kernel", "_kimi_round_kernel", "_kimi_walk_kernel", "kimi_walk_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("kernel", sorted(overlapped_kernels() - overlap.READ_EARLY - overlap.BESIDE))
def test_kernels_wait_before_their_first_access(kernel: str) -> None:
    """What the compiler makes of it: tests/kernels/test_aot.py."""
    before: list[str] = []
    for statement in functions()[kernel].body:
        if calls(statement) == ["follow"]:
            break
        before += calls(statement)
    else:
        pytest.fail("it does not follow")
    assert set(before) <= HARMLESS


@pytest.mark.parametrize(("capability", "able"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_overlap_is_enabled_by_compute_capability(
    capability: tuple[int, int], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(overlap, "overlaps", overlap.overlaps.__wrapped__)
    cuda, cpu = overlap.overlapped(torch.device("cuda", 0)), overlap.overlapped(torch.device("cpu"))
    assert cuda == ({"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False})
    assert cpu == {"OVERLAP": False}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU runs one after the other")
def test_overlapped_chain_equals_serial_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 kernels in a graph, each a few microseconds, each reading what the one before it wrote."""
    torch.manual_seed(0)
    size, rows = 1024, 5
    up, down = (
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in ((2 * size, size), (size, size))
    )
    scale, x = (
        torch.ones(size, device="cuda", dtype=torch.bfloat16),
        torch.empty(rows, size, device="cuda", dtype=torch.bfloat16),
    )

    def run() -> None:
        y = x
        for _ in range(50):
            total, h = norm.launch_add_rms_norm(y, x, scale, 1e-6)
            h = activation.launch_silu_mul(linear.launch_linear(h, up, None, None))
            y = linear.launch_linear(h, down, None, total)
        x.copy_(y)

    def replayed() -> torch.Tensor:
        x.copy_(torch.linspace(-1, 1, rows * size, device="cuda").view_as(x))
        kept = x.clone()
        run()
        x.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        x.copy_(kept)
        states = []
        for _ in range(20):
            graph.replay()
            states.append(x.clone())
        return torch.stack(states)

    with monkeypatch.context() as patch:
        patch.setattr(overlap, "overlaps", lambda device: False)
        expected = replayed()
    got = replayed()
    assert expected.isfinite().all()
    assert torch.equal(got, expected)


def test_kernels_declare_early_reads() -> None:
    assert {"layer_tail_kernel", "fp8_rows_kernel", "_rms_norm_kernel"} <= overlap.READ_EARLY
    assert {"walk_kernel", "kimi_walk_kernel"} == overlap.BESIDE
    assert {"_quantize_kernel", "attention_kernel"} <= overlap.LEADING
    assert overlapped_kernels() >= overlap.READ_EARLY | overlap.BESIDE | overlap.LEADING
