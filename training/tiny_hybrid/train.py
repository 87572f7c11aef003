"""Trains the bundled hybrid: ``python -m training.tiny_hybrid.train --out DIR --minutes 9`` on one GPU.

The command trains the tokenizer, the model, and then the MTP module on the frozen model. At the end it measures
accuracy and acceptance on held-out problems. The phases follow the clock, and everything ends within ``--minutes`` of
the start. The checkpoint is written every minute and after each phase; training.json holds settings and figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny.batches import Batch, Packing, stream
from training.tiny.tokenizer import SAMPLE_DOCUMENTS, train_tokenizer
from training.tiny_hybrid.checkpoint import Save, round_
from training.tiny_hybrid.documents import MARKS, document
from training.tiny_hybrid.evaluate import evaluate
from training.tiny_hybrid.model import HybridConfig, TinyHybrid
from unisono.tools.draft_training.muon import Muon

BEGAN = time.monotonic()

TRUNK_UNTIL, MTP_UNTIL = 0.78, 0.95
"""Shares of the time limit at which training of the model, and of its MTP module, ends."""

WARM_UP, COOL_DOWN = 0.02, 0.6
"""Shares of a phase in which the learning rate rises linearly from zero, and falls linearly to zero."""

BALANCE = 0.02
"""Weight of the experts' balance in the loss."""

DRAFTS, DISCOUNT = 3, 0.8
"""Steps of the MTP module in training, and the weight of a step's loss relative to the step before."""

SEGMENT = 512
"""Tokens of a row that the MTP module sees at once; attention of an unrolled step costs their square."""

