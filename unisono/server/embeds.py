"""Embeddings that come with a request: base64 of a tensor as ``torch.save`` writes it, vLLM's form.

What is loaded comes from anybody, so its size is known before any of it is unpacked, nothing but tensors is unpickled
(``weights_only``), and a tensor may not claim more memory than the file brought.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from dataclasses import dataclass, replace

import torch

from unisono import vectors
from unisono.server.protocol import EmbeddingOverrides
from unisono.types import BadRequest, Overrides

OVERHEAD_BYTES = 1 << 16
"""What torch.save writes beside a tensor's numbers, at most."""


@dataclass(frozen=True)
class Prompt:
    """What is to be continued: token ids, and the embeddings that stand in for those of some. text: if it was text."""

    token_ids: list[int]
    text: str | None = None
    overrides: Overrides | None = None


def load_embeds(text: str, tokens: int, hidden_size: int, param: str) -> torch.Tensor:
    """The tensor that ``text`` encodes, of up to ``tokens`` vectors. Raises BadRequest naming what is wrong."""
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


def embedded_prompt(text: str, tokens: int, hidden_size: int) -> Prompt:
    """The prompt that an entry of ``prompt_embeds`` is. Raises BadRequest."""
    ids, overrides = vectors.embedded_prompt(load_embeds(text, tokens, hidden_size, "prompt_embeds"))
    return Prompt(ids, overrides=overrides)


def overridden(prompt: Prompt, given: EmbeddingOverrides, tokens: int, hidden_size: int) -> Prompt:
    """A prompt of tokens with ``embedding_overrides``. Raises BadRequest."""
    rows = load_embeds(given.embeddings, tokens, hidden_size, "embedding_overrides")
    ids, overrides = vectors.overridden(prompt.token_ids, (given.positions, rows))
    return replace(prompt, token_ids=ids, overrides=overrides)
