"""The command line: ``unisono serve | generate | chat | explain | compare | bench``.

Flags carry vLLM's and SGLang's names. This file parses and prints; the work is done by ``llm``, ``server`` and
``tools``, imported inside the command that needs them so that ``unisono --help`` is quick. Exit status: 0, 1 for an
error, 2 for a flag that cannot be honoured.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from unisono import __version__, catalog, hub
from unisono.cli_aliases import translate
from unisono.cli_commands import ModelPath, chat, compare, evaluate, explain, generate
from unisono.cli_config import with_config
from unisono.cli_engine_flags import adapter_flags, engine_flags, memory_flags, model_flags, speculative_flags
from unisono.cli_output import Commands, note, show_progress
from unisono.cli_values import (
    API_KEY,
    LOG_LEVELS,
    checked_key,
    log_level_named,
    read_template,
    speculative_dict,
    strings,
)
from unisono.lora import read_modules
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig


class _EngineCommand(TyperCommand):
    """A command that starts an engine: it also takes a file of flags, and other engines' names of flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        known = {name for p in options for name in (*p.opts, *p.secondary_opts)}
        switches = {name for p in options if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
        lists = {name for p in options if p.multiple for name in p.opts}
        translation = translate(with_config(args, switches), known, switches, lists)
        for text in translation.notes:
            note(text)
        return super().parse_args(ctx, translation.arguments)


app = typer.Typer(
    cls=Commands,
    help="Unisono serves language models. Speculative decoding and CUDA graphs always compose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _http_flags(
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM file of the server's private key.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="PEM file of its certificate: serve HTTPS.")] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="PEM file that clients' certificates are checked by.")
    ] = None,
    ssl_cert_reqs: Annotated[int, typer.Option(help="Clients' certificates: 0 none, 1 optional, 2 required.")] = 0,
    allowed_origins: Annotated[str, typer.Option(help="Of pages that may call the server (CORS), JSON.")] = '["*"]',
    allowed_methods: Annotated[str, typer.Option(help="That such pages may use, JSON.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="That such pages may send, JSON.")] = '["*"]',
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="Such pages may send cookies; needs --allowed-origins.")
    ] = False,
    root_path: Annotated[str, typer.Option(help="Prefix of the paths that a proxy in front of the server takes.")] = "",
) -> None:
    """The server's flags that are fields of ``unisono.server.http_settings.HttpSettings``."""


def _answer_flags(
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
) -> None:
    """The server's flags that say how chat requests are read, and answers."""


def _media_flags(
    allowed_media_domains: Annotated[
        list[str] | None, typer.Option(help="Hosts that pictures are fetched from, *.example.com or *; default: none.")
    ] = None,
    allowed_local_media_path: Annotated[
        str | None, typer.Option(help="Directory of files that requests may name as file:// URLs.")
    ] = None,
    limit_mm_per_prompt: Annotated[
        str | None, typer.Option(help='Pictures and videos of a prompt, JSON; default: {"image": 32, "video": 4}.')
    ] = None,
    mm_processor_kwargs: Annotated[
        str | None, typer.Option(help='Settings for pictures, JSON: {"max_pixels": 1000000}; requests may set others.')
    ] = None,
    media_io_kwargs: Annotated[
        str | None, typer.Option(help='Settings for decoding, JSON: {"video": {"fps": 1}}; requests may set others.')
    ] = None,
    media_max_mb: Annotated[int | None, typer.Option(help="MiB of an encoded picture or video; default: 32.")] = None,
    media_max_pixels: Annotated[
        int | None, typer.Option(help="Pixels of a decoded picture or frame; default: 67108864.")
    ] = None,
    media_max_frames: Annotated[int | None, typer.Option(help="Frames of a video; default: 256.")] = None,
    media_timeout: Annotated[float | None, typer.Option(help="Seconds to fetch a picture; default: 10.")] = None,
    mm_processor_cache_gb: Annotated[
        float | None, typer.Option(help="GiB of preprocessed pictures that are kept; default: 1.")
    ] = None,
    media_processes: Annotated[int | None, typer.Option(help="Pictures that are decoded at once; default: 2.")] = None,
) -> None:
    """The server's flags for pictures: fields of ``unisono.frontend.media.settings.MediaSettings``."""


