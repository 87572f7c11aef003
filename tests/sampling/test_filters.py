"""Top-k, top-p and min-p keep what transformers' warpers keep in float64; greedy and odd rows behave."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.sampling.arena import arena
from unisono.kernels.sampling.sampler import sample, thresholds_cpu
from unisono.sampling.pipeline import sample_tokens


def kept_by_transformers(logits, temperature, top_k, top_p, min_p):
    scores = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores > -torch.inf


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4099])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.1), (40, 0.95, 0.0), (50, 0.7, 0.02), (0, 0.01, 0.0), (10_000, 0.5, 1.0)],
)
def test_thresholds_keep_what_transformers_keeps(vocab, temperature, top_k, top_p, min_p):
    rows = 4
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    parameters = [torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p)]
    kept = logits >= thresholds_cpu(logits, *parameters)[:, None]
    assert torch.equal(kept, kept_by_transformers(logits, temperature, top_k, top_p, min_p))


def test_ties_at_a_boundary_are_kept_whole():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    parameters = [torch.tensor([value]) for value in (1.0, 2, 1.0, 0.0)]
    assert thresholds_cpu(logits, *parameters).tolist() == [1.0]
    parameters = [torch.tensor([value]) for value in (1.0, 0, 0.75, 0.0)]
    assert thresholds_cpu(logits, *parameters).tolist() == [1.0]


def choose(logits: torch.Tensor, **settings: float) -> list[int]:
    rows = logits.shape[0]
    return sample_tokens(logits, torch.arange(rows, dtype=torch.int32), 1, arena(rows, **settings)).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_greedy_is_argmax_with_ties_to_the_lowest_id(temperature):
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [-1.0, -0.0, 0.0, -0.0], [5.0, 5.0, 5.0, 5.0]])
    assert choose(logits, temperature=temperature) == [1, 1, 0]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_nan_and_infinities(settings):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, -inf, 3.0, nan], [nan, nan, nan, nan], [-inf, -inf, -inf, -inf], [0.0, 1.0, inf, nan]])
    assert choose(logits, **settings) == [2, 0, 0, 2]


def test_an_inactive_slot_draws_nothing():
    logits = torch.randn(3, 50)
    for status in (1, 2, 3, 4):
        assert choose(logits, status=status) == [0, 0, 0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}])
def test_a_row_depends_on_no_other(settings):
    """Alone, in any batch, at any index and at any width: the same token for a seed and position."""
    rows, width, vocab = 6, 3, 1001
    logits = torch.randn(rows * width, vocab, generator=torch.Generator().manual_seed(9)) * 2
    length = torch.tensor([3, 900, 17, 40, 5, 77])
    fields = arena(rows, seed_lo=torch.arange(rows) - 3, length=length, **settings)
    whole = sample_tokens(logits, torch.arange(rows, dtype=torch.int32), width, fields)
    order = [4, 1, 5, 0]
    part = sample_tokens(logits.view(rows, width, -1)[order].flatten(0, 1), torch.tensor(order).int(), width, fields)
    assert torch.equal(part, whole.view(rows, width)[order].flatten())
    for row in range(rows):
        for j in range(width):
            fields.length[row] = length[row] + j
            alone = sample_tokens(logits[row * width + j][None], torch.tensor([row]).int(), 1, fields)
            assert alone.item() == whole[row * width + j]


def test_width_moves_the_position():
    """Equal logits at successive positions draw afresh; at an equal position they draw the same."""
    logits = torch.zeros(8, 500)
    slots = torch.zeros(2, dtype=torch.int32)
    tokens = sample_tokens(logits, slots, 4, arena(1)).view(2, 4)
    assert torch.equal(tokens[0], tokens[1])
    assert len(set(tokens[0].tolist())) == 4


def test_the_op_is_opaque_to_tracing():
    fields = arena(2)
    arguments = (torch.randn(4, 10), torch.tensor([0, 1]).int(), 2, *vars(fields).values())
    assert torch.library.opcheck(torch.ops.unisono.sample.default, arguments)
    assert sample(*arguments).dtype is torch.int32
