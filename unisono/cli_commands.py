"""The commands that run a model in this process: ``generate``, ``chat``, ``explain`` and ``eval``.

Each takes the engine's flags as a dict first; ``cli`` adds them to its command line.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli_output import complain, print_tables, show_progress, stderr
from unisono.types import BadRequest, FinishReason, SamplingParams, UnisonoError

if TYPE_CHECKING:
    from unisono.llm import LLM

ModelPath = Annotated[
    str,
    typer.Argument(metavar="[PATH]", help="A Hugging Face checkpoint directory, a bundled name, or a Hub id."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most; default: to the context's end.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
SampleSeed = Annotated[int | None, typer.Option(help="Repeats an answer; default: a new one, printed.")]


def generate(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    prompt: Annotated[str | None, typer.Option(help="Text to continue; default: standard input.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: SampleSeed = None,
) -> None:
    """Continue a prompt."""
    asked = _asked(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if prompt is None:
        prompt = sys.stdin.read()
    with _load(path, flags) as llm:
        if llm.tokenizer is None:
            raise BadRequest(f"{path} has no tokenizer, so it cannot take text.")
        params = _params(llm, asked)
        _stream(llm, llm.tokenizer.encode(prompt), params)
        stderr.print(f"[dim]seed {params.seed}[/]", highlight=False)


def chat(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: SampleSeed = None,
) -> None:
    """Talk to a model; Ctrl-D or /exit ends it, Ctrl-C cuts an answer short."""
    asked = _asked(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    messages = [] if system is None else [{"role": "system", "content": system}]
    with _load(path, flags) as llm:
        for line in _lines():
            messages.append({"role": "user", "content": line})
            try:
                prompt = llm.chat_prompt(messages)["prompt_token_ids"]
                with _interrupts() as interrupted:
                    answer = _stream(llm, prompt, _params(llm, asked), interrupted)
            except BadRequest as error:
                complain(error)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def explain(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start the engine, say what it decided and why, and which passes replay graphs."""
    with _load(path, flags) as llm:
        info = llm.engine.info()
    if as_json:
        print(json.dumps(info, indent=2))
        return
    print_tables(info)


def evaluate(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    problems: Annotated[int, typer.Option(min=1, max=500, help="Held-out problems to ask.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
) -> None:
    """Accuracy on the bundled models' held-out problems, tokens a second, and how drafts fare.

    A model that sees is asked about pictures. With speculation, drafts are also measured without their embeddings.
    """
    from unisono.tools.evaluation import evaluate as run
    from unisono.tools.evaluation import pictures_withheld

    with _load(path, flags) as llm:
        found = run(llm, problems, max_tokens)
    print("\n".join(found.lines()))
    if found.pictures and found.accept_length is not None:
        with pictures_withheld(), _load(path, flags) as llm:
            blind = run(llm, problems, max_tokens)
        print(f"{blind.acceptance} with the pictures' embeddings withheld from the drafts")
        differ = sum(a != b for a, b in zip(found.answers, blind.answers, strict=True))
        print(f"{differ} of {found.problems} answers differ between the two")
        if differ:
            raise UnisonoError("drafts changed an answer.")


def _asked(**values: Any) -> dict[str, Any]:
    """The sampling flags that were given. Raises typer.BadParameter, before any model is loaded, for a bad one."""
    given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    try:
        SamplingParams(**given)
    except BadRequest as error:
        raise typer.BadParameter(str(error), param_hint=f"--{(error.param or '').replace('_', '-')}") from None
    return given


def _params(llm: LLM, asked: dict[str, Any]) -> SamplingParams:
    """The checkpoint's defaults, what was asked for, and a seed."""
    defaults = llm.engine.default_params()
    names = ("temperature", "top_k", "top_p", "min_p")
    return SamplingParams(**{n: getattr(defaults, n) for n in names} | {"seed": secrets.randbits(53)} | asked)


@contextlib.contextmanager
def _load(path: str, flags: dict[str, Any]) -> Iterator[LLM]:
    with show_progress() as progress:
        progress("start", 0.0)
        from unisono.llm import LLM

        llm = LLM(path, progress=progress, **flags)
    with llm:
        yield llm


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, stop: Callable[[], object] = lambda: False) -> str:
    """Print an answer as it comes, to its end or until ``stop()``; returns it."""
    from unisono.frontend.detokenizer import Detokenizer

    assert llm.tokenizer is not None
    detokenizer = Detokenizer(llm.tokenizer, params, prompt)
    answer = ""
    for delta in llm.stream(prompt, params):
        piece = detokenizer.feed(delta.token_ids, delta.finish)
        answer += piece
        print(piece, end="", flush=True)
        if delta.finish is FinishReason.ABORT:
            raise UnisonoError(f"The engine failed on this request: {delta.error}")
        if stop():
            break
    print(flush=True)
    return answer


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], object]]:
    """Whether Ctrl-C was pressed. It is looked at between tokens, so that the engine is never cut off in a step."""
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, handler)


def _lines() -> Iterator[str]:
    """What the user says, line by line, until Ctrl-D, Ctrl-C or /exit. Piped input shows no prompt."""
    if terminal := sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() line editing and history)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input("› " if terminal else "")
            if line.strip() == "/exit":
                return
            if line.strip():
                yield line
