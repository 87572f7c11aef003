"""``--help``: flags in groups, with whole names at any width.

``--help=GROUP``, ``=all``, ``=FLAG`` and ``=WORD``.

``cli`` sets the group of each flag (``rich_help_panel``). Commands use :class:`HelpfulCommand`, or the group class of
``console/output.py``.
"""

from __future__ import annotations

import difflib
import inspect
import pydoc
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from unisono.config.flag_aliases import ACCEPTED, RENAMED, SHORT, SWITCHES
from unisono.config.flag_effects import NOTED_SWITCHES, NOTED_VALUES, REFUSED
from unisono.types import ConfigError

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "request": ("Prompt, sampling, seed", ()),
    "server": ("Address, names, keys, template, logs", ()),
    "output": ("What is measured and printed", ()),
    "general": ("Flags of this command", ()),
    "target": ("Server that is measured", ()),
    "engine": ("Engine that is measured", ()),
    "mix": ("Requests: data set, lengths, prefixes", ()),
    "rate": ("Request rate and concurrency", ()),
    "sampling": ("Sampling parameters of the requests", ()),
    "report": ("Percentiles, goodput, files", ()),
    "scene": ("Scenario stall", ()),
    "answers": (
        "Reasoning and tool calls of chat answers, unknown fields of requests",
        (
            "reasoning_parser", "tool_call_parser", "default_chat_template_kwargs", "enable_auto_tool_choice",
            "trust_request_chat_template", "allow_unknown_fields", "ignore_hosted_tools",
        ),
    ),
    "model": (
        "Weights, dtype, context, tokenizer, device",
        (
            "dtype", "quantization", "max_model_len", "load_format", "tokenizer", "generation_config", "revision",
            "hf_overrides", "config", "device",
        ),
    ),
    "memory": (
        "KV cache: size, dtype, prefix cache, pages in host memory and files",
        (
            "gpu_memory_utilization", "kv_cache_dtype", "num_pages", "enable_prefix_caching", "snapshot_share",
            "snapshot_points", "cpu_offload_gb", "cpu_offload_ratio", "kv_offload_dir", "kv_offload_dir_gb",
            "enable_sleep_mode",
        ),
    ),
    "scheduling": (
        "Requests at once, prompt chunks, priorities",
        ("max_num_seqs", "max_num_batched_tokens", "max_stall_ms", "enable_mixed_chunk", "scheduling_policy"),
    ),
    "speculation": (
        "Drafts",
        (
            "speculative_config", "speculative_method", "speculative_model", "num_speculative_tokens",
            "speculative_topk", "speculative_tree_nodes", "speculative_draft_quantization", "max_forced_tokens",
        ),
    ),
    "graphs": (
        "CUDA graphs, torch.compile, attention kernels",
        ("enforce_eager", "graphs", "graph_capture", "graph_memory", "compile", "attention_backend"),
    ),
    "features": (
        "Log-probabilities, embeddings and hidden states in requests",
        (
            "logprobs_mode", "max_logprobs", "enable_prompt_embeds", "enable_return_hidden_states",
            "enable_return_routed_experts",
        ),
    ),
    "parallel": (
        "Several GPUs for one model; several engines",
        (
            "tensor_parallel_size", "enable_expert_parallel", "expert_placement", "enable_dp_attention", "tp_reduce",
            "data_parallel_size", "distributed_executor_backend", "ray_address",
        ),
    ),
    "disaggregation": (
        "Separate engines for prefill and decode",
        ("role", "transfer_listen", "prefill_urls", "transfer_backend", "transfer_timeout"),
    ),
    "adapters": (
        "LoRA",
        (
            "enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype",
            "allowed_lora_path",
        ),
    ),
    "media": (
        "Images and videos",
        (
            "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "allowed_media_domains",
            "allowed_local_media_path", "media_max_mb", "media_max_pixels", "media_max_frames", "media_timeout",
            "media_processes", "mm_processor_cache_gb", "mm_encoder_cache_gb",
        ),
    ),
    "http": (
        "TLS, CORS, host names, proxies",
        (
            "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "allowed_hosts", "allowed_origins",
            "allowed_methods", "allowed_headers", "allow_credentials", "root_path", "timeout_keep_alive",
        ),
    ),
    "limits": (
        "Queue and rate limits",
        ("max_queued_requests", "max_concurrent_requests_per_key", "max_requests_per_minute_per_key"),
    ),
    "operations": (
        "Metrics, traces, profiles, restarts",
        (
            "metrics_prefix", "otlp_traces_endpoint", "per_request_spec_decode_metrics", "profile_dir",
            "restart_engine", "max_engine_restarts", "engine_restart_window", "heartbeat_timeout",
        ),
    ),
}  # fmt: skip
"""Groups of flags in order: title, and names of the parameters.

A group without names is for flags that a command declares itself.
"""

