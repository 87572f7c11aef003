"""State space of Mamba2 (Dao and Gu, arXiv 2405.21060). Owns the ``mamba2`` op; called by ``models``.

It is the gated delta rule without the delta: nothing is erased, and the new values are the values times their steps. So
it has the chunks of 16 tokens at absolute positions, the remembered inputs and the kernels of
``kernels/recurrent/gated_delta.py``, and a token's bits do not depend on the division of a text into passes, nor on the
other rows. Queries are C, keys are B, values are x.

Shapes: T tokens, R rows, NR state rows, G groups, H heads, N state size, P head size, RING positions that a row
remembers.
"""

from __future__ import annotations

import functools

from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.recurrent.gated_delta import Sizes, delta_cases, launch_gated_delta
from unisono.kernels.recurrent.gated_delta_cpu import CHUNK, recurrence_cpu
from unisono.kernels.recurrent.mamba2_cpu import mamba2_rule


def launch_mamba2(
    cbx: Tensor, gates: Tensor, skip: Tensor, state: Tensor, bx_ring: Tensor, gates_ring: Tensor, rows: Tensor,
    since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """See :func:`mamba2`."""
    where = rows, since, first, until, end, query_start
    return launch_gated_delta(cbx, gates, state, bx_ring, gates_ring, *where, skip=skip)


@op(cuda=launch_mamba2, meta=lambda cbx, state: cbx.new_empty(len(cbx), state.shape[1:3].numel()))
def mamba2(
    cbx: Tensor, gates: Tensor, skip: Tensor, state: Mutated[Tensor], bx_ring: Mutated[Tensor],
    gates_ring: Mutated[Tensor], rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor,
    query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """Apply Mamba2's recurrence over each row's tokens.

    For each head h, with C and B of its group::

        S <- S exp(a_t) + step_t x_t B_t^T;  y_t = S C_t + skip_h x_t

    cbx [T, G N + G N + H P]: C, B, x after the convolution. gates [T, 2, H] fp32: a, then the step. skip [H] fp32.
    state [NR, H, P, N] fp32: S after ``since`` tokens. bx_ring [NR, RING, G N + H P], gates_ring [NR, RING, 2, H]:
    inputs of the tokens since then, position p at p % RING. rows … end [R], query_start [R + 1] or None in a round:
    see :class:`unisono.kv.recurrent_pass.RecurrentPass`. Heads h r … h r + r - 1 share group h, with r = H / G. N and
    P are powers of two from 16 to 128.

    Returns y [T, H P] in cbx's dtype, zero for padding tokens. The state advances to ``until`` tokens, and the rings
    store the pass's tokens.
    """
    of_pass = rows, since, first, until, end
    rule = functools.partial(mamba2_rule, skip=skip)
    return recurrence_cpu(cbx, gates, state, (bx_ring, gates_ring), of_pass, query_start, rule)


AOT: list[AotCase] = [
    case
    for dtype, groups, heads, state_size, size, width in (
        ("bf16", 8, 64, 128, 64, 4),  # Nemotron-3-Nano
        ("bf16", 1, 128, 128, 64, 1),  # Granite 4.0 H Small
        ("bf16", 8, 64, 128, 64, 12), ("fp16", 1, 8, 32, 32, 4), ("fp32", 2, 4, 32, 16, 2),
    )
    for is_round in (False, True)
    for case in delta_cases(
        dtype, Sizes(groups, heads, state_size, size, CHUNK - 1 + 2 * width), width, is_round, delta=False
    )
]  # fmt: skip
