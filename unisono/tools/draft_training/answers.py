"""Generates the target's answers with the engine, and stores them in a file for resumed runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.entrypoints.llm import LLM
from unisono.tools.draft_training.data import TrainingPrompt
from unisono.types import EngineRequest, FinishReason, SamplingParams, UnisonoError

Progress = Callable[[str, float], None]
"""(stage, share of the stage that is done)."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its answer. The draft model learns to predict the tokens from ``answer_start`` on.

    greedy: the answer was generated at temperature 0.
    """

    token_ids: list[int]
    answer_start: int
    greedy: bool = False


def answer_all(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Callable[[int], SamplingParams]
) -> Iterator[tuple[int, list[int]]]:
    """Generate answers with full batches; yields (index of the prompt, generated tokens) as requests finish.

    params: sampling parameters by the index of the prompt.
    """
    engine, waiting = llm.engine, iter(enumerate(prompts))
    running: dict[str, tuple[int, list[int]]] = {}
    capacity = 2 * engine.config.max_num_seqs
    while True:
        while len(running) < capacity and (following := next(waiting, None)) is not None:
            index, prompt = following
            request = EngineRequest(f"answer-{index}", list(prompt), params(index), llm.eos_token_ids)
            engine.add(request)
            running[request.request_id] = index, list[int]()
        if not running:
            return
        for delta in engine.step():
            index, answer = running[delta.request_id]
            answer += delta.token_ids
            if delta.finish is not FinishReason.RUNNING:
                del running[delta.request_id]
                if delta.finish is FinishReason.ABORT:
                    raise UnisonoError(f"The engine failed to generate an answer: {delta.error}")
                yield index, answer


@dataclass(frozen=True)
class AnswerConfig:
    """Settings of answer generation.

    A share ``sampled`` of the prompts, evenly spread, is answered at ``temperature``, the others greedily.

    max_tokens: limit per answer. longest: limit for prompt and answer together. seconds: time limit from the engine's
    start on.
    """

    temperature: float = 1.0
    max_tokens: int = 512
    longest: int = 1024
    seed: int = 0
    seconds: float = float("inf")
    sampled: float = 0.5

    def is_greedy(self, index: int) -> bool:
        """True if prompt number ``index`` is answered at temperature 0."""
        return self.temperature == 0 or int((index + 1) * self.sampled) == int(index * self.sampled)

    def params(self, index: int, prompt_tokens: int) -> SamplingParams:
        """Sampling parameters of prompt number ``index``."""
        return SamplingParams(
            temperature=0.0 if self.is_greedy(index) else self.temperature,
            seed=self.seed + index,
            max_tokens=max(1, min(self.max_tokens, self.longest - prompt_tokens)),
        )


def collect(
    make_llm: Callable[[], LLM], prompts: list[TrainingPrompt], asking: AnswerConfig, file: Path, progress: Progress
) -> None:
    """Generate the answers that ``file`` lacks and append them, one JSON object per line.

    A line is ``{"prompt": number, "learnt": answer start, "greedy": bool, "ids": [token ids]}``. At the time limit the
    function returns with the answers generated so far.
    """
    if file.exists():  # remove an incomplete last line
        with file.open("r+b") as stored:
            stored.truncate(stored.read().rfind(b"\n") + 1)
    held = {number for number, _ in _lines(file)}
    missing = [i for i in range(len(prompts)) if i not in held]
    with file.open("a", encoding="utf-8") as out:

        def append(number: int, answer_start: int, ids: list[int], greedy: bool) -> None:
            line = {"prompt": number, "learnt": answer_start, "greedy": greedy, "ids": ids}
            out.write(json.dumps(line) + "\n")

        for number in missing:
            if prompts[number].complete:
                append(number, 1, prompts[number].token_ids, greedy=False)
        open_prompts = [i for i in missing if not prompts[i].complete]
        if not open_prompts or asking.seconds <= 0:
            return
        with make_llm() as llm:
            ids, started = [prompts[i].token_ids for i in open_prompts], time.monotonic()
            answered = answer_all(llm, ids, lambda i: asking.params(open_prompts[i], len(ids[i])))
            for done, (i, answer) in enumerate(answered, 1):
                number = open_prompts[i]
                append(number, len(ids[i]), ids[i] + answer, asking.is_greedy(number))
                spent = time.monotonic() - started
                if done % 64 == 0:
                    progress("answers", max(done / len(open_prompts), min(1.0, spent / asking.seconds)))
                if spent > asking.seconds:
                    break
    progress("answers", 1.0)


def read_answers(file: Path) -> list[Text]:
    """The texts of a file, sorted by prompt number, so that the order does not depend on the engine's timing."""
    return [text for _, text in sorted(_lines(file), key=lambda pair: pair[0])]


def _lines(file: Path) -> Iterator[tuple[int, Text]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("}\n"):  # otherwise the run was interrupted while writing the line
                entry = json.loads(line)
                yield entry["prompt"], Text(entry["ids"], entry["learnt"], entry.get("greedy", False))
