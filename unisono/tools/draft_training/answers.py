"""The target's answers, made by the engine in full batches, and the file that keeps them for a resumed run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono.llm import LLM
from unisono.tools.draft_training.data import Prompt
from unisono.types import EngineRequest, FinishReason, SamplingParams, UnisonoError

Progress = Callable[[str, float], None]


@dataclass
class Answer:
    """Tokens that one request generated, and how many of them each of its rounds committed (the first token is the
    prompt pass's)."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    """A prompt with its answer; tokens from ``learnt`` on are what a draft head has to foresee."""

    token_ids: list[int]
    learnt: int


def play(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Callable[[int], SamplingParams]
) -> Iterator[tuple[int, Answer]]:
    """Answer the prompts, as many at once as the engine takes; yields (index, answer) as they end."""
    engine, waiting = llm.engine, iter(enumerate(prompts))
    under_way: dict[str, tuple[int, Answer]] = {}
    room = 2 * engine.config.max_num_seqs
    while True:
        while len(under_way) < room and (following := next(waiting, None)) is not None:
            index, prompt = following
            request = EngineRequest(f"answer-{index}", list(prompt), params(index), llm.eos_token_ids)
            engine.add(request)
            under_way[request.request_id] = index, Answer()
        if not under_way:
            return
        for delta in engine.step():
            index, answer = under_way[delta.request_id]
            if answer.token_ids:
                answer.rounds.append(len(delta.token_ids))
            answer.token_ids += delta.token_ids
            if delta.finish is not FinishReason.RUNNING:
                del under_way[delta.request_id]
                if delta.finish is FinishReason.ABORT:
                    raise UnisonoError(f"The engine failed on an answer: {delta.error}")
                yield index, answer


@dataclass(frozen=True)
class Asking:
    """How the target is asked. Every other prompt is answered greedily, the rest at ``temperature``.

    max_tokens: of an answer. longest: tokens of prompt and answer together. seconds: stop asking after so many, from
    when the engine is ready.
    """

    temperature: float = 1.0
    max_tokens: int = 512
    longest: int = 1024
    seed: int = 0
    seconds: float = float("inf")

    def params(self, index: int, prompt_tokens: int) -> SamplingParams:
        """Of the prompt with this number."""
        return SamplingParams(
            temperature=self.temperature if index % 2 else 0.0,
            seed=self.seed + index,
            max_tokens=max(1, min(self.max_tokens, self.longest - prompt_tokens)),
        )


def collect(make_llm: Callable[[], LLM], prompts: list[Prompt], asking: Asking, file: Path, progress: Progress) -> None:
    """Append to ``file`` a line for each prompt it does not yet hold: ``{"prompt": number, "learnt": …, "ids": […]}``.

    Raises nothing when the time is up: what was answered until then is there.
    """
    if file.exists():  # a line that was cut off goes, before others follow it
        with file.open("r+b") as stored:
            stored.truncate(stored.read().rfind(b"\n") + 1)
    held = {number for number, _ in _lines(file)}
    left = [i for i in range(len(prompts)) if i not in held]
    with file.open("a", encoding="utf-8") as out:

        def keep(number: int, learnt: int, ids: list[int]) -> None:
            out.write(json.dumps({"prompt": number, "learnt": learnt, "ids": ids}) + "\n")

        for number in left:
            if prompts[number].complete:
                keep(number, 1, prompts[number].token_ids)
        asked = [i for i in left if not prompts[i].complete]
        if not asked or asking.seconds <= 0:
            return
        with make_llm() as llm:
            ids, started = [prompts[i].token_ids for i in asked], time.monotonic()
            answered = play(llm, ids, lambda i: asking.params(asked[i], len(ids[i])))
            for done, (i, answer) in enumerate(answered, 1):
                keep(asked[i], len(ids[i]), ids[i] + answer.token_ids)
                spent = time.monotonic() - started
                if done % 64 == 0:
                    progress("answers", max(done / len(asked), min(1.0, spent / asking.seconds)))
                if spent > asking.seconds:
                    break
    progress("answers", 1.0)


def read_answers(file: Path) -> list[Text]:
    """The texts of a file, in the order of their prompts, so that the engine's timing decides nothing."""
    return [text for _, text in sorted(_lines(file), key=lambda pair: pair[0])]


def _lines(file: Path) -> Iterator[tuple[int, Text]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("}\n"):  # else the run was cut off in it
                entry = json.loads(line)
                yield entry["prompt"], Text(entry["ids"], entry["learnt"])
