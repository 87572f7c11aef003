"""Two processes gather through the GPU's kernel in Triton's interpreter, over memory that both map at one address.

Run as a script with TRITON_INTERPRET=1; exits 0 if every gather brought every rank's words.
"""

import mmap
import os
import sys
import time

import torch

from unisono.kernels.gather import PROGRAMS, buffer_words, launch_gather

SHAPES = [(1, 5), (3, 700), (2, 40), (1030, 20), (5, 1300), (1, 5)]


START = int(sys.argv[1])
"""The turn before the first."""


def main() -> int:
    words = buffer_words(2)
    memory = mmap.mmap(-1, 2 * 8 * words + 64)
    whole = torch.frombuffer(memory, dtype=torch.int64)
    buffers, others = [whole[:words], whole[words : 2 * words]], whole[2 * words :].view(torch.int32)
    addresses = torch.tensor([*(b.data_ptr() for b in buffers), others.data_ptr()])
    child = os.fork()
    rank, turns, right = int(child == 0), torch.zeros(PROGRAMS, dtype=torch.int32), True
    turns.fill_(START)
    others[1 + rank] = 1
    while not (others[1:3] == 1).all():
        os.sched_yield()
    for turn, (rows, width) in enumerate(SHAPES):
        parts = [torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 10_000 * r + turn for r in range(2)]
        if rank == turn % 2:
            time.sleep(0.2)  # the other waits, also in the first turn of a place
        right &= torch.equal(launch_gather(parts[rank], addresses, turns, rank, 2), torch.cat(parts, 1))
    if child == 0:
        os._exit(0 if right else 1)
    return 0 if right and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
