"""Heads whose acceptance is known by construction: text proves nothing of a drafter, acceptance does.

The targets' blocks add nothing, so that their next token is a function of the last one alone, and every row of their
embeddings has a root mean square of 1, so that norms change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.ledger import Entry, acceptance, assert_every_draft_accepted, play
from tests.drafters.make_heads import Weights, layer_fields, make_eagle, random_weights, write
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from tests.models.make_mtp import options
from unisono.drafters.eagle.model import Eagle3Head, EagleHead
from unisono.entrypoints.llm import LLM
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError, ConfigError, SamplingParams, SpeculativeConfig

TAG, WRONG = 0, 1  # dimensions that no logit reads


def engine(path: Path, **flags: Any) -> LLM:
    """In float32 on a GPU too: these heads are right by exact arithmetic."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


def spec(method: str, head: Path, k: int, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method, str(head), k, options)


def plain_target(directory: Path, embed: torch.Tensor, lm_head: torch.Tensor) -> Path:
    """logits = lm_head(embed(last token)); embed, lm_head [263, 90]."""
    path = make_checkpoint(directory, "llama", **options(rms_norm_eps=1e-12))
    weights = load_file(path / WEIGHTS)
    for name, weight in weights.items():
        weight.fill_(1) if "norm" in name else weight.zero_()
    weights |= {"model.embed_tokens.weight": embed, "lm_head.weight": lm_head}
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    return path


def zeroed(config: DecoderConfig, fields: dict[str, Any], inputs: int, fc: tuple[int, int]) -> Weights:
    """A head of which nothing is left but norms of 1."""
    weights = random_weights(fields, inputs, fc)
    return {name: torch.ones_like(w) if "norm" in name else torch.zeros_like(w) for name, w in weights.items()}


# ---- EAGLE-1: always right, as long as every entry and every hidden state is ------------------------------


def certain_target(directory: Path) -> Path:
    """Its hidden states carry 1 in dimension TAG."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(263, 90, generator=generator).sign() * (89 / 88) ** 0.5
    lm_head = 0.3 * torch.randn(263, 90, generator=generator)
    embed[:, TAG], embed[:, WRONG], lm_head[:, [TAG, WRONG]] = 1, 0, 0
    return plain_target(directory, embed, lm_head)


def certain_head(directory: Path, target: Path, noise: float = 0.0) -> Path:
    """Passes on the token's embedding, tag included; WRONG becomes the hidden state's tag - 1.

    Attention, uniform over the entries it sees, spreads WRONG over the logits: a state that was never written, in any
    entry, turns drafts into noise. ``noise`` is added to all weights, so that every one of them matters.
    """
    config = Checkpoint.open(target).config
    fields = layer_fields(config, rms_norm_eps=1e-12)
    weights = zeroed(config, fields, 90, (90, 180))
    fc = weights["fc.weight"]
    fc[:, :90] = torch.eye(90)
    fc[WRONG] = 0
    fc[WRONG, 90 + TAG], fc[WRONG, TAG] = 1, -1
    generator = torch.Generator().manual_seed(1)
    weights["layers.0.self_attn.v_proj.weight"][0, WRONG] = 30
    weights["layers.0.self_attn.o_proj.weight"][:, 0] = torch.randn(90, generator=generator)
    for weight in weights.values() if noise else ():
        weight += noise * torch.randn(weight.shape, generator=generator)
    write(directory, fields, weights)
    return directory


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certain_target(tmp_path_factory.mktemp("certain"))


CHUNKED = {"max_num_batched_tokens": 21, "max_num_seqs": 3}


@pytest.mark.parametrize(("k", "flags"), [(1, {}), (3, CHUNKED), (5, {})], ids=["1", "3, chunks of 21", "5"])
def test_a_right_head_is_always_accepted(certain: Path, tmp_path: Path, k: int, flags: dict) -> None:
    """In graphs, greedy and sampled, in chunks, behind cached prefixes; and the text is the target's own."""
    batch, params = prompts(6, 250, low=1, high=70), mixed_params(6)
    with engine(certain, **flags) as llm:
        written = tokens(llm, batch, params)
        longer = [p + t for p, t in zip(batch, written, strict=True)]
        expected = [written, written, tokens(llm, longer, params)]
    with engine(certain, speculative=spec("eagle", certain_head(tmp_path, certain), k), **flags) as llm:
        for prompts_, texts in zip([batch, batch, longer], expected, strict=True):
            entries = play(llm, prompts_, params)
            assert_every_draft_accepted(llm, entries)
            assert [entry.tokens for entry in entries] == texts
        assert llm.engine.scheduler.prefix_hits > 0


