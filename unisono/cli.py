"""The command line: ``unisono serve | generate | chat | explain | bench``.

Flags carry vLLM's and SGLang's names. This file parses and prints; the work is done by ``llm``, ``server`` and
``tools``, imported inside the command that needs them so that ``unisono --help`` is quick. Exit status: 0, 1 for an
error, 2 for a flag that cannot be honoured.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from unisono import __version__, catalog
from unisono.cli_aliases import translate
from unisono.types import BadRequest, ConfigError, FinishReason, SamplingParams, SpeculativeConfig, UnisonoError

if TYPE_CHECKING:
    from unisono.llm import LLM

SHORT_COLUMNS = ("program", "rows", "width", "features", "kind", "breaks", "MiB", "ms", "capture")

stdout = Console()
stderr = Console(stderr=True)


class _Commands(TyperGroup):
    """Ends every command that raises on purpose with one red line and the right status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnisonoError as error:
            _complain(error)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)


def _complain(error: UnisonoError) -> None:
    stderr.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)


class _EngineCommand(TyperCommand):
    """A command that starts an engine: it also takes the names that other engines give to flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        known = {name for p in options for name in (*p.opts, *p.secondary_opts)}
        switches = {name for p in options if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
        translation = translate(args, known, switches)
        for note in translation.notes:
            stderr.print(f"[dim]{escape(note)}[/]", soft_wrap=True, highlight=False)
        return super().parse_args(ctx, translation.arguments)


app = typer.Typer(
    cls=_Commands,
    help="Unisono serves language models. Speculative decoding and CUDA graphs always compose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelPath = Annotated[
    str, typer.Argument(metavar="[PATH]", help="A Hugging Face checkpoint directory or a bundled name.")
]


def _engine_flags(
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 (half) or float32.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Context: prompt and output together, in tokens.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use.")] = 0.9,
    snapshot_share: Annotated[
        float, typer.Option(help="Of models with recurrent layers: share of the KV cache for prefix snapshots.")
    ] = 0.1,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per pass.")] = None,
    max_stall_ms: Annotated[
        float, typer.Option(help="Milliseconds of prompt passes between two rounds of running requests.")
    ] = 50.0,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights; needs config.json only.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(catalog.formats.names)}; default: the checkpoint's. fp8 quantises a plain one."),
    ] = None,
    attention_backend: Annotated[str, typer.Option(help=f"auto, {', '.join(catalog.attention.names)}.")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Capture no graph.")] = False,
    graphs: Annotated[
        str, typer.Option(help="auto, full, segmented or off; or per program: extend=segmented,round=full.")
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile pieces of captured passes.")] = False,
    graph_memory: Annotated[float | None, typer.Option(help="GiB that graphs may take.")] = None,
    logprobs_mode: Annotated[
        str, typer.Option(help="raw_logprobs: the model's own; processed_logprobs: what tokens are drawn from.")
    ] = "raw_logprobs",
    max_logprobs: Annotated[int, typer.Option(help="Log-probabilities per token at most; -1: any number.")] = 20,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs, or priority: lower values first.")] = "fcfs",
    enable_prompt_embeds: Annotated[
        bool, typer.Option("--enable-prompt-embeds", help="Serve prompt_embeds and embedding_overrides.")
    ] = False,
    enable_return_hidden_states: Annotated[
        bool, typer.Option("--enable-return-hidden-states", help="Serve return_hidden_states.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    speculative_config: Annotated[
        str | None, typer.Option(help='JSON: {"method": …, "model": PATH, "num_speculative_tokens": k, …}.')
    ] = None,
    speculative_method: Annotated[
        str | None, typer.Option(help=f"Short for its method: {', '.join(catalog.drafters.names)}.")
    ] = None,
    speculative_model: Annotated[str | None, typer.Option(help="Short for its model: a checkpoint directory.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Short for its k: drafts per round.")] = None,
    speculative_topk: Annotated[int | None, typer.Option(help="Short for its topk: children of a tree's node.")] = None,
    speculative_tree_nodes: Annotated[
        int | None, typer.Option(help="Short for its num_draft_tokens: nodes of a tree of drafts.")
    ] = None,
    speculative_draft_quantization: Annotated[
        str | None, typer.Option(help="Short for its draft_quantization: auto, fp8 or none.")
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse prompts' KV pages.")
    ] = True,
) -> None:
    """The flags of every command that starts an engine: fields of ``unisono.config.EngineConfig``."""


def _with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the engine's flags to a command; it receives them as its first argument, a dict."""
    flags = inspect.signature(_engine_flags, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in flags}
        given["speculative"] = _speculative(
            given.pop("speculative_config"),
            method=given.pop("speculative_method"),
            model=given.pop("speculative_model"),
            num_speculative_tokens=given.pop("num_speculative_tokens"),
            topk=given.pop("speculative_topk"),
            num_draft_tokens=given.pop("speculative_tree_nodes"),
            draft_quantization=given.pop("speculative_draft_quantization"),
        )
        _check_names(given)
        command(given, **values)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *flags.values())]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _check_names(given: dict[str, Any]) -> None:
    """Whether the catalog has what flags name; asked before anything slow is imported. Raises ConfigError."""
    speculative, backend = given["speculative"], given["attention_backend"]
    named = {
        "--quantization": (given["quantization"], catalog.formats),
        "--speculative-method": (speculative.method if speculative else None, catalog.drafters),
        "--attention-backend": (None if backend == "auto" else backend, catalog.attention),
    }
    for flag, (name, registry) in named.items():
        if name is not None and name not in registry:
            raise ConfigError(f"{flag} {name!r}: unknown {registry.kind}. Supported: {', '.join(registry.names)}.")


