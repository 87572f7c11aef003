"""The table of rotary angles defined by a checkpoint's configuration.

Built once per model and kind of layer by ``models``; read by the ``rope_and_cache`` op.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.types import ConfigError

SUPPORTED = ("default", "dynamic", "linear", "llama3", "longrope", "none", "proportional", "yarn")
"""Rope types. ``none``: the angle of every position is 0. The angles of ``dynamic`` and ``longrope`` depend on the
longest length, those of the others on the position alone."""


@dataclass(frozen=True)
class RotarySpec:
    """Rotary table of an attention layer; layers with equal specs share a table.

    head_dim: elements of a head.
    parameters: the rope parameters as JSON; their ``partial_rotary_factor`` is the fraction of a head that is rotated.
    hf_config: other inputs of the rope type (the trained context length).
    axes: for each rotated plane, the axis whose position rotates it (0 time, 1 height, 2 width); empty if positions
        have one axis.
    """

    head_dim: int
    parameters: str
    hf_config: Any = field(compare=False, repr=False)
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, hf_config: Any, head_dim: int, parameters: dict[str, Any] | None = None) -> RotarySpec:
        """Spec of a transformers config; ``parameters``: of one kind of its layers, if they differ."""
        found = _rope_parameters(hf_config) if parameters is None else parameters
        return cls(head_dim, json.dumps(found, sort_keys=True), hf_config, _axes(head_dim, found))

    @classmethod
    def none(cls, head_dim: int) -> RotarySpec:
        """Spec of layers that do not rotate."""
        return cls(head_dim, json.dumps({"rope_type": "none"}), None)

    @property
    def planes(self) -> int:
        """Number of rotated planes of a head."""
        return _rot_dim(self.head_dim, json.loads(self.parameters)) // 2

    def table(self, max_positions: int, device: torch.device | str, length: int | None = None) -> torch.Tensor:
        """See :func:`rotary_table`."""
        return rotary_table(self.hf_config, self.head_dim, max_positions, device, json.loads(self.parameters), length)


def _rope_parameters(config: Any) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5; from a raw or older config, rope_theta and rope_scaling."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = dict(parameters)
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] == "mrope":  # an older name of the default with sections
        parameters["rope_type"] = "default"
    return parameters


def _rot_dim(head_dim: int, parameters: dict[str, Any]) -> int:
    if parameters.get("rope_type") == "proportional":  # all planes are in the table; some do not rotate
        return head_dim
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _axes(head_dim: int, parameters: dict[str, Any]) -> tuple[int, ...]:
    """Axis of each plane, if the parameters define sections that fit."""
    section, planes = parameters.get("mrope_section"), _rot_dim(head_dim, parameters) // 2
    axes = rotary_axes(tuple(section), bool(parameters.get("mrope_interleaved")), planes) if section else ()
    return axes if len(axes) == planes else ()


def rotary_axes(section: tuple[int, ...], interleaved: bool, planes: int) -> tuple[int, ...]:
    """Axis (0 time, 1 height, 2 width) whose position rotates each of ``planes`` planes.

    section: planes of each of the three axes.
    interleaved: the axes alternate as long as each has planes left, and time has the rest (Qwen3-VL); otherwise they
        lie in blocks (Qwen2-VL, arXiv 2409.12191), whose sum must be ``planes``.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    return tuple(plane % 3 if plane < 3 * section[plane % 3] else 0 for plane in range(planes))


def angles_of(
    table: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Table of the angles of these tokens only, and the row of it for each token.

    table [max_positions, D] fp32: see :func:`rotary_table`.
    positions [T, 3] int32: on the axes of time, height and width; below 0 counts as 0.
    axes [D] int64: axis of each element of a row; None: time only. Returns [T, D] and [T] int32. A token whose three
        positions are equal gets exactly a row of the table.
    """
    if axes is None:
        return table, positions[:, 0].contiguous()
    rows = positions.index_select(1, axes).clamp_min(0).long()
    return table.gather(0, rows), torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)


def _inverse_frequencies(
    config: Any, head_dim: int, parameters: dict[str, Any], length: int
) -> tuple[torch.Tensor, float]:
    """Radians per position of each plane [rot_dim / 2], fp32, and the factor on cosines and sines.

    length: longest text in tokens.
    """
    kind = parameters["rope_type"]
    if kind not in SUPPORTED:
        raise ConfigError(
            f"rope_type={kind!r} is not supported; supported are {', '.join(SUPPORTED)}. "
            "Within the context the model was first trained for, delete rope_scaling from its config.json."
        )
    if kind == "none":
        return torch.zeros(head_dim // 2), 1.0
    if kind == "default":
        rot_dim = _rot_dim(head_dim, parameters)
        exponents = torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind == "proportional":
        rotating = int(parameters.get("partial_rotary_factor", 1.0) * head_dim / 2)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (parameters["rope_theta"] ** exponents) / parameters.get("factor", 1.0)
        return torch.where(torch.arange(head_dim // 2) < rotating, frequencies, 0.0), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(config)
    config.head_dim, config.rope_parameters = head_dim, parameters
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=length)
    if kind == "longrope" and "long_mscale" in parameters:
        long = length > config.rope_parameters["original_max_position_embeddings"]
        factor = float(parameters["long_mscale" if long else "short_mscale"])
    return frequencies, factor


def rotary_table(
    hf_config: Any,
    head_dim: int,
    max_positions: int,
    device: torch.device | str,
    parameters: dict[str, Any] | None = None,
    length: int | None = None,
) -> torch.Tensor:
    """Cosines followed by sines of every position: [max_positions, rot_dim] fp32 on ``device``.

    parameters: the rope parameters, by default the configuration's. rot_dim is ``head_dim`` times their
        partial_rotary_factor; for ``proportional`` (Gemma 4) it is head_dim, and the other planes have the angle 0.
        The frequencies, scaling (linear; Llama 3; YaRN, arXiv 2309.00071) and its attention
        factor are those of transformers. Computed on the CPU, so that the table is the same on every device.
    length: longest text in tokens, by default max_positions: ``dynamic`` stretches the base for it, and ``longrope``
        takes the long factors (and ``long_mscale`` on cosines and sines, in place of the factor that follows from the
        lengths) if it is above the length of the first training. Raises ConfigError for other rope types.
    """
    parameters = parameters or _rope_parameters(hf_config)
    frequencies, factor = _inverse_frequencies(hf_config, head_dim, parameters, length or max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies.float()
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)
