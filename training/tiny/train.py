"""Trains the bundled model: ``python -m training.tiny.train --out DIR`` writes a Hugging Face directory.

The command trains the tokenizer, then the model. The training text is generated during training (``batches``). The
learning-rate schedule follows the clock (``--minutes``), so that a slower GPU does fewer steps in the same time. The
checkpoint is written every minute and at the end, with the settings and figures of the run in training.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny.batches import Batch, Packing, stream
from training.tiny.documents import END, SPECIAL_TOKENS, STOP
from training.tiny.model import TinyConfig, TinyQwen3
from training.tiny.tokenizer import save_tokenizer, train_tokenizer
from unisono.tools.draft_training.muon import Muon

WARM_UP, COOL_DOWN = 0.02, 0.6
"""Shares of the run in which the learning rate rises linearly from zero, and falls linearly to zero."""

WARMING_STEPS = 3
"""Steps that compile. The clock starts after them."""

SYNC_STEPS = 20
"""Steps between synchronisations of host and device. Without them the host would measure only launch times."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a run. rows, length: shape of a batch."""

    seed: int = 0
    minutes: float = 6.0
    rows: int = 64
    length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    save_every_s: float = 60.0


def learning_rate(progress: float) -> float:
    """The factor on both learning rates; ``progress`` runs from 0 to 1."""
    return min(1.0, (progress + 1e-3) / WARM_UP, max(0.0, 1 - progress) / COOL_DOWN)


def train(recipe: Recipe, batches: Iterator[Batch], device: str, save: Save) -> dict[str, float]:
    """Train for the recipe's time, saving at intervals; returns steps, tokens, loss and speed."""
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model = TinyQwen3(TinyConfig()).to(device)
    optimizers, loss_of = _optimizers(model, recipe), _loss_function(model, device)
    step, progress, recent = 0, 0.0, []
    start = saved = time.monotonic()
    while progress < 1:
        if step == WARMING_STEPS:
            start = time.monotonic()
        loss = loss_of(*_to_device(next(batches), device))
        loss.backward()
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * learning_rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.detach())
        step += 1
        if step % SYNC_STEPS == 0:
            figures = _figures(step, recipe, recent, start)
            recent.clear()
            if step in (SYNC_STEPS, 20 * SYNC_STEPS) or step % (40 * SYNC_STEPS) == 0:
                print(f"{progress:5.1%}  {_line(figures)}", flush=True)
            if time.monotonic() - saved > recipe.save_every_s:
                save(model, figures)
                saved = time.monotonic()
        progress = (time.monotonic() - start) / (60 * recipe.minutes) if step >= WARMING_STEPS else 0.0
    figures = _figures(step, recipe, recent or [loss.detach()], start)
    save(model, figures)
    return figures


class Save:
    """Writes a checkpoint directory: bf16 weights, config, tokenizer and training.json."""

    def __init__(self, out: Path, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.out, self.tokenizer, self.recipe = out, tokenizer, recipe
        out.mkdir(parents=True, exist_ok=True)

    def __call__(self, model: TinyQwen3, figures: dict[str, float]) -> None:
        tensors = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, self.out / "model.safetensors", {"format": "pt"})
        end, stop = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(STOP)  # they are the first ids of the tokenizer
        self._json("config.json", model.config.to_hf(pad=end, eos=stop))
        self._json("generation_config.json", {"eos_token_id": [stop, end], "pad_token_id": end})
        save_tokenizer(self.tokenizer, self.out)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        parameters = sum(tensor.numel() for tensor in tensors.values())
        self._json("training.json", {**asdict(self.recipe), **figures, "parameters": parameters, "versions": versions})

    def _json(self, name: str, content: dict[str, object]) -> None:
        (self.out / name).write_text(json.dumps(content, indent=2) + "\n")


def _optimizers(model: TinyQwen3, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for embedding and norms; each with its peak learning rate."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
    return [(Muon(matrices), recipe.muon_lr), (adam, recipe.adam_lr)]


def _loss_function(model: TinyQwen3, device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A function (ids, targets, weights, positions) -> loss. Layers share one compiled graph, for a short start."""
    head_loss = model.head_loss
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile()
        head_loss = torch.compile(model.head_loss)

    def loss_of(ids: Tensor, targets: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return head_loss(model.hidden(ids, positions), targets, weights)

    return loss_of


def _to_device(batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.from_numpy(batch.ids.astype("int32")).to(device).long()
    weights = torch.from_numpy(batch.weights[:, 1:].copy()).to(device).float() / 10
    positions = torch.from_numpy(batch.positions.astype("int32")).to(device).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights, positions


def _figures(step: int, recipe: Recipe, losses: list[Tensor], start: float) -> dict[str, float]:
    loss = float(torch.stack(losses).mean())  # waits for the device, so it comes before reading the clock
    tokens, seconds = step * recipe.rows * recipe.length, time.monotonic() - start
    return {"steps": step, "tokens": tokens, "loss": loss, "seconds": seconds, "tokens_per_s": tokens / seconds}


def _line(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in figures.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that generate text"
    )
    for name, default in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    out, workers = options.pop("out"), options.pop("workers")
    recipe = Recipe(**options)
    began = time.monotonic()
    tokenizer = train_tokenizer(recipe.seed)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens in {time.monotonic() - began:.0f} s", flush=True)
    packing = Packing(recipe.rows, recipe.length, TinyConfig().max_position_embeddings)
    with stream(tokenizer, packing, recipe.seed, workers) as batches:
        first = next(batches)  # the workers fork here, before CUDA is initialised
        device = "cuda" if torch.cuda.is_available() else "cpu"
        figures = train(recipe, itertools.chain([first], batches), device, Save(out, tokenizer, recipe))
    print(f"done in {time.monotonic() - began:.0f} s: {_line(figures)}", flush=True)


if __name__ == "__main__":
    main()
