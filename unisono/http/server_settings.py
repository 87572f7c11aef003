"""Flags of the server, and the client of its engines. Imports nothing slow: a server reads them before its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.cluster.client import HEARTBEAT_TIMEOUT, EngineClient
from unisono.cluster.engine_handle import Progress
from unisono.cluster.engines import Engines
from unisono.cluster.replicas.client import ReplicaClient
from unisono.cluster.replicas.plan import ReplicaSettings, plan
from unisono.cluster.restarts import Restarts
from unisono.http.limits.overload import LoadLimits
from unisono.http.limits.sizes import Limits
from unisono.http.settings import HttpSettings
from unisono.media.settings import MediaSettings
from unisono.types import ConfigError
from unisono.types.acceptance import LEVELS

ENGINE = "unisono.engine.engine:Engine"


@dataclass(frozen=True)
class ServerSettings:
    """The server's flags.

    model_path: the checkpoint's directory. tokenizer: directory of the tokenizer, if not that. chat_template: text of a
    template that replaces the checkpoint's. http: TLS and CORS.
    names: accepted model names; answers carry the one in the request.
    metrics_prefix: of the names in /metrics, a key of ``prefixes.PREFIXES``.
    per_request_spec_decode_metrics: acceptance of drafts in answers, one of ``acceptance.LEVELS``.
    otlp_traces_endpoint: URL for spans, OTLP over HTTP; None sends none.
    allowed_lora_path: directory below which adapters may be loaded at run time; None: none.
    profile_dir: directory for /stop_profile; None turns profiles off.
    drain_timeout: seconds for running requests to finish after the first signal.
    api_key, api_key_file: keys that open the server; see ``key_file``.
    limits: of connections, before a key is checked. load: admission limits.
    reasoning_parser, tool_call_parser: formats of reasoning and tool calls in chat answers (``reasoning.PARSERS``,
    ``tool_parsers.formats.FORMATS``); None: by the chat template.
    ignore_hosted_tools: leave out tools that an API's provider would run, instead of refusing the request.
    media: sources, sizes and numbers of images and videos.
    allow_unknown_fields: drop unknown fields of requests, with a count and a header, instead of refusing them.
    default_chat_template_kwargs: variables of the chat template; those of a request take precedence.
    trust_request_chat_template: bodies may have a chat template, which is rendered in a sandbox.
    restart_engine: restart an engine that died, ``max_engine_restarts`` times within ``engine_restart_window`` seconds.
    heartbeat_timeout: seconds without a heartbeat until the engine process counts as dead; 0: never.
    scale: number and place of engines.
    engine: ``"module:Class"``, called with the engine's config in the engine process.
    """

    model_path: Path
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    allow_unknown_fields: bool = False
    allowed_lora_path: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    drain_timeout: float = 30.0
    engine_restart_window: float = 600.0
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    limits: Limits = field(default_factory=Limits)
    load: LoadLimits = field(default_factory=LoadLimits)
    max_engine_restarts: int = 5
    metrics_prefix: str = "unisono"
    otlp_traces_endpoint: str | None = None
    per_request_spec_decode_metrics: str = "none"
    profile_dir: Path | None = None
    reasoning_parser: str | None = None
    restart_engine: bool = True
    tool_call_parser: str | None = None
    ignore_hosted_tools: bool = False
    trust_request_chat_template: bool = False
    engine: str = ENGINE
    http: HttpSettings = field(default_factory=HttpSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    scale: ReplicaSettings = field(default_factory=ReplicaSettings)
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if (level := self.per_request_spec_decode_metrics) not in LEVELS:
            raise ConfigError(f"--per-request-spec-decode-metrics {level}: give one of {', '.join(LEVELS)}.")

    def restarts(self) -> Restarts | None:
        """The restart policy of a dead engine; None: never. Raises ConfigError."""
        if self.heartbeat_timeout and not 1 <= self.heartbeat_timeout < float("inf"):
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout:g} must be 1 second or more; 0 turns the watchdog off."
            )
        return Restarts(self.max_engine_restarts, self.engine_restart_window) if self.restart_engine else None

    def client(self, config: Any, progress: Progress) -> Engines:
        """The client of the engine or engines; it makes files and connections only when it starts them."""
        timeout = self.heartbeat_timeout
        if not self.scale.several:
            return EngineClient(self.engine, config, progress, self.restarts(), timeout)
        replicas = plan(self.scale, config, self.restarts, timeout)
        return ReplicaClient(self.engine, config, replicas, progress)
