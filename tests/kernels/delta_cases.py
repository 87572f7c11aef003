"""Texts for the recurrent ops: their float64 oracle, and an engine's passes over them, cut in any way.

Everything that a pass may not read is NaN: remembered inputs outside the live window, queries of earlier tokens,
rows of padding. Rejected drafts are random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.kernels.gluon_threads import Machine
from unisono.kernels.recurrent import gated_delta, gated_delta_gluon, kimi_delta, kimi_delta_gluon

TAPS, PAGE = 4, 16
ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def dots_in_a_chain(dots_in_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's ``tl.dot`` begins with what there is, as the device's does: a sum in slices is one sum."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> TensorHandle:
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None].astype(total.dtype) * b.data[k].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double().cpu() - y.double()).norm() / y.double().norm())


@dataclass(frozen=True)
class Sizes:
    """Heads of a layer, and how many tokens of a row a round may have.

    by_channel: each channel of a key has a decay, as in Kimi Delta Attention; otherwise each value head.
    """

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    width: int = 8
    by_channel: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.keys if self.by_channel else self.value_heads

    @property
    def gates(self) -> tuple[int, ...]:
        """Shape of a token's gates."""
        return (self.decays + self.value_heads,) if self.by_channel else (2, self.value_heads)


@dataclass
class Layer:
    """A layer's weights, and the raw inputs u and gate inputs ba of some texts."""

    sizes: Sizes
    dtype: torch.dtype
    lengths: list[int]
    seed: int = 0
    texts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        s, g = self.sizes, torch.Generator().manual_seed(self.seed)
        self.weight = (torch.randn(s.channels, 1, TAPS, generator=g) / 2).to(self.dtype)
        self.a_log = torch.log(torch.rand(s.value_heads, generator=g) * 15 + 1)
        step = torch.exp(torch.rand(s.decays, generator=g) * 4.6 - 6.9)
        self.dt_bias = step + torch.log(-torch.expm1(-step))
        self.texts = [self.noise(n, g) for n in self.lengths]

    def noise(self, tokens: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """u [tokens, C] and ba [tokens, inputs of the gates]."""
        u, inputs = torch.randn(tokens, self.sizes.channels, generator=g), self.sizes.decays + self.sizes.value_heads
        return u.to(self.dtype), (1.5 * torch.randn(tokens, inputs, generator=g)).to(self.dtype)


def oracle(layer: Layer, text: int, rounded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas in float64: outputs [T, Hv, V] and the state after all tokens [Hv, V, K].

    rounded: the convolution's output is rounded to the layer's dtype, as the ops do.
    """
    s, (u, ba) = layer.sizes, layer.texts[text]
    padded = torch.cat((torch.zeros(TAPS - 1, s.channels), u)).double()
    conv = sum(padded[j : j + len(u)] * layer.weight[:, 0, j].double() for j in range(TAPS))
    x = conv * torch.sigmoid(conv)
    x = x.to(layer.dtype).double() if rounded else x
    q, k, v = x.split((s.keys, s.keys, s.value_heads * s.value_dim), dim=1)
    groups = s.value_heads // s.key_heads

    def heads(t: torch.Tensor) -> torch.Tensor:
        t = t.unflatten(1, (s.key_heads, s.key_dim))
        return (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(groups, 1)

    q, k, v = heads(q) * s.key_dim**-0.5, heads(k), v.unflatten(1, (s.value_heads, s.value_dim))
    b, a = ba.double().chunk(2, dim=1)
    g = -layer.a_log.double().exp() * torch.nn.functional.softplus(a + layer.dt_bias.double())
    state, out = torch.zeros(s.value_heads, s.value_dim, s.key_dim, dtype=torch.float64), []
    for t in range(len(u)):
        state = state * g[t].exp()[:, None, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
        state = state + error[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), state


class Passes:
    """Rows of state, and passes over the texts of a layer. ``conv`` and ``rule`` are the ops or their launchers.

    length [r]: tokens of text r that are committed. out [r]: outputs of committed tokens, NaN for those to come.
    """

    def __init__(self, layer: Layer, conv: Callable[..., Any], rule: Callable[..., Any], device: str = "cpu") -> None:
        s, rows = layer.sizes, len(layer.texts) + 1
        self.layer, self.conv, self.rule, self.device = layer, conv, rule, device

        def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows, *shape), torch.nan, dtype=dtype, device=device)

        self.order = torch.randperm(
            rows, generator=torch.Generator().manual_seed(1)
        ).int()  # rows of state, the last pads
        self.state = nan(s.value_heads, s.value_dim, s.key_dim, dtype=torch.float32)
        self.taps = nan(TAPS - 1, s.channels, dtype=layer.dtype)
        self.state[self.order[:-1].long()] = 0
        self.taps[self.order[:-1].long()] = 0
        self.rings = {
            "conv": nan(TAPS - 1 + s.width - 1, s.channels, dtype=layer.dtype),
            "kv": nan(PAGE - 1 + 2 * s.width, s.channels - s.keys, dtype=layer.dtype),
            "gates": nan(PAGE - 1 + 2 * s.width, *s.gates, dtype=torch.float32),
        }
        self.since = torch.zeros(rows, dtype=torch.int32)
        self.length = [0] * len(layer.texts)
        self.out = [torch.full((n, s.value_heads * s.value_dim), torch.nan, dtype=layer.dtype) for n in layer.lengths]

    def prompt(self, new: list[int], pad: int = 0, pad_rows: int = 0) -> None:
        """Compute new[r] more tokens of each text; pad tokens and rows at the end."""
        part = [(r, self.length[r], n) for r, n in enumerate(new) if n]
        parts = [tuple(x[at : at + n] for x in self.layer.texts[r]) for r, at, n in part]
        starts = [0]
        for _, _, n in part:
            starts.append(starts[-1] + n)
        starts += [starts[-1]] * pad_rows
        first = torch.tensor([at for _, at, _ in part] + [-1] * pad_rows, dtype=torch.int32)
        end = torch.tensor([at + n for _, at, n in part] + [0] * pad_rows, dtype=torch.int32)
        out = self._run(parts, pad, first, end, end, [r for r, _, _ in part], torch.tensor(starts, dtype=torch.int32))
        assert not out[starts[-1] :].any(), "padding tokens are zero"
        for (r, at, n), begin in zip(part, starts, strict=False):
            self.out[r][at : at + n] = out[begin : begin + n]
            self.length[r] += n

    def round(
        self, width: int, right: list[int], seed: int = 0, pad_rows: int = 0, room: list[int] | None = None
    ) -> None:
        """A round of ``width`` tokens of each text, of which the first right[r] are the text's and are committed.

        room: tokens of each row that count, as near a request's last position; all by default.
        """
        g, parts = torch.Generator().manual_seed(seed), []
        for r, good in enumerate(right):
            at, drafts = self.length[r], self.layer.noise(width, g)
            parts.append(
                tuple(
                    torch.cat((x[at : at + good], d[good:])) for x, d in zip(self.layer.texts[r], drafts, strict=True)
                )
            )
        first = torch.tensor([*self.length, *[-1] * pad_rows], dtype=torch.int32)
        end = first + torch.tensor([*(room or [width] * len(right)), *[1] * pad_rows], dtype=torch.int32)
        out = self._run(parts, width * pad_rows, first, end, first, list(range(len(right))), None)
        assert not out[width * len(right) :].any(), "padding rows are zero"
        for r, good in enumerate(right):
            at = self.length[r]
            self.out[r][at : at + good] = out[width * r : width * r + good]
            self.length[r] += good

    def ragged(self, widths: list[int], right: list[int], seed: int = 0, pad: int = 0) -> None:
        """A round of widths[r] tokens of each text, one after another, the first right[r] of them right; 0: none."""
        g, parts, live = torch.Generator().manual_seed(seed), [], [r for r, width in enumerate(widths) if width]
        for r in live:
            at, drafts = self.length[r], self.layer.noise(widths[r], g)
            parts.append(
                tuple(
                    torch.cat((x[at : at + right[r]], d[right[r] :]))
                    for x, d in zip(self.layer.texts[r], drafts, strict=True)
                )
            )
        starts = torch.tensor([0, *widths]).cumsum(0)
        first = torch.tensor([at if width else -1 for at, width in zip(self.length, widths, strict=True)]).int()
        end = torch.where(first < 0, 0, first + torch.tensor(widths)).int()
        out = self._run(parts, pad, first, end, first, list(range(len(widths))), starts.int())
        assert not out[starts[-1] :].any(), "padding tokens are zero"
        for r in live:
            at, begin = self.length[r], int(starts[r])
            self.out[r][at : at + right[r]] = out[begin : begin + right[r]]
            self.length[r] += right[r]

    def settle(self) -> None:
        """Move every state on to the last multiple of 16 tokens, by a pass without tokens."""
        at = torch.tensor(self.length, dtype=torch.int32)
        nothing = tuple(x[:0] for x in self.layer.texts[0])
        self._run([nothing], 0, at, at, at, list(range(len(at))), torch.zeros(len(at) + 1, dtype=torch.int32))

    def _run(self, parts, pad, first, end, committed, texts, query_start) -> torch.Tensor:
        u, ba = (
            torch.cat([*tensors, torch.full((pad, tensors[0].shape[1]), 7.0).to(tensors[0])])
            for tensors in zip(*parts, strict=True)
        )
        wide = torch.cat((u, torch.full_like(u, torch.nan)), 1).to(self.device)[:, : u.shape[1]]  # rows with a stride
        rows = torch.cat((self.order[torch.tensor(texts)], self.order[-1:].expand(len(first) - len(texts))))
        since = self.since[rows.long()]
        until = torch.where(first >= 0, committed - committed % PAGE, since)
        where = [t.to(self.device) for t in (rows, since, first, until.int(), end)]
        query_start = None if query_start is None else query_start.to(self.device)
        layer, on = self.layer, self.device
        weights = (layer.weight.to(on), ba.to(on), layer.a_log.to(on), layer.dt_bias.to(on))
        qkv, gates = self.conv(wide, *weights, self.taps, self.rings["conv"], *where, query_start)
        if query_start is not None or pad:
            live = len(u) - pad
            assert not qkv[live:].any(), "padding tokens are zero"
            gates = torch.cat((gates[:live], torch.full_like(gates[live:], torch.nan)))
        out = self.rule(qkv, gates, self.state, self.rings["kv"], self.rings["gates"], *where, query_start)
        self.since[rows.long()] = until.int()
        return out.cpu()


def cuts(passes: Passes, rnd: random.Random, most: int) -> None:
    """Compute all texts in prompt passes of random sizes."""
    while any(at < n for at, n in zip(passes.length, passes.layer.lengths, strict=True)):
        left = [n - at for at, n in zip(passes.length, passes.layer.lengths, strict=True)]
        new = [min(rnd.randrange(most), n) for n in left]
        if any(new):
            passes.prompt(new, pad=rnd.randrange(3), pad_rows=rnd.randrange(2))


def rounds(passes: Passes, rnd: random.Random, widths: Iterator[int], first: int = 40) -> None:
    """A prompt pass of random length, then rounds with random accepted counts until a text is over."""
    passes.prompt([rnd.randrange(1, first) for _ in passes.length])
    for width in widths:
        left = min(n - at for at, n in zip(passes.length, passes.layer.lengths, strict=True))
        if left < width:
            break
        right = [rnd.randrange(1, width + 1) for _ in passes.length]
        passes.round(width, right, seed=rnd.randrange(10**6), pad_rows=rnd.randrange(2))


def ragged_rounds(passes: Passes, rnd: random.Random, most: int) -> None:
    """A prompt pass of random length, then rounds of rows of 0 … ``most`` tokens until a text is over."""
    passes.prompt([rnd.randrange(1, 20) for _ in passes.length])
    while min(n - at for at, n in zip(passes.length, passes.layer.lengths, strict=True)) >= most:
        widths = [rnd.randrange(most + 1) for _ in passes.length]
        if any(widths):
            right = [rnd.randrange(1, width + 1) if width else 0 for width in widths]
            passes.ragged(widths, right, seed=rnd.randrange(10**6), pad=rnd.randrange(3))


def assert_bits_in_any_cuts(made: Callable[[Layer], Passes], sizes: Sizes) -> None:
    """Assert that cuts of prompts and rounds of any width give the bits of one pass over each text."""
    layer = Layer(sizes, torch.float32, [70, 100, 33, 16, 130])
    whole = made(layer)
    whole.prompt(layer.lengths)
    for seed in range(4):
        other = made(layer)
        cuts(other, random.Random(seed), 40)
        assert differing(whole, other) == 0
    layer = Layer(sizes, torch.float32, [110, 117, 125])
    whole = made(layer)
    whole.prompt(layer.lengths)
    for width in (1, 2, 4, 6, 8):
        other = made(layer)
        rounds(other, random.Random(width), itertools.repeat(width))
        assert differing(whole, other) == 0
        assert max(other.length) > 90
    rnd, other = random.Random(0), made(layer)
    rounds(other, rnd, iter(lambda: rnd.randrange(1, 9), 0))
    assert differing(whole, other) == 0
    other = made(layer)
    ragged_rounds(other, rnd, 8)
    assert differing(whole, other) == 0


def assert_outputs_and_states(made: Passes, oracle: Callable[[Layer, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Assert that one pass over each text has the oracle's outputs, and its states at multiples of 16 tokens."""
    layer, fp32 = made.layer, made.layer.dtype == torch.float32
    made.prompt(layer.lengths)
    for r, length in enumerate(layer.lengths):
        out, state = oracle(layer, r)
        assert relative(made.out[r], out.flatten(1)) < (3e-6 if fp32 else 5e-3)
        if length % 16 == 0:
            assert relative(made.state[made.order[r]], state) < (3e-6 if fp32 else 2e-3)


def differing(one: Passes, other: Passes) -> int:
    """Rows of outputs that differ among the tokens that both have computed, and rows of state at equal positions."""
    count = 0
    for r, (a, b) in enumerate(zip(one.out, other.out, strict=True)):
        n = min(one.length[r], other.length[r])
        count += int((a[:n] != b[:n]).any(1).sum())  # NaN differs from itself
        row = int(one.order[r])
        if int(one.since[row]) == int(other.since[row]):
            count += int((one.state[row] != other.state[row]).flatten(1).any(1).sum())
            count += int((one.taps[row] != other.taps[row]).any())
    return count


class GluonKernel:
    """A kernel in Gluon without a GPU. modules: those with its functions."""

    def __init__(self, kernel: Any, modules: list[Any]) -> None:
        self.kernel, self.modules = kernel, modules

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **options: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False)) | options
            Machine(self.modules, grid, seed=len(args[0])).run(self.kernel, **given)

        return launch


