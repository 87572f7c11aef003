"""Embeddings in place of token ids: their text is that of the ids whose embeddings they are, whatever else goes on.

Oracles: the same prompts as token ids, and transformers' ``inputs_embeds``. On a GPU this runs in bfloat16.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.helpers import counted, draw_drafts, idle, lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import DRAFTERS, drafting
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, EngineRequest, SamplingParams, SpeculativeConfig, StructuredOutputs

PROMPTS = prompts(9, 250, low=3, high=70)
FORM = StructuredOutputs(regex="([a-d]{2}-){3,9}")
PARAMS = [replace(p, structured_outputs=FORM) if i in (3, 7) else p for i, p in enumerate(mixed_params(9))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HIDDEN = 84


def table(llm: LLM) -> torch.Tensor:
    return llm.engine.worker.model.embed.weight.cpu()


def whole(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """A prompt of nothing but embeddings."""
    return {"prompt_embeds": table(llm)[ids]}


def partly(llm: LLM, ids: list[int], seed: int = 0) -> dict[str, Any]:
    """A prompt with every third token overridden, or so, in two spellings; the ids there are arbitrary."""
    rng = random.Random(seed)
    positions = [i for i in range(len(ids)) if rng.random() < 0.35]
    rng.shuffle(positions)
    others = [(-1 if seed % 2 else 7) if i in positions else t for i, t in enumerate(ids)]
    rows = table(llm)[[ids[i] for i in positions]]
    given: Any = (positions, rows) if seed % 2 else dict(zip(positions, rows, strict=True))
    return {"prompt_token_ids": others, "embedding_overrides": given}


def mixed(llm: LLM, batch: list[list[int]] = PROMPTS) -> list[Any]:
    """By turns: embeddings alone, overrides, plain."""
    ways = (whole, partly, lambda llm, ids, seed=0: ids)
    return [ways[i % 3](llm, ids) if i % 3 != 1 else partly(llm, ids, i) for i, ids in enumerate(batch)]


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> list[list[int]]:
    """What the token ids give, each alone and eagerly."""
    with lazy_engine(qwen3, max_num_seqs=1, enforce_eager=True) as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"enforce_eager": True, "max_num_seqs": 2},
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 3}, marks=pytest.mark.full),
        {"max_num_batched_tokens": 37, "graphs": "segmented"},
        {"attention_backend": "torch", "max_num_batched_tokens": 50},
    ],
    ids=["batched", "eager", "chunks of 16", "chunks of 37, segmented", "planned on the host"],
)
def test_the_text_is_that_of_the_ids(qwen3: Path, expected: list[list[int]], flags: dict[str, Any]) -> None:
    if "attention_backend" in flags and torch.cuda.is_available():
        pytest.skip("on a GPU the two backends have other bits")
    with lazy_engine(qwen3, **flags) as llm:
        assert tokens(llm, mixed(llm), PARAMS) == expected
        idle(llm)
        before = counted(llm)
        assert tokens(llm, mixed(llm), PARAMS) == expected, "after prefix hits, with the graphs that were missing"
        assert llm.engine.scheduler.prefix_hits > 0
        if not flags.get("enforce_eager"):
            eager = {key: n - before.get(key, 0) for key, n in counted(llm).items() if key[1] == "eager"}
            assert sum(eager.values()) == 0, eager
            assert any(g.key.features.embeddings and g.key.features.masks for g in llm.engine.runner.planner.graphs())
        llm.engine.check_integrity()


def test_random_embeddings_equal_transformers(checkpoints: dict[str, Path]) -> None:
    torch.manual_seed(0)
    for family in ("llama", "qwen3"):
        model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32).eval()
        size = model.config.hidden_size
        given = [torch.randn(n, size) * 0.3 for n in (3, 40, 17)]
        with torch.inference_mode():
            wanted = [
                model.generate(
                    inputs_embeds=e[None], attention_mask=torch.ones(1, len(e)), do_sample=False, max_new_tokens=24,
                    eos_token_id=None, pad_token_id=0,
                )[0].tolist()
                for e in given
            ]  # fmt: skip
        with lazy_engine(checkpoints[family], dtype="float32", max_num_batched_tokens=32) as llm:
            assert tokens(llm, [{"prompt_embeds": e} for e in given], GREEDY) == wanted
            assert tokens(llm, [{"prompt_embeds": e[None].numpy()} for e in given], GREEDY) == wanted


@pytest.mark.full
def test_preempted(qwen3: Path) -> None:
    params = mixed_params(9, max_tokens=60)
    with lazy_engine(qwen3, max_num_seqs=1) as llm:
        wanted = [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    with lazy_engine(qwen3, max_model_len=144, num_pages=1 + 14) as llm:
        assert tokens(llm, mixed(llm), params) == wanted
        assert llm.engine.scheduler.preemptions >= 3
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize("method", [m if m == "eagle3" else pytest.param(m, marks=pytest.mark.full) for m in DRAFTERS])
def test_drafted(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = DRAFTERS[method](checkpoints, tmp_path)
    narrow = [p if p.structured_outputs else replace(p, allowed_token_ids=(40, 41, 42)) for p in PARAMS]
    with lazy_engine(made[0]) as llm:
        wanted = tokens(llm, PROMPTS, narrow)
    with drafting(method, made, 3, max_num_batched_tokens=40) as llm:
        assert tokens(llm, mixed(llm), narrow) == wanted
        assert tokens(llm, mixed(llm), narrow) == wanted, "after prefix hits"
        assert llm.engine.counters.accepted_tokens > 0


def test_paused_drafter_catches_up_after_embeddings(
    qwen3: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a draft model catches up with begins before the first generated token, where there may be none."""
    draw_drafts(monkeypatch, lambda rng, choices: rng.choice((0, 0, choices[-1])))
    with drafting("standalone", (qwen3, qwen3), 3, adaptive=True) as llm:
        assert tokens(llm, mixed(llm), PARAMS) == expected
        assert any(program == "catch_up" for program, _, _ in counted(llm))
        assert llm.engine.counters.accepted_tokens > 0


