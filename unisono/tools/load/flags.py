"""The flags of ``unisono bench serve`` and ``bench throughput``, in groups. Spellings are vLLM's where it has them."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.console.help import HelpfulCommand
from unisono.console.output import note
from unisono.console.values import whole_numbers
from unisono.tools.load.mixes import MIXES, MixFlags
from unisono.tools.load.stall import StallScenario
from unisono.types import ConfigError

LISTS = ("--goodput", "--header", "--metadata")
"""Flags with one value or several, such as ``--goodput ttft:200 tpot:20``."""


NO_EFFECT = {
    "--disable-tqdm": "there is no progress bar",
    "--disable-shuffle": "the order of prompts follows from --seed",
    "--trust-remote-code": "no code of a checkpoint runs",
}
"""Switches of other engines' benchmarks that change nothing, and what holds instead."""

ELSEWHERE = {
    "--append-result": "--out FILE writes one run",
    "--label": "--metadata label=NAME writes it into --out",
    "--num-prompt": "--num-prompts sets the number of requests",
    "--output-file": "--out FILE writes the results",
    "--profile": "POST /start_profile and /stop_profile of a server with --profile-dir",
    "--result-dir": "--out FILE writes the results, with any directory",
    "--save-result": "--out FILE writes the results",
    "--sharegpt-output-len": "--dataset-name custom reads prompts of a JSONL file, with --custom-output-len",
    "--tokenizer-mode": "tokenizers are read through transformers",
}
"""Flags of other engines' benchmarks that are refused, and what to use instead."""


class SeveralValues(HelpfulCommand):
    """A command whose LISTS take several values, and that knows flags of other engines' benchmarks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in (argument.partition("=")[0] for argument in args):
            if name in ELSEWHERE:
                raise ConfigError(f"{name} is not a flag of this command: {ELSEWHERE[name]}.")
            if name in NO_EFFECT:
                note(f"{name}: no effect; {NO_EFFECT[name]}.")
        args = [argument for argument in args if argument not in NO_EFFECT]
        rewritten: list[str] = []
        flag = None
        for argument in args:
            if argument.startswith("-") or flag is None:
                flag = argument if argument in LISTS else None
                rewritten.append(argument)
                taken = False
            else:
                rewritten += [flag, argument] if taken else [argument]
                taken = True
        return super().parse_args(ctx, rewritten)


def mix_flags(
    dataset_name: Annotated[str, typer.Option(help=f"Request mix: {', '.join(MIXES)}.")] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="custom: a JSONL file.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 1000,
    input_len: Annotated[str | None, typer.Option(help="Short for --random-input-len.")] = None,
    output_len: Annotated[str | None, typer.Option(help="Short for --random-output-len.")] = None,
    random_input_len: Annotated[str, typer.Option(help="Prompt tokens: N, or A:B, drawn evenly.")] = "1024",
    random_output_len: Annotated[str, typer.Option(help="Output tokens: N or A:B.")] = "128",
    random_range_ratio: Annotated[float, typer.Option(help="r: lengths from N × (1 - r) to N × (1 + r).")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts share.")] = 0,
    prefix_repetition_prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of a prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[str, typer.Option(help="Tokens after it: N or A:B.")] = "256",
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(min=1, help="Different prefixes.")] = 10,
    prefix_repetition_output_len: Annotated[str, typer.Option(help="Output tokens: N or A:B.")] = "128",
    conversation_turns: Annotated[str, typer.Option(help="Requests of a conversation: N or A:B.")] = "1:6",
    conversation_system_len: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt.")] = 256,
    conversation_num_systems: Annotated[int, typer.Option(min=1, help="Different system prompts.")] = 4,
    conversation_input_len: Annotated[str, typer.Option(help="Tokens of a user's message: N or A:B.")] = "16:256",
    conversation_output_len: Annotated[str, typer.Option(help="Output tokens of a turn: N or A:B.")] = "32:256",
    custom_output_len: Annotated[
        int, typer.Option(min=1, help="custom: output tokens of lines without output_len.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
) -> None:
    """Flags of the requests."""


def stall_flags(
    scenario: Annotated[str, typer.Option(help="load, or stall: long prompts arrive while streams run.")] = "load",
    streams: Annotated[int, typer.Option(min=1, help="stall: running streams.")] = 32,
    prompts: Annotated[str, typer.Option(help="stall: simultaneous prompts, separated by commas.")] = "1,8",
    prompt_len: Annotated[int, typer.Option(min=1, help="stall: tokens per prompt.")] = 8000,
    stream_input_len: Annotated[int, typer.Option(min=1, help="stall: prompt tokens of a stream.")] = 64,
    stream_output_len: Annotated[int, typer.Option(min=1, help="stall: output tokens of a stream at most.")] = 4096,
) -> None:
    """Flags of the scenario."""


def report_flags(
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits of a good request in ms: ttft:200 tpot:20 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics with percentiles: ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, separated by commas.")] = "90,99",
    out: Annotated[
        Path | None, typer.Option("--out", "--result-filename", help="Write the results to this file, as JSON.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Add every request's figures to --out.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the results to a PNG, SVG or PDF file.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Metadata to write into --out: one or several KEY=VALUE.")
    ] = None,
) -> None:
    """Flags of the report."""


def target_flags(
    base_url: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of a running server; without it, one is started.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host of a running server, in place of --base-url.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of a running server, in place of --base-url.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name in requests; default: the server's first. PATH for a started server.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in requests, if --model is the tokenizer's directory.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer directory; default: --model, or the server's.")] = (
        None
    ),
    backend: Annotated[
        str, typer.Option(help="API: openai (vllm, sglang, sglang-oai: the same) or openai-chat.")
    ] = "openai",
    endpoint: Annotated[
        str | None, typer.Option(help="Path; default: /v1/completions, with openai-chat /v1/chat/completions.")
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Send prompts as token ids: exact lengths, /v1/completions only.")
    ] = False,
    header: Annotated[list[str] | None, typer.Option(help="Request headers: one or several KEY=VALUE.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Authorization: Bearer KEY.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any TLS certificate.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Timeout of a request, seconds.")] = 21600.0,
    ready_check_timeout_sec: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server.")] = 0.0,
) -> None:
    """Flags of the server."""


def rate_flags(
    request_rate: Annotated[float, typer.Option(help="Conversations that begin per second; inf: all at once.")] = (
        float("inf")
    ),
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; less: burstier; more: more even (gamma).")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measurement.")] = 0,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send and read.")] = 1,
) -> None:
    """Flags of the request rate."""


def sampling_flags(
    temperature: Annotated[float | None, typer.Option(help="Default: 0, greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: the server's.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate output_len tokens, ignoring EOS.")] = False,
    extra_body: Annotated[str, typer.Option(help="More fields of requests, JSON.")] = "{}",
) -> None:
    """Flags of the sampling parameters."""


def engine_flags(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    tokenizer: Annotated[str | None, typer.Option(help="As for `unisono serve`.")] = None,
    hf_overrides: Annotated[str | None, typer.Option(help="As for `unisono serve`, JSON.")] = None,
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As for `unisono serve`.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length of the engine.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per pass, at most.")] = None,
    max_stall_ms: Annotated[float, typer.Option(help="As for `unisono serve`.")] = 50.0,
    enable_mixed_chunk: Annotated[
        bool | None, typer.Option("--enable-mixed-chunk/--no-enable-mixed-chunk", help="As for `unisono serve`.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="As for `unisono serve`.")] = 0.9,
    num_pages: Annotated[int | None, typer.Option(help="As for `unisono serve`.")] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Capture no graphs.")] = False,
    graphs: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="As for `unisono serve`.")] = False,
    attention_backend: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="As for `unisono serve`.")
    ] = True,
    tensor_parallel_size: Annotated[int, typer.Option(help="As for `unisono serve`.")] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="As for `unisono serve`.")
    ] = False,
    enable_dp_attention: Annotated[bool, typer.Option("--enable-dp-attention", help="As for `unisono serve`.")] = False,
    tp_reduce: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "gather",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Flags of the engine of ``bench throughput``."""


