"""Slots: device-resident rows with the state of running requests.

A row holds everything that a round needs of a request: committed length, last token, sampling parameters, stop ids,
page table. A batch is then a vector of slot numbers. The row S - 1 is the padding slot: it stays FREE, so kernels skip
it. :class:`SlotPool` is rank 0's host side, :class:`Slots` the device side that a worker owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unisono.engine.worker.commands import WritePages, WriteSlot
from unisono.engine.worker.progress import Progress
from unisono.graphs import BufferSchema, Field
from unisono.kv.specs import ALL, PADDING_PAGE, PerSlot
from unisono.kv.store import StateStore
from unisono.sampling.edits import pack_edits, row_words
from unisono.types import MAX_DRAFTS, MAX_STOP_IDS, EngineRequest, FinishReason

SLOT_SCHEMA = BufferSchema(
    (
        Field("length", torch.int32, ()),  # committed tokens; the last one's KV is not written yet
        Field("max_length", torch.int32, ()),  # total length at which the request ends
        Field("status", torch.int32, (), pad=FinishReason.FREE),
        Field("last_token", torch.int32, ()),
        Field("temperature", torch.float32, ()),
        Field("top_k", torch.int32, ()),  # 0: all
        Field("top_p", torch.float32, (), pad=1.0),
        Field("min_p", torch.float32, ()),
        Field("seed_lo", torch.int32, ()),
        Field("seed_hi", torch.int32, ()),
        Field("max_drafts", torch.int32, ()),
        Field("logprobs", torch.int32, (), pad=-1),  # alternatives to report; -1: no log-probabilities
        Field("prompt_logprobs", torch.int32, (), pad=-1),  # the same for prompt tokens
        Field("edits", torch.int32, ()),  # 1: logits are edited, by the slot's row of the edit table
        Field("stop_ids", torch.int32, (MAX_STOP_IDS,), pad=-1),
    )
)


def slot_schema(more: Sequence[Field] = ()) -> BufferSchema:
    """Return the fields of a slot, including those that features declare for this engine's model."""
    return BufferSchema((*SLOT_SCHEMA.fields, *more)) if more else SLOT_SCHEMA


class Slots:
    """``[slots + 1]`` rows of ``schema`` in one int32 arena: :data:`SLOT_SCHEMA` and the fields of features.

    Each field is an attribute: a strided view of the arena, ``[S]`` or ``[S, n]``, float32 ones bitcast. Beside it,
    int32: ``page_table [S, pages]``; ``history [S, max_model_len]``, every committed token at its position;
    ``edit_table [S, words]``, see ``kernels/sampling/edits.py``. If rounds try several paths per request
    (``kernels/speculation/tree_paths.py``), the page table also has a row for each further path of each slot, after the
    slots' own.
    """

    length: torch.Tensor
    max_length: torch.Tensor
    status: torch.Tensor
    last_token: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed_lo: torch.Tensor
    seed_hi: torch.Tensor
    max_drafts: torch.Tensor
    logprobs: torch.Tensor
    prompt_logprobs: torch.Tensor
    edits: torch.Tensor
    stop_ids: torch.Tensor
    rotary_delta: torch.Tensor | None = None

    def __init__(
        self, num_slots: int, max_model_len: int, vocab_size: int, store: StateStore, schema: BufferSchema = SLOT_SCHEMA
    ) -> None:
        self.padding, self.schema = num_slots, schema
        self._device = store.device
        sizes = sum(schema.row_words), max_model_len, row_words(vocab_size)
        words, history, edits = (PerSlot((n,), torch.int32) for n in sizes)
        store.declare("slots", {"fields": words, "history": history, "edit_table": edits})
        state = store.view("slots")
        self._arena, self.history, self.edit_table = state["fields"], state["history"], state["edit_table"]
        self._tables, self.page_table = store.page_tables, store.page_tables[ALL]
        at = 0
        for field, size in zip(schema, schema.row_words, strict=True):
            view = self._arena[:, at : at + size].view(field.dtype)
            setattr(self, field.name, view if field.shape else view.squeeze(1))
            at += size
        self.reset()

    def reset(self) -> None:
        """Free every slot and clear every row."""
        blank = torch.from_numpy(_row(self.schema.pads, self.schema).copy())
        self._arena.copy_(blank.expand_as(self._arena))
        for table in self._tables.values():
            table.fill_(PADDING_PAGE)
        self.history.zero_()
        self.edit_table.zero_()

    def write(self, command: WriteSlot) -> None:
        """Write a slot's row, edits, history and pages."""
        slot = command.slot
        parts = [
            (self._arena[slot], command.row),
            (self.history[slot, : len(command.history)], command.history),
            (self.page_table[slot, : len(command.pages)], command.pages),
        ]
        if command.edits is not None:
            parts.append((self.edit_table[slot], command.edits))
        self._upload(parts)

    def write_pages(self, command: WritePages) -> None:
        """Write pages of a window group into a slot's page table."""
        end = command.column + len(command.pages)
        self._upload([(self._tables[command.window_group][command.slot, command.column : end], command.pages)])

    def _upload(self, parts: Sequence[tuple[torch.Tensor, np.ndarray]]) -> None:
        """Copy int32 arrays ``[n]`` to these places ``[n]`` of the device, through one piece of pinned memory."""
        values = np.concatenate([values for _, values in parts])
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            source = source.pin_memory()  # the caching host allocator keeps it until the copies are done
        for (target, _), part in zip(parts, source.split([len(values) for _, values in parts]), strict=True):
            target.copy_(part, non_blocking=True)


