"""The flags of ``unisono serve`` beside the engine's, by group; ``cli/main.py`` adds them to the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def http_flags(
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM file of the server's private key.")] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="PEM file of the server's certificate; serves HTTPS.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="PEM file of the authorities that sign client certificates.")
    ] = None,
    ssl_cert_reqs: Annotated[int, typer.Option(help="Client certificates: 0 none, 1 optional, 2 required.")] = 0,
    allowed_origins: Annotated[str, typer.Option(help="CORS: allowed origins, a JSON list.")] = '["*"]',
    allowed_methods: Annotated[str, typer.Option(help="CORS: allowed methods, a JSON list.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="CORS: allowed headers, a JSON list.")] = '["*"]',
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="CORS: allow cookies; needs --allowed-origins.")
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(help="Host names of the server behind a proxy, *.example.com or * for all.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix that a proxy in front of the server removes.")] = "",
    timeout_keep_alive: Annotated[
        int, typer.Option(help="Seconds until an idle connection is closed; more than clients and proxies wait.")
    ] = 75,
) -> None:
    """The server's flags that are fields of ``unisono.http.settings.HttpSettings``."""


def answer_flags(
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Format of reasoning in answers: qwen3, …; none: no parsing. Default: by the chat template."),
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="Format of tool calls: hermes, mistral, …; default: by the chat template.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help='Variables of the chat template, JSON: {"enable_thinking": false}; a request may override them.'
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice", help="Accepted for compatibility with vLLM: tool_choice auto always works."
        ),
    ] = False,
    ignore_hosted_tools: Annotated[
        bool,
        typer.Option(
            "--ignore-hosted-tools", help="Remove hosted tools (web_search, …) from requests, with a warning."
        ),
    ] = False,
    allow_unknown_fields: Annotated[
        bool,
        typer.Option(
            "--allow-unknown-fields", help="Drop and count unknown fields of requests instead of refusing them."
        ),
    ] = False,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template", help="Accept chat_template in requests; it is rendered in a sandbox."
        ),
    ] = False,
) -> None:
    """Flags of ``ServerSettings``: parsing of requests and answers."""


def media_flags(
    allowed_media_domains: Annotated[
        list[str] | None, typer.Option(help="Hosts that images may be fetched from, *.example.com or *; default: none.")
    ] = None,
    allowed_local_media_path: Annotated[
        str | None, typer.Option(help="Directory of files that requests may read with file:// URLs.")
    ] = None,
    limit_mm_per_prompt: Annotated[
        str | None, typer.Option(help='Images and videos per prompt, JSON; default: {"image": 32, "video": 4}.')
    ] = None,
    mm_processor_kwargs: Annotated[
        str | None,
        typer.Option(help='Image processor settings, JSON: {"max_pixels": 1000000}; a request may override them.'),
    ] = None,
    media_io_kwargs: Annotated[
        str | None, typer.Option(help='Decoder settings, JSON: {"video": {"fps": 1}}; a request may override them.')
    ] = None,
    media_max_mb: Annotated[int | None, typer.Option(help="Largest encoded image or video, MiB; default: 32.")] = None,
    media_max_pixels: Annotated[
        int | None, typer.Option(help="Largest decoded image or frame, pixels; default: 67108864.")
    ] = None,
    media_max_frames: Annotated[
        int | None, typer.Option(help="Maximum number of frames per video; default: 256.")
    ] = None,
    media_timeout: Annotated[
        float | None, typer.Option(help="Timeout for fetching an image, seconds; default: 10.")
    ] = None,
    mm_processor_cache_gb: Annotated[
        float | None, typer.Option(help="Cache of preprocessed images, GiB; default: 1.")
    ] = None,
    media_processes: Annotated[int | None, typer.Option(help="Processes that decode images; default: 2.")] = None,
) -> None:
    """The server's flags for images and videos: fields of ``unisono.media.settings.MediaSettings``."""


def load_flags(
    max_queued_requests: Annotated[int, typer.Option(help="Sequences that may wait; further requests get 503.")] = 4096,
    max_concurrent_requests_per_key: Annotated[
        int | None,
        typer.Option(help="Concurrent requests per API key, or per client address without keys; further ones get 429."),
    ] = None,
    max_requests_per_minute_per_key: Annotated[
        int | None, typer.Option(help="Requests per minute, per API key or client address; further ones get 429.")
    ] = None,
) -> None:
    """The server's limits on queue and rate: fields of ``unisono.http.limits.overload.LoadLimits``."""


def operation_flags(
    metrics_prefix: Annotated[
        str, typer.Option(help="Prefix of metric names in /metrics: unisono, vllm or both.")
    ] = "unisono",
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option(help="Acceptance of drafts in each answer: none, summary or detailed.")
    ] = "none",
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="OTLP endpoint for traces: http://HOST:4318/v1/traces.")
    ] = None,
    allowed_lora_path: Annotated[
        Path | None, typer.Option(help="Directory whose adapters may be loaded at run time; default: none.")
    ] = None,
    profile_dir: Annotated[Path | None, typer.Option(help="Directory for the traces of /stop_profile.")] = None,
    restart_engine: Annotated[
        bool, typer.Option("--restart-engine/--no-restart-engine", help="Restart an engine that died.")
    ] = True,
    max_engine_restarts: Annotated[
        int, typer.Option(help="Maximum number of restarts within --engine-restart-window.")
    ] = 5,
    engine_restart_window: Annotated[float, typer.Option(help="Window for --max-engine-restarts, seconds.")] = 600.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat until the engine counts as dead; 0: no limit.")
    ] = 30.0,
) -> None:
    """The server's flags for operators: metrics, traces, adapters, profiles, restarts."""


def scale_flags(
    data_parallel_size: Annotated[int, typer.Option(help="Engines of this server, each with a copy of the model.")] = 1,
    distributed_executor_backend: Annotated[
        str, typer.Option(help="mp: engines are processes of this machine; ray: actors of a Ray cluster.")
    ] = "mp",
    ray_address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, HOST:PORT or auto; implies the backend ray.")
    ] = None,
) -> None:
    """The server's flags for several engines: fields of ``ReplicaSettings``."""
