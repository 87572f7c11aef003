"""The command line: ``unisono serve | generate | chat | explain | compare | eval | place-experts | bench |
train-draft | pack-kernels``.

Flags have vLLM's and SGLang's names. This file parses and prints; ``entrypoints``, ``http`` and ``tools`` do the work.
They are imported inside the command that needs them, so that ``unisono --help`` is quick. Exit status: 0, 1 for an
error, 2 for a flag that cannot be honoured.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono import __version__
from unisono.cli.aliases import translate
from unisono.cli.commands import ModelPath, chat, compare, evaluate, explain, generate
from unisono.cli.config_file import with_config
from unisono.cli.engine_flags import ENGINE_FLAGS
from unisono.cli.kernels import pack_kernels
from unisono.cli.server_flags import answer_flags, http_flags, load_flags, media_flags, operation_flags, scale_flags
from unisono.config import catalog, env, hub
from unisono.config.preflight.model import check_engine_model, check_model, read_overrides, with_method
from unisono.console.help import HelpfulCommand, group_of
from unisono.console.output import CommandGroup, note, show_progress
from unisono.console.values import (
    LOG_LEVELS,
    checked_key,
    log_level_named,
    read_template,
    speculative_dict,
    strings,
    template_variables,
)
from unisono.tools.place_experts import place_experts
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig
from unisono.types.lora import read_modules


class _EngineCommand(HelpfulCommand):
    """A command that starts an engine. It also takes a file of flags, and other engines' flag names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        known = {name for p in options for name in (*p.opts, *p.secondary_opts)}
        switches = {name for p in options if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
        lists = {name for p in options if p.multiple for name in p.opts}
        translation = translate(with_config(args, switches), known, switches, lists)
        for text in (*(env.unread() if ctx.info_name == "serve" else ()), *translation.notes):
            note(text)
        return super().parse_args(ctx, translation.arguments)


def _bench() -> typer.Typer:
    from unisono.tools.bench.latency import app

    return app


def _train_draft() -> typer.Typer:
    from unisono.tools.draft_training.command import app

    return app


LAZY: Mapping[str, Callable[[], typer.Typer]] = {"bench": _bench, "train-draft": _train_draft}
"""Commands that are imported only when they run or are completed."""


class _Root(CommandGroup):
    """The program's commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        lazy = LAZY.get(name or "")
        if name == "train-draft" and (target := _value_of("--target", rest)) is not None:
            check_model(target)  # before its module imports torch
        return name, typer.main.get_command(lazy()) if lazy else command, rest


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The value of a flag in unparsed arguments; None without one."""
    for place, argument in enumerate(arguments):
        if argument == flag:
            return arguments[place + 1] if place + 1 < len(arguments) else None
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


app = typer.Typer(
    cls=_Root,
    help="Unisono serves language models. Speculative decoding and CUDA graphs always compose.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)


def _parameters(*groups: Callable[..., None]) -> dict[str, inspect.Parameter]:
    return {name: p for group in groups for name, p in inspect.signature(group, eval_str=True).parameters.items()}


NEED_TEXT = (generate, chat, evaluate)
"""Commands that need a tokenizer."""

ONE_REQUEST = {"graph_capture": "lazy", "max_num_seqs": 1}
"""Defaults of short-lived commands that run one request at a time."""


def _engine_command(
    command: Callable[..., None],
    own_group: str,
    defaults: Mapping[str, Any] | None = None,
    **groups: Callable[..., None],
) -> Callable[..., None]:
    """Add the engine's flags to a command; it receives them, checked, as a dict in its first argument.

    own_group: help group of the command's own flags. defaults: values that differ from the flags' defaults. groups:
    more flags; the command takes each group as a dict under the group's name.
    """
    flags = _parameters(*ENGINE_FLAGS)
    flags |= {name: flags[name].replace(default=value) for name, value in (defaults or {}).items()}
    more = {name: _parameters(group) for name, group in groups.items()}
    own = [p for name, p in list(_parameters(command).items())[1:] if name not in groups]
    for parameter in own:
        parameter.annotation.__metadata__[0].rich_help_panel = group_of(parameter.name, own_group)
    for parameter in (*flags.values(), *own):
        _add_completion(parameter)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        settings = {name: values.pop(name) for name in flags}
        for name, group in more.items():
            values[name] = {each: values.pop(each) for each in group}
        if values.get("url") is not None:
            _refuse_engine_flags(settings, flags)
        else:
            weights = not values.get("dry_run", False)
            values["path"] = _engine_settings(settings, values["path"] or "tiny", command in NEED_TEXT, weights)
        command(settings, **values)

    added = [*flags.values(), *(p for group in more.values() for p in group.values())]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *added)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _add_completion(parameter: inspect.Parameter) -> None:
    """Let shells complete the values of a parameter, if they are known."""
    named = {
        "path": lambda: [name for name, home in catalog.bundled.items() if (home / "tokenizer.json").exists()],
        "speculative_method": lambda: catalog.drafters.names,
        "attention_backend": lambda: ("auto", *catalog.attention.names),
        "quantization": lambda: catalog.formats.names,
        "dtype": lambda: ("auto", "bfloat16", "float16", "float32"),
        "kv_cache_dtype": lambda: ("auto", "fp8", "fp8_e4m3"),
        "load_format": lambda: ("auto", "dummy"),
        "graphs": lambda: ("auto", "full", "segmented", "off"),
        "graph_capture": lambda: ("start", "lazy"),
        "scheduling_policy": lambda: ("fcfs", "priority"),
        "role": lambda: ("prefill", "decode", "both"),
        "device": lambda: ("auto", "cpu", "cuda"),
        "log_level": lambda: LOG_LEVELS,
    }
    if (values := named.get(parameter.name)) is not None:
        info = parameter.annotation.__metadata__[0]
        info.autocompletion = lambda incomplete: [one for one in values() if one.startswith(incomplete)]


def _refuse_engine_flags(settings: dict[str, Any], flags: Mapping[str, inspect.Parameter]) -> None:
    """Refuse engine flags together with --url: the server runs already. Raises ConfigError."""
    for name, value in settings.items():
        if value != flags[name].default and name != "config":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for an engine in this process; --url talks to one that runs. Drop either.")


def _engine_settings(settings: dict[str, Any], path: str, needs_text: bool, weights: bool) -> str:
    """Convert the flags' values, in place, to fields of ``EngineConfig``; returns PATH with its revision.

    needs_text: the command needs a tokenizer. weights: download the weights of a hub id. Runs every check that needs no
    slow import. Raises ConfigError and CheckpointError.
    """
    settings["speculative"] = _speculative(
        settings.pop("speculative_config"),
        method=settings.pop("speculative_method"),
        model=settings.pop("speculative_model"),
        num_speculative_tokens=settings.pop("num_speculative_tokens"),
        topk=settings.pop("speculative_topk"),
        num_draft_tokens=settings.pop("speculative_tree_nodes"),
        draft_quantization=settings.pop("speculative_draft_quantization"),
    )
    settings["lora_modules"] = read_modules(settings["lora_modules"] or ())
    settings["hf_overrides"] = read_overrides("--hf-overrides", settings["hf_overrides"] or {})
    _check_names(settings)
    settings.pop("config")  # with_config has read it
    if revision := settings.pop("revision"):
        path = _with_revision(path, revision)
    _check_tokenizer(settings)
    from unisono.config import EngineConfig

    check_engine_model(EngineConfig(path, **settings), needs_text, weights)
    return path


def _check_names(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a name that the catalog lacks, before anything slow is imported."""
    speculative, backend = settings["speculative"], settings["attention_backend"]
    named = {
        "--quantization": (settings["quantization"], catalog.formats),
        "--speculative-method": (speculative.method if speculative else None, catalog.drafters),
        "--attention-backend": (None if backend == "auto" else backend, catalog.attention),
    }
    for flag, (name, registry) in named.items():
        if name is not None and name not in registry:
            names = ("auto", *registry.names) if registry is catalog.attention else registry.names
            raise ConfigError(f"{flag} {name!r}: unknown {registry.kind}. Supported: {', '.join(names)}.")


def _check_tokenizer(settings: dict[str, Any]) -> None:
    """Resolve --tokenizer to an existing directory. Raises CheckpointError."""
    if (tokenizer := settings["tokenizer"]) is not None:
        if not catalog.resolve_name(tokenizer).exists():
            raise CheckpointError(f"--tokenizer {tokenizer} does not exist: give a directory.")
        settings["tokenizer"] = str(catalog.resolve_name(tokenizer))


def _with_revision(path: str, revision: str) -> str:
    if Path(path).exists() or path in catalog.bundled:
        raise ConfigError(f"--revision {revision}: {path} is a directory, which has no revisions; leave it out.")
    return f"{path}@{revision}"


def _speculative(text: str | None, **short: Any) -> SpeculativeConfig | None:
    """The speculative config of the JSON and of the short flags, which take precedence. Raises ConfigError."""
    settings = speculative_dict(text) if text else {}
    settings |= {name: value for name, value in short.items() if value is not None}
    return SpeculativeConfig.parse(with_method(settings)) if settings else None


def _print_version(ctx: typer.Context, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        print(f"unisono {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _check_answers(answers: dict[str, Any]) -> None:
    """Check and convert the flags of answers, in place, to fields of ``ServerSettings``. Raises ConfigError."""
    from unisono.text.reasoning import parser_named
    from unisono.text.tool_parsers.formats import format_named

    parser_named(answers["reasoning_parser"])
    format_named(answers["tool_call_parser"])
    answers["default_chat_template_kwargs"] = template_variables(answers["default_chat_template_kwargs"])
    del answers["enable_auto_tool_choice"]


def _parts(http: dict[str, Any], load: dict[str, Any], scale: dict[str, Any]) -> dict[str, Any]:
    """The parts of ``ServerSettings`` with these flags as fields. Raises ConfigError."""
    from unisono.cluster.replicas.plan import ReplicaSettings
    from unisono.http.limits.overload import LoadLimits
    from unisono.http.settings import HttpSettings

    http["allowed_hosts"] = tuple(http["allowed_hosts"] or ())
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
        list[str] | None, typer.Option(help="Model name in the API, one or several; default: PATH.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of dummy weights; the seed of an answer is a field of its request.")
    ] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar=env.API_KEY.name, help="Require the header Authorization: Bearer KEY.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of API keys, lines NAME sha256:DIGEST.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Chat template: a Jinja file or the template itself; default: the checkpoint's.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish after Ctrl-C.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help=f"Log level: {', '.join(LOG_LEVELS)}.")] = "info",
) -> None:
    """Serve the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models."""
    from unisono.http.security.process_title import hide
    from unisono.media.settings import MediaSettings

    _check_answers(answers)  # these raise before anything slow is imported
    media_settings = MediaSettings.of(**media)
    hide(api_key or "")
    key, template, level = checked_key(api_key), read_template(chat_template), log_level_named(log_level)
    with show_progress() as progress:
        progress("start", 0.0)
        from unisono.config import EngineConfig
        from unisono.http.server import ServerSettings
        from unisono.http.server import serve as run_server

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
            media=media_settings,
            **_parts(http, load, scale),
            tokenizer=Path(flags["tokenizer"]) if flags["tokenizer"] else None,
            **answers,
            **operation,
        )
        run_server(EngineConfig(model=path, seed=seed, **flags), settings, progress)


app.command(cls=_EngineCommand)(
    _engine_command(
        serve,
        "server",
        http=http_flags,
        answers=answer_flags,
        load=load_flags,
        media=media_flags,
        operation=operation_flags,
        scale=scale_flags,
    )
)
app.command(cls=_EngineCommand)(_engine_command(generate, "request", ONE_REQUEST))
app.command(cls=_EngineCommand)(_engine_command(chat, "request", ONE_REQUEST))
app.command(cls=_EngineCommand)(_engine_command(explain, "output"))
app.command(name="eval", cls=_EngineCommand)(_engine_command(evaluate, "output"))
app.command(cls=HelpfulCommand)(compare)
app.command(cls=HelpfulCommand)(place_experts)
app.command()(pack_kernels)


@app.command()
def bench() -> None:
    """Measure latency and throughput: see `unisono bench --help`."""


@app.command()
def train_draft() -> None:
    """Train a draft head for a model from its own outputs: see `unisono train-draft --help`."""