@pytest.mark.parametrize(("drafts", "cached"), [(3, 96), (0, 32)])
def test_prefix_cache_after_paused_drafting_with_embeddings(qwen3: Path, drafts: int, cached: int) -> None:
    """An answer's pages are known by what stands before them; those that the drafter has not read are not kept."""
    ids = prompts(1, 250, low=40, high=41, seed=3)[0]
    long = replace(GREEDY, max_tokens=60)
    with drafting("standalone", (qwen3, qwen3), 3, adaptive=True) as llm:
        llm.engine.pin_drafts(drafts)
        (answer,) = tokens(llm, [whole(llm, ids)], long)
        llm.engine.pin_drafts(3)
        rows = table(llm)[ids]
        longer = {"prompt_token_ids": ids + answer, "embedding_overrides": (range(40), rows)}
        given, other, plain = (
            llm.generate([prompt], GREEDY)[0]
            for prompt in (longer, {**longer, "embedding_overrides": (range(40), rows + 1e-3)}, ids + answer)
        )
        assert (given.num_cached_tokens, other.num_cached_tokens, plain.num_cached_tokens) == (cached, 0, 0)
        assert given.outputs[0].token_ids == plain.outputs[0].token_ids
        llm.engine.check_integrity()


def test_penalties_ignore_embedding_positions(qwen3: Path) -> None:
    """Repetition counts the tokens that are left."""
    ids = [9, 10, 11, 12] * 4
    given = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=30.0)
    with lazy_engine(qwen3, logprobs_mode="processed_logprobs") as llm:
        nines = {"prompt_token_ids": ids, "embedding_overrides": {i: table(llm)[9] for i in range(0, 16, 4)}}
        choice = replace(given, max_tokens=1, allowed_token_ids=(9, 10), logit_bias={9: 1.0, 10: 1.0})
        unpenalised = replace(choice, repetition_penalty=1.0)

        def gap(prompt: Any, params: SamplingParams) -> float:
            """By how much 9 is likelier than 10 among what tokens are drawn from."""
            (entry,) = llm.generate([prompt], replace(params, logprobs=2))[0].outputs[0].logprobs or ()
            return entry[9].logprob - entry[10].logprob

        plain, free = gap(ids, choice), gap(ids, unpenalised)
        assert gap(whole(llm, ids), choice) == free, "no token of the prompt is penalised"
        assert gap(ids, choice) == plain != free
        assert gap(nines, choice) not in (plain, free), "10 is, 9 is not"


