"""``unisono train-draft``: the command line, and the run from prompts to a directory that serves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from unisono.console.help import HelpfulCommand
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import Checkpoint
from unisono.text.tokenizer import Tokenizer
from unisono.tools.draft_training.answers import AnswerConfig, Progress, Text, collect, read_answers
from unisono.tools.draft_training.bars import progress_bars
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.data import TrainingPrompt, read_prompts, split_held_out
from unisono.tools.draft_training.held_out import set_aside
from unisono.tools.draft_training.measure import DRAFTS, DraftAcceptance, measure
from unisono.tools.draft_training.methods import METHODS, DraftShape
from unisono.tools.draft_training.teacher import Teacher
from unisono.tools.draft_training.trainer import RECIPE, STATE, Recipe, Trainer, check_recipe
from unisono.types import ConfigError, SpeculativeConfig

ANSWERS_SHARE, MEASURING_SHARE = 0.35, 0.1
"""Shares of --minutes for generating the target's answers, and for starts of the engine and the measurement."""

GPU_SHARE = 0.5
"""Share of GPU memory for the engine that generates the answers, and for the one that measures acceptance."""


@dataclass(frozen=True)
class Run:
    """The settings of one training run, except for its texts.

    out: directory for the draft model. work: directory for the state that a resumed run needs; default: inside ``out``.
    """

    method: str
    target: str
    out: Path
    recipe: Recipe
    shape: DraftShape
    asking: AnswerConfig
    device: str = "auto"
    work: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} cannot be trained; choose one of {', '.join(METHODS)}.")

    @property
    def folder(self) -> Path:
        """The directory for the state of the run."""
        return self.work or self.out / "training"

    def check(self, resume: bool) -> None:
        """Check that the run may start or resume, see :func:`check_recipe`. Raises ConfigError if ``out`` is in use."""
        if (self.out / "config.json").exists() and not (self.folder / RECIPE).exists() and self.work is None:
            raise ConfigError(f"{self.out} holds a checkpoint that was not made by train-draft: give another --out.")
        check_recipe(
            self.folder,
            {
                **{"method": self.method, "target": self.target},
                **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.shape).items()},
                **asdict(self.recipe),
                **{f"answers_{k}": v for k, v in asdict(self.asking).items() if k != "seconds"},
            },
            resume,
        )


def make_llm(run: Run, **flags: Any) -> LLM:
    """The LLM that generates answers."""
    return LLM(
        run.target, device=run.device, max_model_len=run.asking.longest, gpu_memory_utilization=GPU_SHARE, **flags
    )


def train_on_texts(run: Run, texts: list[Text], resume: bool, report: Progress, log: Callable[[str], None]) -> None:
    """Train the draft model on the texts, export it, and free the device memory.

    Some greedy answers are set aside to measure the accept length on.
    """
    texts = [t for t in texts if len(t.token_ids) - t.answer_start > 1]
    if not texts:
        raise ConfigError(
            "no answer has two tokens or more: there is nothing to train on. Raise --max-tokens or --minutes."
        )
    torch.manual_seed(run.recipe.seed)
    texts, held = set_aside(texts)
    checkpoint = Checkpoint.open(run.target)
    longest = max(run.asking.longest, max(len(t.token_ids) for t in (*texts, *held)))
    teacher = Teacher(checkpoint, run.device, longest + 16)
    method = METHODS[run.method](teacher, run.shape, texts, run.out)
    batches = Batches(texts, run.recipe.batch_tokens, run.recipe.seed)
    trainer = Trainer(teacher, method, batches, run.recipe, run.folder, held)
    if resume and trainer.resume():
        log(f"resumed at {trainer.figures.line()}")
    count = sum(p.numel() for p in trainer.weights.values())
    log(f"{run.method}: {count:,} trained weights; {len(texts)} texts and {len(held)} to measure on, {teacher.device}")
    trainer.run(report, log)
    del trainer, method, teacher
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_acceptance(run: Run, held: list[TrainingPrompt], **flags: Any) -> DraftAcceptance:
    """Acceptance of the exported draft model on the prompts ``held``; ``flags`` are those of the engine."""
    spec = SpeculativeConfig(run.method, str(run.out), run.shape.drafts(run.method, DRAFTS), adaptive=False)
    return measure(
        run.target, held, spec, max_tokens=run.asking.max_tokens, longest=run.asking.longest, device=run.device,
        gpu_memory_utilization=GPU_SHARE, **flags,
    )  # fmt: skip