GENERAL = "general"

VLLM_GROUPS = {
    "cache": "memory", "compilation": "graphs", "frontend": "server", "load": "model", "lora": "adapters",
    "multimodal": "media", "observability": "operations", "scheduler": "scheduling", "speculative": "speculation",
}  # fmt: skip
"""vLLM's groups (``--help=CacheConfig``) -> the group with their flags."""

MOST_USED = (
    "prompt", "max_tokens", "temperature", "seed", "url", "system", "host", "port", "served_model_name", "api_key",
    "dtype", "quantization", "max_model_len", "gpu_memory_utilization", "max_num_seqs", "tensor_parallel_size",
    "model", "base_url", "dataset_name", "num_prompts", "random_input_len", "random_output_len", "request_rate",
    "max_concurrency", "batch", "output_len", "speculative_method", "speculative_config", "reasoning_parser",
    "tool_call_parser", "config", "json",
)  # fmt: skip
"""Parameters that ``--help`` shows above the list of groups."""

FEW = 16
"""``--help`` shows all flags of a command with at most this many."""

COLUMN = 34
"""Column of descriptions, on wide terminals."""

_KINDS = {"str": "TEXT", "int": "INT", "float": "FLOAT", "bool": "", "path": "PATH", "list[str]": "TEXT"}


def group_of(name: str, own: str = GENERAL) -> str:
    """The group of a parameter. own: the group of a command's own parameters."""
    return next((group for group, (_, names) in GROUPS.items() if name in names), own)


def _effect(flag: str) -> str | None:
    """A sentence about another engine's flag that has no equivalent; None for other names."""
    if flag in ACCEPTED:
        return f"{flag} takes only {', '.join(ACCEPTED[flag][0])}: {ACCEPTED[flag][1]}."
    if (reason := {**NOTED_VALUES, **NOTED_SWITCHES}.get(flag)) is not None:
        return f"{flag} has no effect: {reason}."
    return f"{flag} is not supported: {REFUSED[flag]}." if flag in REFUSED else None


