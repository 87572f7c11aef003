"""Measures ``tiny-vl`` and its head on held-out scenes, without the engine: greedy answers, and drafts accepted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.tiny_vl.batches import TOKEN_PIXELS
from training.tiny_vl.head import STEPS, Head, acceptance, teach
from training.tiny_vl.model import TinyVL, visible
from training.tiny_vl.text import Format
from unisono.tools.eval.picture_problems import PictureProblem
from unisono.tools.eval.problems import final_answer
from unisono.tools.eval.scenes import draw

MAX_TOKENS = 96
GROUP = 128
"""Problems that are answered at once, at most."""


@dataclass(frozen=True)
class Report:
    """right: problems solved. by_kind: (solved, asked). samples: (question, answer, expected) of some that failed.
    answers: (problem, ids of prompt, ids of the answer)."""

    problems: int
    right: int
    by_kind: dict[str, tuple[int, int]]
    samples: list[tuple[str, str, str]]
    answers: list[tuple[PictureProblem, list[int], list[int]]]

    def lines(self) -> list[str]:
        """The result as a table."""
        lines = [f"{self.right} of {self.problems} held-out scenes right, greedy ({self.right / self.problems:.1%})"]
        lines += ["| kind | right | asked |", "|---|---|---|"]
        return lines + [f"| {kind} | {right} | {asked} |" for kind, (right, asked) in sorted(self.by_kind.items())]


@torch.no_grad()
def measure(model: TinyVL, format: Format, problems: Sequence[PictureProblem], device: str) -> Report:
    """Answer the problems greedily."""
    groups: dict[tuple[int, int], list[PictureProblem]] = defaultdict(list)
    for problem in problems:
        groups[problem.scene.width, problem.scene.height].append(problem)
    right, asked, samples, answers = Counter[str](), Counter[str](), [], []
    for group in groups.values():
        for begin in range(0, len(group), GROUP):
            some = group[begin : begin + GROUP]
            for problem, prompt, ids in zip(some, *_answers(model, format, some, device), strict=True):
                text = format.tokenizer.decode(ids)
                ok = final_answer(text) == problem.final_answer
                asked[problem.kind] += 1
                right[problem.kind] += ok
                answers.append((problem, prompt, ids))
                if not ok:
                    samples.append((problem.question, text, problem.final_answer))
    return Report(len(problems), right.total(), {k: (right[k], asked[k]) for k in asked}, samples, answers)


@torch.no_grad()
def measure_head(
    model: TinyVL, head: Head, format: Format, report: Report, device: str, blind: bool
) -> tuple[float, list[float]]:
    """(mean tokens committed per round, share of rounds that accepted draft 1, 2 …) on the report's answers."""
    tokens = rounds = 0
    positions = [0] * STEPS
    for problem, prompt, answer in report.answers:
        rows = _Rows(format, [problem], [prompt + answer], device)
        weights = torch.zeros(1, len(prompt) + len(answer), device=device)
        weights[:, len(prompt) :] = 1
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            taught = teach(model, rows.pictures, rows.ids, weights, rows.positions, rows.mask, rows.places, blind=blind)
            found = acceptance(head, taught)
        tokens, rounds = tokens + found[0], rounds + found[1]
        positions = [a + b for a, b in zip(positions, found[2], strict=True)]
    return tokens / max(1, rounds), [p / max(1, rounds) for p in positions]


class _Rows:
    """Rows of one picture each, of one size: what the model's parts take."""

    def __init__(
        self, format: Format, problems: Sequence[PictureProblem], texts: Sequence[list[int]], device: str
    ) -> None:
        scene = problems[0].scene
        rows, columns = scene.height // TOKEN_PIXELS, scene.width // TOKEN_PIXELS
        longest = max(map(len, texts))
        self.ids = torch.full((len(texts), longest), format.pad, dtype=torch.long)
        segments = torch.full((len(texts), longest), -1)
        positions = torch.zeros(len(texts), 3, longest, dtype=torch.long)
        places = []
        for number, ids in enumerate(texts):
            self.ids[number, : len(ids)] = torch.tensor(ids)
            segments[number, : len(ids)] = 0
            at = ids.index(format.image)
            places.append(torch.arange(at, at + rows * columns))
            positions[number, :, : len(ids)] = rotary_positions(len(ids), at, rows, columns)
        pictures = torch.stack([torch.from_numpy(draw(problem.scene)) for problem in problems])
        self.pictures, self.ids, self.positions = pictures.to(device), self.ids.to(device), positions.to(device)
        self.places, self.mask = torch.stack(places).to(device), visible(segments.to(device))


def rotary_positions(length: int, at: int, rows: int, columns: int) -> Tensor:
    """Positions [3, length] of a text with one picture of rows × columns tokens at ``at``."""
    found = torch.arange(length).repeat(3, 1)
    count = rows * columns
    each = torch.arange(count)
    found[:, at : at + count] = at + torch.stack((torch.zeros_like(each), each // columns, each % columns))
    found[:, at + count :] -= count - max(rows, columns)
    return found


def _answers(
    model: TinyVL, format: Format, problems: Sequence[PictureProblem], device: str
) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers) in token ids. Whole rows are computed anew for each token: there are few of them."""
    count = (problems[0].scene.height // TOKEN_PIXELS) * (problems[0].scene.width // TOKEN_PIXELS)
    prompts = [format.prompt(problem.question, count) for problem in problems]
    texts, open_ = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        seen = None
        for _ in range(MAX_TOKENS):
            rows = _Rows(format, problems, texts, device)
            seen = seen or model.see(rows.pictures)
            x = model.merge(rows.ids, rows.places, seen[0])
            hidden, _ = model.read(x, seen[1], rows.places, rows.positions, rows.mask)
            ends = torch.tensor([len(text) - 1 for text in texts], device=device)
            best = model.head(hidden[torch.arange(len(texts), device=device), ends]).argmax(-1).tolist()
            for number in list(open_):
                texts[number].append(best[number])
                if best[number] in (format.stop, format.pad):
                    open_.discard(number)
            if not open_:
                break
    return prompts, [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
