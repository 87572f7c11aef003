"""Measures ``tiny-gemma`` with torch alone: greedy accuracy on the held-out problems, and acceptance of its assistant.

``generate`` computes the whole texts anew for every token: there is no cache that could be wrong. ``matches`` replays
the rounds of drafting on the finished texts, as ``training.tiny_hybrid.evaluate`` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny.data import test_split
from training.tiny.documents import END, SPECIAL_TOKENS, START, STOP
from training.tiny_gemma.assistant import TinyAssistant
from training.tiny_gemma.model import TinyGemma
from training.tiny_hybrid.evaluate import Report, count_rounds, score

DRAFTS = 3


def prompt(question: str) -> str:
    """What the chat template writes for one question."""
    return f"{START}user\n{question}{STOP}\n{START}assistant\n"


@torch.no_grad()
def evaluate(
    model: TinyGemma, assistant: TinyAssistant, tokenizer: Tokenizer, problems: int, device: str, until: float,
    max_new_tokens: int = 220,
) -> tuple[Report, list[str]]:  # fmt: skip
    """Ask the first ``problems`` problems of the test split -> (report, answers). until: as in ``generate``."""
    texts = [prompt(problem.question) for _, problem in test_split(problems)]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    stops = [SPECIAL_TOKENS.index(STOP), SPECIAL_TOKENS.index(END)]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        answers = generate(model, prompts, stops, max_new_tokens, device, until)
        length, by_position = count_rounds(
            lambda some: matches(model, assistant, some, DRAFTS, device), prompts, answers, DRAFTS
        )
    return score(tokenizer, answers, length, by_position)


@torch.no_grad()
def generate(
    model: TinyGemma, prompts: Sequence[list[int]], stops: Sequence[int], max_new_tokens: int, device: str, until: float
) -> list[list[int]]:
    """Greedy continuations, the stop token included. Texts that are not finished at time ``until`` are cut."""
    texts = [list(p) for p in prompts]
    unfinished = list(range(len(texts)))
    for _ in range(max_new_tokens):
        if not unfinished or time.monotonic() > until:
            break
        some = [texts[row] for row in unfinished]
        hidden = model(*padded(model, some, device)).hidden
        last = torch.tensor([len(text) - 1 for text in some], device=device)
        found = model.head(hidden[torch.arange(len(some), device=device), last]).argmax(-1).tolist()
        for row, token in zip(unfinished, found, strict=True):
            texts[row].append(token)
        unfinished = [row for row, token in zip(unfinished, found, strict=True) if token not in stops]
    return [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]


def matches(
    model: TinyGemma, assistant: TinyAssistant, texts: Sequence[list[int]], drafts: int, device: str
) -> list[list[list[int]]]:
    """[row][t][s]: 1 if the drafts 0 ... s of a round whose newest token is t + 1 are all right."""
    ids, positions = padded(model, texts, device, model.config.sliding_window)
    states = assistant.unroll(model, ids, positions, model(ids, positions), drafts)
    count = states[0].shape[1]
    same = [assistant.head(state).argmax(-1) == ids[:, 2 + s : 2 + s + count] for s, state in enumerate(states)]
    found: list[list[list[int]]] = torch.stack(same, dim=-1).int().cumprod(-1).tolist()
    return found


def padded(model: TinyGemma, texts: Sequence[list[int]], device: str, more: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, positions) of texts [B, T], padded with zeros by at least ``more`` to a multiple of the window."""
    block = model.config.sliding_window
    length = -(-(max(map(len, texts)) + more) // block) * block
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=device)
    return ids, torch.arange(length, device=device).expand(len(texts), -1)
