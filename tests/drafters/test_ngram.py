"""Prompt lookup in the engine: same tokens as without, and exactly the acceptance that plain Python predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, lazy_engine, mixed_params, prompts, tokens
from tests.kernels.lookup_oracle import replay
from unisono import LLM, SamplingParams
from unisono.types import ConfigError, SpeculativeConfig

K = 3
CODE = """\
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def set_x(self, x):
        self.x = x

    def set_y(self, y):
"""
ZEROS = "0 0 0 0 0 0 0 0"
MATHS = "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many apples are left?"
REPETITIVE = [p[:n] * 4 for p, n in zip(prompts(8, 250, low=20, high=21), range(1, 9), strict=True)]

PARAMS = mixed_params(8, max_tokens=30)


def ngram(**options: Any) -> SpeculativeConfig:
    """Looks in the request's own text, unless told otherwise: what others do is then of no account."""
    return SpeculativeConfig("ngram", num_speculative_tokens=K, adaptive=False, options={"shared_tokens": 0, **options})


def predicted(batch: list[list[int]], outputs: list[list[int]], longest: int = 4, shortest: int = 1) -> tuple[int, int]:
    """(rounds, accepted drafts) of the whole batch."""
    each = [replay(p, o, K, longest=longest, shortest=shortest) for p, o in zip(batch, outputs, strict=True)]
    return sum(rounds for rounds, _ in each), sum(accepted for _, accepted in each)


def observed(llm: LLM) -> tuple[int, int]:
    c = llm.engine.counters
    return c.draft_rounds, c.accepted_tokens


@pytest.fixture(scope="module")
def plain(qwen3: Path) -> list[list[int]]:
    with lazy_engine(qwen3) as llm:
        return tokens(llm, REPETITIVE, PARAMS)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_same_tokens_and_the_predicted_acceptance(qwen3: Path, plain: list[list[int]], eager: bool) -> None:
    with lazy_engine(qwen3, speculative=ngram(), enforce_eager=eager) as llm:
        assert tokens(llm, REPETITIVE, PARAMS) == plain
        assert observed(llm) == predicted(REPETITIVE, plain)
        assert observed(llm)[1] > 5
        kinds = {kind for program, kind, _ in counted(llm) if program == "round"}
        graph = "full" if torch.cuda.is_available() else "tape"
        assert kinds == ({"eager"} if eager else {graph})


def test_options_bound_the_match(qwen3: Path, plain: list[list[int]]) -> None:
    seen = set()
    for longest, shortest in ((1, 1), (64, 2)):
        options = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}
        with lazy_engine(qwen3, speculative=ngram(**options)) as llm:
            assert tokens(llm, REPETITIVE, PARAMS) == plain
            assert observed(llm) == predicted(REPETITIVE, plain, longest, shortest)
            seen.add(observed(llm))
    assert len(seen) == 2


@pytest.mark.parametrize("size", [50, 4096], ids=["small ring", "all of it"])
def test_ngrams_match_outputs_of_other_requests(qwen3: Path, plain: list[list[int]], size: int) -> None:
    """One request at a time, twice, so that plain Python knows what the ring holds when it drafts."""
    ring, rounds, accepted = [-1] * size, 0, 0
    with lazy_engine(qwen3, speculative=ngram(shared_tokens=size), max_num_seqs=1) as llm:
        for prompt, params, output in [*zip(REPETITIVE, PARAMS, plain, strict=True)] * 2:
            assert tokens(llm, [prompt], [params]) == [output]
            more = replay(prompt, output, K, longest=4, shortest=1, ring=ring)
            rounds, accepted = rounds + more[0], accepted + more[1]
            assert observed(llm) == (rounds, accepted)
            ring = [*ring, *output, -1][-size:]
    alone = predicted(REPETITIVE, plain)
    assert accepted > (6 * alone[1] if size == 4096 else alone[1])


def test_chunks_prefix_hits_and_preemption_change_neither(qwen3: Path, plain: list[list[int]]) -> None:
    with lazy_engine(qwen3, speculative=ngram(), max_num_batched_tokens=16, max_num_seqs=3) as llm:
        for times in (1, 2):
            assert tokens(llm, REPETITIVE, PARAMS) == plain
            rounds, accepted = predicted(REPETITIVE, plain)
            assert observed(llm) == (times * rounds, times * accepted)
    with lazy_engine(qwen3, speculative=ngram(), max_model_len=144, num_pages=1 + 12) as llm:
        assert tokens(llm, REPETITIVE, PARAMS) == plain
        assert llm.engine.scheduler.preemptions > 0


def test_the_bundled_model_repeats_itself() -> None:
    """A loop, code and a sum: text whose next tokens stand in it already more often than not."""
    flags: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 256, "graph_capture": "lazy"}
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM("tiny", **flags) as llm:
        batch = [llm.tokenizer.encode(ZEROS), llm.tokenizer.encode(CODE)]
        batch.append(llm.chat_prompt([{"role": "user", "content": MATHS}])["prompt_token_ids"])
        expected = tokens(llm, batch, params)
    with LLM("tiny", **flags, speculative=ngram()) as llm:
        assert tokens(llm, batch, params) == expected
        assert observed(llm) == predicted(batch, expected)
        assert llm.engine.counters.accept_length > 1.6


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"options": {"prompt_lookup_maximum": 3}},
            r"'prompt_lookup_maximum'.*prompt_lookup_max, prompt_lookup_min, shared_tokens",
        ),
        ({"options": {"prompt_lookup_max": 0}}, r"prompt_lookup_max=0: give 1 to 64"),
        ({"options": {"prompt_lookup_max": 65}}, r"prompt_lookup_max=65: give 1 to 64"),
        ({"options": {"prompt_lookup_min": 5}}, r"prompt_lookup_min=5 is above prompt_lookup_max=4"),
        ({"options": {"prompt_lookup_min": 1.5}}, r"prompt_lookup_min=1.5: give a whole number"),
        ({"options": {"prompt_lookup_min": True}}, r"prompt_lookup_min=True: give a whole number"),
        ({"options": {"shared_tokens": -1}}, r"shared_tokens=-1: give 0 to 16777216"),
        ({"model": "somewhere"}, r"'somewhere': the method 'ngram' has no checkpoint"),
    ],
    ids=["unknown", "low", "high", "order", "fraction", "bool", "ring", "model"],
)
def test_invalid_ngram_options_raise(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("tiny", speculative=SpeculativeConfig("ngram", **config))