def train(
    run: Run, data: Path, *, held_out: int = 100, resume: bool = False, report: Progress, log: Callable[[str], None],
    **flags: Any,
) -> DraftAcceptance:  # fmt: skip
    """All of ``unisono train-draft``: generate answers, train, measure. ``flags`` are those of the engine.

    Raises BadRequest, ConfigError and CheckpointError for bad input.
    """
    checkpoint = Checkpoint.open(run.target)
    tokenizer = Tokenizer.load(checkpoint.path)
    if tokenizer is None:
        raise ConfigError(
            f"{run.target} has no tokenizer, which is needed to read prompts. Add tokenizer.json to its directory."
        )
    if run.asking.longest > checkpoint.config.max_positions:
        raise ConfigError(
            f"--max-model-len {run.asking.longest} is above the target's context of {checkpoint.config.max_positions}."
        )
    prompts, held = split_held_out(read_prompts(data, tokenizer, run.asking.longest), held_out, run.recipe.seed)
    run.check(resume)
    answers = run.folder / "answers.jsonl"
    if not (run.folder / STATE).exists():
        log(f"{len(prompts)} training prompts, {len(held)} held out")
        collect(functools.partial(make_llm, run, **flags), prompts, run.asking, answers, report)
    train_on_texts(run, read_answers(answers), resume, report, log)
    acceptance = measure_acceptance(run, held, **flags)
    log(f"{run.out}: {acceptance.line()}, greedy, on {len(held)} held-out prompts")
    return acceptance


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=HelpfulCommand)
def train_draft(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"One of {', '.join(METHODS)}.")],
    target: Annotated[str, typer.Option(help="The model to draft for: a checkpoint directory or a bundled name.")],
    data: Annotated[Path, typer.Option(help='JSON lines: {"messages": […]}, {"prompt": "…"} or {"text": "…"}.')],
    out: Annotated[Path, typer.Option(help="Directory for the draft model.")],
    minutes: Annotated[float, typer.Option(help="Time limit, from answers to the measurement.")] = 30.0,
    steps: Annotated[int | None, typer.Option(help="Limit of training steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 8192,
    lr: Annotated[float, typer.Option(help="Peak learning rate of vocabularies and norms (AdamW).")] = 2e-3,
    muon_lr: Annotated[float, typer.Option(help="Peak learning rate of the layers' matrices (Muon).")] = 0.02,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, order of texts, and answers.")] = 0,
    temperature: Annotated[float, typer.Option(help="Temperature of sampled answers; the rest are greedy.")] = 1.0,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="Share of the answers that are sampled.")] = 0.5,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.")] = 512,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer together, at most; default: 1024, or the context if that is shorter."
        ),
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts held out to measure acceptance.")] = 100,
    unroll: Annotated[int, typer.Option(help="Steps that a head is unrolled in training.")] = 3,
    modules: Annotated[int, typer.Option(help="mtp: number of modules, one per draft.")] = 3,
    layout: Annotated[str, typer.Option(help="mtp: deepseek or qwen.")] = "deepseek",
    beside_target: Annotated[
        bool, typer.Option("--beside-target", help="mtp: write a copy of the target that includes the modules.")
    ] = False,
    draft_vocab: Annotated[
        int | None, typer.Option(help="eagle3: size of the draft vocabulary; default: a quarter of the target's.")
    ] = None,
    aux_layers: Annotated[
        str | None, typer.Option(help="eagle3, dflash: layers of the target whose inputs it reads, such as 2,4,5.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Intermediate size of the MLP; default: the target's.")
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="standalone, mtp_frozen: hidden size.")] = 128,
    layers: Annotated[int, typer.Option(help="standalone, mtp_frozen, dflash: number of layers.")] = 3,
    block_size: Annotated[int, typer.Option(help="dflash: tokens per block; the number of drafts is one less.")] = 8,
    heads: Annotated[int | None, typer.Option(help="dflash: attention heads; default: the target's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="dflash: KV heads; default: the target's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Train a draft model for a target on the target's own outputs."""
    if not minutes > 0:
        raise ConfigError(f"--minutes {minutes}: give a number above 0.")
    recipe = Recipe(steps, minutes * (1 - ANSWERS_SHARE - MEASURING_SHARE), batch_tokens, lr, muon_lr, save_every, seed)
    shape = DraftShape(
        unroll, modules, layout, beside_target, draft_vocab, _layers(aux_layers, method), intermediate_size,
        hidden_size, layers, block_size=block_size, heads=heads, kv_heads=kv_heads,
    )  # fmt: skip
    longest = max_model_len or min(1024, Checkpoint.open(target).config.max_positions)
    asking = AnswerConfig(temperature, max_tokens, longest, seed, 60 * minutes * ANSWERS_SHARE, sampled)
    run = Run(method, target, out, recipe, shape, asking, device)
    with progress_bars() as (report, log):
        train(run, data, held_out=held_out, resume=resume, report=report, log=log)
    served = {"method": method, "model": str(out), "num_speculative_tokens": shape.drafts(method, DRAFTS)}
    print(f"unisono serve {target} --speculative-config '{json.dumps(served)}'")


def _layers(text: str | None, method: str) -> tuple[int, ...] | None:
    """Parse --aux-layers."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--aux-layers {text!r}: give layer numbers separated by commas, such as 2,4,5.")
    if method == "eagle3" and len(parts) != 3:
        raise ConfigError(f"--aux-layers {text!r}: eagle3 reads three: give three layer numbers.")
    return tuple(int(part) for part in parts)
