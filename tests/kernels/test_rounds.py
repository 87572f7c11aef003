"""Round inputs, extend inputs and commit against a plain Python oracle, kernel and twin alike."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.slot_rows import MAX_TOKENS, PAGE, random_rows, slots_of
from unisono.kernels.speculation import rounds
from unisono.types import FinishReason

MAX_PAGES = 6


def commit_oracle(row: dict, tokens: list[int], drafts: list[int]) -> tuple[list[int], int]:
    """What a round commits, one token at a time: (committed tokens, status)."""
    if row["status"] != FinishReason.RUNNING:
        return [], row["status"]
    committed: list[int] = []
    for token, draft in zip(tokens, [*drafts, None], strict=True):
        committed.append(token)
        if token in row["stops"]:
            return committed, FinishReason.STOP
        if row["length"] + len(committed) == row["max_length"]:
            return committed, FinishReason.LENGTH
        if token != draft:
            break
    return committed, FinishReason.RUNNING


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device) -> SimpleNamespace:
    """The ops, and ``tensor`` and ``device`` for their arguments."""
    if request.param == "twin":
        device, found = torch.device("cpu"), (
            rounds.round_inputs, rounds.extend_inputs, rounds.commit, rounds.limit_drafts,
        )  # fmt: skip
    else:
        found = (
            rounds.launch_round_inputs, rounds.launch_extend_inputs, rounds.launch_commit, rounds.launch_limit_drafts,
        )  # fmt: skip
    return SimpleNamespace(
        **dict(zip(("round_inputs", "extend_inputs", "commit", "limit_drafts"), found, strict=True)),
        device=device,
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("trial", range(4))
def test_commit_equals_the_oracle(ops, width, trial):
    rng = random.Random(width * 100 + trial)
    rows = random_rows(rng, 12)
    fields = slots_of(rows, ops.device)
    expected = fields.block.cpu().clone()
    order = [*rng.sample(range(12), 9), 12, 12]  # the padding slot, twice
    tokens = torch.randint(0, 4, (len(order), width), dtype=torch.int32)
    drafts = torch.where(torch.rand(tokens.shape) < 0.75, tokens, -1)[:, : width - 1]
    result = ops.commit(
        ops.tensor(tokens), ops.tensor(drafts), ops.tensor(order), fields.length, fields.max_length, fields.status,
        fields.last_token, fields.stop_ids, fields.history,
    )  # fmt: skip
    history = torch.full((13, MAX_TOKENS), -7, dtype=torch.int32)

    for i, slot in enumerate(order):
        row = rows[slot] if slot < 12 else {"status": FinishReason.FREE}
        committed, status = commit_oracle(row, tokens[i].tolist(), drafts[i].tolist())
        padded = committed + [-1] * (width - len(committed))
        assert result[i].tolist() == [len(committed), status, *padded]
        for column, token in enumerate(committed):
            history[slot, row["length"] + column] = token
        expected[slot, 0] += len(committed)
        expected[slot, 2] = status
        if committed:
            expected[slot, 3] = committed[-1]
    assert torch.equal(fields.block.cpu(), expected)
    assert torch.equal(fields.history.cpu(), history)


@pytest.mark.parametrize(
    ("tokens", "drafts", "max_length", "stops", "expected"),
    [
        ([5, 6, 7], [5, 6], 99, (), [3, 0, 5, 6, 7]),
        ([5, 6, 7], [5, 9], 99, (), [2, 0, 5, 6, -1]),
        ([5, 6, 7], [9, 6], 99, (), [1, 0, 5, -1, -1]),
        ([5, 6, 7], [-1, -1], 99, (), [1, 0, 5, -1, -1]),
        ([5, 6, 7], [5, 6], 99, (6,), [2, 1, 5, 6, -1]),
        ([5, 6, 7], [5, 9], 99, (7,), [2, 0, 5, 6, -1]),
        ([5, 6, 7], [5, 6], 12, (), [2, 2, 5, 6, -1]),
        ([5, 6, 7], [5, 6], 12, (6,), [2, 1, 5, 6, -1]),
        ([5, 6, 7], [5, 6], 11, (6,), [1, 2, 5, -1, -1]),
        ([5, 6, 7], [5, 6], 10, (), [0, 2, -1, -1, -1]),
    ],
    ids=[
        "all",
        "prefix",
        "none",
        "undrafted",
        "stop",
        "unreached",
        "max_length",
        "stop-at-limit",
        "limit-first",
        "no-room",
    ],
)
def test_commit_examples(ops, tokens, drafts, max_length, stops, expected):
    row = {"length": 10, "max_length": max_length, "status": FinishReason.RUNNING, "last_token": 4, "stops": stops}
    fields = slots_of([row], ops.device)
    result = ops.commit(
        ops.tensor([tokens]), ops.tensor([drafts]), ops.tensor([0]), fields.length, fields.max_length, fields.status,
        fields.last_token, fields.stop_ids, fields.history,
    )  # fmt: skip
    assert result.tolist() == [expected]
    assert fields.length[0] == 10 + expected[0]
    assert fields.last_token[0] == [4, *tokens][expected[0]]


def kv_slot(table: torch.Tensor, slot: int, position: int) -> int:
    return int(table[slot, position // PAGE]) * PAGE + position % PAGE


@pytest.mark.parametrize("apart", [False, True], ids=["own rows", "given rows"])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_round_inputs_equal_the_oracle(ops, width, apart):
    """Each row writes to its slot's pages, or to those of the page-table row that it is given."""
    rows = random_rows(random.Random(width), 10)
    fields = slots_of(rows, ops.device)
    table = torch.randint(1, 50, (11, MAX_PAGES), dtype=torch.int32)
    order = [3, 0, 9, 10, 7, 1, 2, 10]
    tables = [5, 4, 3, 2, 1, 0, 9, 8] if apart else order
    drafts = torch.randint(-1, 9, (len(order), width - 1), dtype=torch.int32)
    token_ids, positions, slot_mapping, kv_len = ops.round_inputs(
        ops.tensor(order), ops.tensor(drafts), fields.length, fields.max_length, fields.status, fields.last_token,
        ops.tensor(table), PAGE, ops.tensor(tables) if apart else None,
    )  # fmt: skip
    for r, slot in enumerate(order):
        row = rows[slot] if slot < 10 else {"status": FinishReason.FREE}
        active = row["status"] == FinishReason.RUNNING
        assert kv_len[r] == (min(row["length"] - 1 + width, row["max_length"]) if active else 0)
        for j in range(width):
            at = r * width + j
            got = (int(token_ids[at]), int(positions[at]), int(slot_mapping[at]))
            if not active:
                assert got == (0, -1, j % PAGE)
                continue
            position = row["length"] - 1 + j
            token = row["last_token"] if j == 0 else max(int(drafts[r, j - 1]), 0)
            inside = position < row["max_length"]
            place = kv_slot(table, tables[r], position) if inside else j % PAGE
            assert got == (token, position if inside else row["max_length"] - 1, place)


