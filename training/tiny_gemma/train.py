"""Trains ``tiny-gemma`` and its assistant: ``python -m training.tiny_gemma.train --out DIR --minutes 7`` on one GPU.

The command trains the model, then the assistant on the frozen model, and measures accuracy and acceptance on held-out
problems. The phases follow the clock, and everything ends within ``--minutes`` of the start. Checkpoints are written
every minute and after each phase. ``--start DIR`` goes on from the weights in DIR; with ``--model-until 0`` it trains
the assistant alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.tiny.batches import Batch, Packing, stream
from training.tiny_gemma.assistant import TinyAssistant
from training.tiny_gemma.checkpoint import ASSISTANT, MODEL, WEIGHTS, Save, load_, round_
from training.tiny_gemma.evaluate import DRAFTS, evaluate
from training.tiny_gemma.model import GemmaConfig, TinyGemma
from training.tiny_hybrid.train import BALANCE, BEGAN, DISCOUNT, Phase, log, to_device
from unisono.config import catalog
from unisono.tools.draft_training.muon import Muon

TOY = GemmaConfig(hidden_size=64, num_hidden_layers=4, sliding_window=32, assistant_hidden_size=64)
"""Sizes for a few steps on a CPU."""

SMALL = "embed_tokens", "router.proj"
"""Parts of the names of matrices that AdamW trains."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a run.

    minutes: limit of the whole run. rows, length: shape of a batch. model_until, assistant_until: shares of the time at
    which the phases end. problems: of the evaluation. repeat: batches that are kept, to be given again while
    the next one is not ready.
    """

    minutes: float = 6.9
    seed: int = 0
    rows: int = 64
    length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    assistant_lr: float = 0.02
    model_until: float = 0.7
    assistant_until: float = 0.91
    problems: int = 500
    repeat: int = 128
    save_every_s: float = 60.0


class Run:
    """All phases of a run."""

    def __init__(self, recipe: Recipe, config: GemmaConfig, device: str, compiled: bool, save: Save) -> None:
        self.recipe, self.device, self.compiled, self.save = recipe, device, compiled, save
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_tf32 = True
        self.model, self.assistant = TinyGemma(config).to(device), TinyAssistant(config).to(device)
        sizes = [sum(p.numel() for p in module.parameters()) for module in (self.model, self.assistant)]
        log(f"{sizes[0]} parameters, {sizes[1]} of the assistant")
        self.figures: dict[str, object] = {}

    def start_from(self, directory: Path) -> None:
        """Load what the directory has of both."""
        for name, module in ((MODEL, self.model), (ASSISTANT, self.assistant)):
            if (directory / name / WEIGHTS).is_file():
                load_(module, directory / name)
                log(f"{name}: loaded from {directory}")

    def train(self, batches: Iterator[Batch]) -> None:
        """Train both, and round them as their checkpoints are. Phases whose end is over are left out."""
        recipe = self.recipe
        losses = Losses(self.model, self.assistant, self.device, self.compiled)

        def phase(name: str, module: nn.Module, until: float, lr: float, loss: Callable[..., Tensor]) -> None:
            optimizers = _optimizers(module, lr, recipe.adam_lr)
            phase = Phase(name, BEGAN + 60 * recipe.minutes * until, optimizers)
            next_loss = lambda: loss(*to_device(next(batches), self.device))  # noqa: E731
            if until > 0:
                self.figures |= phase.run(next_loss, self.write, recipe.save_every_s, self.device)
            round_(module)

        phase("trunk", self.model, recipe.model_until, recipe.muon_lr, losses.model_loss)
        self.model.requires_grad_(False)
        phase("assistant", self.assistant, recipe.assistant_until, recipe.assistant_lr, losses.assistant_loss)

    def write(self, more: dict[str, object]) -> None:
        """Write both checkpoints."""
        self.save.model(self.model, {**self.figures, **more})
        self.save.assistant(self.assistant)

    def measure(self, tokenizer: Tokenizer) -> None:
        """Print what the evaluation finds, and write it to training.json."""
        model, assistant = (
            TinyGemma(self.model.config).to(self.device),
            TinyAssistant(self.model.config).to(self.device),
        )
        model.load_state_dict(self.model.state_dict())  # not compiled: shapes change
        assistant.load_state_dict(self.assistant.state_dict())
        until = BEGAN + 60 * self.recipe.minutes
        report, texts = evaluate(model, assistant, tokenizer, self.recipe.problems, self.device, until)
        self.figures |= asdict(report)
        self.write({})
        log("\n".join([json.dumps(asdict(report)), *texts[:2]]))


class Losses:
    """The losses of both phases, compiled on a GPU. Layers of a kind share one compiled graph, for a short start."""

    def __init__(self, model: TinyGemma, assistant: TinyAssistant, device: str, compiled: bool) -> None:
        self.model, self.assistant, self.device = model, assistant, device
        self._head_loss: Callable[..., Tensor] = model.head_loss
        self._step_loss: Callable[..., Tensor] = self._draft_loss
        if compiled:
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
            for layer in (*model.model.layers, *assistant.model.layers):
                layer.compile(dynamic=False)
            self._head_loss = torch.compile(model.head_loss, dynamic=False)
            self._step_loss = torch.compile(self._draft_loss, dynamic=False)

    def model_loss(self, ids: Tensor, targets: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """Cross entropy of the next token, and the experts' balance."""
        with torch.autocast(self.device, torch.bfloat16):
            outputs = self.model(ids, positions)
            return self._head_loss(outputs.hidden, targets, weights) + BALANCE * outputs.balance

    def assistant_loss(self, ids: Tensor, targets: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """Cross entropy of the steps of every round with the model's own distributions."""
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                outputs = self.model(ids, positions)
            losses = []
            for s, state in enumerate(self.assistant.unroll(self.model, ids, positions, outputs, DRAFTS)):
                seen = slice(1 + s, 1 + s + state.shape[1])  # these states of the model predict what the step drafts
                loss = self._step_loss(state, outputs.hidden[:, seen].contiguous(), weights[:, seen].contiguous())
                losses.append(DISCOUNT**s * loss)
            return torch.stack(losses).sum()

    def _draft_loss(self, state: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean cross-entropy of a step's states with the model's distribution at ``hidden`` [B, n, H]."""
        wanted = self.model.head(hidden).softmax(-1)
        losses = -(wanted * self.assistant.head(state).log_softmax(-1)).sum(-1)
        return (losses * weights).sum() / weights.sum()


def _optimizers(module: nn.Module, muon_lr: float, adam_lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for matrices and experts, AdamW for the rest; each with its peak learning rate."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in module.named_parameters():
        inner = parameter.ndim >= 2 and not any(part in name for part in SMALL)
        (matrices if inner else others).append(parameter)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
    return [(Muon(matrices), muon_lr), (adam, adam_lr)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help=f"directory for {MODEL} and {ASSISTANT}")
    parser.add_argument("--start", type=Path, help="directory of an earlier run to go on from")
    parser.add_argument("--sizes", choices=("full", "toy"), default="full", help="toy: a few steps on a CPU")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing on a GPU")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=max(1, cores - 2), help="processes that generate text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    named = {name: options.pop(name) for name in ("out", "start", "sizes", "no_compile", "workers", "device")}
    recipe, device, config = Recipe(**options), named["device"], GemmaConfig() if named["sizes"] == "full" else TOY
    log(f"training on {device}, {named['workers']} workers")
    tokenizer = Tokenizer.from_file(str(catalog.bundled_path("tiny") / "tokenizer.json"))
    packing = Packing(recipe.rows, recipe.length, config.max_position_embeddings)
    seed = recipe.seed + (1000 if named["start"] else 0)  # other text than the run before it
    with stream(tokenizer, packing, seed, named["workers"], repeat=recipe.repeat) as batches:
        first = next(batches)  # the workers fork here, before CUDA is initialised
        compiled = device == "cuda" and not named["no_compile"]
        run = Run(recipe, config, device, compiled, Save(named["out"], tokenizer, asdict(recipe)))
        if named["start"]:
            run.start_from(named["start"])
        run.train(itertools.chain([first], batches))
        if recipe.problems:
            run.measure(tokenizer)
        log("done")


if __name__ == "__main__":
    main()