def _load_flags(
    max_queued_requests: Annotated[int, typer.Option(help="Sequences that may wait; more get 503.")] = 4096,
    max_concurrent_requests_per_key: Annotated[
        int | None, typer.Option(help="Of a key, or without keys of an address; more get 429.")
    ] = None,
    max_requests_per_minute_per_key: Annotated[int | None, typer.Option(help="As above, on average.")] = None,
) -> None:
    """The server's flags that say what it takes on: fields of ``unisono.server.overload.LoadLimits``."""


def _operation_flags(
    metrics_prefix: Annotated[str, typer.Option(help="Of names in /metrics: unisono, vllm or both.")] = "unisono",
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="URL for spans: http://HOST:4318/v1/traces.")] = None,
    allowed_lora_path: Annotated[
        Path | None, typer.Option(help="Directory below which adapters may be loaded while serving; default: none.")
    ] = None,
    profile_dir: Annotated[Path | None, typer.Option(help="Where /stop_profile writes its traces.")] = None,
    restart_engine: Annotated[
        bool | None,
        typer.Option(
            "--restart-engine/--no-restart-engine", help="Start an engine that died again; default: with several."
        ),
    ] = None,
    max_engine_restarts: Annotated[int, typer.Option(help="That often within --engine-restart-window.")] = 5,
    engine_restart_window: Annotated[float, typer.Option(help="Seconds; what dies more often is given up.")] = 600.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which the engine counts as dead; 0: never.")
    ] = 30.0,
) -> None:
    """The server's flags for those who run it."""


def _scale_flags(
    data_parallel_size: Annotated[int, typer.Option(help="Engines of one server, each with a copy of the model.")] = 1,
    distributed_executor_backend: Annotated[
        str, typer.Option(help="Where they run: mp, processes of this machine, or ray, actors of a Ray cluster.")
    ] = "mp",
    ray_address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster, HOST:PORT or auto; implies the backend ray.")
    ] = None,
) -> None:
    """The server's flags that say how many engines there are: fields of ``ReplicaSettings``."""


def _parameters(*groups: Callable[..., None]) -> dict[str, inspect.Parameter]:
    return {name: p for group in groups for name, p in inspect.signature(group, eval_str=True).parameters.items()}


ONE_REQUEST = {"graph_capture": "lazy", "max_num_seqs": 1}
"""Defaults of commands that run one request at a time, and end soon."""


def _engine_command(
    command: Callable[..., None], defaults: Mapping[str, Any] | None = None, **groups: Callable[..., None]
) -> Callable[..., None]:
    """Adds the engine's flags to a command; it receives them, checked, as its first argument, a dict.

    defaults: of flags, where they differ. groups: more flags; each group is a dict that the command takes under the
    group's name.
    """
    flags = _parameters(engine_flags, memory_flags, adapter_flags, model_flags, speculative_flags)
    flags |= {name: flags[name].replace(default=value) for name, value in (defaults or {}).items()}
    more = {name: _parameters(group) for name, group in groups.items()}
    own = [p for name, p in list(_parameters(command).items())[1:] if name not in groups]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in flags}
        for name, group in more.items():
            values[name] = {each: values.pop(each) for each in group}
        if values.get("url") is not None:
            _refuse_engine_flags(given, flags)
        else:
            values["path"] = _engine_settings(given, values["path"] or "tiny")
        command(given, **values)

    added = [*flags.values(), *(p for group in more.values() for p in group.values())]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *added)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _refuse_engine_flags(given: dict[str, Any], flags: Mapping[str, inspect.Parameter]) -> None:
    """Flags of an engine mean nothing to a server that runs already. Raises ConfigError."""
    for name, value in given.items():
        if value != flags[name].default and name != "config":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for an engine in this process; --url talks to one that runs. Drop either.")


def _engine_settings(given: dict[str, Any], path: str) -> str:
    """Make the flags' values, in place, fields of ``EngineConfig``; returns PATH with its revision.

    What can be checked before anything slow is imported is. Raises ConfigError and CheckpointError.
    """
    given["speculative"] = _speculative(
        given.pop("speculative_config"),
        method=given.pop("speculative_method"),
        model=given.pop("speculative_model"),
        num_speculative_tokens=given.pop("num_speculative_tokens"),
        topk=given.pop("speculative_topk"),
        num_draft_tokens=given.pop("speculative_tree_nodes"),
        draft_quantization=given.pop("speculative_draft_quantization"),
    )
    given["lora_modules"] = read_modules(given["lora_modules"] or ())
    _check_names(given)
    given.pop("config")  # it was read before the flags were
    if revision := given.pop("revision"):
        path = _with_revision(path, revision)
    _check_files(path, given)
    return path


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


