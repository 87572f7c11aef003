"""Table of the weight formats in docs/guide/quantise.md: stored form, arithmetic, kernels, cards and tests of each.

``scripts/reference.py formats`` writes it; ``tests/models/test_documented_formats.py`` compares it with the catalog.
"""

from __future__ import annotations

from dataclasses import dataclass

GATED = (
    "gemm.fp8", "gemm.int4", "gemm.int8", "gemm.int8_weights", "gemm.linear", "gemm.nvfp4",
    "moe.experts", "moe.fp8", "moe.int8", "moe.integers", "moe.mxfp4", "moe.nvfp4",
)  # fmt: skip
"""Modules of ``unisono.kernels`` with products, which ``tests/kernels/test_cards.py`` compiles for every card."""

MEASURED = "9.0 measured; 8.0, 8.6, 8.9, 10.0, 12.0 compiled"
COMPILED = "8.0, 8.6, 8.9, 9.0, 10.0, 12.0 compiled"
E4M3_MEASURED, E4M3_COMPILED = "9.0 measured; 8.9, 10.0, 12.0 compiled", "8.9, 9.0, 10.0, 12.0 compiled"
"""Cards of products with e4m3 activations, which begin with 8.9."""


@dataclass(frozen=True)
class DocumentedFormat:
    """A row. method: quant_method, or the source of the weights. kernels: modules of ``unisono.kernels``.

    layouts: names in ``tests/models/quantised.py``, or test files.
    """

    method: str
    stored: str
    weights: str
    activations: str
    kernels: tuple[str, ...]
    cards: str
    tests: tuple[str, ...]
    experts: bool = True


_FP8 = ("gemm.fp8", "gemm.fp8_gluon", "moe.fp8")
_INT4 = ("gemm.int4", "gemm.packed_gluon", "moe.integers", "moe.packed_gluon")
_INT8 = ("gemm.int8_weights", "moe.integers")
_NVFP4 = ("gemm.nvfp4", "gemm.packed_gluon", "moe.nvfp4", "moe.packed_gluon")
_NONE = "not quantised"

