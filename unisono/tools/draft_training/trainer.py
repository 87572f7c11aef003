"""The training loop: learning-rate schedule, checkpoints, resume.

Step n depends on the recipe, the texts and n only. The exception is a run limited by ``minutes``, whose learning rate
follows the clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.tools.draft_training.answers import Progress, Text
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.draft import loss_of
from unisono.tools.draft_training.held_out import ReplayedRounds, accepted_drafts
from unisono.tools.draft_training.methods import Method, trainable_parameters
from unisono.tools.draft_training.muon import Muon
from unisono.tools.draft_training.teacher import Teacher
from unisono.types import ConfigError

WARM_UP, COOL_DOWN = 0.03, 0.7
"""Shares of the run in which the learning rate rises linearly from zero, and falls linearly to zero."""

MEASURE_EVERY = 0.1
"""Share of the run between two measurements on held-out answers."""

SYNC_STEPS = 20
"""Steps between synchronisations of host and device. Without them the host would measure only launch times."""

STATE, RECIPE = "state.pt", "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """Length of the training, and the learning rates.

    The run ends after ``steps`` or ``minutes``, whichever is first.

    batch_tokens: tokens per step, including padding. muon_lr: peak learning rate of the layers' matrices. lr: peak
    learning rate of all other parameters (AdamW). save_every: seconds between checkpoints.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 8192
    lr: float = 2e-3
    muon_lr: float = 0.02
    save_every: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError("the run has no limit: give --steps or --minutes.")
        for name in ("steps", "minutes", "lr", "muon_lr", "save_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0.")
        if self.batch_tokens < 64:
            raise ConfigError(f"--batch-tokens {self.batch_tokens}: give at least 64.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to {2**31 - 1}.")


