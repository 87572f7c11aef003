"""Draft heads see what the target sees: pictures and given embeddings, at the target's rotary positions.

Oracle: the forward of an EAGLE-3 head, and of Qwen3.5's MTP module, in plain PyTorch over the tower's embeddings and
transformers' hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_blocks import Block, make_dflash
from tests.drafters.make_blocks import reference as block_reference
from tests.drafters.make_heads import Head, make_eagle3, make_speculators, reference
from tests.drafters.proposals import mistakes, record
from tests.drafters.watch import BlockWatch, Watch
from tests.engine.helpers import engine, mixed_params, prompts
from tests.engine.matrix import config_of, drafting, with_modules
from tests.engine.pictures import IMAGE, VIDEO, Picture, Prompt, make_seeing, prompt, run, several, vision_of, words
from tests.models.hybrid_mtp import forward, random_module
from tests.models.hybrids import reference as transformers_model
from tests.models.make_mtp import write_beside
from unisono.drafters.base import PromptPass
from unisono.drafters.block.model import BlockHead
from unisono.entrypoints.llm import LLM
from unisono.models.blocks.rotary_positions import rotary_positions
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.vision.config import VisionConfig
from unisono.types import SamplingParams, SpeculativeConfig, vectors

SECTION = (4, 3, 3)
ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": list(SECTION), "mrope_interleaved": True}}
AXES = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
"""By hand, of 10 planes: every third one height, every third one width, until each has three; the rest time."""

LAYERS = (2, 1, 3)
CLOSE = 3e-4 if torch.cuda.is_available() else 1e-4

NO_MEDIA = {IMAGE: -100.0, VIDEO: -100.0}
"""Logit bias: transformers would look for the picture of a generated placeholder."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def head(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return make_eagle3(tmp_path_factory.mktemp("head"), config_of(seeing), LAYERS, aux=list(LAYERS), **ROPE)


