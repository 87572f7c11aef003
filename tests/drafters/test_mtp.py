"""MTP drafters propose what the paper's forward proposes, in every round, however the tokens came to be."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import acceptance, assert_every_draft_accepted, play
from tests.drafters.proposals import GREEDY, mistakes, record
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from tests.models.make_mtp import Weights, greedy_drafts, named, options, random_modules, write_alone, write_beside
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig

LAYERS = 3


@dataclass
class Case:
    """A target with random modules beside it, and what a reference needs of both."""

    path: Path
    layout: str
    modules: list[Weights]

    def __post_init__(self) -> None:
        self.config = Checkpoint.open(self.path).config
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def greedy(self, batch: Sequence[list[int]]) -> list[list[int]]:
        """The target's tokens without a drafter."""
        if not hasattr(self, "_greedy"):
            with engine(self.path) as llm:
                self._greedy = tokens(llm, batch, GREEDY)
        return self._greedy

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]:
        """Logits of k greedy drafts after ``ids``."""
        hidden = self.model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        embed, head = self.model.get_input_embeddings().weight, self.model.lm_head.weight
        return greedy_drafts(self.modules, self.layout, self.config, embed, head, ids, hidden, k)


CASES = {"deepseek-1": ("deepseek", "llama", 1), "qwen-2": ("qwen", "qwen3", 2), "mimo-3": ("mimo", "qwen2", 3)}


def engine(path: Path | str, **flags: Any) -> LLM:
    """In float32 everywhere, as the references compute."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


def make(root: Path, name: str) -> Case:
    layout, family, depth = CASES[name]
    path = make_checkpoint(root / name, family, **options())
    modules = random_modules(Checkpoint.open(path).config, depth, shared=layout == "qwen")
    return Case(write_beside(path, named(modules, layout, LAYERS)), layout, modules)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(tmp_path_factory.mktemp("cases"), request.param)


def spec(k: int, **fields: object) -> SpeculativeConfig:
    return SpeculativeConfig(method="mtp", num_speculative_tokens=k, **fields)  # type: ignore[arg-type]


FLAGS = {
    "one pass": {},
    "chunks of 21, two at once": {"max_num_batched_tokens": 21, "max_num_seqs": 2},
    "preempted": {"max_model_len": 80, "num_pages": 1 + 6},
}


CELLS = [
    pytest.param(name, way, marks=pytest.mark.full if (i + j) % 3 == 1 else ())
    for i, name in enumerate(CASES)
    for j, way in enumerate(FLAGS)
]


@pytest.mark.parametrize(("case", "way"), CELLS, indirect=["case"])
def test_every_draft_is_the_references(case: Case, way: str) -> None:
    flags = FLAGS[way]
    batch = prompts(4, 250, low=1, high=50, seed=3)
    with engine(case.path, speculative=spec(4), enforce_eager=True, **flags) as llm:
        texts = [p + t for p, t in zip(batch, case.greedy(batch), strict=True)]
        seen = record(llm, texts)
        again = [p + t for p, t in zip(batch, tokens(llm, batch, GREEDY), strict=True)]
        assert again == texts
        assert llm.engine.counters.accept_length > 2
        tokens(llm, texts, GREEDY)  # now behind cached prefixes, of prompts and of what was written
        assert (llm.engine.scheduler.preemptions if "num_pages" in flags else llm.engine.scheduler.prefix_hits) > 0
    assert mistakes(case, seen[::2]) == [0] * 4


def test_comparison_fails_for_a_shared_module_state(tmp_path: Path) -> None:
    """The comparison above can fail: with one hidden state kept for all modules, drafts change."""
    case = make(tmp_path, "mimo-3")
    batch = prompts(4, 250, low=1, high=50, seed=3)
    with engine(case.path, speculative=spec(4), enforce_eager=True) as llm:
        texts = [p + t for p, t in zip(batch, case.greedy(batch), strict=True)]
        seen = record(llm, texts)
        first, *others = llm.engine.worker.store.view("drafter")["stages"]
        for stage in others:
            stage["hidden"] = first["hidden"]
        assert tokens(llm, batch, GREEDY) == case.greedy(batch)
    assert sum(mistakes(case, seen[::2])) > len(seen[::2]) / 2


# ---- modules that are right by construction ---------------------------------------------------------

TAG = 3.0


def certain(directory: Path, depth: int) -> Path:
    """A target whose next token depends on the last one alone, and modules that predict it if all they read is right.

    The target's blocks add nothing. Every state carries a tag, in a dimension that no logit reads: the target's in
    dimension 0, module i's in i + 1 (the last one's where it reads its own input's). Module i passes the token's
    embedding on, and writes ``tag i - TAG`` where its attention, uniform over the entries it sees, spreads it over the
    logits: one entry made from another module's state, or one that is none, and the drafts are noise.
    """
    path = make_checkpoint(directory, "llama", **options(rms_norm_eps=1e-12))
    config = Checkpoint.open(path).config
    hidden, spare = config.hidden_size, depth + 2  # dimensions below it are tags and, last, what is wrong
    generator = torch.Generator().manual_seed(0)

    def content(rows: int) -> torch.Tensor:
        random = torch.randn(rows, hidden, generator=generator)
        random[:, :spare] = 0
        return random

    weights = load_file(path / WEIGHTS)
    for name, weight in weights.items():
        weight.fill_(1) if "norm" in name else weight.zero_()
    embed = content(config.vocab_size)
    embed *= ((hidden - TAG**2) / embed.square().sum(1, keepdim=True)).sqrt()
    embed[:, 0] = TAG  # so that the root mean square of a row is 1, and norms change nothing
    weights["model.embed_tokens.weight"] = embed
    weights["lm_head.weight"] = content(config.vocab_size) * 0.3
    save_file(weights, path / WEIGHTS)

    modules = random_modules(config, depth)
    for i, w in enumerate(modules):
        for name, weight in w.items():
            weight.fill_(1) if "norm" in name else weight.zero_()
        reads, writes, wrong = i, min(i + 1, depth - 1), spare - 1
        w["proj"][spare:, spare:hidden] = torch.eye(hidden - spare)
        w["proj"][writes, 0] = 1
        w["proj"][wrong, hidden + reads], w["proj"][wrong, 0] = 1, -1
        w["self_attn.v_proj.weight"][0, wrong] = 30
        w["self_attn.o_proj.weight"][:, 0] = content(1)[0]
    return write_beside(path, named(modules, "deepseek", LAYERS))


BATCH, PARAMS = prompts(5, 250, low=1, high=70), mixed_params(5)


@dataclass
class Sure:
    """The checkpoint of :func:`certain`, and its tokens without a drafter: for BATCH, and for BATCH and that."""

    path: Path
    texts: list[list[int]]
    further: list[list[int]]


@pytest.fixture(scope="module", params=[1, 3], ids=["one module", "three modules"])
def sure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sure:
    path = certain(tmp_path_factory.mktemp("certain"), request.param)
    with engine(path) as llm:
        texts = tokens(llm, BATCH, PARAMS)
        return Sure(path, texts, tokens(llm, [p + t for p, t in zip(BATCH, texts, strict=True)], PARAMS))


@pytest.mark.parametrize(
    ("k", "flags"),
    [(1, {}), (2, {}), (5, {"max_num_batched_tokens": 21, "max_num_seqs": 3})],
    ids=["1", "2", "5, chunks of 21"],
)
def test_right_modules_are_always_accepted(sure: Sure, k: int, flags: dict) -> None:
    """In graphs, greedy and sampled, in chunks, behind cached prefixes; and the text is the target's own."""
    longer = [p + t for p, t in zip(BATCH, sure.texts, strict=True)]
    with engine(sure.path, speculative=spec(k), **flags) as llm:
        for batch, texts in ((BATCH, sure.texts), (BATCH, sure.texts), (longer, sure.further)):
            entries = play(llm, batch, PARAMS)
            assert_every_draft_accepted(llm, entries)
            assert [entry.tokens for entry in entries] == texts
        assert llm.engine.scheduler.prefix_hits > 0


