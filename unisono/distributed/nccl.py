"""Gathers between the GPUs of one host: by a kernel over memory that peers reach, or by NCCL.

Both are captured in graphs like any other launch. The kernel (``kernels/comm/gather.py``) carries what is small, which
is all that rounds gather; NCCL carries long prompts, and everything where torch cannot map peers' memory. Nothing uses
NVLink's multicast.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.distributed.gather import Ranks
from unisono.kernels.comm.gather import PROGRAMS, buffer_words, launch_gather
from unisono.kernels.comm.gather_fused import (
    Peers,
    has_bits_of_parts,
    launch_gather_add_rms_norm,
    launch_silu_gather,
    norm_parts,
    silu_parts,
)
from unisono.kernels.norm.rms_norm import Normed

NEAR_BYTES = 4 << 20
"""Bytes of a rank that the kernel carries, at most."""

START = timedelta(minutes=10)
"""How long ranks wait for each other at the start: their processes import and load at different speeds."""


class Nccl:
    """What carries the gathers of one rank. store: path of a file where the ranks meet. near: whether the kernel may
    serve; by default unless ``UNISONO_GATHER=nccl``."""

    def __init__(self, ranks: Ranks, device: torch.device, store: str, near: bool | None = None) -> None:
        self.ranks = ranks
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        meeting = dist.FileStore(store, ranks.count)
        dist.init_process_group(
            "nccl", store=meeting, rank=ranks.index, world_size=ranks.count, timeout=START, device_id=device
        )
        self._group: Any = dist.group.WORLD
        dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator, which a capture must not do
        self.why = "UNISONO_GATHER=nccl"
        self._near: Near | None = None
        wanted = os.environ.get("UNISONO_GATHER", "near") != "nccl" if near is None else near
        if wanted:
            self._near, self.why = _near_of_all(ranks, device, meeting)

    @property
    def name(self) -> str:
        """What carries small gathers."""
        return "NCCL" if self._near is None else "a kernel over peers' memory"

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`unisono.distributed.gather.Transport`."""
        rows, columns = x.shape
        count = self.ranks.count
        if not x.numel():
            return x.new_empty(rows, count * columns)
        if (near := self._near_for(x, 1)) is not None:
            return near.all_gather(x.view(torch.int32)).view(x.dtype)
        parts = torch.empty((count, rows, columns), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return parts.transpose(0, 1).reshape(rows, count * columns)

    def _near_for(self, x: torch.Tensor, parts: int) -> Near | None:
        """The peers' memory, where it carries rows like these, each of ``parts`` runs of columns."""
        whole_words = x.shape[1] // parts * x.itemsize % 4 == 0
        return self._near if x.numel() and x.nbytes // parts <= NEAR_BYTES and whole_words else None

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
        summed: bool,
    ) -> tuple[torch.Tensor, *Normed] | None:  # fmt: skip
        """See :class:`unisono.distributed.gather.FusingTransport`."""
        near = self._near_for(x, 1)
        if near is None or not near.fuses or not norm_parts(len(x), x.shape[1] * x.itemsize // 4):
            return None
        return launch_gather_add_rms_norm(x, residual, weight, eps, group, keep, summed, near.peers)

    def silu(self, x: torch.Tensor) -> torch.Tensor | None:
        """See :class:`unisono.distributed.gather.FusingTransport`."""
        near = self._near_for(x, 2)
        if near is None or not near.fuses or not silu_parts(len(x), x.shape[1] // 2 * x.itemsize // 4):
            return None
        return launch_silu_gather(x, near.peers)

    def give_up(self) -> None:
        """Have the kernels of this rank stop waiting, and NCCL's too; from any thread."""
        if self._near is not None:
            self._near.give_up()
        self._group.abort()

    def close(self) -> None:
        """Free the buffers and leave the group."""
        self._near = None
        if dist.is_initialized():
            dist.destroy_process_group()


class Near:
    """A buffer that peers write to, and the addresses of theirs.

    fuses: whether norms and SiLU may be computed by the kernels that gather: their bits were compared on every rank.
    """

    fuses = False

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._index, self._count = ranks.index, ranks.count
        self._buffer = symmetric.empty(buffer_words(ranks.count), dtype=torch.int64, device=device)
        self._handle = symmetric.rendezvous(self._buffer, dist.group.WORLD)  # type: ignore[arg-type]
        self._buffer.zero_()
        self._given_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        pointers = [*self._handle.buffer_ptrs, self._given_up.data_ptr()]
        self._addresses = torch.tensor(pointers, dtype=torch.int64, device=device)
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self.peers = Peers(self._addresses, self._turns, ranks.index, ranks.count)
        torch.cuda.synchronize()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, W] int32 -> [M, N · W]."""
        return launch_gather(x, self._addresses, self._turns, self._index, self._count)

    def give_up(self) -> None:
        """Let waiting kernels go on; what they then read is void."""
        self._given_up.fill_(1)


def _near_of_all(ranks: Ranks, device: torch.device, store: Any) -> tuple[Near | None, str]:
    """The buffers, where every rank could make them and a gather through them is right; and why not."""
    near, why = None, "torch maps the memory of peers, and a trial was right on every rank"
    try:
        near = Near(ranks, device)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
        why = f"torch cannot map the memory of peers: {' '.join(str(error).split())[:200]}"
    if not _all(store, ranks, "made", near is not None):
        return None, why if near is None else "torch cannot map the memory of peers on another rank"
    assert near is not None
    if not _all(store, ranks, "right", _is_right(near, ranks, device)):
        return None, "a trial over peers' memory was wrong"
    near.fuses = _all(store, ranks, "fused", has_bits_of_parts(near.peers, device))
    if not near.fuses:
        why += "; norms and SiLU have launches of their own, for their bits differ in a gather"
    return near, why


def _all(store: Any, ranks: Ranks, question: str, answer: bool) -> bool:
    """Whether every rank says yes; all ask."""
    store.set(f"{question}/{ranks.index}", b"1" if answer else b"0")
    return all(store.get(f"{question}/{index}") == b"1" for index in range(ranks.count))


def _is_right(near: Near, ranks: Ranks, device: torch.device) -> bool:
    """Whether gathers of small and large rows, several in a row, bring what the ranks said."""
    right = True
    for turn, (rows, width) in enumerate([(1, 64), (3, 700), (64, 1024), (200, 2048), (1, 8), (5, 33)] * 3):
        parts = [(torch.arange(rows * width, device=device).int() + 7 * rank + turn) for rank in range(ranks.count)]
        shaped = [part.view(rows, width) for part in parts]
        right &= torch.equal(near.all_gather(shaped[ranks.index].contiguous()), torch.cat(shaped, 1))
    return right