class HelpfulCommand(TyperCommand):
    """A command with ``--help`` in groups, and ``--help=GROUP``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        for argument, following in pairwise([*own, ""]):
            if argument.startswith("--help="):
                topic = argument.partition("=")[2]
            elif argument in ctx.help_option_names and following in (*GROUPS, "all"):
                topic = following
            else:
                continue
            if not ctx.resilient_parsing:
                Page(self, ctx).show(topic)
                ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        Page(self, ctx).overview()


class Page:
    """Writer of a command's help. console: default: standard output, as wide as the terminal."""

    def __init__(self, command: Any, ctx: Any, console: Console | None = None) -> None:
        self._command, self._ctx = command, ctx
        self._console = console or Console()
        listed = [p for p in command.get_params(ctx) if p.param_type_name == "option" and not p.hidden]
        self._options = [p for p in listed if p.name != "help" or len(listed) <= FEW]
        self._groups: dict[str, list[Any]] = {}
        for option in self._options:
            self._groups.setdefault(getattr(option, "rich_help_panel", None) or group_of(option.name), []).append(
                option
            )
        order = list(GROUPS)
        self._groups = dict(sorted(self._groups.items(), key=lambda each: order.index(each[0])))

    # ---- pages ----------------------------------------------------------------------------------

    def overview(self) -> None:
        """Print usage, arguments, the most used flags, and the groups."""
        self._head()
        if len(self._options) <= FEW:
            self._section("Flags", self._options)
            return
        by_name = {option.name: option for option in self._options}
        used = [by_name[name] for name in MOST_USED if name in by_name]
        self._section("Most used flags", [one for one in used if one.name != "seed" or "temperature" in by_name])
        self._title("Groups")
        for name, options in self._groups.items():
            self._row(Text(name, "bold cyan"), f"{GROUPS[name][0]} ({len(options)})", 18)
        self._print("")
        path = self._ctx.command_path
        self._row(Text(f"{path} --help=GROUP"), "the flags of one group", COLUMN)
        self._row(Text(f"{path} --help=all"), f"all {len(self._options)} flags", COLUMN)
        self._row(Text(f"{path} --help=WORD"), "flags by name, or by a word of their name or description", COLUMN)

    def commands(self) -> None:
        """Print the commands of a group and its own flags."""
        self._head()
        self._title("Commands")
        for name in self._command.list_commands(self._ctx):
            command = self._command.get_command(self._ctx, name)
            if command is not None and not command.hidden:
                paragraph = inspect.cleandoc(command.help or "").split("\n\n")[0]
                self._row(Text(name, "bold cyan"), " ".join(paragraph.split()), 18)
        self._print("")
        self._section("Flags", self._options)

    def show(self, topic: str) -> None:
        """Print the flags that match ``--help=TOPIC``. Raises ConfigError if there are none."""
        word = topic.lstrip("-").lower().replace("_", "-")
        group = word.removesuffix("config")
        group = VLLM_GROUPS.get(group, group)
        if word == "listgroup":
            self._console.print("\n".join(self._groups), highlight=False)
        elif word == "page":
            self._paged()
        elif word == "all":
            self._all()
        elif group in self._groups:
            self._section(self._titled(group), self._groups[group])
        else:
            self._search(topic, word)

    def _all(self) -> None:
        self._head()
        for name, options in self._groups.items():
            self._section(self._titled(name), options)

    def _paged(self) -> None:
        """Show all flags, in a pager on a terminal."""
        if not sys.stdout.isatty():
            return self._all()
        with self._console.capture() as captured:
            self._all()
        pydoc.pager(Text.from_ansi(captured.get()).plain)
        return None

    def _search(self, topic: str, word: str) -> None:
        flag = "--" + word
        ours = RENAMED.get(flag) or SWITCHES.get(flag) or SHORT.get("-" + word) or flag
        ours = ours.partition("=")[0]
        if (effect := _effect(ours)) is not None and not any(ours in option.opts for option in self._options):
            self._console.print(effect, highlight=False, markup=False, soft_wrap=True)
            return
        if ours != flag:
            self._console.print(f"{flag} stands for {ours} here.", highlight=False, markup=False, soft_wrap=True)
        found = [o for o in self._options if ours in (*o.opts, *o.secondary_opts)]
        found = found or [o for o in self._options if any(word in name for name in (*o.opts, *o.secondary_opts))]
        found = found or [o for o in self._options if word.replace("-", " ") in (o.help or "").lower()]
        if not found:
            names = sorted({*self._groups, *(name.lstrip("-") for o in self._options for name in o.opts)})
            near = difflib.get_close_matches(word, names, 3, 0.4)
            hint = f"Near it: {', '.join(near)}. " if near else ""
            raise ConfigError(f"--help={topic}: no group or flag has this word. {hint}--help lists the groups.")
        self._section(f"Flags with {topic!r}" if len(found) > 1 else "Flag", found)

    # ---- parts ----------------------------------------------------------------------------------

    def _head(self) -> None:
        pieces = [
            piece.replace("[[", "[").replace("]]", "]") for piece in self._command.collect_usage_pieces(self._ctx)
        ]
        usage = " ".join([self._ctx.command_path, *pieces])
        self._print(*textwrap.wrap(f"Usage: {usage}", self._width, subsequent_indent="    ", break_long_words=False))
        self._print("")
        for paragraph in inspect.cleandoc(self._command.help or "").split("\n\n"):
            self._print(*_wrapped(" ".join(paragraph.split()), self._width), "")
        arguments = [p for p in self._command.get_params(self._ctx) if p.param_type_name == "argument"]
        if shown := [p for p in arguments if p.help]:
            self._section("Arguments", shown)

    def _titled(self, group: str) -> str:
        return f"{group}: {GROUPS[group][0]}"

    def _section(self, title: str, params: Sequence[Any]) -> None:
        self._title(title)
        for param in params:
            self._row(_names(param), _described(param), COLUMN)
        self._print("")

    def _title(self, title: str) -> None:
        lines = _wrapped(title, self._width - 4)
        rule = "─" * max(2, self._width - len(lines[-1]) - 4)
        for line in lines[:-1]:
            self._console.print(Text(f"── {line}", "bold"))
        self._console.print(Text.assemble(("── ", "dim"), (lines[-1], "bold"), (f" {rule}", "dim")), no_wrap=True)

    def _row(self, head: Text, text: str, column: int) -> None:
        """Print a name with its description beside it, or below it if it does not fit."""
        if self._width < 70 or head.cell_len + 4 > column:
            for part in head.split("\n") if self._width < 70 else [head]:
                self._fit(part)
            indent = 6 if self._width < 70 else column
        else:
            indent = column
        lines = _wrapped(text, self._width - indent)
        if indent == column and head.cell_len + 4 <= column and self._width >= 70:
            first = Text.assemble("  ", head, " " * (column - 2 - head.cell_len), lines.pop(0) if lines else "")
            self._console.print(first, soft_wrap=True, highlight=False)
        self._print(*(" " * indent + line for line in lines))

    def _fit(self, head: Text) -> None:
        """Print a name, broken between its words if it is too long. Words are never cut."""
        words = head.split(" ")
        line = Text("  ")
        for number, word in enumerate(words):
            if number and line.cell_len + 1 + word.cell_len > self._width:
                self._console.print(line, soft_wrap=True, highlight=False)
                line = Text("      ")
            elif number:
                line.append(" ")
            line.append_text(word)
        self._console.print(line, soft_wrap=True, highlight=False)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def _width(self) -> int:
        return max(24, min(self._console.width, 120))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 16), break_long_words=False, break_on_hyphens=False)


