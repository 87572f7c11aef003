"""``python -m benchmarks.dynamic_trees``: would trees shaped by the draft's confidence (EAGLE-2) pay?

Simulates rounds of ``tiny`` with the head ``tiny-eagle3`` on greedy answers, in plain PyTorch. The accepted tokens of a
round depend only on the text and on the drafts, so every shape of a draft is tried on the same states: chains, static
trees, and EAGLE-2's trees, which expand the likeliest nodes of each depth and keep the N likeliest of all. Tokens per
second at batch 1 follow from measured times of an 8B model's rounds on an H200 (``ROUND_MS``, ``STEP_MS``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.command import run
from training.tiny.model import TinyConfig, TinyQwen3, rotate
from unisono.config import catalog
from unisono.tools.eval.problems import COUNT, held_out_problems
from unisono.types import SamplingParams, SpeculativeConfig
from unisono.types.draft_tree import leaves, promising

AUX_LAYERS = (2, 4, 5)
"""Layers of tiny whose inputs tiny-eagle3 reads (its config.json)."""

DEPTH, BEAM = 6, 10
"""Depth of a tree at most; nodes that are expanded at each depth, and children of each, as in EAGLE-2."""

CHAINS, NODES = range(1, 8), (8, 16, 32)

ROUND_MS = {1: 4.18, 4: 4.28, 16: 4.53, 24: 4.74, 64: 5.59, 96: 6.22}
"""Milliseconds of the target's part of a round by rows: Qwen3-8B shape, bf16, H200 (results/2026-11-26-h200.md, E).

Rows of few requests, as a tree's are: 16 and 24 are those of four requests with k = 3 and 5, 64 and 96 those of 16
requests, less the steps of the head.
"""

STEP_MS = 0.22
"""Milliseconds of one step of an EAGLE-3 head there: rounds of one request, k = 3 and 5, less those of 4 and 6 rows."""


Line = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [N, 2, 64] of the drafts before each of N nodes, and of the node itself, first to last."""


@dataclass(frozen=True)
class Drafted:
    """What the head drafts from every position of one text, of S starts.

    ranks [S, D]: rank of the text's next token at each depth, if the drafts before are the text's. kept: by number of
    nodes, the length of the text's beginning in the dynamic tree [S].
    """

    ranks: np.ndarray
    kept: dict[int, np.ndarray]


