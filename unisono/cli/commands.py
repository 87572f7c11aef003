"""The commands that run a model in this process: ``generate``, ``chat``, ``explain``, ``compare`` and ``eval``.

Each takes the engine's flags as its first argument, a dict; ``cli/main.py`` adds them to its command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cluster.heap import uncollected
from unisono.config import env
from unisono.console.output import print_dry_run, print_tables, show_progress, stderr
from unisono.types import BadRequest, ConfigError, FinishReason, SamplingParams, UnisonoError, request_failure

if TYPE_CHECKING:
    from unisono.entrypoints.llm import LLM
    from unisono.tools.chat.answers import AnswerSource

ModelPath = Annotated[
    str,
    typer.Argument(metavar="[PATH]", help="A Hugging Face checkpoint directory, a bundled name, or a Hub id."),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens to generate; default: the rest of the context.")
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature, 0 is greedy; default: the checkpoint's.")
]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this cumulative probability.")]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens below this fraction of the most likely token's probability.")
]
SampleSeed = Annotated[
    int | None, typer.Option(help="Seed that repeats an answer; default: a new one, which is printed.")
]


def generate(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    prompt: Annotated[str | None, typer.Option(help="Prompt; default: standard input.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: SampleSeed = None,
) -> None:
    """Continue a prompt."""
    sampling = _asked(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if prompt is None:
        prompt = sys.stdin.read()
    with _load(path, flags) as llm:
        if llm.tokenizer is None:
            raise BadRequest(f"{path} has no tokenizer, so it cannot take text.")
        params = _params(llm, sampling)
        _stream(llm, llm.tokenizer.encode(prompt), params)
        if seed is None:
            stderr.print(f"[dim]--seed {params.seed} repeats this text.[/]", highlight=False)


def chat(
    flags: dict[str, Any],
    path: Annotated[
        str | None,
        typer.Argument(metavar="[PATH]", help="As for generate, default tiny; with --url the name of a model there."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of a server with OpenAI's API; no model is loaded here.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key for --url; default: UNISONO_API_KEY or OPENAI_API_KEY.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: SampleSeed = None,
) -> None:
    r"""Chat with a model in this process, or with a server's model (--url).

    /help lists commands; Ctrl-D ends.

    Ctrl-C stops an answer. In a pipe each line of the input is a question and each line of the output an answer, with
    line breaks written as \n.
    """
    sampling = _asked(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    params = {name: value for name, value in sampling.items() if value is not None}
    from unisono.tools.chat.screen import Screen
    from unisono.tools.chat.session import Session

    with _source(path, url, api_key, flags) as source:
        Session(source, Screen(), system, params).run()


@contextlib.contextmanager
def _source(path: str | None, url: str | None, api_key: str | None, flags: dict[str, Any]) -> Iterator[AnswerSource]:
    """The source of a chat's answers. Raises UnisonoError."""
    if url is not None:
        from unisono.tools.chat.remote import RemoteModel

        key = api_key or env.api_key() or os.environ.get("OPENAI_API_KEY")
        with contextlib.closing(RemoteModel(url, path, key)) as source:
            yield source
        return
    if api_key is not None:
        raise ConfigError("--api-key is for a server: give its --url, or leave it out.")
    name = path or "tiny"
    with _load(name, flags) as llm:
        from unisono.tools.chat.offline import OfflineModel

        yield OfflineModel(llm, name)


def explain(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Start no engine and download no weights: support, decisions, memory.")
    ] = False,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --dry-run: plan for a GPU of this memory, such as 24GiB.")
    ] = None,
    device_capability: Annotated[
        str | None, typer.Option(metavar="X.Y", help="With --device-memory: its compute capability. Default: 9.0.")
    ] = None,
) -> None:
    """Start the engine; print its decisions with their reasons, and the passes that replay graphs."""
    if dry_run:
        _explain_without_engine(path, flags, as_json, device_memory, device_capability)
        return
    if device_memory or device_capability:
        raise ConfigError("--device-memory and --device-capability plan for another GPU: add --dry-run.")
    with _load(path, flags) as llm:
        info = llm.engine.info()
    if as_json:
        print(json.dumps(info, indent=2))
        return
    print_tables(info)