def _names(param: Any) -> Text:
    """Every name of a parameter, and the type of its value."""
    if param.param_type_name == "argument":
        return Text(param.metavar or param.name.upper(), "bold cyan")
    names = Text(", ").join(Text(name, "bold cyan") for name in (*param.opts, *param.secondary_opts))
    kind = "" if getattr(param, "is_flag", False) else param.metavar or _kind(param)
    return Text.assemble(names, " ", (kind, "yellow")) if kind else names


def _kind(param: Any) -> str:
    bare = param.bare_type() if hasattr(param, "bare_type") else getattr(param.type, "name", "text")
    for part in str(bare).lower().replace("text", "str").replace("integer", "int").split("|"):
        if (kind := _KINDS.get(part.strip().removeprefix("pathlib.").partition(" ")[0])) is not None:
            return kind
    return "VALUE"


def _described(param: Any) -> str:
    """Help, default and environment variable of a parameter."""
    notes = list(_notes(param))
    return " ".join([param.help or "", *(f"[{note}]" for note in notes)]).strip()


def _notes(param: Any) -> Iterator[str]:
    help_text, default = param.help or "", param.default
    if getattr(param, "multiple", False):
        yield "may be given again"
    if param.envvar:
        yield f"environment: {param.envvar}"
    has_default = "default:" in help_text.lower() or (getattr(param, "is_flag", False) and not default)
    if default not in (None, (), [], "") and not callable(default) and not has_default:
        if getattr(param, "is_flag", False):
            default = (param.opts if default else param.secondary_opts or ["off"])[0]
        yield f"default: {default}"