def split(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``_split`` of the Gluon kernel."""
    high = (x.view(torch.int32) & -65536).view(torch.float32)
    return high.to(dtype), (x - high).to(dtype)


def both_walks(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Passes], plain_rule: Callable[..., Any], kimi: bool = False
) -> None:
    """Assert that the faster walk over prompts has the bits of ``plain_rule``, Triton's walk.

    made: passes over three texts of 135, 70 and 16 tokens by the kernels. kimi: of Kimi Delta Attention.
    """
    plain = made()
    plain.rule = plain_rule
    plain.prompt(plain.layer.lengths)
    launched = []
    if not ON_GPU:
        modules = [gated_delta_gluon, kimi_delta_gluon] if kimi else [gated_delta_gluon]
        kernel = kimi_delta_gluon.kimi_walk_kernel if kimi else gated_delta_gluon.walk_kernel
        op = kimi_delta if kimi else gated_delta
        for module in modules:
            monkeypatch.setattr(module, "_split", split)
        monkeypatch.setattr(op, kernel.fn.__name__, GluonKernel(kernel, modules))
        monkeypatch.setattr(op, "walks", lambda *_: launched.append(0) or True)
    whole, other, later, width = made(), made(), made(), plain.layer.sizes.width
    whole.prompt(plain.layer.lengths, pad=3, pad_rows=1)
    cuts(other, random.Random(3), 90)
    assert differing(plain, whole) == differing(plain, other) == 0
    later.prompt([40, 18, 3])
    later.round(width, [width, 1, 1])
    later.prompt([95 - width, 0, 12])
    later.settle()
    assert differing(plain, later) == 0
    assert ON_GPU or len(launched) > 5
