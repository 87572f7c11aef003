"""The gated delta rule in plain torch: in chunks with gradients for training, and one token at a time for generation.

Source: Gated Delta Networks (arXiv 2412.06464), sections 3.1 and 3.3. Per value head, with state S [K, V]::

    S <- S * exp(g_t);   d = (v_t - S^T k_t) * beta_t;   S <- S + k_t d^T;   o_t = S^T q_t

Everything is fp32. q and k are l2-normalised here, and q is scaled by K ** -0.5.

Shapes: B rows, T tokens, h key heads, H value heads (a multiple of h), K / V key / value head dim, C chunk, N chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
BLOCK = 8
"""Size of the diagonal blocks that ``unit_lower_inverse`` inverts by a product of powers."""

EPS = 1e-6


def chunked(q_BThK: Tensor, k_BThK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor) -> Tensor:
    """Outputs [B, T, H, V] fp32 of rows that begin with a zero state. T is a multiple of ``CHUNK``."""
    repeats = v_BTHV.shape[2] // k_BThK.shape[2]
    q, k = (_in_chunks(x) for x in (normalize(q_BThK) * q_BThK.shape[-1] ** -0.5, normalize(k_BThK)))
    v = _in_chunks(v_BTHV.float())
    g, beta = (_in_chunks(x.float().unsqueeze(-1)) for x in (g_BTH, beta_BTH))  # [N, B, H, C, 1]
    similar, attend = (_each_value_head(x @ k.mT, repeats) for x in (k, q))
    q, k = _each_value_head(q, repeats), _each_value_head(k, repeats)

    total = g.cumsum(dim=3)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total - total.mT).masked_fill(~seen, float("-inf")).exp()
    inverse = unit_lower_inverse((beta * similar * decay).tril(-1))
    written = inverse @ (beta * v)  # what a chunk writes if the state before it is zero
    read = inverse @ (beta * k * total.exp())  # how the state before it changes that
    attend = attend * decay
    last = total[..., -1:, :]
    kept_keys = (k * (last - total).exp()).mT
    states = _states_before(
        last.exp() * torch.eye(k.shape[-1], device=k.device) - kept_keys @ read, kept_keys @ written
    )
    out = (q * total.exp() - attend @ read) @ states + attend @ written
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)


def step(
    state_BHKV: Tensor, q_BhK: Tensor, k_BhK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: (the new state, output [B, H, V]), both fp32."""
    repeats = v_BHV.shape[1] // k_BhK.shape[1]
    q, k = (normalize(x).repeat_interleave(repeats, dim=1) for x in (q_BhK, k_BhK))
    state = state_BHKV * g_BH.float().exp()[..., None, None]
    delta = (v_BHV.float() - torch.einsum("bhkv,bhk->bhv", state, k)) * beta_BH.float().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return state, torch.einsum("bhkv,bhk->bhv", state, q * q.shape[-1] ** -0.5)


def normalize(x: Tensor) -> Tensor:
    """l2-normalise the last dim, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + ``lower``) ** -1 for strictly lower triangular matrices [..., C, C], with a gradient.

    Diagonal blocks are inverted first and then merged in pairs: no intermediate value is large, even if all keys of a
    chunk are equal. The last line is a Newton step. It squares the relative error, and because ``guess`` is a constant
    in it, its gradient is that of the inverse.
    """
    constant = lower.detach()
    size, power = BLOCK, -_diagonal_blocks(constant, BLOCK)
    guess = torch.eye(BLOCK, device=lower.device) + power
    for _ in range(BLOCK.bit_length() - 2):
        power = power @ power
        guess = guess + power @ guess
    while size < lower.shape[-1]:
        upper_left, lower_right = guess[..., 0::2, :, :], guess[..., 1::2, :, :]
        below = _diagonal_blocks(constant, 2 * size)[..., size:, :size]
        lower_left = -lower_right @ (below @ upper_left)
        top = torch.cat((upper_left, torch.zeros_like(upper_left)), dim=-1)
        guess = torch.cat((top, torch.cat((lower_left, lower_right), dim=-1)), dim=-2)
        size *= 2
    guess = guess.squeeze(-3)
    return 2 * guess - guess @ (guess + lower @ guess)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[..., C, C] -> [..., C / size, size, size]."""
    count = matrix.shape[-1] // size
    blocks = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))  # [..., rows, size, columns, size]
    return torch.stack([blocks[..., i, :, i, :] for i in range(count)], dim=-3)


def _in_chunks(x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [N, B, heads, C, D]."""
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def _each_value_head(x: Tensor, repeats: int) -> Tensor:
    """[N, B, h, ...] -> [N, B, H, ...]: consecutive value heads share a key head."""
    return x.repeat_interleave(repeats, dim=2) if repeats > 1 else x


def _states_before(kept: Tensor, added: Tensor) -> Tensor:
    """The state before each chunk; chunk n makes ``kept[n] @ S + added[n]`` of S. [N, B, H, K, V]."""
    state, states = torch.zeros_like(added[0]), []
    for n in range(added.shape[0]):
        states.append(state)
        state = added[n] + kept[n] @ state
    return torch.stack(states)


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) in fp32 from the projections a and b [..., H]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()