class Head:
    """``tiny-eagle3`` in fp32 over one text. T tokens; entry p joins token p with the target's states of p - 1."""

    def __init__(self, embed: torch.Tensor, cos_sin: torch.Tensor) -> None:
        loaded = load_file(catalog.bundled_path("tiny-eagle3") / "model.safetensors")
        self.w = {name: x.float() if x.is_floating_point() else x for name, x in loaded.items()}
        self.embed, self.cos_sin = embed, cos_sin
        self.ids = self.w["d2t"] + torch.arange(len(self.w["d2t"]))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], 1e-6)

    def project(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries [N, 8, 64], keys and values [N, 2, 64] of N entries."""
        x = self._norm(self.embed[tokens], "midlayer.input_layernorm.weight")
        x = torch.cat((x, self._norm(hidden, "midlayer.hidden_norm.weight")), -1)
        q, k, v = (F.linear(x, self.w[f"midlayer.self_attn.{n}_proj.weight"]).view(len(x), -1, 64) for n in "qkv")
        cos, sin = self.cos_sin[:, positions].unsqueeze(-2)
        return rotate(q[None], cos[None], sin[None])[0], rotate(k[None], cos[None], sin[None])[0], v

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state handed on [N, H], and log-probabilities [N, V'] of the next token."""
        x = hidden + F.linear(attended.flatten(1), self.w["midlayer.self_attn.o_proj.weight"])
        y = self._norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up, down = (self.w[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
        return x, F.linear(self._norm(x, "norm.weight"), self.w["lm_head.weight"]).log_softmax(-1)


class Text:
    """One text and the head's entries of all its tokens.

    ids [T]; shown [T, 3 H]: what the target shows of each token; first: its first start.
    """

    def __init__(self, head: Head, ids: torch.Tensor, shown: torch.Tensor, first: int) -> None:
        self.head, self.ids = head, ids
        hidden = F.linear(shown, head.w["fc.weight"])[:-1]
        at = torch.arange(1, len(ids))
        self.hidden, (self.q, self.k, self.v) = hidden, head.project(ids[1:], hidden, at)
        self.starts = torch.arange(first, len(ids) - 1)  # position of the last committed token
        self.column = {int(token): i for i, token in enumerate(head.ids)}

    def attend(self, q: torch.Tensor, start: torch.Tensor, own: Line) -> torch.Tensor:
        """Attend to the text's entries up to ``start`` [N] and each node's own line. q [N, 8, 64]; own: [N, 2, 64]."""
        wide = lambda x: x.repeat_interleave(4, -2)  # noqa: E731
        scores = torch.einsum("nhd,thd->nht", q, wide(self.k)) / 8
        scores = scores.masked_fill((torch.arange(1, len(self.ids)) > start[:, None])[:, None], -torch.inf)
        if not own:
            return torch.einsum("nht,thd->nhd", scores.softmax(-1), wide(self.v))
        keys, values = (torch.stack(part, 1) for part in zip(*own, strict=True))
        scores = torch.cat((scores, torch.einsum("nhd,njhd->nhj", q, wide(keys)) / 8), -1).softmax(-1)
        of_text, of_own = scores[..., : len(self.k)], scores[..., len(self.k) :]
        return torch.einsum("nht,thd->nhd", of_text, wide(self.v)) + torch.einsum("nhj,njhd->nhd", of_own, wide(values))

    def root(self) -> tuple[torch.Tensor, torch.Tensor]:
        """State and log-probabilities after each start."""
        entry = self.starts - 1
        return self.head.finish(self.attend(self.q[entry], self.starts, []), self.hidden[entry])

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor, depth: int,
        own: Line,
    ) -> tuple[torch.Tensor, torch.Tensor, Line]:  # fmt: skip
        """One draft step of N nodes at ``depth`` 1 …: state, log-probabilities, and the line with this node."""
        q, k, v = self.head.project(tokens, hidden, starts + depth)
        own = [*own, (k, v)]
        return *self.head.finish(self.attend(q, starts, own), hidden), own

    def next_column(self, depth: int) -> torch.Tensor:
        """The head's column [S] of the text's token ``depth`` after each start; -1: none, or not in its vocabulary."""
        after = [self.ids[int(s) + depth].item() if int(s) + depth < len(self.ids) else -1 for s in self.starts]
        return torch.tensor([self.column.get(int(token), -1) for token in after])

    def ranks(self, depth: int) -> np.ndarray:
        """See :class:`Drafted`: the head follows the text."""
        (hidden, found), own, ranks = self.root(), Line(), []
        for each in range(1, depth + 1):
            column = self.next_column(each)
            right = found.gather(1, column.clamp_min(0)[:, None])
            ranks.append((found > right).sum(1).masked_fill(column < 0, 10_000))
            tokens = self.head.ids[column.clamp_min(0)]
            hidden, found, own = self.step(tokens, hidden, self.starts, each, own)
        return torch.stack(ranks, 1).numpy()

    def dynamic(self, sizes: Sequence[int]) -> dict[int, np.ndarray]:
        """EAGLE-2's trees: see :class:`Drafted`."""
        count = len(self.starts)
        hidden, found = self.root()
        reach, columns = found.topk(BEAM)  # of the last depth's candidates [S, c]
        right = columns == self.next_column(1)[:, None]  # they continue the text
        lines: Line = []
        every, on_text = [reach], [torch.where(right, 1, 0)]
        parent = torch.zeros(count, BEAM, dtype=torch.long)
        states = hidden[:, None]
        for depth in range(1, DEPTH):
            best = reach.topk(BEAM).indices  # nodes to expand [S, b]
            reach, right, token = (x.gather(1, best) for x in (reach, right, self.head.ids[columns]))
            above = parent.gather(1, best)
            pick = lambda x, above=above: torch.stack([x[s, above[s]] for s in range(count)])  # noqa: E731
            flat = pick(states).flatten(0, 1)
            kept = [tuple(pick(part.unflatten(0, (count, -1))).flatten(0, 1) for part in pair) for pair in lines]
            starts = self.starts.repeat_interleave(BEAM)
            state, found, lines = self.step(token.flatten(), flat, starts, depth, kept)  # type: ignore[arg-type]
            states = state.unflatten(0, (count, BEAM))
            more, columns = found.topk(BEAM)
            reach = (reach.flatten()[:, None] + more).view(count, -1)
            columns = columns.view(count, -1)
            parent = torch.arange(BEAM).repeat_interleave(BEAM).expand(count, -1)
            right = right.gather(1, parent) & (columns == self.next_column(depth + 1)[:, None])
            every.append(reach)
            on_text.append(torch.where(right, depth + 1, 0))
        values, depths = torch.cat(every, 1), torch.cat(on_text, 1)
        return {n: depths.gather(1, values.topk(n).indices).amax(1).numpy() for n in sizes}


def round_ms(rows: int) -> float:
    """Milliseconds of the target's part of a round with this number of rows."""
    return float(np.interp(rows, list(ROUND_MS), list(ROUND_MS.values())))


def walk(accepted: np.ndarray) -> tuple[int, int]:
    """Rounds and tokens of one text. accepted [S]: accepted drafts of a round at each start."""
    at = rounds = 0
    while at < len(accepted):
        at += 1 + int(accepted[at])
        rounds += 1
    return rounds, at


def dynamic_trees(
    problems: Annotated[int, typer.Option(min=1, max=COUNT, help="Held-out problems.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer, at most.")] = 120,
) -> None:
    """Simulate chains, static and dynamic trees of one head on the bundled model's greedy answers."""
    drafted = [_drafted(text) for text in _texts(problems, max_tokens)]
    print("| draft | rows | accept length | ms a round | tokens/s | to the best chain |")
    print("|---|---|---|---|---|---|")
    rows: list[tuple[str, int, float, float]] = []
    for k in CHAINS:
        rows.append(_row(f"chain, k = {k}", 1 + k, k, drafted, lambda d, k=k: _prefix(d.ranks[:, :k] == 0)))
    best = max(1e3 * length / ms for _, _, length, ms in rows)
    for n in NODES:
        nodes = promising(4, n, DEPTH)
        paths, depth = len(leaves(nodes)), max(map(len, nodes))
        tree = frozenset(nodes)
        accepted = lambda d, tree=tree: np.array([_longest(tree, digits) for digits in d.ranks])  # noqa: E731
        rows.append(_row(f"static, {n} nodes", 1 + n, depth, drafted, accepted))
        rows.append(_row(f"static, {n} nodes as {paths} paths", paths * (1 + depth), depth, drafted, accepted))
    rows += [_row(f"dynamic, {n} nodes", 1 + n, DEPTH, drafted, lambda d, n=n: d.kept[n]) for n in NODES]
    for name, count, length, ms in rows:
        rate = 1e3 * length / ms
        print(f"| {name} | {count} | {length:.2f} | {ms:.2f} | {rate:.0f} | {rate / best:.3f} |", flush=True)


def _row(
    name: str, rows: int, steps: int, drafted: Sequence[Drafted], accepted: Callable[[Drafted], np.ndarray]
) -> tuple[str, int, float, float]:
    """Name, rows, accept length and milliseconds of a round of one shape."""
    rounds, tokens = np.array([walk(accepted(text)) for text in drafted]).sum(0)
    return name, rows, tokens / rounds, round_ms(rows) + steps * STEP_MS


def _prefix(right: np.ndarray) -> np.ndarray:
    """Number of leading True of each row."""
    return np.logical_and.accumulate(right, axis=1).sum(1)


def _longest(tree: frozenset[tuple[int, ...]], digits: np.ndarray) -> int:
    """Length of the longest beginning of these digits that is a node of the tree."""
    line = tuple(map(int, digits))
    return next((n for n in range(len(line), 0, -1) if line[:n] in tree), 0)


@torch.inference_mode()
def _drafted(text: Text) -> Drafted:
    return Drafted(text.ranks(max(CHAINS)), text.dynamic(NODES))


@torch.inference_mode()
def _texts(problems: int, max_tokens: int) -> list[Text]:
    """Greedy answers of the engine with the states that the head reads."""
    from unisono.entrypoints.llm import LLM

    model = TinyQwen3(TinyConfig())
    weights = load_file(catalog.bundled_path("tiny") / "model.safetensors")
    model.load_state_dict({name: x.float() for name, x in weights.items()})
    head = Head(model.model.embed_tokens.weight, model.cos_sin)
    texts = []
    with LLM("tiny", speculative=SpeculativeConfig("none"), max_num_seqs=problems, device="cpu") as llm:
        prompts = [
            llm.chat_prompt([{"role": "user", "content": problem.question}]) for problem in held_out_problems(problems)
        ]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, seed=0), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([*prompt["prompt_token_ids"], *output.outputs[0].token_ids])
        cos, sin = model.cos_sin[:, torch.arange(len(ids))[None]].unsqueeze(-2)
        x, shown = model.model.embed_tokens(ids[None]), []
        for number, layer in enumerate(model.model.layers):
            if number in AUX_LAYERS:
                shown.append(x[0])
            x = layer(x, cos, sin)
        # the prompt pass commits the answer's first token; rounds begin after it
        texts.append(Text(head, ids, torch.cat(shown, -1), len(prompt["prompt_token_ids"])))
    return texts


if __name__ == "__main__":
    run(dynamic_trees)