class SlotPool:
    """Pool of free slots, with the ``progress`` of the requests in the others, which the scheduler begins.

    ``send`` executes the command that writes a claimed slot. schema: of the slots.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, send: Callable[[WriteSlot], object], schema: BufferSchema = SLOT_SCHEMA
    ) -> None:
        self.progress = Progress(num_slots)
        self._free = list(range(num_slots - 1, -1, -1))
        self._vocab_size, self._send, self._schema = vocab_size, send, schema

    @property
    def available(self) -> int:
        return len(self._free)

    def claim(
        self,
        request: EngineRequest,
        tokens: Sequence[int],
        max_length: int,
        pages: Sequence[int],
        more: Mapping[str, int] | None = None,
    ) -> int:
        """Claim a free slot and send its initial state; see :func:`slot_write`. Returns the slot."""
        slot = self._free[-1]
        command = slot_write(slot, request, tokens, max_length, pages, self._vocab_size, self._schema, more or {})
        self._free.pop()  # the request can no longer fail here
        self._send(command)
        return slot

    def free(self, slot: int) -> None:
        """Free a slot. Its row stays as it is until the next claim, and no round names it."""
        self.progress.end(slot)
        self._free.append(slot)


def slot_write(
    slot: int,
    request: EngineRequest,
    tokens: Sequence[int],
    max_length: int,
    pages: Sequence[int],
    vocab_size: int,
    schema: BufferSchema,
    more: Mapping[str, int],
) -> WriteSlot:
    """Return the command that writes a request's slot.

    tokens: the committed ones. max_length: total length at which the request ends. pages: from the first token on.
    more: values of fields that features declare; the others are as in a blank slot.
    """
    params, stop_ids = request.params, request.stop_ids
    seed = params.seed or 0
    edits = pack_edits(params, request.bad_words, len(request.prompt_token_ids), vocab_size)
    row = _row(
        {
            **schema.pads,
            **more,
            "length": len(tokens),
            "max_length": max_length,
            "status": FinishReason.RUNNING,
            "last_token": tokens[-1],
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed_lo": _signed(seed & 0xFFFFFFFF),
            "seed_hi": _signed(seed >> 32),
            "max_drafts": MAX_DRAFTS if params.max_drafts is None else min(params.max_drafts, MAX_DRAFTS),
            "logprobs": -1 if params.found_logprobs is None else params.found_logprobs,
            "prompt_logprobs": -1 if params.prompt_logprobs is None else params.prompt_logprobs,
            "edits": edits is not None,
            "stop_ids": list(stop_ids) + [-1] * (MAX_STOP_IDS - len(stop_ids)),
        },
        schema,
    )
    history, table = np.asarray(tokens, dtype=np.int32), np.asarray(pages, dtype=np.int32)
    return WriteSlot(slot, row, history, table, edits)


def _row(values: Mapping[str, Any], schema: BufferSchema) -> np.ndarray:
    """Return a row of the schema with these values, int32 [words]. A number fills a field of several."""
    words: list[Any] = []
    for field, size in zip(schema, schema.row_words, strict=True):
        value = values[field.name]
        words += value if isinstance(value, list) else [value] * size
    return np.frombuffer(schema.packer.pack(*words), dtype=np.int32)


def _signed(word: int) -> int:
    """Return the int32 with the bits of this unsigned 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word
