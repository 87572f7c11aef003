"""Embeddings in request bodies: base64 of a safetensors file, or of a tensor from ``torch.save`` (vLLM's form).

The sender is not trusted. The size is checked before decoding, nothing is unpickled (``torch_archive.py``), and a
tensor has exactly the bytes that were sent.

Only this needs torch in the API process; a server without embeddings does not import it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import TYPE_CHECKING

from unisono.config.torch_archive import read_tensor
from unisono.types import BadRequest

if TYPE_CHECKING:
    import torch

OVERHEAD_BYTES = 1 << 16
"""Most bytes that torch.save or safetensors write beside a tensor's numbers."""
SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
ARCHIVE = b"PK"
"""Prefix of the archives of torch.save."""


def get_ready() -> None:
    """Import torch now, which takes 1.5 s, so that no request waits for it."""
    import torch  # noqa: F401


def load_embeds(text: str, tokens: int, hidden_size: int, param: str) -> torch.Tensor:
    """Decode the tensor in ``text``, of up to ``tokens`` vectors. Raises BadRequest with the reason."""
    limit = tokens * hidden_size * 4 + OVERHEAD_BYTES
    least = len(text) // 4 * 3 - 2
    if least > limit:
        raise BadRequest(
            f"{param} has {least} bytes; {tokens} vectors of {hidden_size} numbers, the model's context, take {limit} "
            "at most. Send fewer.",
            param,
            "context_length_exceeded",
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        message = f"{param} is not base64; send base64 of a safetensors file, or of what torch.save wrote."
        raise BadRequest(message, param) from None
    try:
        return read_safetensors(data) if _is_safetensors(data) else read_tensor(data, limit)
    except ValueError as error:
        raise BadRequest(f"{param} {error}.", param) from None


def _is_safetensors(data: bytes) -> bool:
    """True for bytes that begin as a safetensors file: the header's length, then an object."""
    return not data.startswith(ARCHIVE) and data[8:9] == b"{"


def read_safetensors(data: bytes) -> torch.Tensor:
    """The one tensor in a safetensors file. Raises ValueError with the end of a sentence that begins with "it"."""
    import torch

    length = int.from_bytes(data[:8], "little")
    if length > OVERHEAD_BYTES or 8 + length > len(data):
        raise ValueError("is not a safetensors file: its header does not fit")
    try:
        header = json.loads(data[8 : 8 + length])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        [entry] = tensors.values()
        dtype, shape, (start, end) = SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"does not hold one tensor of {', '.join(SAFETENSORS)}, as safetensors files do") from None
    sizes = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48 for n in shape) and len(shape) <= 8
    kind = getattr(torch, dtype)
    sent = len(data) - 8 - length
    if not sizes or start != 0 or end != sent or math.prod(shape) * kind.itemsize != sent:
        raise ValueError(f"has {sent} bytes of numbers, which is not a tensor of shape {shape} and dtype {dtype}")
    if not sent:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data[8 + length :]), dtype=kind).view(shape)