class Target:
    """transformers' model: what it embeds, and what it shows of a text that begins with a prompt.

    hidden: what it showed last, [T, H], after its last norm.
    """

    axes: Sequence[int] = AXES
    hidden: torch.Tensor

    def __init__(self, path: Path) -> None:
        self.path, self.model, self.vision = path, transformers_model(path), vision_of(path)
        self.embed = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.lm_head.weight.detach()

    @torch.no_grad()
    def shows(self, given: Prompt, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the embeddings [T, H] that the text model reads of ids, the inputs of LAYERS that it has, side by side)."""
        text = self.model.model.language_model
        inputs: dict[int, torch.Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, i=i: inputs.update({i: args[0][0]}))
            for i, layer in enumerate(text.layers)
        ]
        tensor = torch.tensor([ids])
        media: dict[str, Any] = {"mm_token_type_ids": (tensor == IMAGE) + 2 * (tensor == VIDEO)}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            items = [item for item in given.media if item.kind == kind]
            if items:
                media[name] = torch.cat([vectors.unpack(item.pixels) for item in items])
                media[f"{kind}_grid_thw"] = torch.tensor([item.grid for item in items])
        self.hidden = self.model.model(input_ids=tensor, **media).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return inputs[0], torch.cat([inputs[i] for i in LAYERS if i in inputs], -1)

    def positions(self, given: Prompt, count: int) -> torch.Tensor:
        """By which each plane of each of ``count`` tokens turns, [count, planes]."""
        prompt_positions, delta = rotary_positions(len(given.ids), given.media, self.vision)
        after = torch.arange(len(given.ids), count).expand(3, -1) + delta
        return torch.cat((torch.from_numpy(prompt_positions), after), 1).T[:, self.axes]


def prompts_of(vision: VisionConfig) -> list[Prompt]:
    picture = prompt(vision, Picture(6, 10, 3), words(5, 2))  # it begins with the picture
    return [*several(vision)[1:6], picture]


def errors(target: Target, head: Head, watch: Watch, given: list[Prompt]) -> tuple[float, float]:
    """The largest relative errors of hidden states and logits of all draft steps."""
    hidden_error = logits_error = 0.0
    for seen in watch.rounds[::2]:
        by = max((p for p in given if seen.ids[: len(p.ids)] == p.ids), key=lambda p: len(p.ids))
        embedded, shown = target.shows(by, seen.ids)
        positions = target.positions(by, len(seen.ids) + len(seen.drafts))
        steps = reference(
            head, target.embed, target.lm_head, seen.ids, shown[:-1], seen.drafts, embedded.double(), positions
        )
        for got, want in zip(seen.steps, steps, strict=True):
            hidden_error = max(hidden_error, float((got[0] - want[0]).norm() / want[0].norm()))
            logits_error = max(logits_error, float((got[1] - want[1]).norm() / want[1].norm()))
    return hidden_error, logits_error


def watched(seeing: Path, head: Head, **flags: Any) -> tuple[Watch, list[Prompt], LLM]:
    spec = SpeculativeConfig("eagle3", str(head.path), 3)
    given = prompts_of(vision_of(seeing))
    with engine(seeing, dtype="float32", speculative=spec, enforce_eager=True, **flags) as llm:
        watch = Watch(llm)
        how = mixed_params(len(given), max_tokens=5)
        run(llm, given, how)
        run(llm, given, how)  # after cached prefixes
        assert llm.engine.scheduler.prefix_hits > 0
    return watch, given, llm


@pytest.mark.parametrize("flags", [{}, {"max_num_batched_tokens": 16}], ids=["one pass", "chunks of 16"])
def test_eagle3_head_reads_image_embeddings_and_positions(seeing: Path, head: Head, flags: dict[str, Any]) -> None:
    """Embeddings, hidden states and rotary positions: in prompts, chunks, after prefix hits, in rounds, in catch-up."""
    watch, given, _ = watched(seeing, head, **flags)
    assert len(watch.rounds) > 10
    hidden_error, logits_error = errors(Target(seeing), head, watch, given)
    assert hidden_error < CLOSE
    assert logits_error < CLOSE


@pytest.mark.parametrize("withheld", ["embeddings", pytest.param("rotary positions", marks=pytest.mark.full)])
def test_comparison_fails_without_embeddings_or_positions(
    seeing: Path, head: Head, withheld: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    of_entries = PromptPass.of_entries

    def less(self: PromptPass) -> Any:
        given, rotary = of_entries(self)
        return ((), rotary) if withheld == "embeddings" else (given, None)

    monkeypatch.setattr(PromptPass, "of_entries", less)
    watch, given, _ = watched(seeing, head)
    hidden_error, _ = errors(Target(seeing), head, watch, given)
    assert hidden_error > 0.05


def test_a_head_of_another_width_reads_token_ids(seeing: Path, tmp_path: Path) -> None:
    """It has no room for the target's embeddings: ``explain`` says so, and the text is the same."""
    narrow = make_speculators(tmp_path, config_of(seeing), LAYERS, {}, hidden_size=66).path
    vision, found = vision_of(seeing), []
    spec = SpeculativeConfig("eagle3", str(narrow), 3)
    for speculative in (None, spec):
        with engine(seeing, dtype="float32", speculative=speculative, enforce_eager=True) as llm:
            found.append(run(llm, several(vision)[2:4], mixed_params(2)))
            told = {decision.name: decision.value for decision in llm.engine.config.decisions}
    assert found[0] == found[1]
    assert told["drafter sees"] == "token ids"


# ---- block drafters ---------------------------------------------------------------------------------------


def block_error(seeing: Path, head: Block, **flags: Any) -> float:
    """The largest relative error of a block head's logits after texts with pictures."""
    spec, target = SpeculativeConfig("dflash", str(head.path), 3), Target(seeing)
    given, error = prompts_of(target.vision), 0.0
    with engine(seeing, dtype="float32", speculative=spec, enforce_eager=True, **flags) as llm:
        watch = BlockWatch(llm)
        for _ in range(2):  # then after cached prefixes
            run(llm, given, mixed_params(len(given), max_tokens=6))
        assert llm.engine.scheduler.prefix_hits > 0
    assert len(watch.rounds) > 10
    for ids, _, drafts, got in watch.rounds[::2]:
        by = max((p for p in given if ids[: len(p.ids)] == p.ids), key=lambda p: len(p.ids))
        _, shown = target.shows(by, ids)
        want, _ = block_reference(head, target.embed, target.lm_head, ids, shown[:-1], drafts)
        error = max(error, float((got - want).norm() / want.norm()))
    return error


