"""Forking, copying spans and choosing the best path against plain Python oracles, kernel and twin alike."""

import random
from types import SimpleNamespace

import pytest
import torch

from unisono.kernels.speculation import tree_paths as ops_of
from unisono.types import FinishReason

PAGE, MAX_PAGES, SLOTS = 4, 6, 7  # and the padding slot behind them


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device) -> SimpleNamespace:
    """The three ops, and ``tensor`` for their arguments. Blocks are small, so that rows take several steps."""
    if request.param == "twin":
        device, found = torch.device("cpu"), (ops_of.fork_paths, ops_of.copy_span, ops_of.best_path)
    else:
        found = (ops_of.launch_fork_paths, ops_of.launch_copy_span, ops_of.launch_best_path)
    return SimpleNamespace(
        fork=found[0],
        copy=found[1],
        best=found[2],
        device=device,
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


@pytest.mark.parametrize("columns", [2, 256])
@pytest.mark.parametrize(("paths", "drafts"), [(2, 1), (3, 3), (5, 7)])
def test_forks_equal_the_oracle(ops, paths, drafts, columns, monkeypatch):
    monkeypatch.setattr(ops_of, "COLUMNS_PER_STEP", columns)
    rng = random.Random(paths)
    pages = ops_of.span_pages(drafts, PAGE)
    lengths = [1, 2, PAGE, PAGE + 1, PAGE + 2, 3 * PAGE + 3, MAX_PAGES * PAGE - 1, 0]
    status = [FinishReason.RUNNING] * SLOTS + [FinishReason.FREE]
    status[2] = FinishReason.STOP
    table = [[rng.randrange(1, 40) for _ in range(MAX_PAGES)] for _ in range((SLOTS + 1) * paths)]
    fields = ops.tensor([[n, 9, s] for n, s in zip(lengths, status, strict=True)])
    page_table, order = ops.tensor(table), [6, 0, 7, 2, 1, 3, 4, 5, 7]
    got = ops.fork(page_table, ops.tensor(order), fields[:, 0], fields[:, 2], paths, pages, 100, PAGE)
    owners, tables, sources, first, last = (t.tolist() for t in got)

    assert owners == sources == [slot for slot in order for _ in range(paths)]
    private: set[int] = set()
    for m, slot in enumerate(owners):
        row = slot if m % paths == 0 else SLOTS + 1 + slot * (paths - 1) + m % paths - 1
        assert tables[m] == row
        if m % paths == 0 or status[slot] != FinishReason.RUNNING:
            assert first[m] >= last[m]
            continue
        tail = max(lengths[slot] - 2, 0) // PAGE
        assert (first[m], last[m]) == (tail * PAGE, lengths[slot])
        own = page_table[row].tolist()
        assert own[:tail] == table[slot][:tail]
        assert min(own[tail : tail + pages]) >= 100
        assert own[tail + pages :] == table[row][tail + pages :]
        assert private.isdisjoint(own[tail : tail + pages]), "a private page of two paths"
        private |= set(own[tail : tail + pages])
        # All that a round may write is private, up to the end of the table.
        written = range(max(lengths[slot] - 2, 0), min(lengths[slot] + drafts, MAX_PAGES * PAGE))
        assert {own[p // PAGE] for p in written} <= private
        table[row] = own
    assert max(private) < 100 + SLOTS * (paths - 1) * pages, "the pages that are reserved are enough"
    assert page_table.tolist() == table, "and no other row has changed"


@pytest.mark.parametrize("drafts", range(1, 40))
def test_private_pages_are_as_few_as_can_be(drafts):
    touched = {len({p // PAGE for p in range(max(n - 2, 0), n + drafts)}) for n in range(1, 3 * PAGE)}
    assert max(touched) == ops_of.span_pages(drafts, PAGE)


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize(("layers", "heads", "dim"), [(3, 2, 5), (1, 1, 1), (2, 3, 1), (5, 1, 72)])
def test_spans_are_copied(ops, layers, heads, dim, dtype, block, monkeypatch):
    """Across page boundaries, into other pages, in every layer and head; nothing else changes."""
    monkeypatch.setattr(ops_of, "SPAN_BLOCK", block)
    pages = 30
    kv = torch.randn(layers, pages, heads, PAGE, dim).to(dtype)
    order = list(range(1, pages))
    random.Random(2).shuffle(order)
    table = [order[i * MAX_PAGES : (i + 1) * MAX_PAGES] for i in range(4)]
    spans = [(0, 1, 3, 10), (0, 2, 8, 9), (3, 3, 0, 8), (1, 2, 5, 5), (1, 2, 4, -3), (2, 3, 0, 2 * PAGE)]
    expected = kv.clone()
    for source, target, first, last in spans:
        for p in range(first, last):
            from_page, to_page = table[source][p // PAGE], table[target][p // PAGE]
            expected[:, to_page, :, p % PAGE] = kv[:, from_page, :, p % PAGE]
    # The last span reads row 2 at positions that the second does not write.
    out = kv.clone().to(ops.device)
    columns = [ops.tensor(column) for column in zip(*spans, strict=True)]
    ops.copy(out, ops.tensor(table), *columns)
    assert torch.equal(out.cpu(), expected)
    assert not torch.equal(expected, kv)


def test_groups_with_page_tables_of_their_own_fork_alike(ops):
    """Two groups: other pages, other pools, one of them with freed columns. Rows and positions to copy are the same."""
    paths, drafts, lengths = 3, 3, [1, 9, 2 * PAGE + 2, 3 * PAGE, 14, 5, 7, 0]
    fields = ops.tensor([[n, FinishReason.RUNNING if n else FinishReason.FREE] for n in lengths])
    slots, pages, forks = ops.tensor([6, 0, 2, 1, 3, 7, 4]), ops_of.span_pages(drafts, PAGE), []
    reserved = (SLOTS + 1) * MAX_PAGES + 1
    for layers, heads, dim, freed in ((2, 1, 3, 0), (1, 2, 1, 2)):
        own = torch.randperm(reserved - 1).add(1).view(SLOTS + 1, MAX_PAGES)
        own[:, :freed] = 0
        table = ops.tensor(torch.cat((own, torch.zeros((SLOTS + 1) * (paths - 1), MAX_PAGES))))
        pool = torch.randn(layers, reserved + (SLOTS + 1) * (paths - 1) * pages, heads, PAGE, dim).to(ops.device)
        before = pool.clone()
        fork = ops.fork(table, slots, fields[:, 0], fields[:, 1], paths, pages, reserved, PAGE)
        owners, tables, sources, first, last = fork
        ops.copy(pool, table, sources, tables, first, last)
        forks.append(torch.stack(tuple(fork)))
        assert torch.equal(pool[:, :reserved], before[:, :reserved]), "only private pages are written"
        assert not torch.equal(pool, before)
        for slot, row in zip(owners.tolist(), tables.tolist(), strict=True):
            for p in range(lengths[slot]):
                if lengths[slot] - p <= 2 or p // PAGE >= freed:
                    ours, theirs = table[row, p // PAGE], table[slot, p // PAGE]
                    assert torch.equal(pool[:, ours, :, p % PAGE], pool[:, theirs, :, p % PAGE])
    assert torch.equal(*forks)


@pytest.mark.parametrize(("paths", "drafts"), [(2, 1), (3, 3), (5, 4), (32, 2)])
def test_the_best_path_equals_the_oracle(ops, paths, drafts):
    rng = random.Random(paths)
    sampled = [[rng.randrange(3) for _ in range(drafts + 1)] for _ in range(9 * paths)]
    tried = [[t if rng.random() < 0.6 else rng.choice([-1, 3]) for t in row[:-1]] for row in sampled]
    tables = [rng.randrange(500) for _ in sampled]
    rows, best_tables, best_sampled, best_drafts, drafted = ops.best(
        ops.tensor(sampled), ops.tensor(tried), ops.tensor(tables), paths
    )
    seen = set()
    for r in range(9):
        accepted = []
        for m in range(r * paths, (r + 1) * paths):
            right = 0
            while right < drafts and tried[m][right] == sampled[m][right]:
                right += 1
            accepted.append(right)
        best = r * paths + accepted.index(max(accepted))
        seen.add(best % paths)
        assert (int(rows[r]), int(best_tables[r])) == (best, tables[best])
        assert best_sampled[r].tolist() == sampled[best]
        assert best_drafts[r].tolist() == tried[best]
        nodes = {
            tuple(row[: j + 1]) for row in tried[r * paths : r * paths + paths] for j in range(drafts) if row[j] >= 0
        }
        assert drafted[r] == len(nodes)
    assert len(seen) > 1


def test_ops_declare_what_they_write():
    table, slots = torch.arange(24).int().view(6, 4), torch.tensor([1, 0]).int()
    length, status = torch.tensor([5, 2]).int(), torch.zeros(2).int()
    given = (table, slots, length, status, 3, 2, 50, PAGE)
    torch.library.opcheck(torch.ops.unisono.fork_paths.default, given, test_utils="test_schema")
    kv, table = torch.randn(2, 9, 1, PAGE, 2), torch.tensor([[1, 2], [3, 4]]).int()
    given = (kv, table, slots, slots.flip(0), torch.tensor([1, 0]).int(), torch.tensor([3, 0]).int())
    torch.library.opcheck(torch.ops.unisono.copy_span.default, given, test_utils="test_schema")
    sampled = torch.ones(4, 3).int()
    torch.library.opcheck(torch.ops.unisono.best_path.default, (sampled, sampled[:, 1:], sampled[:, 0], 2))
