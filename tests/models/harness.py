"""Runs a Decoder over a paged cache of its own, one pass at a time: the engine's work without the engine.

Pages are handed out in a scrambled order, so that nothing passes by luck of contiguity. Every pass returns
the logits of each token it was given.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.config import catalog
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import Paged, Recurrent, leaves, map_tree
from unisono.kv.store import RecurrentView
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model

PAGE = 16
MAX_WIDTH = 4
"""Tokens of a row in the widest round."""
IN_ROUNDS = 40
"""Tokens of a prompt that ``rounds`` computes in rounds, at most."""


def load(directory: Path, quantization: str | None = None, **options: Any) -> Decoder:
    """The checkpoint's decoder with the in-tree attention; fp32 on the CPU unless ``options`` say otherwise."""
    options = {"dtype": torch.float32, "device": "cpu", "max_positions": 512, **options}
    checkpoint = Checkpoint.open(directory, quantization)
    backend = catalog.attention.load("triton")
    return load_model(checkpoint, attention=lambda q, kv: backend(q, kv, options["device"]), **options)


class Session:
    """``slots`` requests of up to ``max_length`` tokens, each growing by the passes it takes part in."""

    def __init__(self, decoder: Decoder, slots: int, max_length: int, seed: int = 0) -> None:
        self.decoder = decoder
        device = decoder.embed.weight.device
        self.ints = {"dtype": torch.int32, "device": device}
        pages = -(-max_length // PAGE)
        order = list(range(1, slots * pages + 1))
        random.Random(seed).shuffle(order)
        self.pages = [order[s * pages : (s + 1) * pages] for s in range(slots)]
        self.page_table = torch.tensor([*self.pages, [0] * pages], **self.ints)  # the last slot is padding

        def nan(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            # a read of what was never written can't go unseen; of an e4m3 row's exponents, 255 is NaN
            return torch.full(shape, 255 if dtype is torch.uint8 else float("nan"), dtype=dtype, device=device)

        def allocate(spec: Paged | Recurrent) -> torch.Tensor | RecurrentView:
            if isinstance(spec, Recurrent):
                return RecurrentView(
                    {n: torch.zeros(slots + 1, *s, dtype=t, device=device) for n, (s, t) in spec.snapshot.items()},
                    {n: nan((slots + 1, r.ring(MAX_WIDTH), *r.shape), r.dtype) for n, r in spec.inputs.items()},
                )
            cache = nan((slots * pages + 1, *spec.shape), spec.dtype)
            cache[0] = 0
            return cache

        self.state = map_tree(decoder.state_specs(), allocate)
        self.recurs = any(isinstance(spec, Recurrent) for spec in leaves(decoder.state_specs()))
        self.seen = torch.zeros(slots + 1, **self.ints)  # tokens that each row's snapshots have seen
        self.length = [0] * slots

    def extend(
        self, chunks: Mapping[int, Sequence[int]], padding: int = 0, last_tokens: bool = False
    ) -> dict[int, torch.Tensor]:
        """A ragged pass: each slot in ``chunks`` appends its tokens; ``padding`` tokens of no row follow.

        ends: of each row the logits of its last token only.
        """
        positions: list[int] = []
        slot_mapping: list[int] = []
        starts = [0]
        for slot, tokens in chunks.items():
            self._append(slot, len(tokens), positions, slot_mapping)
            starts.append(len(positions))
        tokens = [t for chunk in chunks.values() for t in chunk] + [0] * padding
        positions += [-1] * padding
        slot_mapping += [i % PAGE for i in range(padding)]
        rows = list(chunks)
        logits = self._run(tokens, rows, positions, slot_mapping, width=None, starts=starts, last_tokens=last_tokens)
        if last_tokens:
            return {slot: logits[i : i + 1] for i, slot in enumerate(rows)}
        return {slot: logits[a:b] for slot, a, b in zip(rows, starts, starts[1:], strict=False)}

    def round(self, width: int, chunks: Mapping[int, Sequence[int]], padding: int = 0) -> dict[int, torch.Tensor]:
        """``width`` tokens per row, a shorter chunk padded; ``padding`` rows of the padding slot follow."""
        positions: list[int] = []
        slot_mapping: list[int] = []
        tokens: list[int] = []
        for slot, chunk in chunks.items():
            self._append(slot, len(chunk), positions, slot_mapping)
            self._pad(width - len(chunk), positions, slot_mapping)
            tokens += [*chunk, *[0] * (width - len(chunk))]
        self._pad(width * padding, positions, slot_mapping)
        tokens += [0] * (width * padding)
        rows = list(chunks) + [len(self.length)] * padding
        logits = self._run(tokens, rows, positions, slot_mapping, width=width, starts=None)
        return {slot: logits[i * width :][: len(chunk)] for i, (slot, chunk) in enumerate(chunks.items())}

    def _append(self, slot: int, count: int, positions: list[int], slot_mapping: list[int]) -> None:
        for position in range(self.length[slot], self.length[slot] + count):
            positions.append(position)
            slot_mapping.append(self.pages[slot][position // PAGE] * PAGE + position % PAGE)
        self.length[slot] += count

    @staticmethod
    def _pad(count: int, positions: list[int], slot_mapping: list[int]) -> None:
        positions += [-1] * count
        slot_mapping += [i % PAGE for i in range(count)]

    @torch.inference_mode()
    def _run(
        self,
        tokens: list[int],
        rows: list[int],
        positions: list[int],
        slot_mapping: list[int],
        width: int | None,
        starts: list[int] | None,
        last_tokens: bool = False,
    ) -> torch.Tensor:
        inputs = AttentionInputs(
            slots=torch.tensor(rows, **self.ints),
            positions=torch.tensor(positions, **self.ints),
            slot_mapping=torch.tensor(slot_mapping, **self.ints),
            kv_len=torch.tensor([(*self.length, 0)[row] for row in rows], **self.ints),
            page_table=self.page_table,
            width=width,
            query_start=None if starts is None else torch.tensor(starts, **self.ints),
        )
        alone = inputs.last_tokens(inputs.query_start[1:] - 1) if last_tokens else None
        context = ForwardContext.of(inputs, alone)
        if self.recurs:
            where = inputs.positions, inputs.kv_len, inputs.query_start
            context.recurrent = RecurrentPass.of(inputs.slots, *where, self.seen)
        hidden, _ = self.decoder(torch.tensor(tokens, **self.ints), context, self.state)
        if context.recurrent is not None:
            context.recurrent.advance(self.seen)
        return self.decoder.logits(hidden)


def whole(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Each prompt alone, in one extend pass: logits [len, V] per prompt."""
    return [Session(decoder, 1, len(p)).extend({0: p})[0] for p in prompts]


def together(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """All prompts in one ragged extend pass with padding behind."""
    session = Session(decoder, len(prompts), max(map(len, prompts)), seed=1)
    logits = session.extend(dict(enumerate(prompts)), padding=5)
    return [logits[i] for i in range(len(prompts))]


def chunked(decoder: Decoder, prompts: Sequence[Sequence[int]], size: int) -> list[torch.Tensor]:
    """All prompts side by side, ``size`` tokens of each per extend pass."""
    return _in_steps(decoder, prompts, size, lambda session, chunks: session.extend(chunks, padding=3))


def rounds(decoder: Decoder, prompts: Sequence[Sequence[int]], width: int, padding: int = 1) -> list[torch.Tensor]:
    """All prompts side by side in rounds of ``width`` tokens, with padding rows.

    A prompt of more than ``IN_ROUNDS`` tokens begins with a prompt pass, and only its last tokens are in rounds.
    """
    return _in_steps(decoder, prompts, width, lambda session, chunks: session.round(width, chunks, padding), IN_ROUNDS)


def _in_steps(decoder, prompts, size, step, most=None) -> list[torch.Tensor]:
    session = Session(decoder, len(prompts), max(map(len, prompts)), seed=2)
    firsts = [0 if most is None else max(len(p) - most, 0) for p in prompts]
    begun = {i: prompts[i][:first] for i, first in enumerate(firsts) if first}
    computed = session.extend(begun) if begun else {}
    pieces: list[list[torch.Tensor]] = [[computed[i]] if i in computed else [] for i in range(len(prompts))]
    for start in range(0, max(len(p) - first for p, first in zip(prompts, firsts, strict=True)), size):
        rest = {i: p[first + start :][:size] for i, (p, first) in enumerate(zip(prompts, firsts, strict=True))}
        chunks = {i: chunk for i, chunk in rest.items() if chunk}
        for i, logits in step(session, chunks).items():
            pieces[i].append(logits)
    return [torch.cat(p) for p in pieces]
