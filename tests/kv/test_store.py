"""The store: who keeps what, copies between page-table rows, pages that move to another store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv.helpers import TAIL, WINDOW, made, tensors
from tests.ops import Ops
from unisono.kv.specs import ALL, PAGE_SIZE, SNAPSHOTS, leaves, whole_requests
from unisono.kv.store import StateStore
from unisono.kv.transfer import pack, unpack


def test_views_have_the_shape_of_the_specs() -> None:
    store = made(paths=3)
    (k, v), (wide, _), tail = store.view("target").tree
    assert k.shape == v.shape == (12, 2, PAGE_SIZE, 4)
    assert wide.shape == (7, 1, PAGE_SIZE, 8)
    assert {name: tuple(t.shape) for name, t in tail.snapshot.items()} == {"h": (12, 3, 2), "taps": (12, 3, 4)}
    assert {name: tuple(t.shape) for name, t in tail.inputs.items()} == {"x": (12, 15 + 8, 5), "u": (12, 3 + 3, 4)}
    assert tail.snapshot["taps"].dtype == tail.inputs["u"].dtype == torch.float16
    drafter = store.view("drafter")
    assert drafter["hidden"].shape == (4, 6)
    assert drafter["page"].shape == (12, 6)
    assert store.page_tables[ALL].shape == store.page_tables[32].shape == (12, 11)
    assert store.window_groups == (ALL, 32)
    assert store.recurrent


def test_bytes_are_counted_by_lifetime_and_owner() -> None:
    store, kv = made(), 2 * PAGE_SIZE * 4 * 4
    assert store.page_bytes(ALL) == 4 * kv + 12
    assert store.page_bytes(ALL, "drafter") == 2 * kv + 12
    assert store.page_bytes(32) == 2 * PAGE_SIZE * 8 * 4
    assert store.nbytes("target") == 12 * 2 * kv + 7 * store.page_bytes(32)
    assert store.snapshot_bytes() == 24 + 24


def test_a_window_that_no_request_outgrows_is_kept_whole() -> None:
    store = StateStore(2, 1, max_model_len=32, width=4, device=torch.device("cpu"))
    store.declare("target", [WINDOW])
    assert store.window_groups == (ALL,)
    assert [spec.window_group for spec in leaves(whole_requests({"a": WINDOW}))] == [ALL]


def test_a_slot_keeps_its_state_when_pages_are_allocated_again() -> None:
    store = made()
    hidden = store.view("drafter")["hidden"]
    store.allocate({ALL: 30, 32: 30})
    assert store.view("drafter")["hidden"] is hidden
    assert store.view("target").tree[0][0].shape[0] == 30


@pytest.mark.parametrize("window_group", [ALL, 32])
def test_a_span_is_copied_in_every_tensor_of_its_lifetime_and_in_no_other(window_group: int) -> None:
    store = made(paths=2)
    table = store.page_tables[window_group]
    table[0, :2], table[4, :2] = torch.tensor([1, 2]), torch.tensor([1, 5])
    before = {id(t): t.clone() for t in tensors(store.view("target").tree) + tensors(store.view("drafter").tree)}
    row = [torch.tensor([n], dtype=torch.int32) for n in (0, 4, PAGE_SIZE + 2, PAGE_SIZE + 5)]
    store.copy_span(window_group, *row)
    changed = {"kv": tensors(store.view("drafter")["kv"]), "all": tensors(store.view("target").tree[0])}
    changed["window"] = tensors(store.view("target").tree[1])
    for name, parts in changed.items():
        for part in parts:
            expected = before[id(part)].clone()
            if (name == "window") == (window_group == 32):
                expected[5, :, 2:5] = expected[2, :, 2:5]
            assert torch.equal(part, expected), name
    page = store.view("drafter")["page"]
    assert torch.equal(page, before[id(page)])


def test_a_page_moves_to_another_store_bit_by_bit() -> None:
    """Parts of every window group, and snapshots; pages that are skipped or not named keep their bytes."""
    one, other = made(), made()
    for store, seed in ((one, 1), (other, 2)):
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*store._pages.values(), *store._snapshots):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for kind in (*one.window_groups, SNAPSHOTS):
        before = [part.clone() for part in other.parts(kind)]
        payload = b"".join(pack(one, [(kind, np.asarray([2, 0, 1], np.int32))]).payload())
        unpack(other, [(kind, np.asarray([1, -1, 2], np.int32))], payload)
        for mine, theirs, old in zip(one.parts(kind), other.parts(kind), before, strict=True):
            assert torch.equal(theirs[1:3], torch.stack([mine[2], mine[1]]))
            assert torch.equal(theirs[[0, *range(3, len(old))]], old[[0, *range(3, len(old))]])


def test_snapshots_of_all_layers_are_copied_at_once() -> None:
    """A launch for each dtype: a hybrid has some thirty recurrent layers, and a request waits for its first state."""

    def ops(layers: int) -> list[int]:
        store = StateStore(slots=2, paths=1, max_model_len=32, width=4, device=torch.device("cpu"))
        store.declare("target", [TAIL] * layers)
        store.allocate({}, snapshots=2)
        counts = []
        for run in (
            lambda: store.reset_recurrent(0),
            lambda: store.save_snapshot(0, 1),
            lambda: store.load_snapshot(1, 1, 16),
        ):
            with Ops() as seen:
                run()
            counts.append(sum(n for name, n in seen.found.items() if not name.startswith("aten.select")))
        return counts

    assert ops(5) == ops(1)


def test_snapshots_bring_a_tail_back() -> None:
    store = made(paths=2)
    tail = store.view("target").tree[2]
    store.snapshot_positions[1] = 48
    saved = {name: kept[1].clone() for name, kept in tail.snapshot.items()}

    def is_saved(row: int) -> bool:
        return all(torch.equal(tail.snapshot[name][row], kept) for name, kept in saved.items())

    store.save_snapshot(1, 2)
    store.reset_recurrent(1)
    assert int(store.snapshot_positions[1]) == 0
    assert not any(kept[1].any() for kept in tail.snapshot.values())
    store.load_snapshot(3, 2, 48)
    assert is_saved(3)
    assert int(store.snapshot_positions[3]) == 48
    store.copy_recurrent(torch.tensor([3], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
    assert is_saved(6)
    assert all(torch.equal(kept[6], kept[3]) for kept in tail.inputs.values())
    assert int(store.snapshot_positions[6]) == 48
