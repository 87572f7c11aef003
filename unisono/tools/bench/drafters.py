"""``unisono bench drafters``: accept length of a model's drafters, side by side, on the held-out problems of ``eval``.

An engine for each drafter answers the same problems greedily, with k drafts in every round. Accept lengths and answers
do not depend on the device. The command fails if a drafter changes a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.config import catalog
from unisono.config.preflight.model import check_model
from unisono.tools.eval.problems import COUNT
from unisono.types import ConfigError, SpeculativeConfig, UnisonoError

if TYPE_CHECKING:
    from unisono.tools.eval.command import Evaluation

SETUPS = {
    "tiny": "ngram,suffix,standalone:tiny-draft,eagle:tiny-eagle,eagle3:tiny-eagle3,mtp:tiny-mtp,dflash:tiny-dflash",
    "tiny-hybrid": "ngram,suffix,mtp,dflash:tiny-hybrid-dflash",
    "tiny-vl": "ngram,suffix,eagle3:tiny-vl-eagle3",
    "tiny-gemma": "ngram,suffix,mtp_frozen:tiny-gemma-assistant",
}
"""Bundled model -> its drafters."""


@dataclass(frozen=True)
class Setup:
    """A drafter. model: its directory or bundled name, or None. drafts: k."""

    method: str
    model: str | None
    drafts: int

    @property
    def name(self) -> str:
        """The method and the name of the directory."""
        return self.method if self.model is None else f"{self.method} ({self.model.rstrip('/').rpartition('/')[2]})"


def setups_of(text: str, drafts: int) -> list[Setup]:
    """Read --setups: ``method``, ``method:directory`` or ``method:directory:k``, separated by commas.

    Raises ConfigError for other forms.
    """
    found = []
    for each in text.split(","):
        method, _, rest = each.strip().partition(":")
        model, _, last = rest.rpartition(":") if rest.rpartition(":")[2].isdigit() else (rest, "", "")
        if not method:
            raise ConfigError(f"--setups {text!r}: give method, method:directory or method:directory:k.")
        found.append(Setup(method, model or None, int(last) if last else drafts))
    return found


def drafters(
    model: Annotated[str, typer.Argument(help="Directory or bundled name of the target.")] = "tiny",
    setups: Annotated[
        str | None,
        typer.Option(help="method, method:directory or method:directory:k, separated by commas; default: all bundled."),
    ] = None,
    drafts: Annotated[int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Drafts of every round.")] = 7,
    problems: Annotated[int, typer.Option(min=1, max=COUNT, help="Held-out problems.")] = 500,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 220,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="As for `unisono serve`.")] = 0.5,
) -> None:
    """Measure the accept length of drafters on held-out problems; fails if one changes a text."""
    check_model(model)
    if setups is None:
        if model not in SETUPS:
            raise ConfigError(f"{model} has no bundled drafters: give --setups, such as eagle3:DIRECTORY,ngram.")
        setups = ",".join(each for each in SETUPS[model].split(",") if _installed(each))
    flags = {"device": device, "max_num_seqs": max_num_seqs, "gpu_memory_utilization": gpu_memory_utilization}
    print("| drafter | k | tokens a round | accepted by position | right | tokens/s | same text |")
    print("|---" * 7 + "|", flush=True)
    plain = _measured(model, SpeculativeConfig("none"), problems, max_tokens, flags)
    print(f"| none | 0 | 1 | – | {plain.right} of {problems} | {plain.tokens / plain.seconds:.0f} | – |", flush=True)
    changed = []
    for setup in setups_of(setups, drafts):
        spec = SpeculativeConfig(setup.method, setup.model, setup.drafts, adaptive=False)
        found = _measured(model, spec, problems, max_tokens, flags)
        same = found.answers == plain.answers
        changed += [] if same else [setup.name]
        shares = " ".join(f"{share:.2f}".lstrip("0") for share in found.positions)
        print(
            f"| {setup.name} | {setup.drafts} | {found.accept_length:.3f} | {shares} | {found.right} of {problems} | "
            f"{found.tokens / found.seconds:.0f} | {'yes' if same else 'NO'} |", flush=True,
        )  # fmt: skip
    if changed:
        raise UnisonoError(f"a text changed with {', '.join(changed)}.")


def _installed(setup: str) -> bool:
    """True unless the setup names a bundled head that is not there."""
    name = setup.partition(":")[2]
    return not name or name in catalog.bundled


def _measured(model: str, spec: SpeculativeConfig, problems: int, max_tokens: int, flags: dict[str, Any]) -> Evaluation:
    """Answer the problems with an engine of its own."""
    from unisono.entrypoints.llm import LLM
    from unisono.tools.eval.command import evaluate

    with LLM(model, speculative=spec, **flags) as llm:
        return evaluate(llm, problems, max_tokens)
