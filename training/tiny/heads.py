"""Trains the bundled model's draft heads: ``python -m training.tiny.heads --out DIR --minutes M``.

First the model answers problems of the training split and continues beginnings of its other training text. Then each
head is trained on these answers, all for the same time. Finally the engine measures the heads on held-out problems.
The command writes config.json and model.safetensors to DIR/tiny-eagle3, tiny-eagle, tiny-mtp and tiny-draft.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from training.tiny.data import test_problems
from training.tiny.documents import document, standard_library
from training.tiny.prompts import questions
from unisono.config import catalog
from unisono.text.tokenizer import Tokenizer
from unisono.tools.draft_training.answers import AnswerConfig, Text, collect, read_answers
from unisono.tools.draft_training.command import GPU_SHARE, Run, make_llm, train_on_texts
from unisono.tools.draft_training.data import TrainingPrompt
from unisono.tools.draft_training.measure import DRAFTS, DraftAcceptance, measure
from unisono.tools.draft_training.methods import DraftShape
from unisono.tools.draft_training.trainer import Recipe
from unisono.tools.eval.problems import final_answer
from unisono.types import SpeculativeConfig

TARGET = "tiny"
NAMES = {"eagle3": "tiny-eagle3", "eagle": "tiny-eagle", "mtp": "tiny-mtp", "standalone": "tiny-draft"}

MEASURING_SHARE, ANSWERS_SHARE = 0.25, 0.2
"""Shares of the time: for measuring, and for generating answers once the engine has started."""

LONGEST, MAX_TOKENS = 512, 256
"""Limits in tokens: of prompt and answer together, and of an answer."""

CHUNK = 1000
"""Prompts per task of a worker; the seed is the number of the chunk."""


def make_prompts(count: int, workers: int) -> list[TrainingPrompt]:
    """About ``count`` different prompts of the training split; they depend on ``count`` only."""
    chunks = range(1, 1 + -(-count // CHUNK))
    size = min(CHUNK, count)
    context = multiprocessing.get_context("fork")  # CUDA is not initialised yet
    with ProcessPoolExecutor(workers, context) as pool:
        made = [ids for some in pool.map(_chunk, chunks, [size] * len(chunks)) for ids in some]
    return [TrainingPrompt(list(ids)) for ids in dict.fromkeys(map(tuple, made))][:count]


def _chunk(number: int, size: int) -> list[list[int]]:
    """Token ids of problems in chat form, and a tenth as many beginnings of training documents."""
    tokenizer, rng = _tokenizer(), Random(f"beginnings {number}")
    found = _prompt_ids(questions("train", size - size // 11, seed=number))
    for _ in range(size // 11):
        text = "".join(piece for piece, _ in document(rng, _library()))
        found.append(tokenizer.encode(text, add_special_tokens=False)[: rng.randint(8, LONGEST // 4)])
    rng.shuffle(found)
    return found


_library = functools.cache(standard_library)


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(catalog.bundled_path(TARGET))
    assert tokenizer is not None
    return tokenizer


def _prompt_ids(asked: Sequence[str]) -> list[list[int]]:
    tokenizer = _tokenizer()
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in asked]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def train_all(options: argparse.Namespace, texts: list[Text], work: Path, until: float) -> None:
    """Train and export every head. until: the end, by the monotonic clock."""
    for done, method in enumerate(options.methods):
        minutes = max(0.02, (until - time.monotonic()) / 60 / (len(options.methods) - done))
        out = options.out / NAMES[method]
        out.mkdir(parents=True, exist_ok=True)
        recipe = Recipe(
            options.steps, minutes, options.batch_tokens, options.lr, options.muon_lr, save_every=1e9, seed=options.seed
        )
        asking = AnswerConfig(longest=LONGEST)
        run = Run(method, TARGET, out, recipe, DraftShape(tokenizer=False), asking, options.device, work)
        run.check(resume=False)
        train_on_texts(run, texts, False, lambda stage, share: None, _log)
        (work / "recipe.json").unlink()
        (work / "state.pt").unlink()
        size = sum(file.stat().st_size for file in out.iterdir())
        _log(f"{out}: {size / 2**20:.1f} MiB in {len(list(out.iterdir()))} files")


def measure_all(options: argparse.Namespace) -> bool:
    """Print the table of acceptance. Returns True if no head changes a text."""
    problems = test_problems(options.problems)
    prompts = [TrainingPrompt(ids) for ids in _prompt_ids([question for question, _, _ in problems])]
    specs: dict[str, SpeculativeConfig | None] = {"none": None, "ngram": SpeculativeConfig("ngram", None, DRAFTS)}
    for method in options.methods:
        specs[method] = SpeculativeConfig(method, str(options.out / NAMES[method]), DRAFTS)
    flags: dict[str, Any] = {"device": options.device, "gpu_memory_utilization": GPU_SHARE, "max_num_seqs": 32}
    plain: list[list[int]] = []
    _log(f"| method | accept length | by position | right of {len(problems)} | same tokens as without |")
    _log("|---|---|---|---|---|")
    same = True
    for method, spec in specs.items():
        acceptance = measure(TARGET, prompts, spec, max_tokens=MAX_TOKENS, longest=LONGEST, **flags)
        answers = acceptance.answers
        plain = plain or answers
        same &= answers == plain
        _log(_row(method, acceptance, _count_right(answers, problems), answers == plain))
    return same


def _row(method: str, acceptance: DraftAcceptance, right: int, same: bool) -> str:
    positions = " ".join(f"{share:.3f}" for share in acceptance.positions)
    return f"| {method} | {acceptance.length:.3f} | {positions} | {right} | {'yes' if same else 'NO'} |"


def _count_right(answers: Sequence[list[int]], problems: Sequence[tuple[str, str, str]]) -> int:
    texts = [_tokenizer().decode(answer) for answer in answers]
    return sum(final_answer(text) == expected for text, (_, _, expected) in zip(texts, problems, strict=True))


_STARTED = time.monotonic()


def _log(line: str) -> None:
    print(f"{time.monotonic() - _STARTED:6.1f} s  {line}" if not line.startswith("|") else line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the four heads")
    parser.add_argument("--minutes", type=float, default=7.0, help="time limit for everything")
    parser.add_argument("--methods", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--prompts", type=int, default=100_000, help="prompts to answer, if time allows")
    parser.add_argument("--problems", type=int, default=100, help="held-out problems to measure on")
    parser.add_argument("--steps", type=int, help="limit of training steps per head")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--muon-lr", type=float, default=Recipe.muon_lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, default=min(16, len(os.sched_getaffinity(0))), help="processes that make prompts"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--answers", type=Path, help="file to store answers in and to reuse them from")
    return parser.parse_args()


def main() -> None:
    """The command line."""
    options = _options()
    budget = 60 * options.minutes
    prompts = make_prompts(options.prompts, options.workers)
    _log(f"{len(prompts)} prompts")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        asking = AnswerConfig(max_tokens=MAX_TOKENS, longest=LONGEST, seed=options.seed, seconds=budget * ANSWERS_SHARE)
        answers = options.answers or work / "answers.jsonl"
        run = Run("eagle3", TARGET, work, Recipe(steps=1), DraftShape(), asking, options.device, work)
        collect(lambda: make_llm(run), prompts, replace(asking), answers, lambda stage, share: None)
        texts = read_answers(answers)
        _log(f"{len(texts)} answers, {sum(len(t.token_ids) for t in texts)} tokens with their prompts")
        train_all(options, texts, work, _STARTED + budget * (1 - MEASURING_SHARE))
    if not measure_all(options):
        raise SystemExit("speculation changed a text")
    _log("done")


if __name__ == "__main__":
    main()