def test_prefix_cache_keys_include_embeddings(qwen3: Path) -> None:
    """Equal embeddings hit, different ones do not, nor do the ids whose embeddings they are."""
    ids = prompts(1, 250, low=64, high=65, seed=3)[0]

    def hits(llm: LLM, prompt: Any) -> int:
        return llm.generate([prompt], GREEDY)[0].num_cached_tokens

    with lazy_engine(qwen3) as llm:
        rows = table(llm)[ids]
        nudged = rows.clone()
        nudged[40] += 1e-3
        assert hits(llm, {"prompt_embeds": rows}) == 0
        assert hits(llm, {"prompt_embeds": rows.clone()}) == 48
        assert hits(llm, ids) == 0
        assert hits(llm, {"prompt_embeds": nudged}) == 32
        assert hits(llm, {"prompt_token_ids": ids, "embedding_overrides": {20: rows[20]}}) == 16
        assert hits(llm, {"prompt_token_ids": [5] * 64, "embedding_overrides": (range(64), rows)}) == 48
        changed = {"prompt_token_ids": ids, "embedding_overrides": {20: nudged[40]}}
        assert hits(llm, changed) == 16
        assert tokens(llm, [ids], GREEDY) != tokens(llm, [changed], GREEDY), "an override decides"
        llm.engine.check_integrity()


def test_a_placeholder_never_matches(qwen3: Path) -> None:
    """Drafts from the request's own text: behind embeddings there is none, however often they stand there."""
    spec = SpeculativeConfig("ngram", num_speculative_tokens=3, options={"shared_tokens": 0, "prompt_lookup_min": 2})
    row = torch.randn(HIDDEN)
    overrides = {i: row for i in range(0, 40, 3)}  # then 5, 6, and one stands last
    with lazy_engine(qwen3, speculative=spec) as llm:
        prompt = {"prompt_token_ids": [7, 5, 6] * 13 + [7], "embedding_overrides": overrides}
        one = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=(5,), ignore_eos=True)
        assert tokens(llm, [prompt], one) == [[5, 5]]
        assert llm.engine.counters.drafted_tokens == 0
        assert tokens(llm, [[5, 6] * 20], one) == [[5, 5]]
        assert llm.engine.counters.drafted_tokens > 0, "with tokens there it drafts"


def test_several_sequences(qwen3: Path) -> None:
    several = SamplingParams(temperature=1, seed=4, n=3, max_tokens=12, ignore_eos=True)
    with lazy_engine(qwen3) as llm:
        ids = PROMPTS[1] * 3
        given = llm.generate([whole(llm, ids)], several)[0]
        plain = llm.generate([ids], several)[0]
        assert [o.token_ids for o in given.outputs] == [o.token_ids for o in plain.outputs]
        assert given.prompt_token_ids == [-1] * len(ids)


