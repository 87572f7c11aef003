"""Embeddings in request bodies: base64 of a tensor as ``torch.save`` writes it, vLLM's form.

The sender is not trusted. The size is checked before anything is unpacked, only tensors are unpickled
(``weights_only``), and a tensor may not claim more memory than the file has bytes.

The API process needs torch for this alone; a server that takes no embeddings imports none of its own.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from typing import TYPE_CHECKING

from unisono.types import BadRequest

if TYPE_CHECKING:
    import torch

OVERHEAD_BYTES = 1 << 16
"""What torch.save writes beside a tensor's numbers, at most."""


def get_ready() -> None:
    """Import torch now, which takes 1.5 s, so that no request waits for it."""
    import torch  # noqa: F401


def load_embeds(text: str, tokens: int, hidden_size: int, param: str) -> torch.Tensor:
    """Decode the tensor in ``text``, of up to ``tokens`` vectors. Raises BadRequest naming what is wrong."""
    import torch

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
        raise BadRequest(f"{param} is not base64; send base64 of what torch.save wrote.", param) from None
    _check_archive(data, limit, param)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # whatever a broken or hostile file leads to
        raise BadRequest(f"{param} cannot be loaded: send one tensor, as torch.save writes it.", param) from None
    if not isinstance(tensor, torch.Tensor):
        raise BadRequest(f"{param} holds a {type(tensor).__name__}; send one tensor.", param)
    if tensor.is_nested:
        raise BadRequest(f"{param} holds a nested tensor; send a dense one.", param)
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        claimed = max(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
        if claimed > len(data):
            raise BadRequest(
                f"{param} is a tensor of shape {tuple(tensor.shape)} that takes {claimed} bytes, of which {len(data)} "
                "were sent; save a contiguous copy.",
                param,
            )
    return tensor


def _check_archive(data: bytes, limit: int, param: str) -> None:
    """Raises BadRequest unless ``data`` is an archive whose files, unpacked, take at most ``limit`` bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception:
        raise BadRequest(f"{param} is not what torch.save writes; send base64 of that.", param) from None
    if unpacked > limit:
        raise BadRequest(f"{param} unpacks to {unpacked} bytes; {limit} is the most for this model's context.", param)
