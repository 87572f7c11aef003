"""Block drafters in an engine draft what their papers' forward passes draft, in every layout and every round."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.make_blocks import (
    FULL,
    SLIDING,
    Block,
    make_dflash,
    make_dflash2,
    make_dspark,
    make_speculators_block,
    reference,
)
from tests.drafters.watch import BlockWatch
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from unisono.config import catalog
from unisono.config.preflight.model import with_method
from unisono.drafters.block.checkpoint import open_block
from unisono.drafters.block.drafter import DFlashDrafter, DSparkDrafter
from unisono.drafters.block.model import BlockHead
from unisono.entrypoints.llm import LLM
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, ConfigError, SamplingParams, SpeculativeConfig

LAYERS, K = 4, 5
GREEDY = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
CLOSE = 3e-4 if torch.cuda.is_available() else 1e-4  # float32 in another order


def engine(path: Path, **flags: Any) -> LLM:
    """In float32 on a GPU too, to compare closely."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


@dataclass
class Target:
    """A random target, and transformers' view of it."""

    path: Path

    def __post_init__(self) -> None:
        self.config = Checkpoint.open(self.path).config
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self.embed, self.lm_head = self.model.get_input_embeddings().weight.detach(), self.model.lm_head.weight.detach()

    @torch.no_grad()
    def shows(self, ids: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
        """The inputs of these layers side by side [T, layers · H]."""
        states = self.model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[i][0] for i in layers], -1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    return Target(make_checkpoint(path, "llama", tokenizer=False, num_hidden_layers=LAYERS))


MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True}
Make = Callable[[Path, DecoderConfig], Block]
HEADS: dict[str, Make] = {
    "DFlash as published": make_dflash,
    "DFlash, one window and causal": lambda path, target: make_dflash(
        path, target, (2, 0, 1), masks=((9, True), (0, False)), **MIXED
    ),
    "DFlash, windows over whole blocks": lambda path, target: make_dflash(
        path, target, masks=((11, False),) * 2, nested={"use_swa": True, "swa_window_size": 11}
    ),
    "DSpark as published": make_dspark,
    "DFlash2 as published": make_dflash2,
    "DFlash2, other names": lambda path, target: make_dflash2(path, target, suffix=".weight"),
    "speculators DSpark, from the first mask, reduced vocabulary": lambda path, target: make_speculators_block(
        path, target, kind="dspark", markov_rank=5, draft_vocab=140
    ),
    "speculators, reduced vocabulary, another hidden size": lambda path, target: make_speculators_block(
        path, target, draft_vocab=120, hidden_size=66
    ),
    "speculators of a Llama, a window over whole blocks, from the last token": lambda path, target: (
        make_speculators_block(
            path, target, (3, 1), model_type="llama", masks=((9, False), (0, False)), anchor=True, extra=1,
            settings={"sliding_window_non_causal": True, "sample_from_anchor": True}, **MIXED,
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Block:
    return HEADS[request.param](tmp_path_factory.mktemp("head"), target.config)


def spec(head: Block, k: int = K, **options: str) -> SpeculativeConfig:
    method = "dspark" if "markov_head.markov_w1.weight" in head.weights else "dflash"
    return SpeculativeConfig(method, str(head.path), k, options)


def compare(target: Target, head: Block, watch: BlockWatch, every: int = 1) -> tuple[float, int]:
    """The largest relative error of logits, and the number of greedy drafts that were not the best."""
    error, wrong = 0.0, 0
    for ids, greedy, drafts, got in watch.rounds[::every]:
        shown = target.shows(ids[:-1], head.layers)
        want, scores = reference(head, target.embed, target.lm_head, ids, shown, drafts)
        error = max(error, float((got - want).norm() / want.norm()))
        for draft, row in zip(drafts, scores, strict=True):
            column = draft if head.ids is None else int((head.ids == draft).nonzero())
            wrong += greedy and bool(row[column] < row.max() - 1e-3)
    return error, wrong


FLAGS = {
    "one pass": {},
    "chunks of 21, two at once": {"max_num_batched_tokens": 21, "max_num_seqs": 2},
    "preempted": {"max_model_len": 80, "num_pages": 1 + 6},
}


def of_every_head(ways: Sequence[Any]) -> list[Any]:
    """Heads and ways by turns: a head's other ways are in the long matrix."""
    return [
        pytest.param(head, way, marks=() if (i + j) % len(ways) == 0 else pytest.mark.full)
        for i, head in enumerate(HEADS)
        for j, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def plain_texts(target: Target) -> Callable[..., list[list[int]]]:
    """The target's tokens without a drafter, once per list of requests."""

    @functools.cache
    def written(count: int, seed: int, max_tokens: int, **lengths: int) -> list[list[int]]:
        with engine(target.path) as llm:
            return tokens(llm, prompts(count, 250, seed=seed, **lengths), mixed_params(count, max_tokens))

    return written


@pytest.mark.parametrize(("head", "way"), of_every_head(tuple(FLAGS)), indirect=["head"])
def test_block_drafts_match_reference_forward(target: Target, head: Block, way: str, plain_texts: Any) -> None:
    """Logits and drafts; then once more behind cached prefixes, of prompts and of generated text."""
    batch, params = prompts(5, 250, low=1, high=50, seed=3), mixed_params(5, max_tokens=14)
    written = plain_texts(5, 3, 14, low=1, high=50)
    with engine(target.path, speculative=spec(head), enforce_eager=True, **FLAGS[way]) as llm:
        texts = [p + t for p, t in zip(batch, written, strict=True)]
        watch = BlockWatch(llm, texts)
        assert tokens(llm, batch, params) == written
        assert llm.engine.counters.accept_length > 2
        tokens(llm, texts, params)
        assert (llm.engine.scheduler.preemptions if way == "preempted" else llm.engine.scheduler.prefix_hits) > 0
    assert len(watch.rounds) > 25
    error, wrong = compare(target, head, watch, 1 if way == "preempted" else 2)
    assert error < CLOSE
    assert wrong == 0


def test_comparison_fails_for_shifted_context(target: Target, tmp_path: Path, monkeypatch) -> None:
    """The comparison above can fail."""
    head = make_dflash(tmp_path, target.config)
    write = BlockHead.write_context
    monkeypatch.setattr(BlockHead, "write_context", lambda self, seen, *where: write(self, seen.roll(1, 0), *where))
    with engine(target.path, speculative=spec(head), enforce_eager=True) as llm:
        watch = BlockWatch(llm)
        tokens(llm, prompts(3, 250), GREEDY)
    error, wrong = compare(target, head, watch)
    assert error > 0.05
    assert wrong > len(watch.rounds)


@pytest.mark.parametrize(("head", "k"), of_every_head((1, 5)), indirect=["head"])
def test_text_equals_the_targets_own(target: Target, head: Block, k: int, plain_texts: Any) -> None:
    batch, params = prompts(6, 250, seed=8), mixed_params(6)
    expected = plain_texts(6, 8, 24)
    with engine(target.path, speculative=spec(head, k)) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected
        llm.engine.check_integrity()


WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "fp8 target and head": ({"quantization": "fp8"}, {"draft_quantization": "fp8"}),
    "fp8 keys and values": ({"kv_cache_dtype": "fp8"}, {}),
    "mixed passes": ({"enable_mixed_chunk": True, "max_num_batched_tokens": 24}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_targets(target: Target, tmp_path: Path, way: str) -> None:
    """The text with the head is the text without it, and the head's drafts follow from the same states."""
    head, (flags, options) = make_dspark(tmp_path, target.config), WAYS[way]
    batch, params = prompts(4, 250, seed=8), mixed_params(4)
    with engine(target.path, **flags) as llm:
        expected = tokens(llm, batch, params)
    with engine(target.path, speculative=spec(head, **options), **flags) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected
        llm.engine.check_integrity()


@pytest.mark.parametrize("make", [make_dflash, make_dflash2, make_dspark])
def test_hybrids(make: Make, tmp_path: Path) -> None:
    """A target with recurrent layers: rounds replay its state, contexts need nothing of it."""
    path = catalog.bundled_path("tiny-hybrid")
    head = make(tmp_path, Checkpoint.open(path).config)
    batch, params = prompts(4, 250, seed=4), mixed_params(4, max_tokens=14)
    with engine(path) as llm:
        expected = tokens(llm, batch, params)
    with engine(path, speculative=spec(head, 4), max_num_batched_tokens=48) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected
        llm.engine.check_integrity()


def test_joined_context_gemm_equals_per_layer_gemms(target: Target, tmp_path: Path) -> None:
    """The joined rows give the bits of each layer's own, with fewer reads."""
    head = make_dflash(tmp_path, target.config)
    with engine(target.path, speculative=spec(head), enforce_eager=True) as llm:
        module = llm.engine.worker.drafter.module
        c = torch.randn(3, target.config.hidden_size, device=llm.engine.worker.model.embed.weight.device)
        joined = list(module._context_rows(c))
        assert module.context is not None
        module.context = None
        for one, other in zip(joined, module._context_rows(c), strict=True):
            assert torch.equal(one, other)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another vocabulary": ({"vocab_size": 100}, "vocab_size is 100"),
    "a mask that is no token": ({"mask_token_id": 5000}, "mask_token_id=5000 is not in the target's vocabulary"),
    "no mask": ({"mask_token_id": None}, "has no mask_token_id"),
    "a mask that is no number": ({"mask_token_id": "x"}, "mask_token_id='x'"),
    "layers of a larger target": ({"target_layer_ids": [1, 9]}, "inputs of layers .2, 10. .* the target has 4 layers"),
    "another depth": ({"num_target_layers": 36}, "a target of 36 layers; the target has 4"),
    "no layers": ({"target_layer_ids": []}, "must list the target layers"),
    "another kind": ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel'. is not a block drafter"),
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias=True is not supported"),
    "a gated Markov head": ({"markov_head_type": "gated"}, "markov_head_type='gated' is not supported"),
    "a window without size": ({"use_swa": True}, "sliding_window=None: layers with a window need"),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"]}, "is a dspark head: give the method 'dspark'"),
    "more layers": ({"num_hidden_layers": 3}, "tensor layers.2.* is missing"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_incompatible_block_drafter_config_raises(target: Target, tmp_path: Path, case: str) -> None:
    changes, says = CHANGES[case]
    make_dflash(tmp_path, target.config)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    for name, value in changes.items():
        place = raw["dflash_config"] if name in ("mask_token_id", "target_layer_ids", "use_swa") else raw
        place[name] = value
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=says):
        open_block(tmp_path, target.config, "dflash")


def cut(path: Path) -> None:
    """Leave half of the weights' file."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(name: str) -> Callable[[Path], None]:
    """Remove a tensor from the weights."""

    def remove(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        save_file({n: x for n, x in tensors.items() if n != name}, path / "model.safetensors")

    return remove


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "a config that is a list": (lambda path: (path / "config.json").write_text("[1]"), "config.json"),
    "a config that is cut": (lambda path: (path / "config.json").write_text('{"a": '), "config.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
    "weights that are cut": (cut, "model.safetensors"),
    "no projection": (without("fc.weight"), "tensor fc.weight .* is missing"),
    "no norm": (without("norm.weight"), "tensor norm.weight .* is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_refused(target: Target, tmp_path: Path, case: str) -> None:
    breaks, says = BROKEN[case]
    make_dflash(tmp_path, target.config)
    breaks(tmp_path)
    with_method({"model": str(tmp_path)})  # finds a method or none
    with pytest.raises(CheckpointError, match=says):
        open_block(tmp_path, target.config, "dflash")


@pytest.mark.parametrize("stated", [None, False])
def test_confidence_of_dspark(target: Target, tmp_path: Path, stated: bool | None, monkeypatch) -> None:
    """Requests share drafts by the head's confidence; the text is the target's."""
    head = make_dspark(tmp_path, target.config)
    if stated is not None:
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"enable_confidence_head": stated}))
    helpers.draw_drafts(monkeypatch, lambda rng, choices: rng.choice(choices[1:-1]))
    batch = prompts(4, 100, low=5, high=20, seed=2)
    with engine(target.path) as llm:
        plain = tokens(llm, batch, GREEDY)
    seen: list[torch.Tensor] = []
    rate = DSparkDrafter.propose_rated
    monkeypatch.setattr(DSparkDrafter, "propose_rated", lambda *args: seen.append(rate(*args)) or seen[-1])
    with engine(target.path, speculative=spec(head, 5), adaptive=True, graph_capture="start") as llm:
        drafter = llm.engine.worker.drafter
        assert llm.engine.runner.shared == (1, 2, 3)
        reasons = {each.name: each.reason for each in llm.engine.config.decisions}
        assert reasons["speculative"] == "config.json of the head names it"
        assert tokens(llm, batch, GREEDY) == plain
        assert drafter.confident is (stated is None)
        assert bool(seen) is drafter.confident
        if seen:
            w = head.weights["confidence_head.proj.weight"].float()
            hidden = torch.randn(3, target.config.hidden_size)
            before = torch.tensor([3, 1, 2], dtype=torch.int32)
            rows = head.weights["markov_head.markov_w1.weight"].float()[before.long()]
            expected = (torch.cat((hidden, rows), 1) @ w.T)[:, 0].sigmoid()
            device = drafter.module.markov_head.markov_w1.weight.device
            got = drafter.module.confidence(hidden.to(device), before.to(device))
            torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)
            assert all(bool(((x >= 0) & (x <= 1)).all()) for x in seen)


def test_k_is_limited_by_the_block(target: Target, tmp_path: Path) -> None:
    head = make_dflash(tmp_path, target.config, block_size=4)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4: .* blocks of 4: give at most 3"):
        DFlashDrafter(spec(head, 4), target.config)
    assert DFlashDrafter(spec(head, 3), target.config).num_drafts == 3


def test_conventions_can_be_set(target: Target, tmp_path: Path) -> None:
    make_dflash(tmp_path, target.config, (1, 2))
    opened = open_block(tmp_path, target.config, "dflash")
    assert (opened.config.aux_layers, opened.settings.from_anchor) == ((2, 3), False)
    opened = open_block(tmp_path, target.config, "dflash", convention="input", first_draft="anchor")
    assert (opened.config.aux_layers, opened.settings.from_anchor) == ((1, 2), True)
    assert "speculative config" in opened.why
    assert "speculative config" in opened.why_first


def test_rounds_of_any_width_leave_the_same_context(target: Target, tmp_path: Path, monkeypatch) -> None:
    """k is drawn for each round, 0 included: a block drafter observes those rounds, it has nothing to catch up with."""
    helpers.draw_drafts(monkeypatch)
    monkeypatch.setattr("unisono.engine.worker.build.draft_choices", lambda config, most: ((0, 1, 2, 4, 5), "drawn"))
    head = make_dflash(tmp_path, target.config)
    each = replace(spec(head), share_drafts=False)
    with engine(target.path, speculative=each, enforce_eager=True, adaptive=True, graph_capture="start") as llm:
        watch = BlockWatch(llm)
        tokens(llm, prompts(4, 250, seed=6), GREEDY)
    assert len({len(drafts) for _, _, drafts, _ in watch.rounds}) > 2
    error, wrong = compare(target, head, watch)
    assert (error < CLOSE, wrong) == (True, 0)


def test_drafts_of_rounds_that_share_them(target: Target, tmp_path: Path, plain_texts: Any, monkeypatch) -> None:
    """Places are shared before they are drafted: a block has as many masks as its request has places."""
    helpers.draw_drafts(monkeypatch, lambda rng, choices: rng.choice(choices[1:-1]))
    monkeypatch.setattr("unisono.engine.worker.build.draft_choices", lambda config, most: ((0, 1, 2, 4, 5), "drawn"))
    batch, params = prompts(5, 250, low=1, high=50, seed=3), mixed_params(5, max_tokens=14)
    written = plain_texts(5, 3, 14, low=1, high=50)
    head = make_dflash(tmp_path, target.config)
    with engine(target.path, speculative=spec(head), enforce_eager=True, adaptive=True, graph_capture="start") as llm:
        assert llm.engine.runner.shared == (1, 2, 4)
        watch = BlockWatch(llm, [p + t for p, t in zip(batch, written, strict=True)])
        assert tokens(llm, batch, params) == written
        assert llm.engine.counters.accept_length > 1.5
    assert len({len(drafts) for _, _, drafts, _ in watch.rounds}) > 2
    error, wrong = compare(target, head, watch)
    assert (error < CLOSE, wrong) == (True, 0)