def test_the_modules_come_from_their_own_directory_too(sure: Sure, tmp_path: Path) -> None:
    both = load_file(sure.path / WEIGHTS)
    own = [name for name in both if name.startswith(("model.layers.3.", "model.layers.4.", "model.layers.5."))]
    drafter = write_alone(tmp_path / "modules", {name: both.pop(name) for name in own})
    target = shutil.copytree(sure.path, tmp_path / "target", ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(both, target / WEIGHTS, metadata={"format": "pt"})
    with engine(target, speculative=spec(3, model=str(drafter))) as llm:
        entries = play(llm, BATCH[:2], PARAMS[:2])
        assert_every_draft_accepted(llm, entries)
    with pytest.raises(CheckpointError, match="no MTP modules"):
        engine(target, speculative=spec(3))
    with pytest.raises(ConfigError, match=r"'mtp' has no option 'topk'. Its options: load_format"):
        engine(target, speculative=spec(3, options={"topk": 4}))


def test_wrong_states_lose_acceptance(tmp_path: Path) -> None:
    """The construction can fail: with one hidden state kept for all modules most drafts are refused."""
    with engine(certain(tmp_path, 3), speculative=spec(5), enforce_eager=True) as llm:
        first, *others = llm.engine.worker.store.view("drafter")["stages"]
        for stage in others:
            stage["hidden"] = first["hidden"]
        play(llm, BATCH, PARAMS)
        assert acceptance(llm) < 0.6
