"""Writers of published quantised layouts: each packs a weight, and returns it with the values it stands for.

Every writer packs numbers one by one as the format's documentation says; nothing here is shared with the package's
readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""(a weight's tensors by the last part of their names, its values in float64)"""
Activations = Callable[[torch.Tensor, float], torch.Tensor]
"""(inputs in float64, the layer's fixed scale) -> what their quantised values stand for."""


def e4m3(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(E4M3)


def by_token(x: torch.Tensor, _: float) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return e4m3(x, scale).double() * scale


def by_token_and_group(x: torch.Tensor, _: float) -> torch.Tensor:
    return torch.cat([by_token(part, 0) for part in x.split(128, -1)], -1)


def fixed(x: torch.Tensor, scale: float) -> torch.Tensor:
    return e4m3(x, scale).double() * scale


def untouched(x: torch.Tensor, _: float) -> torch.Tensor:
    return x


def fp8_blocks(scale_name: str, scale_dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        n, k = weight.shape
        scales = torch.empty(-(-n // 128), -(-k // 128), dtype=scale_dtype)
        stored, values = torch.empty(n, k, dtype=E4M3), torch.empty(n, k, dtype=torch.float64)
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                block = weight[i : i + 128, j : j + 128].double()
                scales[i // 128, j // 128] = block.abs().max() / 448
                scale = scales[i // 128, j // 128].double()
                stored[i : i + 128, j : j + 128] = e4m3(block, scale)
                values[i : i + 128, j : j + 128] = stored[i : i + 128, j : j + 128].double() * scale
        return {"weight": stored, scale_name: scales}, values

    return write


def fp8_rows(
    one: bool, shape: Sequence[int], scale_dtype: torch.dtype, static: bool
) -> Callable[[torch.Tensor], Written]:
    """One scale for all rows or one for each; ``shape``: of the scales as stored, -1 for the rows."""

    def write(weight: torch.Tensor) -> Written:
        largest = weight.abs().max() if one else weight.abs().amax(1)
        scales = (largest / 448).to(scale_dtype)
        of_rows = scales.double().expand(weight.shape[0])[:, None]
        stored = e4m3(weight.double(), of_rows)
        tensors = {"weight": stored, "weight_scale": scales.reshape(tuple(shape))}
        if static:
            tensors["input_scale"] = torch.tensor(0.011)
        return tensors, stored.double() * of_rows

    return write


def int4_numbers(
    weight: torch.Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(numbers 0 … 15 [N, K], zeros [N, G], scales [N, G], values in float64)."""
    n, k = weight.shape
    size = k if group == -1 else group
    grouped = weight.double().view(n, k // size, size)
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        scales, zeros = (grouped.abs().amax(2) / 7.5).to(scale_dtype), torch.full(low.shape, 8)
    else:
        scales = ((high - low) / 15).to(scale_dtype)
        zeros = (-low / scales.double()).round().clamp(1, 15).int()
    numbers = (grouped / scales.double()[..., None] + zeros[..., None]).round().clamp(0, 15).int()
    values = (numbers - zeros[..., None]).double() * scales.double()[..., None]
    return numbers.view(n, k), zeros.int(), scales, values.view(n, k)


def pack(numbers: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight numbers along ``dim`` in an int32: number ``order[i]`` in bits 4 i and up."""
    eights = numbers.movedim(dim, -1).unflatten(-1, (-1, 8)).long()
    words = sum(eights[..., place] << (4 * i) for i, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def awq(group: int) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        numbers, zeros, scales, values = int4_numbers(weight, group, False, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = {"qweight": pack(numbers.t(), 1, order), "qzeros": pack(zeros.t(), 1, order)}
        return {**packed, "scales": scales.t().contiguous()}, values

    return write


def gptq(group: int, symmetric: bool, offset: int) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        numbers, zeros, scales, values = int4_numbers(weight, group, symmetric, torch.float16)
        size = weight.shape[1] if group == -1 else group
        return {
            "qweight": pack(numbers.t(), 0),
            "qzeros": pack(zeros.t() - offset, 1),
            "scales": scales.t().contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // size).int(),
        }, values

    return write


def packed_int4(group: int, symmetric: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        numbers, zeros, scales, values = int4_numbers(weight, group, symmetric, torch.bfloat16)
        tensors = {"weight_packed": pack(numbers, 1), "weight_scale": scales.contiguous()}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        return tensors if symmetric else tensors | {"weight_zero_point": pack(zeros, 0)}, values

    return write


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def mxfp4_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, N, K] as gpt-oss has them: (blocks [E, N, K / 32, 16] uint8, scales [E, N, K / 32] uint8)."""
    groups = weights.unflatten(-1, (-1, 32)).double()
    power = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    magnitude = groups.abs() / 2**power
    number = (magnitude[..., None] - torch.tensor(E2M1, dtype=torch.float64)).abs().argmin(-1)
    bits = number + 8 * (groups < 0)
    return (bits[..., 0::2] + 16 * bits[..., 1::2]).to(torch.uint8), (power.squeeze(-1) + 127).to(torch.uint8)


def experts_in_mxfp4(directory: Path) -> None:
    """Store the experts of a gpt-oss checkpoint, and what config.json says of them, as the published ones."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = mxfp4_blocks(tensors.pop(name).mT)
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(tensors, file, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))


def nvfp4(modelopt: bool, calibrated: bool = True) -> Callable[[torch.Tensor], Written]:
    """compressed-tensors divides by its number of a projection, ModelOpt multiplies with it."""

    def write(weight: torch.Tensor) -> Written:
        groups = weight.double().unflatten(1, (-1, 16))
        largest = groups.abs().amax(-1)
        whole = (weight.double().abs().max() / (6 * 448)).float()  # what values are multiplied with
        stored = (1 / whole) if not modelopt else whole
        factor = whole.double() if modelopt else 1 / stored.double()
        scales = (largest / 6 / factor).to(E4M3)
        scale = scales.double()[..., None] * factor
        number = ((groups / scale).abs()[..., None] - torch.tensor(E2M1, dtype=torch.float64)).abs().argmin(-1)
        bits = (number + 8 * (groups < 0)).flatten(1)
        packed = (bits[:, 0::2] + 16 * bits[:, 1::2]).to(torch.uint8)
        values = (torch.tensor(E2M1, dtype=torch.float64)[number] * groups.sign() * scale).flatten(1)
        if modelopt:
            tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": stored}
            return tensors | {"input_scale": torch.tensor(0.011)}, values
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": stored.view(1)}
        return tensors | ({"input_global_scale": torch.tensor([91.0])} if calibrated else {}), values

    return write


def int8_by_token(x: torch.Tensor, _: float) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return (x / scale).round().clamp(-128, 127) * scale


def int8_shifted(x: torch.Tensor, _: float) -> torch.Tensor:
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = (high - low).clamp_min(1e-10) / 255
    zero = (-low / scale).round() - 128
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


def int8_fixed(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).round().clamp(-128, 127) * scale


def bounded(x: torch.Tensor, _: float) -> torch.Tensor:
    return by_token(x.clamp(-1.5, 1.5), 0)


def int8_rows(one: bool, static: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        largest = weight.abs().max().view(1) if one else weight.abs().amax(1, keepdim=True)
        scales = (largest / 127).to(torch.bfloat16)
        stored = (weight.double() / scales.double()).round().clamp(-128, 127)
        tensors = {"weight": stored.to(torch.int8), "weight_scale": scales}
        return tensors | ({"input_scale": torch.tensor([0.011])} if static else {}), stored * scales.double()

    return write


def int8_numbers(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """(numbers 0 … 255 [N, K], zeros [N, G], bfloat16 scales [N, G], values in float64)."""
    n, k = weight.shape
    grouped = weight.double().view(n, -1, k if group == -1 else group)
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        scales, zeros = (grouped.abs().amax(2) / 127).to(torch.bfloat16), torch.full(low.shape, 128)
    else:
        scales = ((high - low) / 255).to(torch.bfloat16)
        zeros = (-low / scales.double()).round().clamp(1, 255).int()
    numbers = (grouped / scales.double()[..., None] + zeros[..., None]).round().clamp(0, 255).int()
    values = (numbers - zeros[..., None]).double() * scales.double()[..., None]
    return numbers.view(n, k), zeros.int(), scales, values.view(n, k)


def pack_fours(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Four numbers along ``dim`` in an int32, the first in the lowest bits."""
    fours = numbers.movedim(dim, -1).unflatten(-1, (-1, 4)).long()
    words = sum(fours[..., place] << (8 * place) for place in range(4))
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def gptq8(group: int, symmetric: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        numbers, zeros, scales, values = int8_numbers(weight, group, symmetric)
        return {
            "qweight": pack_fours(numbers.t(), 0),
            "qzeros": pack_fours(zeros.t() - 1, 1),
            "scales": scales.t().contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // group).int(),
        }, values

    return write


def in_activation_order(
    write: Callable[[torch.Tensor], Written], words: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], Written]:
    """GPTQ weights whose inputs are grouped in an order drawn from their number, as ``desc_act`` does.

    words: the stored weight -> its numbers [K, N] (:func:`fours`, :func:`eights`), which are packed again.
    """

    def written(weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        tensors, sorted_values = write(weight[:, order])
        numbers, groups, values = words(tensors["qweight"]), torch.empty_like(tensors["g_idx"]), sorted_values.clone()
        groups[order], values[:, order] = tensors["g_idx"], sorted_values
        in_place = torch.empty_like(numbers)
        in_place[order] = numbers
        packed = pack(in_place, 0) if words is eights else pack_fours(in_place, 0)
        return {**tensors, "qweight": packed, "g_idx": groups}, values

    return written


def eights(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> numbers 0 … 15 [8 n, m]."""
    return torch.stack([words >> (4 * place) & 15 for place in range(8)], 1).flatten(0, 1)


def fours(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> numbers 0 … 255 [4 n, m]."""
    return torch.stack([words >> (8 * place) & 255 for place in range(4)], 1).flatten(0, 1)


def int8_weights(group: int, symmetric: bool, packed: bool = True) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        numbers, zeros, scales, values = int8_numbers(weight, group, symmetric)
        if not packed:
            return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}, values
        tensors = {"weight_packed": pack_fours(numbers, 1), "weight_scale": scales.contiguous()}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        return tensors if symmetric else tensors | {"weight_zero_point": pack_fours(zeros, 0)}, values

    return write


def without(kind: str, write: Callable[[torch.Tensor], Written]) -> Callable[[torch.Tensor], Written]:
    """A writer that leaves out one tensor."""

    def written(weight: torch.Tensor) -> Written:
        tensors, values = write(weight)
        del tensors[kind]
        return tensors, values

    return written


def powers_of_two(dtype: torch.dtype) -> Callable[[torch.Tensor], Written]:
    """fp8 blocks whose scales are powers of two, stored as ``dtype``."""

    def write(weight: torch.Tensor) -> Written:
        tensors, _ = fp8_blocks("weight_scale_inv")(weight)
        scales = 2 ** tensors["weight_scale_inv"].double().log2().ceil()
        of_all = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
        stored = e4m3(weight.double(), of_all)
        return {"weight": stored, "weight_scale_inv": scales.float().to(dtype)}, stored.double() * of_all

    return write