def grouped(command: Callable[..., None], **groups: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the flags of all groups; it takes each group as a dict under the group's name."""
    names = {group: list(inspect.signature(flags).parameters) for group, flags in groups.items()}
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name not in groups]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for group, flags in names.items():
            values[group] = {name: values.pop(name) for name in flags}
        command(**values)

    added = []
    for group, flags in groups.items():
        for parameter in inspect.signature(flags, eval_str=True).parameters.values():
            parameter.annotation.__metadata__[0].rich_help_panel = group
            added.append(parameter)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in added]
    positional = [p for p in own if p.annotation is typer.Context]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p not in positional]
    wrapper.__signature__ = inspect.Signature([*positional, *parameters])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*positional, *parameters)}
    return wrapper


def mix_of(flags: dict[str, Any]) -> tuple[MixFlags, int]:
    """(the mix, its seed)."""
    flags = dict(flags)
    seed = flags.pop("seed")
    for short in ("input_len", "output_len"):
        if (value := flags.pop(short)) is not None:
            flags[f"random_{short}"] = value
    return MixFlags(**flags), seed


def scene_of(flags: dict[str, Any]) -> StallScenario | None:
    """The stall scenario; None for a load. Raises ConfigError."""
    if flags["scenario"] not in ("load", "stall"):
        raise ConfigError(f"--scenario {flags['scenario']!r} is unknown; choose load or stall.")
    if flags["scenario"] == "load":
        return None
    counts = whole_numbers("--prompts", flags["prompts"], some=True)
    lengths = (flags["prompt_len"], flags["stream_input_len"], flags["stream_output_len"])
    return StallScenario(flags["streams"], counts, *lengths)


def pairs(flag: str, values: Sequence[str] | None) -> dict[str, str]:
    """Parse ``KEY=VALUE`` texts into a dict. Raises ConfigError."""
    found = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"{flag} {text!r}: give KEY=VALUE.")
        found[name] = value
    return found


def body_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Extra fields of requests. Raises ConfigError."""
    flags = dict(flags)
    try:
        extra = json.loads(text := flags.pop("extra_body"))
    except ValueError as error:
        raise ConfigError(f"--extra-body is not valid JSON: {error}.") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body {text!r}: give a JSON object.")
    ignore = {"ignore_eos": True} if flags.pop("ignore_eos") else {}
    return {name: value for name, value in flags.items() if value is not None} | ignore | extra


def command_line() -> str:
    """The command as typed, for results files, without the values of keys."""
    import sys

    shown, secret = [], False
    for part in sys.argv[1:]:
        shown.append("…" if secret else part.split("=")[0] + "=…" if part.startswith("--api-key=") else part)
        secret = part in ("--api-key", "--header")
    return " ".join(["unisono", *shown])


def environment() -> dict[str, str]:
    """Versions and machine of the client."""
    import platform

    import unisono

    return {"unisono": unisono.__version__, "python": platform.python_version(), "cpus": str(os.cpu_count())}