def test_prompt_logprobs_behind_the_embeddings(qwen3: Path) -> None:
    ids = prompts(1, 250, low=40, high=41, seed=8)[0]
    scoring = replace(GREEDY, prompt_logprobs=2, logprob_start_len=21)
    with lazy_engine(qwen3) as llm:
        soft = {"prompt_token_ids": ids, "embedding_overrides": (range(21), table(llm)[ids[:21]])}
        plain, given = llm.generate([ids, soft], scoring)
        assert given.prompt_logprobs == plain.prompt_logprobs
        assert given.prompt_logprobs is not None
        assert given.prompt_logprobs[:21] == [None] * 21
        with pytest.raises(BadRequest, match=r"position 1 is an embedding.*logprob_start_len to 21 or more"):
            llm.generate([soft], replace(scoring, logprob_start_len=0))
        with pytest.raises(BadRequest, match="start at position 20, but position 20 is an embedding"):
            llm.generate([soft], replace(scoring, logprob_start_len=20))


def bad(**changes: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2, 3], **changes}


ROW = torch.zeros(HIDDEN)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_embeds": torch.zeros(0, HIDDEN)}, "no rows"),
        ({"prompt_embeds": torch.zeros(2, 80)}, "80 numbers each; the model's hidden size is 84"),
        ({"prompt_embeds": torch.zeros(2, 2, HIDDEN)}, r"shape \(2, 2, 84\); give \[tokens, hidden\]"),
        ({"prompt_embeds": torch.zeros(2, HIDDEN, dtype=torch.float64)}, "dtype torch.float64; give one of float32"),
        ({"prompt_embeds": torch.zeros(2, HIDDEN).to_sparse()}, "sparse"),
        ({"prompt_embeds": torch.zeros(300, HIDDEN)}, "300 tokens; the context of 256"),
        ({"prompt_embeds": torch.full((2, HIDDEN), float("nan"))}, "position 0 has numbers that are not finite"),
        ({"prompt_embeds": "text"}, "a str; give tensors"),
        ({"prompt_embeds": ROW[None], "prompt": "x"}, "leave out"),
        ({"prompt_embeds": ROW[None], "embedding_overrides": {}}, "leave out"),
        ({"prompt_embeddings": ROW[None]}, "prompt_embeddings"),
        (bad(embedding_overrides={3: ROW}), "position 3; the prompt's are 0 to 2"),
        (bad(embedding_overrides={"0": ROW}), "position '0'"),
        (bad(embedding_overrides=([0, 0], torch.zeros(2, HIDDEN))), "position 0 twice"),
        (bad(embedding_overrides=([0, 1], torch.zeros(3, HIDDEN))), "2 positions and 3 embeddings"),
        (bad(embedding_overrides={0: ROW, 1: ROW[:5]}), "sizes"),
        (bad(embedding_overrides=7), "neither"),
        ({"prompt_token_ids": [1, -1, 3], "embedding_overrides": {0: ROW}}, "token id -1; the vocabulary"),
    ],
)
def test_refusals(llm: LLM, prompt: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        llm.generate([prompt], GREEDY)
    assert not llm.engine.scheduler.has_work


@pytest.fixture(scope="module")
def llm(qwen3: Path) -> Any:
    with lazy_engine(qwen3, enforce_eager=True) as llm:
        yield llm


def test_empty_overrides_equal_a_plain_prompt(llm: LLM) -> None:
    assert tokens(llm, [bad(embedding_overrides={})], GREEDY) == tokens(llm, [[1, 2, 3]], GREEDY)
    assert all(key.features.embeddings is False for key in llm.engine.worker.graphs._eager_buffers)


def test_the_docs_code_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/embed.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, {})


def test_engine_add_validates_requests(llm: LLM) -> None:
    """The engine's own door checks too: token ids may be placeholders only where an embedding stands."""
    with pytest.raises(BadRequest, match="token id -1"):
        llm.engine.add(EngineRequest("r", [-1, 2], SamplingParams(seed=1)))
    for params, param in ((SamplingParams(), "seed"), (SamplingParams(seed=1, n=2), "n")):
        with pytest.raises(BadRequest, match="one sequence with a seed") as caught:
            llm.engine.add(EngineRequest("r", [1, 2], params))
        assert caught.value.param == param
    assert not llm.engine.scheduler.has_work
