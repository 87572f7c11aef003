"""Trains the bundled models' draft heads: ``python -m training.tiny.heads --out DIR --minutes M``.

First the model answers problems of the training split and continues beginnings of its other training text. Then each
head is trained on these answers, all for the same time. Finally the engine measures the heads on held-out problems.
The command writes config.json and model.safetensors to DIR/tiny-eagle3, tiny-eagle, tiny-mtp, tiny-draft and
tiny-dflash; with ``--target tiny-hybrid`` to DIR/tiny-hybrid-dflash.
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
from training.tiny.documents import document as plain_document
from training.tiny.documents import standard_library
from training.tiny.prompts import questions
from training.tiny_hybrid.documents import document as thinking_document
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

NAMES = {"eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp", "standalone": "draft", "dflash": "dflash"}
"""Method -> name of its head, after that of the target."""

TARGETS = {"tiny": tuple(NAMES), "tiny-hybrid": ("dflash",)}
"""Target -> methods that are trained for it."""

SHAPES = {
    ("tiny", "dflash"): DraftShape(layers=5),
    ("tiny-hybrid", "dflash"): DraftShape(layers=5, intermediate_size=736),
}
"""Sizes of the bundled heads, where they are not the defaults: at most 8 MiB."""

ANSWERS_SHARE, MEASURING_S = 0.2, 25.0
"""Share of the time for generating answers once the engine has started. Seconds for measuring a drafter."""

LONGEST, MAX_TOKENS = 512, 256
"""Limits in tokens: of prompt and answer together, and of an answer."""

CHUNK = 1000
"""Prompts per task of a worker; the seed is the number of the chunk."""


def make_prompts(target: str, count: int, workers: int) -> list[TrainingPrompt]:
    """About ``count`` different prompts of the training split; they depend on ``target`` and ``count`` only."""
    chunks = range(1, 1 + -(-count // CHUNK))
    each = [target] * len(chunks), chunks, [min(CHUNK, count)] * len(chunks)
    context = multiprocessing.get_context("fork")  # CUDA is not initialised yet
    with ProcessPoolExecutor(workers, context) as pool:
        made = [ids for some in pool.map(_chunk, *each) for ids in some]
    return [TrainingPrompt(list(ids)) for ids in dict.fromkeys(map(tuple, made))][:count]


def _chunk(target: str, number: int, size: int) -> list[list[int]]:
    """Token ids of problems in chat form, and a tenth as many beginnings of training documents."""
    tokenizer, rng = _tokenizer(target), Random(f"beginnings {number}")
    found = _prompt_ids(target, questions("train", size - size // 11, seed=number))
    document = plain_document if target == "tiny" else thinking_document
    for _ in range(size // 11):
        text = "".join(piece for piece, _ in document(rng, _library()))
        found.append(tokenizer.encode(text, add_special_tokens=False)[: rng.randint(8, LONGEST // 4)])
    rng.shuffle(found)
    return found


_library = functools.cache(standard_library)


@functools.cache
def _tokenizer(target: str) -> Tokenizer:
    tokenizer = Tokenizer.load(catalog.bundled_path(target))
    assert tokenizer is not None
    return tokenizer


def _prompt_ids(target: str, asked: Sequence[str]) -> list[list[int]]:
    tokenizer = _tokenizer(target)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in asked]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def shape_of(options: argparse.Namespace, method: str) -> DraftShape:
    """Sizes of a head: those of the bundled one, or of the options."""
    shape = replace(SHAPES.get((options.target, method), DraftShape()), tokenizer=False)
    if method != "dflash":
        return shape
    sizes = {name: getattr(options, name) for name in ("layers", "intermediate_size", "kv_heads")}
    return replace(shape, **{name: size for name, size in sizes.items() if size is not None})


def train_all(options: argparse.Namespace, texts: list[Text], work: Path, until: float) -> None:
    """Train and export every head. until: the end, by the monotonic clock."""
    for done, method in enumerate(options.methods):
        minutes = max(0.02, (until - time.monotonic()) / 60 / (len(options.methods) - done))
        out = head_directory(options, method)
        out.mkdir(parents=True, exist_ok=True)
        recipe = Recipe(
            options.steps, minutes, options.batch_tokens, options.lr, options.muon_lr, save_every=1e9, seed=options.seed
        )
        asking = AnswerConfig(longest=LONGEST)
        run = Run(method, options.target, out, recipe, shape_of(options, method), asking, options.device, work)
        run.check(resume=False)
        train_on_texts(run, texts, False, lambda stage, share: None, _log)
        (work / "recipe.json").unlink()
        (work / "state.pt").unlink()
        size = sum(file.stat().st_size for file in out.iterdir())
        _log(f"{out}: {size / 2**20:.1f} MiB in {len(list(out.iterdir()))} files")


def head_directory(options: argparse.Namespace, method: str) -> Path:
    """Directory of a head."""
    out: Path = options.out / f"{options.target}-{NAMES[method]}"
    return out


def measure_all(options: argparse.Namespace) -> bool:
    """Print the table of acceptance. Returns True if no head changes a text."""
    problems = test_problems(options.problems)
    asked = _prompt_ids(options.target, [question for question, _, _ in problems])
    prompts = [TrainingPrompt(ids) for ids in asked]
    known = {"none": SpeculativeConfig("none"), "ngram": SpeculativeConfig("ngram", None, DRAFTS)}
    specs = {name: known[name] for name in options.baselines}
    for method in options.methods:
        drafts = shape_of(options, method).drafts(method, DRAFTS)
        specs[method] = SpeculativeConfig(method, str(head_directory(options, method)), drafts, adaptive=False)
    flags: dict[str, Any] = {"device": options.device, "gpu_memory_utilization": GPU_SHARE, "max_num_seqs": 32}
    plain: list[list[int]] = []
    _log(f"| method | drafts | accept length | by position | right of {len(problems)} | same tokens as the first |")
    _log("|---|---|---|---|---|---|")
    same = True
    for method, spec in specs.items():
        acceptance = measure(options.target, prompts, spec, max_tokens=MAX_TOKENS, longest=LONGEST, **flags)
        answers = acceptance.answers
        plain = plain or answers
        same &= answers == plain
        _log(_row(method, acceptance, _count_right(options.target, answers, problems), answers == plain))
    return same


def _row(method: str, acceptance: DraftAcceptance, right: int, same: bool) -> str:
    positions = " ".join(f"{share:.3f}" for share in acceptance.positions)
    drafts = len(acceptance.positions)
    return f"| {method} | {drafts} | {acceptance.length:.3f} | {positions} | {right} | {'yes' if same else 'NO'} |"


def _count_right(target: str, answers: Sequence[list[int]], problems: Sequence[tuple[str, str, str]]) -> int:
    texts = [_tokenizer(target).decode(answer) for answer in answers]
    return sum(final_answer(text) == expected for text, (_, _, expected) in zip(texts, problems, strict=True))


_STARTED = time.monotonic()


def _log(line: str) -> None:
    print(f"{time.monotonic() - _STARTED:6.1f} s  {line}" if not line.startswith("|") else line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the heads")
    parser.add_argument("--target", choices=list(TARGETS), default="tiny")
    parser.add_argument("--minutes", type=float, default=7.0, help="time limit for everything")
    parser.add_argument("--methods", nargs="+", choices=list(NAMES), help="default: all that the target has")
    parser.add_argument("--baselines", nargs="*", choices=["none", "ngram"], default=["none", "ngram"])
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
    parser.add_argument("--sampled", type=float, default=0.5, help="share of answers that are sampled, not greedy")
    for name in ("--layers", "--intermediate-size", "--kv-heads"):
        parser.add_argument(name, type=int, help="of the dflash head; default: the bundled one's")
    parser.add_argument("--answers", type=Path, help="file to store answers in and to reuse them from")
    options = parser.parse_args()
    options.methods = options.methods or list(TARGETS[options.target])
    if other := sorted({*options.methods} - {*TARGETS[options.target]}):
        parser.error(f"--methods {' '.join(other)}: {options.target} has {', '.join(TARGETS[options.target])}")
    return options


def main() -> None:
    """The command line."""
    options = _options()
    budget = 60 * options.minutes
    prompts = make_prompts(options.target, options.prompts, options.workers)
    _log(f"{len(prompts)} prompts")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        asking = AnswerConfig(
            max_tokens=MAX_TOKENS, longest=LONGEST, seed=options.seed, seconds=budget * ANSWERS_SHARE,
            sampled=options.sampled,
        )  # fmt: skip
        answers = options.answers or work / "answers.jsonl"
        run = Run("eagle3", options.target, work, Recipe(steps=1), DraftShape(), asking, options.device, work)
        plain = SpeculativeConfig("none")  # needs no head, starts sooner, and full batches gain little from drafts
        collect(lambda: make_llm(run, speculative=plain), prompts, replace(asking), answers, lambda stage, share: None)
        texts = read_answers(answers)
        _log(f"{len(texts)} answers, {sum(len(t.token_ids) for t in texts)} tokens with their prompts")
        measuring = MEASURING_S * len([*options.baselines, *options.methods])
        train_all(options, texts, work, _STARTED + max(budget - measuring, budget / 2))
    if not measure_all(options):
        raise SystemExit("speculation changed a text")
    _log("done")


if __name__ == "__main__":
    main()
