"""Measures ``tiny-hybrid`` with torch alone: greedy accuracy on the held-out problems, and acceptance of MTP drafts.

``generate`` runs all prompts side by side, one token a step, with recurrent states and KV caches. ``accept_length``
replays the rounds of drafting on the finished texts: a draft counts only if all drafts before it were right, so the
true tokens may stand for the drafts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny.data import KINDS, test_split
from training.tiny.documents import END, SPECIAL_TOKENS, START, STOP
from training.tiny_hybrid.delta import CHUNK
from training.tiny_hybrid.documents import THINK, THOUGHT
from training.tiny_hybrid.model import GatedDeltaNet, Layer, TinyHybrid
from unisono.tools.eval.problems import final_answer

Caches = list[tuple[Tensor, Tensor]]
"""Per layer: (last projections, state) of Gated DeltaNet, or (keys, values)."""


@dataclass(frozen=True)
class Report:
    """accuracy and by_kind: from 0 to 1. accept_length: tokens per round, with ``drafts`` drafts in each."""

    problems: int
    accuracy: float
    by_kind: dict[str, float]
    drafts: int
    accept_length: float
    by_position: list[float]
    tokens: int


def prompt(question: str, thinking: bool = True) -> str:
    """What the chat template writes for one question."""
    off = "" if thinking else f"\n{THOUGHT}\n\n"
    return f"{START}user\n{question}{STOP}\n{START}assistant\n{THINK}\n{off}"


@torch.no_grad()
def evaluate(
    model: TinyHybrid, tokenizer: Tokenizer, problems: int, device: str, until: float, thinking: bool = True,
    max_new_tokens: int = 300,
) -> tuple[Report, list[str]]:  # fmt: skip
    """Ask the first ``problems`` problems of the test split -> (report, answers). until: as in ``generate``."""
    split = test_split(problems)
    prompts = [tokenizer.encode(prompt(p.question, thinking), add_special_tokens=False).ids for _, p in split]
    stops = [SPECIAL_TOKENS.index(STOP), SPECIAL_TOKENS.index(END)]  # the tokenizer's first ids
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        answers = generate(model, prompts, stops, max_new_tokens, until)
        length, by_position = accept_length(model, prompts, answers)
    return score(tokenizer, answers, length, by_position)


def score(
    tokenizer: Tokenizer, answers: Sequence[list[int]], length: float, by_position: list[float]
) -> tuple[Report, list[str]]:
    """Judge answers to the first problems of the test split -> (report, answers as text)."""
    split = test_split(len(answers))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    right = [final_answer(text) == p.final_answer for text, (_, p) in zip(texts, split, strict=True)]
    asked, solved = (
        Counter(kind for kind, _ in split),
        Counter(kind for ok, (kind, _) in zip(right, split, strict=True) if ok),
    )
    by_kind = {kind: solved[kind] / asked[kind] for kind in KINDS if asked[kind]}
    tokens = sum(map(len, answers))
    return Report(len(split), sum(right) / len(split), by_kind, len(by_position), length, by_position, tokens), texts


@torch.no_grad()
def generate(
    model: TinyHybrid, prompts: Sequence[list[int]], stops: Sequence[int], max_new_tokens: int, until: float
) -> list[list[int]]:
    """Greedy continuations, the stop token included. Texts that are not finished at time ``until`` are cut."""
    device = model.cos_sin.device
    longest = min(max(map(len, prompts)) + max_new_tokens, model.config.max_position_embeddings)
    ids = torch.zeros(len(prompts), longest + 1, dtype=torch.long, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for row, some in enumerate(prompts):
        ids[row, : len(some)] = torch.tensor(some)
    caches = _new_caches(model, len(prompts), longest)
    done = torch.zeros_like(lengths, dtype=torch.bool)
    stop_ids = torch.tensor(list(stops), device=device)
    used = longest
    for position in range(longest):
        token = model.head(_step(model, ids[:, position], position, caches)).argmax(-1)
        answering = lengths <= position + 1
        ids[:, position + 1] = torch.where(answering, token, ids[:, position + 1])
        done |= answering & torch.isin(token, stop_ids)
        if position % 16 == 0 and (bool(done.all()) or time.monotonic() > until):
            used = position + 1
            break
    texts = [row[len(p) : used + 1] for row, p in zip(ids.tolist(), prompts, strict=True)]
    return [_through_stop(text, set(stops))[:max_new_tokens] for text in texts]


@torch.no_grad()
def accept_length(
    model: TinyHybrid, prompts: Sequence[list[int]], answers: Sequence[list[int]], drafts: int = 3
) -> tuple[float, list[float]]:
    """(tokens per round, share of rounds in which the first n drafts are right) over greedy answers."""
    return count_rounds(lambda texts: _matches(model, texts, drafts), prompts, answers, drafts)


def count_rounds(
    matches: Callable[[Sequence[list[int]]], list[list[list[int]]]], prompts: Sequence[list[int]],
    answers: Sequence[list[int]], drafts: int, batch: int = 64,
) -> tuple[float, list[float]]:  # fmt: skip
    """As ``accept_length``, for any drafts. matches: says which drafts of the texts are right, see ``_matches``."""
    tokens, rounds, right = 0, 0, [0] * drafts
    for start in range(0, len(prompts), batch):
        some = [
            list(p + a) for p, a in zip(prompts[start : start + batch], answers[start : start + batch], strict=True)
        ]
        found = matches(some)
        for row, text in enumerate(some):
            at = len(prompts[start + row])  # the first token comes from the prompt's pass
            while at + 1 < len(text):
                accepted, left = sum(found[row][at - 1]), len(text) - at - 1
                new = min(accepted + 1, left)
                tokens, rounds, at = tokens + new, rounds + 1, at + new
                for n in range(min(accepted, left)):
                    right[n] += 1
    return tokens / max(1, rounds), [n / max(1, rounds) for n in right]


def _matches(model: TinyHybrid, texts: Sequence[list[int]], drafts: int) -> list[list[list[int]]]:
    """[row][t][s]: 1 if the drafts 0 ... s of a round whose newest token is t + 1 are all right."""
    device = model.cos_sin.device
    length = -(-(max(map(len, texts)) + drafts + 8) // CHUNK) * CHUNK
    ids = torch.zeros(len(texts), length, dtype=torch.long, device=device)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    hidden, _ = model.hidden(ids, torch.arange(length, device=device).expand(len(texts), -1))
    states = model.unroll(ids, hidden, drafts)
    count = states[0].shape[1]
    same = [model.head(state).argmax(-1) == ids[:, 2 + s : 2 + s + count] for s, state in enumerate(states)]
    found: list[list[list[int]]] = torch.stack(same, dim=-1).int().cumprod(-1).tolist()
    return found


def _step(model: TinyHybrid, ids: Tensor, position: int, caches: Caches) -> Tensor:
    """Hidden states [B, H] after the final norm of one more token in every row."""
    cos, sin = model.angles(torch.full((1, 1), position, device=ids.device))
    x = model.embed(ids)
    for layer, cache in zip(model.model.layers, caches, strict=True):
        assert isinstance(layer, Layer)
        normed = layer.input_layernorm(x)
        mixed = (
            layer.linear_attn.step(normed, *cache)
            if layer.recurrent
            else layer.self_attn.step(normed, cos, sin, cache, position)
        )
        x, _ = layer.feed_forward(x + mixed)
    return model.model.norm(x)


def _new_caches(model: TinyHybrid, rows: int, longest: int) -> Caches:
    c, found, device = model.config, Caches(), model.cos_sin.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        if layer.recurrent:
            mixer: GatedDeltaNet = layer.linear_attn
            recent = torch.zeros(rows, c.linear_conv_kernel_dim - 1, sum(mixer.sizes), device=device)
            found.append((recent, torch.zeros(rows, mixer.value_heads, mixer.key_dim, mixer.value_dim, device=device)))
        else:
            shape = (rows, c.num_key_value_heads, longest, c.head_dim)
            found.append(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            )
    return found


def _through_stop(text: list[int], stops: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(text) if token in stops), len(text) - 1)
    return text[: end + 1]