@dataclass
class TrainingFigures:
    """The state of a run.

    seconds: training time, including runs before a resume. loss, agreed: means since the last synchronisation; agreed
    is the share of positions, by step, where draft and target have the same argmax. measured: number of measurements on
    held-out answers. best: the greatest accept length of those.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    loss: float = float("nan")
    agreed: list[float] = field(default_factory=list)
    measured: int = 0
    best: float = 0.0

    def line(self) -> str:
        """The figures as one log line."""
        shares = " ".join(f"{share:.3f}" for share in self.agreed)
        return f"step {self.step}  {self.seconds:.0f} s  loss {self.loss:.4f}  agreed {shares}"


class Trainer:
    """Trains ``method.draft`` on ``batches``. folder: for the state that a resumed run needs.

    held: greedy answers on which the accept length is measured; the draft model with the greatest is exported. Without
    them the last one is.
    """

    def __init__(
        self, teacher: Teacher, method: Method, batches: Batches, recipe: Recipe, folder: Path,
        held: Sequence[Text] = (),
    ) -> None:  # fmt: skip
        self.teacher, self.method, self.batches, self.recipe, self.folder = teacher, method, batches, recipe, folder
        self.held = Batches(held, max(batches.tokens // 2, 64), recipe.seed) if held else None
        self.weights = trainable_parameters(method.draft, teacher)
        for parameter in self.weights.values():
            parameter.requires_grad_(True)
        self.optimizers = _optimizers(self.weights, recipe)
        self.figures = TrainingFigures()

    @property
    def progress(self) -> float:
        """Share of the run that is done, from 0 to 1."""
        by_steps = self.figures.step / self.recipe.steps if self.recipe.steps else 0.0
        by_clock = self.figures.seconds / (60 * self.recipe.minutes) if self.recipe.minutes else 0.0
        return min(1.0, max(by_steps, by_clock))

    def run(self, report: Progress, log: Callable[[str], None]) -> TrainingFigures:
        """Train to the end of the recipe. Saves every ``save_every`` seconds and at the end, and exports the best."""
        figures, recent = self.figures, list[tuple[torch.Tensor, torch.Tensor]]()
        before, started = figures.seconds, time.monotonic()
        saved = logged = started
        while self.progress < 1:
            recent.append(self._step())
            figures.step += 1
            if figures.step % SYNC_STEPS == 0 or self.progress >= 1:
                self._read(recent)
            figures.seconds = before + time.monotonic() - started
            report("train", self.progress)
            if self.progress < 1 and self.progress >= (1 + figures.measured) * MEASURE_EVERY:
                self._measure(log)
            now = time.monotonic()
            if now - logged > 10 and not recent and self.progress < 1:
                log(f"{self.progress:4.0%}  {figures.line()}")
                logged = now
            if now - saved > self.recipe.save_every:
                self.save()
                saved = now
        self._read(recent)
        log(f"100%  {figures.line()}")
        self._measure(log)
        self.save()
        return figures

    def _measure(self, log: Callable[[str], None]) -> None:
        """Measure the accept length on held-out answers, and export the draft model if it is the best so far."""
        self.figures.measured = int(self.progress / MEASURE_EVERY + 1e-9)
        if self.held is None:
            return
        replayed = ReplayedRounds()
        for batch in self.held.epoch():
            outputs = self.teacher.run(batch, self.method.draft.aux_layers)
            with self._precision():
                replayed.add(batch, accepted_drafts(self.method.draft, outputs, self._kv_dtype))
        length = replayed.accept_length
        better = length >= self.figures.best
        log(f"{self.progress:4.0%}  accept length {length:.3f}{'' if better else f' (best {self.figures.best:.3f})'}")
        if better:
            self.figures.best = length
            self.method.save()

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns (loss, agreed by step)."""
        batch = self.batches[self.figures.step]
        self.figures.tokens += batch.token_ids.numel()
        outputs = self.teacher.run(batch, self.method.draft.aux_layers)
        with self._precision():
            loss = loss_of(self.method.draft, outputs, self._kv_dtype)
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        factor = learning_rate(self.progress)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        return loss.value.detach(), loss.agreed

    @property
    def _kv_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.teacher.device.type == "cuda" else torch.float32

    def _precision(self) -> AbstractContextManager[Any]:
        """Autocast to bf16 on a GPU; fp32 on a CPU, where the target is fp32 too."""
        if self.teacher.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def _read(self, recent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Wait for the device and update the figures from the results of recent steps."""
        if recent:
            most = max(len(agreed) for _, agreed in recent)
            complete = [agreed for _, agreed in recent if len(agreed) == most]
            self.figures.loss = float(torch.stack([loss for loss, _ in recent]).mean())
            self.figures.agreed = torch.stack(complete).mean(0).tolist()
            recent.clear()

    # ---- checkpoints ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state that :meth:`resume` reads; without held-out answers, export the draft model too."""
        if self.held is None:
            self.method.save()
        state = {
            "weights": {name: p.detach().cpu() for name, p in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "figures": asdict(self.figures),
        }
        partial = self.folder / f"{STATE}.part"
        torch.save(state, partial)
        partial.replace(self.folder / STATE)

    def resume(self) -> bool:
        """Load the saved state; False if there is none."""
        file = self.folder / STATE
        if not file.exists():
            return False
        state = torch.load(file, map_location=self.teacher.device, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(state["weights"][name])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.figures = TrainingFigures(**state["figures"])
        return True


def learning_rate(progress: float) -> float:
    """The factor on the learning rates; ``progress`` runs from 0 to 1."""
    return min(1.0, (progress + 1e-3) / WARM_UP, max(0.0, 1 - progress) / COOL_DOWN)


def check_recipe(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings ``settings`` to ``folder``, or compare them with those of the run to resume.

    Raises ConfigError that names a setting that differs. Limits of the run and ``save_every`` may differ.
    """
    file = folder / RECIPE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n")
        return
    if not resume:
        raise ConfigError(f"{folder.parent} already holds a run: give --resume to continue it, or another --out.")
    held = json.loads(file.read_text())
    free = {"steps", "minutes", "save_every"}
    wrong = [n for n in sorted(held.keys() | settings.keys()) if n not in free and held.get(n) != settings.get(n)]
    if wrong:
        raise ConfigError(
            f"{folder.parent} was started with {wrong[0]}={held.get(wrong[0])!r}, not {settings.get(wrong[0])!r}: "
            "resume it with the same settings, or give another --out."
        )


def _optimizers(weights: dict[str, torch.nn.Parameter], recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for matrices inside layers, AdamW for embeddings, LM heads and norms; with their peak learning rates."""
    inner = [p for n, p in weights.items() if p.ndim == 2 and not n.startswith(("embed.", "lm_head."))]
    chosen = {id(p) for p in inner}
    others = [p for p in weights.values() if id(p) not in chosen]
    fused = others[0].is_cuda if others else False
    pairs: list[tuple[torch.optim.Optimizer, float]] = [(Muon(inner, weight_decay=0.0), recipe.muon_lr)]
    if others:
        adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        pairs.append((adam, recipe.lr))
    return pairs