def _check_files(path: str, given: dict[str, Any]) -> None:
    """Whether what flags name is there, also asked before anything slow is imported. Raises CheckpointError."""
    catalog.find_directory(path)
    if (tokenizer := given["tokenizer"]) is not None:
        if not catalog.resolve_name(tokenizer).exists():
            raise CheckpointError(f"--tokenizer {tokenizer} does not exist: give a directory.")
        given["tokenizer"] = str(catalog.resolve_name(tokenizer))


def _with_revision(path: str, revision: str) -> str:
    if Path(path).exists() or path in catalog.bundled:
        raise ConfigError(f"--revision {revision}: {path} is a directory, which has no revisions; leave it out.")
    return f"{path}@{revision}"


def _speculative(text: str | None, **short: Any) -> SpeculativeConfig | None:
    """The speculative config of the JSON and of the short flags, which win. Raises ConfigError."""
    given = speculative_dict(text) if text else {}
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


def _check_answers(answers: dict[str, Any]) -> None:
    """Whether there are the parsers that flags name; keep what ``ServerSettings`` has. Raises ConfigError."""
    from unisono.frontend.reasoning import parser_named
    from unisono.server.tools.formats import format_named

    parser_named(answers["reasoning_parser"])
    format_named(answers["tool_call_parser"])
    del answers["enable_auto_tool_choice"]


def _parts(http: dict[str, Any], load: dict[str, Any], scale: dict[str, Any]) -> dict[str, Any]:
    """The parts of ``ServerSettings`` that these flags are fields of. Raises ConfigError."""
    from unisono.server.http_settings import HttpSettings
    from unisono.server.overload import LoadLimits
    from unisono.server.replicas.plan import ReplicaSettings

    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        http[name] = strings("--" + name.replace("_", "-"), http[name])
    return {
        "http": HttpSettings(**http),
        "load": LoadLimits.of(**load),
        "scale": ReplicaSettings.of(**scale),
    }


def serve(
    flags: dict[str, Any],
    http: dict[str, Any],
    answers: dict[str, Any],
    load: dict[str, Any],
    media: dict[str, Any],
    operation: dict[str, Any],
    scale: dict[str, Any],
    path: ModelPath = "tiny",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model: one name or several; default: PATH as given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of dummy weights.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY, help="Require Authorization: Bearer KEY on /v1.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys: lines of NAME sha256:DIGEST.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file, or a template itself, instead of the checkpoint's.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for running requests to end on Ctrl-C.")] = 30.0,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LOG_LEVELS)}.")] = "info",
) -> None:
    """Serve the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models."""
    from unisono.frontend.media.settings import MediaSettings
    from unisono.server.process_title import hide

    _check_answers(answers)  # these raise before anything slow is imported
    pictures = MediaSettings.of(**media)
    hide(api_key or "")
    key, template, level = checked_key(api_key), read_template(chat_template), log_level_named(log_level)
    with show_progress() as progress:
        progress("start", 0.0)
        from unisono.config import EngineConfig
        from unisono.server.run import ServerSettings
        from unisono.server.run import serve as run_server

        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        settings = ServerSettings(
            model_path=catalog.resolve_name(path),
            names=tuple(served_model_name or (path.partition("@")[0] if hub.is_id(path) else path,)),
            host=host,
            port=port,
            api_key=key,
            api_key_file=api_key_file,
            chat_template=template,
            drain_timeout=drain_timeout,
            media=pictures,
            **_parts(http, load, scale),
            tokenizer=Path(flags["tokenizer"]) if flags["tokenizer"] else None,
            **answers,
            **operation,
        )
        run_server(EngineConfig(model=path, seed=seed, **flags), settings, progress)


app.command(cls=_EngineCommand)(
    _engine_command(
        serve,
        http=_http_flags,
        answers=_answer_flags,
        load=_load_flags,
        media=_media_flags,
        operation=_operation_flags,
        scale=_scale_flags,
    )
)
app.command(cls=_EngineCommand)(_engine_command(generate, ONE_REQUEST))
app.command(cls=_EngineCommand)(_engine_command(chat, ONE_REQUEST))
app.command(cls=_EngineCommand)(_engine_command(explain))
app.command(name="eval", cls=_EngineCommand)(_engine_command(evaluate))
app.command()(compare)


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