@pytest.mark.parametrize("num_tokens", [0, 11, 12, 200])
def test_extend_inputs_equal_the_oracle(ops, num_tokens):
    """Rows of 4, 0, 5 and 2 tokens, two empty padding rows, and padding tokens behind."""
    lengths, starts, order = [4, 0, 5, 2, 0, 0], [0, 3, 13, 7, 0, 0], [2, 4, 0, 1, 5, 5]
    if num_tokens == 0:
        lengths = [0] * 6
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    table = torch.randint(1, 50, (6, MAX_PAGES), dtype=torch.int32)
    positions, slot_mapping, kv_len = ops.extend_inputs(
        ops.tensor(order), ops.tensor(query_start), ops.tensor(starts), ops.tensor(table), PAGE, num_tokens
    )  # fmt: skip
    expected = [(s + i, kv_slot(table, slot, s + i)) for slot, s, n in zip(order, starts, lengths, strict=True)
                for i in range(n)]  # fmt: skip
    expected += [(-1, t % PAGE) for t in range(len(expected), num_tokens)]
    assert list(zip(positions.tolist(), slot_mapping.tolist(), strict=True)) == expected
    assert kv_len.tolist() == [s + n for s, n in zip(starts, lengths, strict=True)]


def test_fields_of_different_arenas_are_refused():
    one, other = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="one arena"):
        rounds.launch_commit(
            torch.zeros(1, 1).int(), torch.zeros(1, 0).int(), torch.zeros(1).int(), one[:, 0], one[:, 1], other[:, 0],
            one[:, 2], one[:, 3:], one,
        )  # fmt: skip


def test_ops_declare_what_they_write():
    row = {"length": 10, "max_length": 20, "status": FinishReason.RUNNING, "last_token": 4, "stops": (3,)}
    f = slots_of([row, row])
    slots, drafts, table = torch.tensor([1, 0]).int(), torch.zeros(2, 2).int(), torch.ones(3, 9).int()
    state = (f.length, f.max_length, f.status, f.last_token, f.stop_ids, f.history)
    committed = (torch.ones(2, 3).int(), drafts, slots, *state)
    torch.library.opcheck(torch.ops.unisono.commit.default, committed, test_utils="test_schema")
    given = (slots, drafts, f.length, f.max_length, f.status, f.last_token, table, PAGE)
    torch.library.opcheck(torch.ops.unisono.round_inputs.default, given)
    given = (slots, torch.tensor([0, 3, 5]).int(), slots, table, PAGE, 8)
    torch.library.opcheck(torch.ops.unisono.extend_inputs.default, given)
    limited = (drafts, slots, torch.ones(2).int(), torch.zeros(2).int())
    torch.library.opcheck(torch.ops.unisono.limit_drafts.default, limited)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_limited_drafts_are_counted(ops, k):
    """Each row keeps its first ``max_drafts``; what is left and is a draft counts."""
    generator = torch.Generator().manual_seed(k)
    drafts = torch.randint(-1, 4, (7, k), generator=generator, dtype=torch.int32)
    most = [0, 1, 2, 99, 3]
    order = [4, 0, 3, 1, 2, 3, 0]
    expected = [[draft if j < most[slot] else -1 for j, draft in enumerate(row)]
                for slot, row in zip(order, drafts.tolist(), strict=True)]  # fmt: skip
    arena = torch.full((len(most), 3), 50, dtype=torch.int32)  # one field of an arena: strided
    arena[:, 1] = torch.tensor(most)
    got, drafted = ops.tensor(drafts).clone(), ops.tensor([77] * 7)
    ops.limit_drafts(got, ops.tensor(order), ops.tensor(arena)[:, 1], drafted)
    assert got.tolist() == expected
    assert drafted.tolist() == [sum(draft >= 0 for draft in row) for row in expected]