ROWS = (
    DocumentedFormat(
        "fp8", "`weight_block_size` [128, 128]; scales float or powers of two (`ue8m0`)",
        "e4m3, a scale for each 128 × 128 block", "e4m3, a scale for each row and 128 columns", _FP8, E4M3_MEASURED,
        ("fp8-blocks", "fp8-blocks-bf16-scales", "fp8-powers-of-two"),
    ),
    DocumentedFormat(
        "fp8", "no blocks", "e4m3, a scale for each projection", "e4m3; `dynamic`: by row; `static`: `input_scale`",
        _FP8, E4M3_MEASURED, ("fp8-static",),
    ),
    DocumentedFormat(
        "fbgemm_fp8", "`activation_scale_ub`", "e4m3, a scale for each output", "e4m3 by row, clamped to the bound",
        ("gemm.fp8",), E4M3_COMPILED, ("fbgemm-fp8",), False,
    ),
    DocumentedFormat(
        "modelopt", "`FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, both in `MIXED_PRECISION`; also hf_quant_config.json",
        "e4m3, a scale for each projection or output", "e4m3, `input_scale` or by row", _FP8, E4M3_COMPILED,
        ("modelopt-fp8",),
    ),
    DocumentedFormat(
        "modelopt", "`NVFP4`, also in `MIXED_PRECISION`; also hf_quant_config.json",
        "e2m1, an e4m3 scale for each 16 inputs", _NONE, _NVFP4, MEASURED, ("modelopt-nvfp4",),
    ),
    DocumentedFormat(
        "compressed-tensors", "float, 8 bits", "e4m3; strategy `tensor`, `channel` or `block` [128, 128]",
        "e4m3; by token, by group of 128, or static for the tensor", _FP8, E4M3_MEASURED,
        ("compressed-fp8-channel", "compressed-fp8-tensor", "compressed-fp8-static", "compressed-fp8-blocks"),
    ),
    DocumentedFormat(
        "compressed-tensors", "float, 4 bits (`nvfp4-pack-quantized`)", "e2m1, an e4m3 scale for each 16 inputs",
        f"{_NONE}, whatever the scheme says", _NVFP4, MEASURED, ("compressed-nvfp4", "compressed-nvfp4-weights"),
    ),
    DocumentedFormat(
        "compressed-tensors", "int, 4 bits (`pack-quantized`)",
        "strategy `group` of 32, 64 or 128, or `channel`; symmetric or not", _NONE, _INT4, MEASURED,
        ("compressed-int4", "compressed-int4-asymmetric", "compressed-int4-channel"),
    ),
    DocumentedFormat(
        "compressed-tensors", "int, 8 bits, no activations (`pack-quantized`, `int-quantized`)",
        "strategy `group` of 32, 64 or 128, or `channel`; symmetric or not", _NONE, _INT8, COMPILED,
        ("compressed-int8", "compressed-int8-asymmetric", "compressed-int8-unpacked"),
    ),
    DocumentedFormat(
        "compressed-tensors", "int, 8 bits, and activations (`int-quantized`)", "int8; strategy `tensor` or `channel`",
        "int8; by token", ("gemm.int8", "gemm.fp8_gluon", "moe.int8"), MEASURED, ("compressed-int8-a8",),
    ),
    DocumentedFormat(
        "compressed-tensors", "int, 8 bits, and activations (`int-quantized`)", "int8; strategy `tensor` or `channel`",
        "int8; by token with a zero point, or static for the tensor", ("gemm.int8",), COMPILED,
        ("compressed-int8-a8-shifted", "compressed-int8-a8-static"), False,
    ),
    DocumentedFormat(
        "awq", "4 bits, version `gemm`", "group of 32, 64 or 128, or all inputs", _NONE, _INT4, MEASURED,
        ("awq", "awq-64"),
    ),
    DocumentedFormat(
        "gptq", "4 bits, `desc_act` false, format v1 or v2", "group of 32, 64 or 128, or all inputs; symmetric or not",
        _NONE, _INT4, MEASURED, ("gptq", "gptq-asymmetric", "gptq-asymmetric-v2"),
    ),
    DocumentedFormat(
        "gptq", "8 bits, `desc_act` false, format v1 or v2", "group of 32, 64 or 128, or all inputs; symmetric or not",
        _NONE, _INT8, COMPILED, ("gptq-8-bits", "gptq-8-bits-asymmetric"),
    ),
    DocumentedFormat(
        "gptq", "4 or 8 bits, `desc_act` true", "as above; inputs sorted by group while loading", _NONE,
        ("gemm.int4", "gemm.int8_weights"), COMPILED, ("gptq-desc-act", "gptq-8-bits-desc-act"), False,
    ),
    DocumentedFormat(
        "auto-round", "4 bits, packing of GPTQ or AWQ", "group of 32, 64 or 128, or all inputs", _NONE, _INT4, MEASURED,
        ("auto-round-gptq", "auto-round-awq"),
    ),
    DocumentedFormat(
        "auto-round", "8 bits, packing of GPTQ", "group of 32, 64 or 128, or all inputs", _NONE, _INT8, COMPILED,
        ("auto-round-8-bits",),
    ),
    DocumentedFormat(
        "mxfp4", "gpt-oss (`*_blocks`, `*_scales`)", "of experts: e2m1, a power of two for each 32 inputs", _NONE,
        ("moe.mxfp4",), MEASURED, ("tests/models/test_gpt_oss.py",),
    ),
    DocumentedFormat(
        "a `.gguf` file", "F32, F16, BF16, Q2_K to Q6_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0",
        "dequantised while loading, rounded once to the model's dtype", _NONE, ("gemm.linear",), MEASURED,
        ("tests/models/test_gguf.py",),
    ),
    DocumentedFormat(
        "gguf", "a `.gguf` file and `--quantization gguf`: Q4_0, Q5_0, Q8_0",
        "integers of 4 bits (Q4_0) or 8, a scale for each 32 inputs", _NONE, ("gemm.int4", *_INT8), COMPILED,
        ("tests/models/test_gguf_packed.py",),
    ),
    DocumentedFormat(
        "`--quantization fp8`", "float32, float16 or bfloat16", "as the first row", "as the first row", _FP8,
        E4M3_MEASURED, ("tests/models/test_quantised.py",),
    ),
)  # fmt: skip
"""In the order of the page."""


def markdown() -> str:
    """Return the table of docs/guide/quantise.md."""
    rows = ["| `quant_method` or source | Stored as | Weights | Activations | Experts | Kernels | Cards | Tests |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        method = row.method if "`" in row.method else f"`{row.method}`"
        kernels, tests = (", ".join(f"`{each}`" for each in names) for names in (row.kernels, row.tests))
        experts = "yes" if row.experts else "refused"
        cells = (method, row.stored, row.weights, row.activations, experts, kernels, row.cards, tests)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"
