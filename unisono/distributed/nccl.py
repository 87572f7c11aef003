"""Gathers between the GPUs of one host: by a kernel over peer memory, or by NCCL.

Both are captured in graphs like any other launch. The kernel (``kernels/comm/gather.py``) carries small gathers, which
are all that rounds need; NCCL carries long prompts, and all gathers if torch cannot map peers' memory. NVLink multicast
is not used.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.config import env
from unisono.distributed.gather import Ranks
from unisono.kernels.comm.gather import PROGRAMS, buffer_words, launch_gather
from unisono.kernels.comm.gather_fused import (
    PeerBuffers,
    has_bits_of_parts,
    launch_gather_add_rms_norm,
    launch_silu_gather,
    norm_parts,
    silu_parts,
)
from unisono.kernels.norm.rms_norm import SumNormed

PEER_MEMORY_BYTES = 4 << 20
"""Largest part of a rank, in bytes, that the kernel carries."""

START = timedelta(minutes=10)
"""Time that ranks wait for each other at the start: their processes import and load at different speeds."""


class Nccl:
    """Transport of one rank's gathers on GPUs. store: path of a file where the ranks meet. peer_memory: True to allow
    the kernel; None: unless ``UNISONO_GATHER=nccl``.
    """

    def __init__(self, ranks: Ranks, device: torch.device, store: str, peer_memory: bool | None = None) -> None:
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
        self._peer_memory: PeerMemory | None = None
        enabled = not env.gathers_by_nccl() if peer_memory is None else peer_memory
        if enabled:
            self._peer_memory, self.why = _agreed_peer_memory(ranks, device, meeting)

    @property
    def name(self) -> str:
        """Name of the transport of small gathers."""
        return "NCCL" if self._peer_memory is None else "a kernel over peers' memory"

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`unisono.distributed.gather.Transport`."""
        rows, columns = x.shape
        count = self.ranks.count
        if not x.numel():
            return x.new_empty(rows, count * columns)
        if (peer_memory := self._peer_memory_for(x, 1)) is not None:
            return peer_memory.all_gather(x.view(torch.int32)).view(x.dtype)
        parts = torch.empty((count, rows, columns), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return parts.transpose(0, 1).reshape(rows, count * columns)

    def _peer_memory_for(self, x: torch.Tensor, parts: int) -> PeerMemory | None:
        """Return the peers' memory if it carries rows like these, each of ``parts`` runs of columns."""
        whole_words = x.shape[1] // parts * x.itemsize % 4 == 0
        return self._peer_memory if x.numel() and x.nbytes // parts <= PEER_MEMORY_BYTES and whole_words else None

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
        summed: bool,
    ) -> SumNormed | None:  # fmt: skip
        """See :class:`unisono.distributed.gather.FusingTransport`."""
        peer_memory = self._peer_memory_for(x, 1)
        if peer_memory is None or not peer_memory.fuses or not norm_parts(len(x), x.shape[1] * x.itemsize // 4):
            return None
        return launch_gather_add_rms_norm(x, residual, weight, eps, group, keep, summed, peer_memory.peers)

    def silu(self, x: torch.Tensor) -> torch.Tensor | None:
        """See :class:`unisono.distributed.gather.FusingTransport`."""
        peer_memory = self._peer_memory_for(x, 2)
        if peer_memory is None or not peer_memory.fuses or not silu_parts(len(x), x.shape[1] // 2 * x.itemsize // 4):
            return None
        return launch_silu_gather(x, peer_memory.peers)

    def give_up(self) -> None:
        """End the waiting of this rank's kernels, and of NCCL's; from any thread."""
        if self._peer_memory is not None:
            self._peer_memory.give_up()
        self._group.abort()

    def close(self) -> None:
        """Free the buffers and leave the group."""
        self._peer_memory = None
        if dist.is_initialized():
            dist.destroy_process_group()


class PeerMemory:
    """Buffer that peers write to, and the addresses of theirs.

    fuses: True if the gathering kernels may compute norms and SiLU: their bits were compared on every rank.
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
        self.peers = PeerBuffers(self._addresses, self._turns, ranks.index, ranks.count)
        torch.cuda.synchronize()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, W] int32 -> [M, N · W]."""
        return launch_gather(x, self._addresses, self._turns, self._index, self._count)

    def give_up(self) -> None:
        """Release waiting kernels; their results are void."""
        self._given_up.fill_(1)


def _agreed_peer_memory(ranks: Ranks, device: torch.device, store: Any) -> tuple[PeerMemory | None, str]:
    """Return the buffers if every rank could allocate them and a test gather is right; and the reason if not."""
    peer_memory, why = None, "torch maps the memory of peers, and a trial was right on every rank"
    try:
        peer_memory = PeerMemory(ranks, device)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
        why = f"torch cannot map the memory of peers: {' '.join(str(error).split())[:200]}"
    if not _all(store, ranks, "made", peer_memory is not None):
        return None, why if peer_memory is None else "torch cannot map the memory of peers on another rank"
    assert peer_memory is not None
    if not _all(store, ranks, "right", _is_right(peer_memory, ranks, device)):
        return None, "a trial over peers' memory was wrong"
    peer_memory.fuses = _all(store, ranks, "fused", has_bits_of_parts(peer_memory.peers, device))
    if not peer_memory.fuses:
        why += "; norms and SiLU have launches of their own, for their bits differ in a gather"
    return peer_memory, why


def _all(store: Any, ranks: Ranks, question: str, answer: bool) -> bool:
    """Return True if every rank answers yes; all call it."""
    store.set(f"{question}/{ranks.index}", b"1" if answer else b"0")
    return all(store.get(f"{question}/{index}") == b"1" for index in range(ranks.count))


def _is_right(peer_memory: PeerMemory, ranks: Ranks, device: torch.device) -> bool:
    """Test gathers of small and large rows, several in a row."""
    right = True
    for number, (rows, width) in enumerate([(1, 64), (3, 700), (64, 1024), (200, 2048), (1, 8), (5, 33)] * 3):
        parts = [(torch.arange(rows * width, device=device).int() + 7 * rank + number) for rank in range(ranks.count)]
        shaped = [part.view(rows, width) for part in parts]
        right &= torch.equal(peer_memory.all_gather(shaped[ranks.index].contiguous()), torch.cat(shaped, 1))
    return right