def _explain_without_engine(
    path: str, flags: dict[str, Any], as_json: bool, memory: str | None, capability: str | None
) -> None:
    """Print the decisions and the memory of an engine, as far as the model's files tell."""
    from unisono.config import EngineConfig
    from unisono.config.preflight.model import find_model, remote_bytes
    from unisono.engine.startup.dry_run import card, dry_run, rows

    hardware = card(memory, capability, flags["device"])
    info = dry_run(EngineConfig(path, **flags), find_model(path, weights=False), remote_bytes(path), hardware)
    if as_json:
        print(json.dumps(info, indent=2))
    else:
        print_dry_run(rows(info), info["decisions"])


def compare(
    path: Annotated[str, typer.Argument(metavar="[A]", help="A checkpoint directory, a bundled name, or a Hub id.")] = (
        "tiny"
    ),
    other: Annotated[str | None, typer.Argument(metavar="[B]", help="As A; default: the same as A.")] = None,
    a: Annotated[str, typer.Option("--a", help='Flags of A, a JSON object: {"speculative_method": "none"}.')] = "{}",
    b: Annotated[str, typer.Option("--b", help="Flags of B.")] = "{}",
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt to continue; may be repeated.")] = None,
    problems: Annotated[int, typer.Option(min=1, max=500, help="Without --prompt: held-out problems to ask.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same on both sides.")] = 0,
    trace_all: Annotated[bool, typer.Option("--trace-all", help="Compare ops where tokens are equal, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the first token in which two configurations differ, and the layer and op that cause the difference.

    Both answer the same prompts. For a difference, both run again without graphs, and the results of all ops of the
    model are compared bit by bit for every position before it. Exit status 1 if a prompt differs.
    """
    from unisono.tools.compare.command import Side, report
    from unisono.tools.compare.command import compare as run

    params = _asked(max_tokens=max_tokens, temperature=temperature, seed=seed)
    sides = Side.parse("--a", path, a), Side.parse("--b", other or path, b)
    found = run(*sides, prompt or [], problems, SamplingParams(**params), trace_all)
    print(report(found, as_json))
    if any(one.index is not None for one in found):
        raise typer.Exit(1)


def evaluate(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    problems: Annotated[int, typer.Option(min=1, max=500, help="Number of held-out problems.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
) -> None:
    """Measure accuracy on held-out problems, tokens per second, and acceptance of drafts.

    Vision models get problems with images. With speculation, drafts are also measured without image embeddings.
    """
    from unisono.tools.eval.command import evaluate as run
    from unisono.tools.eval.command import pictures_withheld

    with _load(path, flags) as llm:
        found = run(llm, problems, max_tokens)
    print("\n".join(found.lines()))
    if found.pictures and found.accept_length is not None:
        with pictures_withheld(), _load(path, flags) as llm:
            blind = run(llm, problems, max_tokens)
        print(f"{blind.acceptance} with image embeddings withheld from the drafts")
        differ = sum(a != b for a, b in zip(found.answers, blind.answers, strict=True))
        print(f"{differ} of {found.problems} answers differ between the two")
        if differ:
            raise UnisonoError("drafts changed an answer.")


def _asked(**values: Any) -> dict[str, Any]:
    """The sampling flags that are set. Raises typer.BadParameter for a bad value, before any model is loaded."""
    sampling = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    try:
        SamplingParams(**sampling)
    except BadRequest as error:
        raise typer.BadParameter(str(error), param_hint=f"--{(error.param or '').replace('_', '-')}") from None
    return sampling


def _params(llm: LLM, sampling: dict[str, Any]) -> SamplingParams:
    """The checkpoint's defaults, the flags, and a random seed."""
    defaults = llm.engine.default_params()
    names = ("temperature", "top_k", "top_p", "min_p")
    return SamplingParams(**{n: getattr(defaults, n) for n in names} | {"seed": secrets.randbits(53)} | sampling)


@contextlib.contextmanager
def _load(path: str, flags: dict[str, Any]) -> Iterator[LLM]:
    with show_progress() as progress, uncollected():
        progress("start", 0.0)
        from unisono.entrypoints.llm import LLM

        llm = LLM(path, progress=progress, **flags)
    with llm:
        yield llm


def _stream(llm: LLM, prompt: list[int], params: SamplingParams) -> None:
    """Print a text while it is generated."""
    from unisono.text.detokenizer import Detokenizer

    assert llm.tokenizer is not None
    detokenizer = Detokenizer(llm.tokenizer, params, prompt)
    for delta in llm.stream(prompt, params):
        print(detokenizer.feed(delta.token_ids, delta.finish), end="", flush=True)
        if delta.finish is FinishReason.ABORT:
            raise request_failure(delta.error, delta.error_param)
    print(flush=True)