def test_max_drafts_limits_drafts_per_request(certain: Path, tmp_path: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=13, max_drafts=k, ignore_eos=True) for k in (0, 1, 2, None)]
    with engine(certain, speculative=spec("eagle", certain_head(tmp_path, certain), 3)) as llm:
        entries = play(llm, prompts(4, 250), params)
    assert [entry.rounds for entry in entries] == [[1] * 12, [2] * 6, [3] * 4, [4] * 3]


def test_lost_hidden_states_lower_acceptance(certain: Path, tmp_path: Path) -> None:
    """The construction can fail: without the hidden state of a cached page's end, nothing is right behind a hit."""
    batch = prompts(6, 250, low=40, high=70)
    greedy = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    with engine(certain, speculative=spec("eagle", certain_head(tmp_path, certain), 3)) as llm:
        play(llm, batch, [greedy] * 6)
        before = acceptance(llm)
        with torch.inference_mode():
            llm.engine.worker.store.view("drafter")["page_hidden"].zero_()
        play(llm, batch, [greedy] * 6)
        assert before == 1
        assert acceptance(llm) < 0.8


def rounds_of(llm: LLM, batch: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [entry.rounds for entry in play(llm, batch, params)]


@pytest.fixture(scope="module")
def unsure(certain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certain_head(tmp_path_factory.mktemp("unsure"), certain, noise=0.01)


def test_acceptance_does_not_depend_on_how_tokens_came(certain: Path, unsure: Path) -> None:
    """A head that is right some of the time, by all it reads: the same drafts in any batch, chunk and cache."""
    batch, params = prompts(8, 250, low=1, high=70, seed=4), mixed_params(8)
    drafting = spec("eagle", unsure, 3)
    with engine(certain, speculative=drafting, max_num_seqs=1, enforce_eager=True) as llm:
        expected = [rounds_of(llm, [p], [q])[0] for p, q in zip(batch, params, strict=True)]
        assert 0.2 < acceptance(llm) < 0.9
    for flags in ({}, {"max_num_batched_tokens": 16}, CHUNKED):
        with engine(certain, speculative=drafting, **flags) as llm:
            assert rounds_of(llm, batch, params) == expected
            assert rounds_of(llm, batch, params) == expected
            assert llm.engine.scheduler.prefix_hits > 0


# ---- EAGLE-3: right by the hidden state alone ------------------------------------------------------------


ODD = torch.arange(1, 263, 2)


def next_of(token: torch.Tensor) -> torch.Tensor:
    """The target's greedy next token: a permutation without fixed points that keeps parity."""
    return (token + 22) % 262


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that steps through a permutation, and a head that only looks at hidden states.

    Entry p reads the token at p - 1 from the target's layers and predicts p + 1 by two steps. What it hands on is
    the embedding of its own token: [0, x] from the target, [x, y] from itself, y counts. The draft vocabulary is the
    odd tokens.
    """
    directory = tmp_path_factory.mktemp("stepping")
    embed = torch.randn(263, 90, generator=torch.Generator().manual_seed(0)).sign()
    every = torch.arange(262)
    lm_head = torch.zeros(263, 90).index_copy(0, next_of(every), embed[every])
    assert torch.equal((embed[every] @ lm_head.T).argmax(1), next_of(every))
    target = plain_target(directory / "target", embed, lm_head)
    fields = layer_fields(
        Checkpoint.open(target).config, model_type="mistral", sliding_window=1, hidden_size=180, rms_norm_eps=1e-12,
        num_attention_heads=4, num_key_value_heads=4, head_dim=46,
    )  # fmt: skip
    weights = zeroed(Checkpoint.open(target).config, fields, 360, (180, 270))
    eye, value, out = torch.eye(90), "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight"
    weights["fc.weight"][90:, :90] = eye
    # A window of 1: attention adds V [embedding (2 × 90), hidden (2 × 90)] to the normed hidden state.
    weights[value][:90, 180:270], weights[value][:90, 270:] = -eye, eye
    weights[value][90:180, :90], weights[value][90:180, 270:] = eye, -eye
    weights[out][:90, :90], weights[out][90:, 90:180] = eye, eye
    weights |= {f"layers.0.{name}.weight": torch.ones(180) for name in ("input_layernorm", "hidden_norm")}
    weights |= {"norm.weight": torch.ones(180), "embed_tokens.weight": torch.cat((embed, 0 * embed), 1)}
    # The first embedding half alone has a root mean square of 1 / sqrt(2): so have the normed hidden states.
    by_two = torch.zeros(263, 90).index_copy(0, next_of(next_of(every)), embed[every])
    weights["lm_head.weight"] = torch.cat((by_two, 0 * by_two), 1)[ODD].contiguous()
    weights |= {"d2t": ODD - torch.arange(131), "t2d": torch.zeros(263, dtype=torch.bool).index_fill(0, ODD, True)}
    config = {
        **fields,
        "draft_vocab_size": 131,
        "target_hidden_size": 90,
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]},
    }
    write(directory / "head", config, weights)
    return target, directory / "head"


def odd_prompts(count: int) -> list[list[int]]:
    return [[t // 2 * 2 + 1 for t in p] for p in prompts(count, 250, low=2, high=70, seed=2)]


def run_stepping(stepping: tuple[Path, Path], **flags: Any) -> tuple[LLM, list[Entry]]:
    target, head = stepping
    batch, greedy = odd_prompts(6), SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    with engine(target, speculative=spec("eagle3", head, 4), **flags) as llm:
        entries = play(llm, batch, [greedy] * 6) + play(llm, batch, [greedy] * 6)
        assert llm.engine.scheduler.prefix_hits > 0
        for prompt, entry in zip(batch * 2, entries, strict=True):
            assert entry.tokens == [int((prompt[-1] + 22 * (i + 1)) % 262) for i in range(21)]
        return llm.engine.counters, entries


@pytest.mark.parametrize("flags", [{}, CHUNKED], ids=["one pass", "chunks of 21"])
def test_hidden_states_alone_suffice(stepping: tuple[Path, Path], flags: dict) -> None:
    """Also through a reduced vocabulary, and behind cached prefixes."""
    counters, entries = run_stepping(stepping, **flags)
    assert [entry.rounds for entry in entries] == [[5] * 4] * 12
    assert counters.accepted_tokens == counters.drafted_tokens


def test_hidden_states_of_another_position_do_not(stepping: tuple[Path, Path], monkeypatch) -> None:
    """The same head, fed one position late, says what was right a token ago."""
    encode = Eagle3Head.encode
    monkeypatch.setattr(Eagle3Head, "encode", lambda self, seen: encode(self, seen.roll(1, 0)))
    counters, _ = run_stepping(stepping)
    assert counters.accepted_tokens < 0.1 * counters.drafted_tokens


# ---- what is refused --------------------------------------------------------------------------------------


def test_invalid_eagle_options_raise_at_start(certain: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head", Checkpoint.open(certain).config).path
    for given, words in (
        (SpeculativeConfig("eagle", None, 3), "'eagle' needs \"model\": the directory of a head made for this target"),
        (spec("eagle3", head, 3, temperature=1), "'eagle3' has no option 'temperature'. Its options: load_format, aux"),
        (
            spec("eagle", head, 3, load_format="fast"),
            "load_format='fast' of the method 'eagle': choose one of auto, dum",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            engine(certain, speculative=given)
    with pytest.raises(CheckpointError, match="is no EAGLE-3 head"):
        engine(certain, speculative=spec("eagle3", head, 3))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_needs_no_file_with_dummy_weights(certain: Path, tmp_path: Path, method: str) -> None:
    config = layer_fields(Checkpoint.open(certain).config)
    if method == "eagle3":
        config |= {"draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": [2, 1, 3]}
    write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    batch, params = prompts(3, 250), mixed_params(3)
    with engine(certain) as llm:
        expected = tokens(llm, batch, params)
    with engine(certain, speculative=spec(method, tmp_path, 3, load_format="dummy")) as llm:
        assert tokens(llm, batch, params) == expected
        module = llm.engine.worker.drafter.module
        assert isinstance(module, EagleHead if method == "eagle" else Eagle3Head)
        assert module.embed is llm.engine.worker.model.embed
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        engine(certain, speculative=spec(method, tmp_path, 3))