@pytest.mark.parametrize("flags", [{}, {"max_num_batched_tokens": 16}], ids=["one pass", "chunks of 16"])
def test_block_head_reads_the_states_of_pictures(seeing: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    """At absolute positions; the target's states have its rotary positions and deepstack levels."""
    head = make_dflash(tmp_path, config_of(seeing), tuple(layer - 1 for layer in LAYERS))
    assert head.layers == LAYERS
    assert block_error(seeing, head, **flags) < CLOSE


@pytest.mark.full
def test_comparison_fails_without_the_states_of_pictures(
    seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    head, write = make_dflash(tmp_path, config_of(seeing), (1, 0, 2)), BlockHead.write_context
    monkeypatch.setattr(BlockHead, "write_context", lambda self, seen, *where: write(self, seen.roll(1, 0), *where))
    assert block_error(seeing, head) > 0.05


# ---- MTP ------------------------------------------------------------------------------------------------


class Module(Target):
    """Qwen3.5 with a random MTP module: greedy drafts after texts that begin with one of ``given``."""

    axes = (0, 1, 2, 0)
    """By hand, of 4 planes: sections of 2, 1 and 1, interleaved."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        self.weights, self.config = random_module(checkpoint.config), checkpoint.config
        super().__init__(write_beside(path, self.weights))
        self.given = prompts_of(self.vision)

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]:
        by = max((p for p in self.given if list(ids[: len(p.ids)]) == p.ids), key=lambda p: len(p.ids))
        (embedded, _), hidden = self.shows(by, list(ids)), self.hidden[:-1]
        positions, logits = self.positions(by, len(ids) + k), []
        for step in range(k):
            turned = positions[1 : len(ids) + step]
            states = forward(self.weights, self.config, embedded[1:], hidden, turned)
            logits.append(states[-1] @ self.lm_head.T)
            logits[-1][list(NO_MEDIA)] += torch.tensor(list(NO_MEDIA.values()))
            embedded = torch.cat((embedded, self.embed[logits[-1].argmax()][None]))
            hidden = torch.cat((hidden, states[-1:]))
        return logits


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return Module(make_seeing(tmp_path_factory.mktemp("hybrid"), "qwen3_5", mtp_num_hidden_layers=1))


def proposed(module: Module) -> list[tuple[list[int], list[int]]]:
    """Proposals of the drafter, in chunks, after prefix hits and in rounds: (committed tokens, drafts)."""
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, seed=0, logit_bias=NO_MEDIA)
    how = [params] * len(module.given)
    spec = SpeculativeConfig("mtp", num_speculative_tokens=3)
    with engine(module.path, dtype="float32", max_num_batched_tokens=21) as llm:
        plain = run(llm, module.given, how)
    texts = [p.ids + said for p, said in zip(module.given, plain, strict=True)]
    with engine(module.path, dtype="float32", speculative=spec, enforce_eager=True, max_num_batched_tokens=21) as llm:
        seen = record(llm, texts)
        assert run(llm, module.given, how) == plain
        assert run(llm, module.given, how) == plain, "after prefix hits"
        assert llm.engine.scheduler.prefix_hits > 0
        assert llm.engine.counters.accept_length > 1.5
    return seen


def test_every_draft_of_mtp_is_the_formulas(module: Module) -> None:
    seen = proposed(module)
    assert len(seen) > 20
    assert mistakes(module, seen) == [0] * 3


@pytest.mark.full
def test_an_mtp_module_that_sees_nothing_drafts_otherwise(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    of_entries = PromptPass.of_entries
    monkeypatch.setattr(PromptPass, "of_entries", lambda self: ((), of_entries(self)[1]))
    assert sum(mistakes(module, proposed(module))) > 0


GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, seed=0)


@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.full), "mtp of several"])
def test_prompt_embeddings_are_drafted_like_their_token_ids(method: str, qwen3: Path, tmp_path: Path) -> None:
    """Prompts of embeddings are drafted for as the token ids whose embeddings they are, wherever a chunk ends."""
    batch, drafts = prompts(3, 250, low=30, high=60, seed=3), []
    if method == "eagle3":
        made = qwen3, make_eagle3(tmp_path, config_of(qwen3), LAYERS, aux=list(LAYERS)).path
    else:
        made = with_modules(qwen3, tmp_path / "target", 2 if method == "mtp of several" else 1), None
    for soft in (False, True):
        with drafting(method.split()[0], made, 3, enforce_eager=True, max_num_batched_tokens=23) as llm:
            table, drafter = llm.engine.worker.model.embed.weight.cpu(), llm.engine.worker.drafter
            seen: list[torch.Tensor] = []
            propose = drafter.propose

            def noted(slots: torch.Tensor, into: torch.Tensor, propose: Any = propose, seen: Any = seen) -> None:
                propose(slots, into)
                seen.append(into.clone().cpu())

            drafter.propose = noted
            given: list[Any] = [{"prompt_embeds": table[ids]} if soft else ids for ids in batch]
            for one in given:
                llm.generate([one], GREEDY)
            drafts.append(seen)
    assert len(drafts[0]) == len(drafts[1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(*drafts, strict=True))