def _speculative(text: str | None, **short: Any) -> SpeculativeConfig | None:
    """The speculative config of the JSON and of the short flags, which win. Raises ConfigError."""
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--speculative-config {text!r}: give a JSON object.")
    given |= {name: value for name, value in short.items() if value is not None}
    return SpeculativeConfig.parse(given) if given else None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"unisono {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command(cls=_EngineCommand)
@_with_engine_flags
def serve(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model (repeatable); default: PATH as given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of dummy weights.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="UNISONO_API_KEY", help="Require Authorization: Bearer KEY on /v1.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How answers tell thinking from content: qwen3, …; none: not at all.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes tool calls: hermes, mistral, …; default: by its template.")
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Accepted: tools may always be called.")
    ] = False,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Render bodies' chat_template in a sandbox.")
    ] = False,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for running requests to end on Ctrl-C.")] = 30.0,
    metrics_prefix: Annotated[str, typer.Option(help="Of names in /metrics: unisono, vllm or both.")] = "unisono",
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="URL for spans: http://HOST:4318/v1/traces.")] = None,
    profile_dir: Annotated[Path | None, typer.Option(help="Where /stop_profile writes its traces.")] = None,
) -> None:
    """Serve the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models."""
    from unisono.server.reasoning import parser_named
    from unisono.server.tools.formats import format_named

    parser_named(reasoning_parser)  # these raise before anything slow is imported
    format_named(tool_call_parser)
    from unisono.config import EngineConfig
    from unisono.server.run import ServerSettings
    from unisono.server.run import serve as run_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    config = EngineConfig(model=path, seed=seed, **flags)
    settings = ServerSettings(
        model_path=catalog.resolve_name(path),
        names=tuple(served_model_name or (path,)),
        host=host,
        port=port,
        api_key=api_key or None,  # an empty environment variable is none
        drain_timeout=drain_timeout,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        trust_request_chat_template=trust_request_chat_template,
        metrics_prefix=metrics_prefix,
        otlp_traces_endpoint=otlp_traces_endpoint,
        profile_dir=profile_dir,
    )
    with _bars() as progress:
        run_server(config, settings, progress)


MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most; default: to the context's end.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
SampleSeed = Annotated[int | None, typer.Option(help="Repeats an answer; default: a new one, printed.")]


@app.command(cls=_EngineCommand)
@_with_engine_flags
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


@app.command(cls=_EngineCommand)
@_with_engine_flags
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
                _complain(error)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


@app.command(cls=_EngineCommand)
@_with_engine_flags
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
    stdout.print(_table("Settings", ("setting", "value"), list(info["settings"].items())))  # type: ignore[attr-defined]
    stdout.print(_table("Graph memory", ("figure", "value"), list(info["graph_memory"].items())))  # type: ignore[attr-defined]
    if costs := info["speculation"]["round_ms"]:  # type: ignore[index]
        columns = list(costs[0])
        stdout.print(_table("Rounds: ms on padding, by drafts", columns, [[row[c] for c in columns] for row in costs]))
    tables = {"Decisions": info["decisions"], "Experts": info["experts"]}
    tables["Passes"] = [_readable(row) for row in info["graphs"]]  # type: ignore[attr-defined]
    for title, rows in tables.items():
        if not rows:
            continue
        # Only what some row has: most runs have no eager pass, so no reason and no advice.
        columns = list(dict.fromkeys(key for row in rows for key in row if row[key] != ""))  # type: ignore[attr-defined]
        stdout.print(_table(title, columns, [[row.get(c, "") for c in columns] for row in rows]))  # type: ignore[attr-defined]


@app.command(name="eval", cls=_EngineCommand)
@_with_engine_flags
def evaluate(
    flags: dict[str, Any],
    path: ModelPath = "tiny",
    problems: Annotated[int, typer.Option(min=1, max=500, help="Held-out word problems to ask.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
) -> None:
    """Accuracy on the bundled model's held-out problems, tokens a second, and how drafts fare."""
    from unisono.tools.evaluation import evaluate as run

    with _load(path, flags) as llm:
        for line in run(llm, problems, max_tokens).lines():
            print(line)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure latency and throughput: see `unisono bench --help`."""
    from unisono.tools.bench import app as bench_app

    bench_app(args=context.args, prog_name="unisono bench")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def train_draft(context: typer.Context) -> None:
    """Train a draft head for a model from its own outputs: see `unisono train-draft --help`."""
    from unisono.tools.draft_training.command import app as train_app

    train_app(args=context.args, prog_name="unisono train-draft")


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
    from unisono.llm import LLM

    with _bars() as progress:
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


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, float], None]]:
    """A progress callback that draws one bar per stage, on a terminal only; a bar goes when its stage is done."""
    shown: dict[str, Progress] = {}

    def report(stage: str, share: float) -> None:
        if stage not in shown and share < 1:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            shown[stage] = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
            shown[stage].add_task(stage.capitalize(), total=1.0)
            shown[stage].start()
        if stage in shown:
            shown[stage].update(shown[stage].task_ids[0], completed=share)
            if share >= 1:
                shown.pop(stage).stop()

    try:
        yield report
    finally:
        for bar in shown.values():
            bar.stop()


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the passes' table with bytes as MiB and times to a tenth."""
    names = {"bytes": ("MiB", 1 << 20), "ms": ("ms", 1), "capture_ms": ("capture", 1)}
    shown = {}
    for key, value in row.items():
        name, unit = names.get(key, (key, None))
        shown[name] = value if unit is None else f"{value / unit:.1f}"
    return shown


def _table(title: str, columns: Any, rows: Any) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=column in SHORT_COLUMNS)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
