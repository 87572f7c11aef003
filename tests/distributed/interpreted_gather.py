"""Two processes gather through the GPU's kernels in Triton's interpreter, over memory that both map at one address.

Run as a script with TRITON_INTERPRET=1, the turn before the first one, and what to try: ``words``, or ``fused``, norms
and SiLU. Exits 0 if all had the bits of the ops one after the other.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from tests.kernels.interpreter import quicken
from unisono.kernels.comm.gather import PROGRAMS, buffer_words, launch_gather
from unisono.kernels.comm.gather_fused import (
    PeerBuffers,
    has_bits_of_parts,
    launch_gather_add_rms_norm,
    launch_silu_gather,
    ordered_sum,
)
from unisono.kernels.norm.activation import launch_silu_mul
from unisono.kernels.norm.rms_norm import launch_add_rms_norm, launch_add_rms_norm_fp8

SHAPES = [(1, 5), (3, 700), (2, 40), (1030, 20), (5, 1300), (1, 5)]
NORMS = [(1, 64, torch.float32), (3, 1280, torch.float16), (2, 4400, torch.float16), (1, 64, torch.float32)]
START, WORDS = int(sys.argv[1]), sys.argv[2] == "words"
"""The turn before the first, and whether words alone are gathered."""


def parts_of(rows: int, columns: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What each rank has, [rows, columns]; every process makes the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2)]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gathers(peers: PeerBuffers, check: Callable[[bool], None]) -> None:
    """Words alone."""
    for turn, (rows, width) in enumerate(SHAPES if WORDS else SHAPES[:3]):
        parts = [torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 10_000 * r + turn for r in range(2)]
        if peers.rank == turn % 2:
            time.sleep(0.2)  # the other waits, also in the first turn of a place
        check(torch.equal(launch_gather(parts[peers.rank], *peers), torch.cat(parts, 1)))


def norms(peers: PeerBuffers, check: Callable[[bool], None]) -> None:
    """Columns or terms of a row, its sum with a residual, and the norm, quantised too."""
    for turn, (rows, width, dtype) in enumerate(NORMS):
        residual, weight = parts_of(rows, width, dtype, 50 + turn)[0], parts_of(1, width, dtype, turn)[0][0]
        for summed in (False, True):
            parts = parts_of(rows, width if summed else width // 2, dtype, 100 + turn)
            whole = torch.cat(parts, 1)
            whole = ordered_sum(whole, 2) if summed else whole
            given = parts[peers.rank], residual, weight, 1e-6
            if peers.rank == turn % 2:
                time.sleep(0.1)
            total, normed, *_ = launch_gather_add_rms_norm(*given, None, True, summed, peers)
            expected = launch_add_rms_norm(whole, residual, weight, 1e-6)
            check(torch.equal(total, expected[0]) and torch.equal(normed, expected[1]))
            if width % 64 == 0:
                found = launch_gather_add_rms_norm(*given, 64, False, summed, peers)
                wanted = launch_add_rms_norm_fp8(whole, residual, weight, 1e-6, 64, False)
                check(all(map(same_bytes, found, wanted)))


def trials(peers: PeerBuffers, check: Callable[[bool], None]) -> None:
    """What every rank asks at its start."""
    # The interpreter cuts what is rounded to bf16.
    check(has_bits_of_parts(peers, torch.device("cpu"), ((2, 128), (1, 1280)), torch.float16))


def silus(peers: PeerBuffers, check: Callable[[bool], None]) -> None:
    """SiLU of this rank's columns, of all ranks."""
    for turn, (rows, columns, dtype) in enumerate(
        [(1, 6, torch.float32), (3, 2600, torch.float16), (20, 40, torch.float16), (2, 700, torch.float32)]
    ):
        parts = parts_of(rows, 2 * columns, dtype, 200 + turn)
        found = launch_silu_gather(parts[peers.rank], peers)
        check(torch.equal(found, torch.cat([launch_silu_mul(part) for part in parts], 1)))


def main() -> int:
    quicken()
    words = buffer_words(2)
    memory = mmap.mmap(-1, 2 * 8 * words + 64)
    whole = torch.frombuffer(memory, dtype=torch.int64)
    buffers, others = [whole[:words], whole[words : 2 * words]], whole[2 * words :].view(torch.int32)
    addresses = torch.tensor([*(b.data_ptr() for b in buffers), others.data_ptr()])
    child = os.fork()
    signal.alarm(220)  # whoever is left alone would wait for ever
    rank, turns, right = int(child == 0), torch.full((PROGRAMS,), START, dtype=torch.int32), [True]
    others[1 + rank] = 1
    while not (others[1:3] == 1).all():
        os.sched_yield()
    peers = PeerBuffers(addresses, turns, rank, 2)
    for each in (gathers,) if WORDS else (gathers, norms, silus, trials, gathers):
        each(peers, right.append)
    if not all(right):
        print(f"rank {rank}: wrong {[i - 1 for i, one in enumerate(right) if not one]} of {len(right) - 1}")
    if child == 0:
        os._exit(0 if all(right) else 1)
    return 0 if all(right) and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
