"""Suffix decoding in the engine: same tokens as without, the predicted acceptance, and outputs shared by requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, lazy_engine, mixed_params, prompts, tokens
from tests.kernels.lookup_oracle import replay
from unisono import LLM, SamplingParams
from unisono.drafters.lookup.suffix import VOTERS
from unisono.types import ConfigError, SpeculativeConfig

K = 3
PROMPTS = [p[:n] * 3 for p, n in zip(prompts(6, 250, low=20, high=21), range(3, 9), strict=True)]
PARAMS = mixed_params(6, max_tokens=24)
QUESTIONS = [
    "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many apples are left?",
    "A shop has 14 boxes with 25 pens each. It sells 120 pens. How many pens are left?",
]


def suffix(k: int = K, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig("suffix", num_speculative_tokens=k, adaptive=False, options=options)


def shared(llm: LLM) -> list[int]:
    """The shared tokens, from the oldest on."""
    texts = llm.engine.worker.drafter.shared  # type: ignore[attr-defined]
    ring, at = texts.ring.tolist(), int(texts.head)
    return ring[at:] + ring[:at]


@pytest.fixture(scope="module")
def plain(qwen3: Path) -> list[list[int]]:
    with lazy_engine(qwen3) as llm:
        return tokens(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_same_tokens_in_any_batch(qwen3: Path, plain: list[list[int]], eager: bool) -> None:
    with lazy_engine(qwen3, speculative=suffix(), max_num_seqs=3, enforce_eager=eager) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        before = llm.engine.counters.accepted_tokens
        assert tokens(llm, PROMPTS[::-1], PARAMS[::-1]) == plain[::-1]
        # Asked again, every output is known but for its first tokens.
        assert llm.engine.counters.accepted_tokens - before > 0.6 * sum(map(len, plain))
        kinds = {kind for program, kind, _ in counted(llm) if program == "round"}
        graph = "full" if torch.cuda.is_available() else "tape"
        assert kinds == ({"eager"} if eager else {graph})


@pytest.mark.parametrize("size", [0, 100, 4096], ids=["own text", "small ring", "shared"])
def test_the_predicted_acceptance(qwen3: Path, plain: list[list[int]], size: int) -> None:
    """One request at a time, twice, so that plain Python knows what the ring holds when it drafts."""
    options = {"longest": 9 - K, "voters": VOTERS, "factor": 1.5, "share": 0.2}
    config = suffix(
        suffix_decoding_max_tree_depth=9, suffix_decoding_max_spec_factor=1.5, suffix_decoding_min_token_prob=0.2,
        shared_tokens=size,
    )  # fmt: skip
    ring, rounds, accepted = [-1] * size, 0, 0
    with lazy_engine(qwen3, speculative=config, max_num_seqs=1) as llm:
        for prompt, params, output in [*zip(PROMPTS, PARAMS, plain, strict=True)] * 2:
            assert tokens(llm, [prompt], [params]) == [output]
            more = replay(prompt, output, K, ring=ring, **options)
            rounds, accepted = rounds + more[0], accepted + more[1]
            assert (llm.engine.counters.draft_rounds, llm.engine.counters.accepted_tokens) == (rounds, accepted)
            if size:
                ring = [*ring, *output, -1][-size:]
                assert shared(llm) == ring
    assert accepted > (80 if size == 4096 else 0)


def test_shared_ring_holds_only_finished_outputs(qwen3: Path, plain: list[list[int]]) -> None:
    """Outputs from the first token to a stop id or the limit; not prompts, not what was aborted."""
    stop = next(t for i, t in enumerate(plain[1]) if i > 4 and t not in plain[1][:i])
    with lazy_engine(qwen3, speculative=suffix(shared_tokens=64), max_num_batched_tokens=16) as llm:
        (stopped,) = tokens(llm, [PROMPTS[1]], [replace(PARAMS[1], stop_token_ids=(stop,))])
        assert stopped == plain[1][: plain[1].index(stop) + 1]
        next(llm.stream(PROMPTS[2], PARAMS[2]))
        tokens(llm, [PROMPTS[0]], [PARAMS[0]])
        ended = [*stopped, -1, *plain[0], -1]
        assert shared(llm) == [-1] * (64 - len(ended)) + ended


def test_preemption(qwen3: Path) -> None:
    params = mixed_params(6, max_tokens=60)
    with lazy_engine(qwen3) as llm:
        expected = tokens(llm, PROMPTS, params)
    with lazy_engine(qwen3, speculative=suffix(), max_model_len=144, num_pages=1 + 12) as llm:
        assert tokens(llm, PROMPTS, params) == expected
        assert llm.engine.scheduler.preemptions > 0


def test_the_bundled_model_learns_from_other_answers() -> None:
    """Two questions of a kind: the second answer is drafted better when the first one is shared."""
    params = SamplingParams(temperature=0, max_tokens=64)
    lengths = []
    for size in (0, 4096):
        with LLM(
            "tiny", graph_capture="lazy", max_num_seqs=1, max_model_len=256, speculative=suffix(shared_tokens=size)
        ) as llm:
            for question in QUESTIONS:
                c = llm.engine.counters
                rounds, accepted = c.draft_rounds, c.accepted_tokens
                llm.chat([{"role": "user", "content": question}], params)
            lengths.append(1 + (c.accepted_tokens - accepted) / (c.draft_rounds - rounds))
    own, with_others = lengths
    assert own > 1.1
    assert with_others > own + 0.3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"options": {"suffix_decoding_max_cached_requests": 9}}, r"max_cached_requests'.*shared_tokens"),
        ({"options": {"suffix_decoding_max_tree_depth": 3}}, r"max_tree_depth=3: give 4 to 67"),
        ({"options": {"suffix_decoding_min_token_prob": 1.5}}, r"min_token_prob=1.5: give 0.0 to 1.0"),
        ({"options": {"suffix_decoding_max_spec_factor": -1}}, r"max_spec_factor=-1: give 0.0 to 64.0"),
        ({"options": {"suffix_decoding_max_spec_factor": "2"}}, r"max_spec_factor='2': give a number"),
        ({"options": {"shared_tokens": -1}}, r"shared_tokens=-1: give 0 to"),
        ({"options": {"shared_tokens": 1e4}}, r"shared_tokens=10000.0: give a whole number"),
        ({"model": "somewhere"}, r"'somewhere': the method 'suffix' has no checkpoint"),
    ],
    ids=["unknown", "depth", "probability", "factor", "text", "negative", "fraction", "model"],
)
def test_invalid_suffix_options_raise(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("tiny", speculative=SpeculativeConfig("suffix", **config))