SYNC_STEPS = 20
"""Steps between synchronisations of host and device."""

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""ids [B, T], targets [B, T], loss weights [B, T], positions [B, T]."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a run.

    minutes: limit of the whole run. rows, length: shape of a batch. documents: the tokenizer's sample. problems: of the
    evaluation.
    """

    minutes: float = 9.0
    seed: int = 0
    rows: int = 64
    length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    mtp_lr: float = 0.01
    documents: int = SAMPLE_DOCUMENTS
    problems: int = 500
    save_every_s: float = 60.0


class Phase:
    """One phase of training: its clock, learning rate, progress lines and checkpoints."""

    def __init__(self, name: str, until: float, optimizers: list[tuple[torch.optim.Optimizer, float]]) -> None:
        self.name, self.until, self.optimizers = name, until, optimizers
        self.start, self.step, self.recent = time.monotonic(), 0, list[Tensor]()

    def run(
        self, losses: Callable[[], Tensor], save: Callable[[dict[str, object]], None], every: float, device: str
    ) -> dict[str, object]:
        """Step until the phase's end. losses: makes the next loss. Returns the figures of the phase."""
        saved = time.monotonic()
        figures: dict[str, object] = {}
        while (progress := self._progress()) < 1:
            loss = losses()
            loss.backward()
            for optimizer, peak in self.optimizers:
                optimizer.param_groups[0]["lr"] = peak * learning_rate(progress)
                optimizer.step()
                optimizer.zero_grad()
            self.recent.append(loss.detach())
            self.step += 1
            if self.step == 3:  # the first steps compile: the schedule starts after them
                self._wait(device)
                self.start = time.monotonic()
                log(f"{self.name}: the first steps are over")
            if self.step % SYNC_STEPS == 0:
                figures = self._figures()
                if self.step in (SYNC_STEPS, 10 * SYNC_STEPS) or self.step % (25 * SYNC_STEPS) == 0:
                    log(f"{self.name} {progress:4.0%}  {_line(figures)}")
                if time.monotonic() - saved > every:
                    save(figures)
                    saved = time.monotonic()
        figures = self._figures() if self.recent else figures
        save(figures)
        log(f"{self.name} done  {_line(figures)}")
        return figures

    def _progress(self) -> float:
        now = time.monotonic()
        return 0.0 if self.step < 3 and now < self.until else (now - self.start) / max(1e-3, self.until - self.start)

    def _figures(self) -> dict[str, object]:
        loss = float(torch.stack(self.recent).mean())  # waits for the device, so it comes before reading the clock
        self.recent.clear()
        if loss != loss:
            raise SystemExit(f"{self.name}: the loss is not a number at step {self.step}; the last checkpoint stays")
        seconds = time.monotonic() - self.start
        return {f"{self.name}_steps": self.step, f"{self.name}_loss": loss, f"{self.name}_seconds": seconds}

    @staticmethod
    def _wait(device: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()


def learning_rate(progress: float) -> float:
    """The factor on the learning rates; ``progress`` runs from 0 to 1."""
    return min(1.0, (progress + 1e-3) / WARM_UP, max(0.0, 1 - progress) / COOL_DOWN)


def train(recipe: Recipe, batches: Iterator[Batch], device: str, save: Save, tokenizer: Tokenizer) -> None:
    """All phases of a run."""
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model = TinyHybrid(HybridConfig()).to(device)
    ends = [BEGAN + 60 * recipe.minutes * share for share in (TRUNK_UNTIL, MTP_UNTIL, 1.0)]
    compiled = Compiled(model, device)
    figures: dict[str, object] = {}

    def next_batch() -> Tensors:
        return to_device(next(batches), device)

    def write(more: dict[str, object]) -> None:
        save(model, {**figures, **more})

    trunk = Phase("trunk", ends[0], _optimizers(model.model, recipe.muon_lr, recipe.adam_lr))
    figures |= trunk.run(lambda: compiled.trunk_loss(*next_batch()), write, recipe.save_every_s, device)
    round_(model)
    model.model.requires_grad_(False)
    _begin_mtp(model)
    mtp = Phase("mtp", ends[1], _optimizers(model.mtp, recipe.mtp_lr, recipe.adam_lr))
    figures |= mtp.run(lambda: compiled.mtp_loss(*next_batch()), write, recipe.save_every_s, device)
    round_(model)
    if recipe.problems:
        measured = TinyHybrid(model.config).to(device)  # not compiled: shapes change
        measured.load_state_dict(model.state_dict())
        report, texts = evaluate(measured, tokenizer, recipe.problems, device, ends[2])
        figures |= asdict(report)
        write({})
        log(f"{json.dumps(asdict(report))}\n{texts[0]}")
        plain, _ = evaluate(measured, tokenizer, min(100, recipe.problems), device, ends[2], thinking=False)
        log(f"without thinking, {plain.problems} problems: {plain.accuracy:.1%} right")


class Compiled:
    """The losses of both phases, compiled on a GPU. Layers of a kind share one compiled graph, for a short start."""

    def __init__(self, model: TinyHybrid, device: str) -> None:
        self.model, self.device = model, device
        self.head_loss: Callable[..., Tensor] = model.head_loss
        self.draft_loss: Callable[..., Tensor] = self._draft_loss
        if device == "cuda":
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
            for layer in model.model.layers:
                layer.compile()
            self.head_loss = torch.compile(model.head_loss)
            self.draft_loss = torch.compile(self._draft_loss)

    def trunk_loss(self, ids: Tensor, targets: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """Cross entropy of the next token, and the experts' balance."""
        with torch.autocast(self.device, torch.bfloat16):
            hidden, balance = self.model.hidden(ids, positions)
            return self.head_loss(hidden, targets, weights) + BALANCE * balance

    def mtp_loss(self, ids: Tensor, targets: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """Cross entropy of the MTP module's steps with the model's own distributions, in segments of the rows."""
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                hidden, _ = self.model.hidden(ids, positions)
            size = min(SEGMENT, ids.shape[1])
            ids, weights, hidden = (x.unflatten(1, (-1, size)).flatten(0, 1) for x in (ids, weights, hidden))
            losses = []
            for s, state in enumerate(self.model.unroll(ids, hidden, DRAFTS)):
                seen = slice(1 + s, 1 + s + state.shape[1])  # these states of the model predict what the step drafts
                loss = self.draft_loss(state, hidden[:, seen].contiguous(), weights[:, seen].contiguous())
                losses.append(DISCOUNT**s * loss)
            return torch.stack(losses).sum()

    def _draft_loss(self, state: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean cross-entropy of a step's states with the model's distribution at ``hidden`` [B, n, H]."""
        wanted = self.model.head(hidden).float().softmax(-1)
        losses = -(wanted * self.model.head(state).float().log_softmax(-1)).sum(-1)
        return (losses * weights).sum() / weights.sum()


def _begin_mtp(model: TinyHybrid) -> None:
    """Start the MTP module from the model's last layer and final norm."""
    model.mtp.layers[0].load_state_dict(model.model.layers[-1].state_dict())
    model.mtp.norm.load_state_dict(model.model.norm.state_dict())


def _optimizers(part: torch.nn.Module, muon_lr: float, adam_lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for matrices and experts, AdamW for the rest; each with its peak learning rate."""
    small = ("embed_tokens", "conv1d", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate")
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in part.named_parameters():
        (matrices if parameter.ndim >= 2 and not any(s in name for s in small) else others).append(parameter)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
    return [(Muon(matrices), muon_lr), (adam, adam_lr)]


def to_device(batch: Batch, device: str) -> Tensors:
    """A batch without the shift between ids and targets."""
    ids = torch.from_numpy(batch.ids.astype("int32")).to(device).long()
    weights = torch.from_numpy(batch.weights[:, 1:].copy()).to(device).float() / 10
    positions = torch.from_numpy(batch.positions.astype("int32")).to(device).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights, positions


def log(line: str) -> None:
    """Print with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {line}", flush=True)


def _line(figures: dict[str, object]) -> str:
    return "  ".join(f"{name.partition('_')[2]} {value:.5g}" for name, value in figures.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=max(1, cores - 2), help="processes that generate text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    out, workers, device = options.pop("out"), options.pop("workers"), options.pop("device")
    recipe = Recipe(**options)
    log(f"training on {device}, {workers} workers")
    tokenizer = train_tokenizer(recipe.seed, recipe.documents, document, MARKS)
    log(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    packing = Packing(recipe.rows, recipe.length, HybridConfig().max_position_embeddings)
    with stream(tokenizer, packing, recipe.seed, workers, document) as batches:
        first = next(batches)  # the workers fork here, before CUDA is initialised
        train(recipe, itertools.chain([first], batches), device, Save(out, tokenizer, asdict(recipe)), tokenizer)
        log("done")


if __name__ == "__main__":
    main()
