"""Log-probabilities against float64, the kernels against their twin, ties, filters and company."""

import pytest
import torch

from unisono.kernels.sampling import logprobs as room
from unisono.types import MAX_LOGPROBS

VOCAB = 1000
WANTED = [-1, 0, 1, 5, 20, 20, 7, 3]
TEMPERATURES = [1.0, 0.0, 0.7, 1.0, 2.0, 1.0, 0.0, 1.3]
EDITS = [0, 0, 0, 1, 1, 0, 1, 0]
STATUS = [0, 0, 0, 0, 0, 1, 0, 0]
ROWS = len(WANTED)
ASKS = torch.tensor([w >= 0 and s == 0 for w, s in zip(WANTED, STATUS, strict=True)])


def fields(device) -> tuple[torch.Tensor, ...]:
    """wanted, status, temperature, edits, as views of one arena."""
    columns = [torch.tensor(c, dtype=torch.int32) for c in (WANTED, STATUS, EDITS)]
    columns.insert(2, torch.tensor(TEMPERATURES).view(torch.int32))
    arena = torch.stack(columns, 1).to(device)
    return arena[:, 0], arena[:, 1], arena[:, 2].view(torch.float32), arena[:, 3]


def run(op, device, logits, slots, width, tokens, edited, threshold, processed, normalized=True):
    logits, slots, tokens, edited, threshold = (t.to(device) for t in (logits, slots, tokens, edited, threshold))
    out = torch.full((len(logits), room.WORDS), -5, dtype=torch.int32, device=device)
    op(logits, slots, width, tokens, *fields(device), edited, threshold, processed, normalized, out)
    return out.cpu()


def unpack(row: torch.Tensor, count: int):
    values = row.view(torch.float32)
    top = row[2 : 2 + count].tolist(), values[2 + MAX_LOGPROBS :][:count].double()
    return values[0].double(), int(row[1]), *top


def case(dtype, width=1):
    logits = (torch.randn(ROWS * width, VOCAB) * 3).to(dtype)
    edited = torch.randn(ROWS * width, VOCAB) * 3
    slots = torch.randperm(ROWS, dtype=torch.int32)
    tokens = torch.randint(0, VOCAB, (ROWS * width,), dtype=torch.int32)
    return logits, slots, width, tokens, edited, torch.full((ROWS * width,), 0.5)


@pytest.mark.parametrize("normalized", [True, False], ids=["logprobs", "logits"])
@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("width", [1, 3])
def test_values_equal_log_softmax_or_logits(width, processed, normalized, dtype, device, monkeypatch):
    monkeypatch.setattr(room, "BLOCK", 256)  # several blocks, one of them short
    arguments = case(dtype, width)
    logits, slots, _, tokens, edited, _ = arguments
    for op, d in ((room.launch_logprobs, device), (room.logprobs.cpu, "cpu")):
        out = run(op, d, *arguments, processed, normalized)
        for n in range(ROWS * width):
            slot = int(slots[n // width])
            if not ASKS[slot]:
                assert (out[n] == -5).all()
                continue
            row = logits[n].double()
            if processed:
                row = edited[n].double() if EDITS[slot] else row
                if TEMPERATURES[slot]:
                    row = torch.where(row >= 0.5, row / TEMPERATURES[slot], -torch.inf)
            expected = row.log_softmax(-1) if normalized else row
            logprob, rank, ids, top = unpack(out[n], WANTED[slot])
            token = int(tokens[n])
            torch.testing.assert_close(logprob, expected[token], rtol=1e-6, atol=2e-6)
            assert rank == int((row >= row[token]).sum())
            order = sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))[: WANTED[slot]]
            assert ids == order
            torch.testing.assert_close(top, expected[order], rtol=1e-6, atol=2e-6)
            assert (out[n, 2 + WANTED[slot] : 2 + MAX_LOGPROBS] == -5).all()


def test_ties_go_to_the_lowest_ids_and_nan_counts_for_nothing(device):
    logits, slots, width, tokens, edited, threshold = case(torch.float32)
    logits = logits.round()
    logits[:, 7] = torch.nan
    for op, d in ((room.launch_logprobs, device), (room.logprobs.cpu, "cpu")):
        out = run(op, d, logits, slots, width, tokens, edited, threshold, False)
        for n, slot in enumerate(slots.tolist()):
            if ASKS[slot]:
                row = logits[n].nan_to_num(-torch.inf)
                order = sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))[: WANTED[slot]]
                assert unpack(out[n], WANTED[slot])[2] == order


def test_missing_alternatives_have_impossible_logprobs(device):
    """The filters kept three: the rest of the alternatives are impossible, and say so."""
    logits, slots, width, tokens, edited, threshold = case(torch.float32)
    slots = torch.full((ROWS,), 7, dtype=torch.int32)  # three wanted
    threshold = logits.max(-1).values
    for op, d in ((room.launch_logprobs, device), (room.logprobs.cpu, "cpu")):
        out = run(op, d, logits, slots, width, tokens, edited, threshold, True)
        top = torch.stack([unpack(row, 3)[3] for row in out])
        assert (top[:, 0] == 0).all()
        assert (top[:, 1:] == -torch.inf).all()


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
def test_a_row_depends_on_no_other(processed, device, assert_rows_exact):
    logits, slots, _, tokens, edited, threshold = (
        t.to(device) if torch.is_tensor(t) else t for t in case(torch.float32)
    )

    def op(*rows):
        logits, slots, tokens, edited, threshold = rows
        return run(room.launch_logprobs, device, logits, slots, 1, tokens, edited, threshold, processed)

    assert_rows_exact(op, logits, slots, tokens, edited, threshold)
