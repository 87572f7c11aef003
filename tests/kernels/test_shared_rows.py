"""Shared drafts and compact inputs against a plain Python oracle, kernel and twin alike."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.slot_rows import PAGE, random_rows, slots_of
from unisono.kernels.speculation import shared_rows
from unisono.types import FinishReason

RATES = (1.0, 0.5, 0.25, 0.125)
"""Their products are exact in any order."""


@pytest.fixture(params=["kernel", "twin"])
def ops(request: pytest.FixtureRequest, device: torch.device) -> SimpleNamespace:
    names = ("launch_share_drafts", "launch_shared_inputs") if request.param == "kernel" else ("share_drafts",) * 2
    if request.param == "twin":
        device, names = torch.device("cpu"), ("share_drafts", "shared_inputs")
    share, inputs = (getattr(shared_rows, name) for name in names)
    return SimpleNamespace(share=share, inputs=inputs, device=device)


def shares_of(rows: list[dict[str, Any]], drafts: list[list[int]], rates: list[list[float]], tokens: int) -> list[int]:
    """Number of drafts of each row, taken one after another: always the likeliest that is next in its row."""
    running = [row["status"] == FinishReason.RUNNING for row in rows]
    room = [row["max_length"] - row["length"] if on else 0 for row, on in zip(rows, running, strict=True)]
    found = [next((j for j, draft in enumerate([*row, -1]) if draft < 0), 0) for row in drafts]
    limits, kept = [min(pair) for pair in zip(room, found, strict=True)], [0] * len(rows)
    for _ in range(tokens - sum(running)):
        reach = [
            (torch.tensor(rate[: n + 1]).prod().item(), -n, -row)
            for row, (rate, n, limit) in enumerate(zip(rates, kept, limits, strict=True))
            if n < limit
        ]
        if reach:
            kept[-max(reach)[2]] += 1
    return kept


@pytest.mark.parametrize(("count", "k", "tokens"), [(1, 3, 3), (9, 1, 12), (12, 5, 27), (12, 7, 96), (11, 15, 14)])
def test_most_likely_drafts_are_verified(ops: SimpleNamespace, count: int, k: int, tokens: int) -> None:
    rng = random.Random(count * k)
    rows = random_rows(rng, count)
    order = [*rng.sample(range(count), count), count]  # and the padding slot
    by_row = [*(rows[slot] for slot in order[:-1]), {"status": FinishReason.FREE, "length": 0, "max_length": 0}]
    drafts = [[rng.choice((-1, 1, 2, 3, 4, 5)) for _ in range(k)] for _ in order]
    rates = [[rng.choice(RATES) for _ in range(k)] for _ in order]
    fields = slots_of(rows, ops.device)
    table = torch.arange((count + 1) * 12, dtype=torch.int32, device=ops.device).view(count + 1, 12)
    given = torch.tensor(drafts, dtype=torch.int32, device=ops.device)
    slots = torch.tensor(order, dtype=torch.int32, device=ops.device)
    drafted, found = torch.full_like(slots, 77), torch.full_like(slots, 77)
    widths = ops.share(
        given, torch.tensor(rates, device=ops.device), slots, fields.length, fields.max_length, fields.status, tokens,
        drafted, found,
    )  # fmt: skip
    kept = shares_of(by_row, drafts, rates, tokens)
    running = [row["status"] == FinishReason.RUNNING for row in by_row]
    assert drafted.tolist() == kept
    assert found.tolist() == shares_of(by_row, drafts, rates, 10_000)
    assert widths.tolist() == [1 + n if on else 0 for n, on in zip(kept, running, strict=True)]
    assert given.tolist() == [[*row[:n], *[-1] * (k - n)] for row, n in zip(drafts, kept, strict=True)]

    got = ops.inputs(slots, given, widths, fields.length, fields.last_token, table, PAGE, tokens)
    got = shared_rows.SharedInputs(*got)
    expected: list[tuple[int, int, int, int]] = []  # token, position, place in the cache, row
    for row, (slot, of_row, n) in enumerate(zip(order, by_row, kept, strict=True)):
        if running[row]:
            for j, token in enumerate([of_row["last_token"], *drafts[row][:n]]):
                at = of_row["length"] - 1 + j
                expected.append((token, at, int(table[slot, at // PAGE]) * PAGE + at % PAGE, row))
    used = len(expected)
    expected += [(0, -1, t % PAGE, len(order) - 1) for t in range(used, tokens)]
    columns = (x.tolist() for x in (got.token_ids, got.positions, got.slot_mapping, got.owners))
    assert list(zip(*columns, strict=True)) == expected
    starts = got.query_start.tolist()
    assert starts == [sum(widths[:row].tolist()) for row in range(len(order) + 1)]
    assert got.kv_len.tolist() == [
        row["length"] + n if on else 0 for row, n, on in zip(by_row, kept, running, strict=True)
    ]
    for row, places in enumerate(got.places.view(len(order), k + 1).tolist()):
        if running[row]:
            assert places == [starts[row] + min(j, kept[row]) for j in range(k + 1)]
        assert all(0 <= place < tokens for place in places)
    real = [[j < width for j in range(k + 1)] for width in widths.tolist()]
    assert torch.equal(got.sampled, got.places.where(torch.tensor(real).flatten().to(got.places.device), -1))


@pytest.mark.parametrize(("tokens", "kept"), [(4, [1, 0, 0]), (6, [1, 1, 1]), (8, [2, 2, 1])])
def test_equally_likely_drafts_go_by_place_then_by_row(ops: SimpleNamespace, tokens: int, kept: list[int]) -> None:
    row = {"length": 3, "max_length": 99, "status": FinishReason.RUNNING, "last_token": 1, "stops": ()}
    fields = slots_of([row] * 3, ops.device)
    slots = torch.arange(3, dtype=torch.int32, device=ops.device)
    drafts = torch.ones(3, 4, dtype=torch.int32, device=ops.device)
    drafted, found = torch.full_like(slots, 77), torch.full_like(slots, 77)
    ops.share(
        drafts, torch.ones(3, 4, device=ops.device), slots, fields.length, fields.max_length, fields.status, tokens,
        drafted, found,
    )  # fmt: skip
    assert drafted.tolist() == kept
    assert found.tolist() == [4, 4, 4]


def test_ops_fit_their_schemas() -> None:
    row = {"length": 3, "max_length": 9, "status": FinishReason.RUNNING, "last_token": 1, "stops": ()}
    f = slots_of([row, row])
    slots, drafts, table = torch.tensor([1, 0]).int(), torch.ones(2, 2).int(), torch.ones(3, 9).int()
    share = (drafts, torch.ones(2, 2), slots, f.length, f.max_length, f.status, 4, slots.clone(), slots.clone())
    torch.library.opcheck(torch.ops.unisono.share_drafts.default, share, test_utils="test_schema")
    given = (slots, drafts, torch.tensor([2, 2]).int(), f.length, f.last_token, table, PAGE, 5)
    torch.library.opcheck(torch.ops.unisono.shared_inputs.default, given)
