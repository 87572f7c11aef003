"""The sampling kernels against their twin, token for token, and the generator against published words."""

import pytest
import torch
import triton
import triton.language as tl

from tests.sampling.arena import ROWS, fields_of
from unisono.kernels.sampling import noise
from unisono.kernels.sampling import sampler as sampling

ZEROS, ONES = (0,) * 6, (0xFFFFFFFF,) * 6
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = {
    ZEROS: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ONES: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    PI: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}
"""Random123's known answers for philox4x32-10: (counter, key) -> words."""


@triton.jit
def _philox_kernel(inputs, outputs):
    c0, c1, c2, c3 = tl.load(inputs), tl.load(inputs + 1), tl.load(inputs + 2), tl.load(inputs + 3)
    k0, k1 = tl.load(inputs + 4), tl.load(inputs + 5)
    c0, c1 = c0.to(tl.uint32, bitcast=True), c1.to(tl.uint32, bitcast=True)
    c2, c3 = c2.to(tl.uint32, bitcast=True), c3.to(tl.uint32, bitcast=True)
    words = noise.philox(c0, c1, c2, c3, k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True))
    for i in tl.static_range(4):
        tl.store(outputs + i, words[i].to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(tokens, keys, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value = noise.gumbel(tl.load(tokens + i), tl.load(keys), tl.load(keys + 1), tl.load(keys + 2))
    tl.store(out + i, value)


def signed(words: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("given", KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_words(given, device):
    assert noise.philox_cpu(*given) == KNOWN[given]
    assert tuple(map(int, noise.philox_cpu(*(torch.tensor([w]) for w in given)))) == KNOWN[given]
    words = torch.empty(4, dtype=torch.int32, device=device)
    _philox_kernel[(1,)](signed(given).to(device), words)
    assert torch.equal(words.cpu(), signed(KNOWN[given]))


@pytest.mark.parametrize("keys", [(0, 0, 0), (4095, -1, 0x7FFFFFFF), (2**31 - 1, 12345, -6789)])
def test_gumbel_equals_its_twin(keys, device):
    tokens = torch.arange(1024, dtype=torch.int32) * 150
    out = torch.empty(1024, device=device)
    _gumbel_kernel[(1,)](tokens.to(device), torch.tensor(keys, dtype=torch.int32).to(device), out, N=1024)
    expected = noise.gumbel_cpu(tokens, *torch.tensor(keys, dtype=torch.int32))
    assert (out.cpu() - expected).abs().max() < 4e-6


def both(logits: torch.Tensor, rows: list[dict], width: int, device: torch.device) -> list[torch.Tensor]:
    """Tokens of the kernels and of the twin, one slot for each of ``rows`` in shuffled order."""
    slots = torch.randperm(len(rows), dtype=torch.int32)
    kernel = sampling.launch_sample(logits.to(device), slots.to(device), width, *fields_of(rows, device))
    return [kernel.cpu(), sampling.sample.cpu(logits, slots, width, *fields_of(rows))]


@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (7, 2), (1000, 1), (4099, 1)])
def test_the_kernels_pick_the_twins_tokens(vocab, width, dtype, device):
    logits = (torch.randn(len(ROWS) * width, vocab) * 3).to(dtype)
    kernel, twin = both(logits, ROWS, width, device)
    assert torch.equal(kernel, twin)


@pytest.mark.parametrize("ids", [None, torch.arange(300, dtype=torch.int32) * 2 + 1], ids=["all tokens", "some tokens"])
def test_scores_of_unfiltered_rows_are_those_of_single_tokens(ids, monkeypatch):
    """The twin draws for whole rows where no filter drops a token, else for each kept token."""
    rows = [{"temperature": temperature} for temperature in (0.7, 1.0, 0.0, 1.3)]
    logits, slots = torch.randn(2 * len(rows), 300), torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    found = []
    for cached in (logits.numel(), 299):
        monkeypatch.setattr(sampling, "CACHED", cached)
        found.append(sampling.scores_cpu(logits, slots, 2, *fields_of(rows), 1, ids)[0])
    assert torch.equal(found[0], found[1])
    assert (found[0] - logits).abs().max() > 1, "there is noise"


def test_rows_at_places_have_the_tokens_of_gathered_rows(device):
    """Rows of a round whose rows differ: each has its row of the logits somewhere, or is not sampled."""
    width, count = 3, len(ROWS)
    logits, places = torch.randn(count + 5, 700) * 3, torch.randint(0, count + 5, (count * width,), dtype=torch.int32)
    gathered = logits[places.long()]
    places[::4] = -1
    slots = torch.randperm(count, dtype=torch.int32)
    fields, on = fields_of(ROWS), fields_of(ROWS, device)
    expected = sampling.sample.cpu(gathered, slots, width, *fields).masked_fill(places < 0, 0)
    twin = sampling.sample.cpu(logits, slots, width, *fields, places=places)
    kernel = sampling.launch_sample(logits.to(device), slots.to(device), width, *on, places=places.to(device))
    assert torch.equal(twin, expected)
    assert torch.equal(kernel.cpu(), expected)


@pytest.mark.parametrize("scale", [0.02, 20.0])
def test_flat_and_peaked_rows(scale, device):
    kernel, twin = both(torch.randn(len(ROWS), 513) * scale, ROWS, 1, device)
    assert torch.equal(kernel, twin)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # the interpreter's numpy
def test_nan_and_infinities_end_and_are_never_picked(device):
    nan, inf = torch.nan, torch.inf
    odd = torch.tensor([[nan, -inf, 3.0, nan], [nan] * 4, [-inf] * 4, [0.0, 1.0, inf, nan]])
    for row in ROWS[:-2]:
        fields = fields_of([row] * 4, device)
        slots = torch.arange(4, dtype=torch.int32, device=device)
        assert sampling.launch_sample(odd.to(device), slots, 1, *fields).tolist() == [2, 0, 0, 2]


def test_signed_zeros_tie(device):
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0]]).to(device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    assert sampling.launch_sample(zeros, slots, 1, *fields_of([{"temperature": 0.0}], device)).tolist() == [1]


KINDS = {
    "smooth": lambda logits: logits * 3,
    "nearly equal": lambda logits: logits * 0.01,
    "tied": lambda logits: (logits * 2).round() / 2,  # zeros of both signs among them
    "masked": lambda logits: logits.masked_fill(logits < 0.5, -torch.inf),
}


@pytest.mark.parametrize(("lanes", "kind"), [(2048, "smooth"), *((128, kind) for kind in KINDS)])
def test_filter_thresholds_equal_the_reference(lanes, kind, dtype, device, monkeypatch):
    """With few lanes the search passes over the row. Rows whose filters are off, or do not matter, keep everything."""
    monkeypatch.setattr(sampling, "FILTER_LANES", lanes)
    logits = KINDS[kind](torch.randn(len(ROWS), 1500)).to(dtype)
    slots = torch.arange(len(ROWS), dtype=torch.int32, device=device)
    _, status, temperature, top_k, top_p, min_p, _, _ = fields_of(ROWS, device)
    threshold = sampling.launch_filter(logits.to(device), slots, 1, status, temperature, top_k, top_p, min_p)[0].cpu()
    kept = logits.float() >= threshold[:, None]
    drawn = ((status == 0) & (temperature > 0)).cpu()
    twin = sampling.thresholds_cpu(logits.float(), *(field.cpu() for field in (temperature, top_k, top_p, min_p)))
    assert torch.equal(kept[drawn], logits[drawn] >= twin[drawn][:, None])
    assert kept[~drawn].all()


def test_ids_and_offset_draw_the_noise_of_the_token_and_position_they_name(device):
    """A drafter that knows every third token and looks two positions ahead agrees with the whole vocabulary."""
    rows, ids = ROWS[:-2], torch.arange(0, 999, 3, dtype=torch.int32)
    whole = torch.full((len(rows), 999), -torch.inf)
    part = torch.randn(len(rows), len(ids)) * 3
    whole[:, ids.long()] = part
    fields = fields_of(rows, device)
    slots = torch.arange(len(rows), dtype=torch.int32, device=device)
    few = sampling.launch_sample(part.to(device), slots, 1, *fields, 2, ids.to(device))
    twin = sampling.sample.cpu(part, slots.cpu(), 1, *fields_of(rows), 2, ids)
    fields[0] += 2
    assert torch.equal(few, sampling.launch_sample(whole.to(device), slots, 1, *fields))
    assert torch.equal(few.cpu(), twin)


def test_a_row_depends_on_no_other(device, assert_rows_exact):
    rows = ROWS[2:9]
    fields = fields_of(rows, device)
    assert_rows_exact(
        lambda logits, slots: sampling.launch_sample(logits, slots, 1, *fields),
        torch.randn(len(rows), 700, device=device) * 3,
        torch.arange(len(rows), dtype=torch.int32, device=device),
    )
