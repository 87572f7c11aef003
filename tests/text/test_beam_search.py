"""Beam search against exhaustive search on a made-up model, and on the engine against a plain loop."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from unisono.entrypoints.llm import LLM
from unisono.frontend.beam_search import BeamSearch, BeamSearchParams, check_beams
from unisono.types import BadRequest, EngineRequest, FinishReason, SamplingParams, TokenLogprobs

VOCABULARY, EOS, STEPS = 4, 3, 4
PROMPT = [7, 8]


def distribution(tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of the next token: a fixed function of all tokens."""
    rng = random.Random(str(list(tokens)))
    weights = [rng.random() + 0.01 for _ in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search(width: int, penalty: float, stop_ids: tuple[int, ...] = (EOS,)) -> BeamSearch:
    params = SamplingParams(n=width, max_tokens=STEPS, seed=0)
    beams = BeamSearch(EngineRequest("r", PROMPT, params, stop_ids), penalty)
    while requests := beams.requests():
        reports = []
        for request in requests:
            logprobs = distribution(request.prompt_token_ids)
            top = sorted(enumerate(logprobs), key=lambda pair: -pair[1])
            reports.append(TokenLogprobs(top[0][1], 1, top))
        beams.take(reports)
    return beams


def every_text() -> list[tuple[tuple[int, ...], float]]:
    """All texts that end with EOS or after STEPS tokens, and their log-probabilities."""
    found = []
    for length in range(1, STEPS + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            if EOS in tokens[:-1] or (length < STEPS and tokens[-1] != EOS):
                continue
            total = sum(distribution([*PROMPT, *tokens[:i]])[tokens[i]] for i in range(length))
            found.append((tokens, total))
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
def test_wide_beams_find_the_best_texts(penalty: float) -> None:
    """As wide as there are texts, no beam is lost: the best texts of all come out, in order."""

    def score(text: tuple[tuple[int, ...], float]) -> float:
        tokens, total = text
        return total / (len(PROMPT) + len(tokens) - (tokens[-1] == EOS)) ** penalty

    expected = sorted(every_text(), key=score, reverse=True)[:20]
    best = search(100, penalty).best()[:20]
    assert [beam.tokens for beam in best] == [tokens for tokens, _ in expected]
    for beam, (tokens, total) in zip(best, expected, strict=True):
        assert beam.cumulative_logprob == pytest.approx(total)
        assert sum(report.logprob for report in beam.logprobs) == pytest.approx(total)
        assert beam.finish is (FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH)


def test_one_beam_is_greedy() -> None:
    [beam] = search(1, 1.0, stop_ids=()).best()
    tokens: list[int] = []
    for _ in range(STEPS):
        logprobs = distribution([*PROMPT, *tokens])
        tokens.append(logprobs.index(max(logprobs)))
    assert list(beam.tokens) == tokens


def test_end_tokens_end_beams_only_if_they_are_stop_ids() -> None:
    beams = search(5, 1.0, stop_ids=()).best()
    assert len(beams) == 5
    assert {len(beam.tokens) for beam in beams} == {STEPS}


def test_offline() -> None:
    """``LLM.beam_search`` and ``priority``, ``chat_template`` and ``cache_salt`` of the offline interface."""
    prompts = ["Tom has 3 boxes of 4 pens.", "def add(a, b):"]
    with LLM("tiny", graph_capture="lazy", max_num_seqs=4, max_model_len=128, scheduling_policy="priority") as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
        first, second = llm.beam_search(prompts, params)
        assert [len(output.sequences) for output in (first, second)] == [2, 2]
        best, other = first.sequences
        assert best.cum_logprob >= other.cum_logprob
        ids = llm.tokenizer.encode(prompts[0])
        assert best.tokens[: len(ids)] == ids
        assert best.text == llm.tokenizer.decode(best.tokens[len(ids) :])
        assert [one.tokens for one in llm.beam_search(prompts[0], params)[0].sequences] == [best.tokens, other.tokens]
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        plain = llm.generate(prompts, greedy)
        ranked = llm.generate(prompts, greedy, priority=[1, -1])
        assert [one.outputs[0].text for one in ranked] == [one.outputs[0].text for one in plain]
        kept = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=4))[0]
        assert (
            kept.outputs[0].token_ids
            == llm.generate([ids[-4:]], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids
        )
        template = "{{ messages[0].content }}{{ documents[0].title }}"
        hi = [{"role": "user", "content": "hi "}]
        written = llm.chat_prompt(hi, chat_template=template, documents=[{"title": "you"}])
        assert written["prompt"] == "hi you"
        with pytest.raises(BadRequest, match="length_penalty"):
            llm.beam_search(prompts[0], BeamSearchParams(2, 4, length_penalty=1e300))
        with pytest.raises(BadRequest, match="--logprobs-mode raw_logits reports logits"):
            check_beams(BeamSearchParams(2, 4).sampling(), 20, "raw_logits")
        with pytest.raises(BadRequest, match="1 priorities for 2 prompts"):
            llm.generate(prompts, greedy, priority=[1])


def test_on_the_engine() -> None:
    """One beam of the bundled model is its greedy text; three beams differ, and come again from cached prefixes."""
    with LLM("tiny", graph_capture="lazy", max_num_seqs=4, max_model_len=128) as llm:
        prompt = llm.tokenizer.encode("Tom has 3 boxes of 4 pens.")
        [greedy] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
        [one] = run(llm, prompt, 1)
        assert list(one) == greedy.outputs[0].token_ids
        three = run(llm, prompt, 3)
        assert len(set(three)) == 3
        assert run(llm, prompt, 3) == three


def run(llm: LLM, prompt: list[int], width: int) -> list[tuple[int, ...]]:
    params = SamplingParams(n=width, max_tokens=12, seed=0)
    eos = tuple(llm.engine.info()["eos_token_ids"])
    beams = BeamSearch(EngineRequest("beams", prompt, params, eos))
    while requests := beams.requests():
        reports: dict[str, TokenLogprobs] = {}
        for request in requests:
            llm.engine.add(request)
        while len(reports) < len(requests):
            for delta in llm.engine.step():
                assert delta.logprobs is not None
                reports[delta.request_id] = delta.logprobs[0]
        beams.take([reports[request.request_id] for request in requests])
    return [beam.tokens for beam in beams.best()]
