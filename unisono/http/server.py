"""The life of the API process: bind, start the engine, serve, drain, stop.

``unisono serve`` calls :func:`serve`. Signals are handled here and nowhere else: the first one drains, the second ends
both processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from unisono.cluster.client import HEARTBEAT_TIMEOUT, EngineClient
from unisono.cluster.engine_handle import Progress
from unisono.cluster.engines import Engines
from unisono.cluster.heap import freeze_heap, return_freed_memory
from unisono.cluster.replicas.client import ReplicaClient
from unisono.cluster.replicas.plan import ReplicaSettings, plan
from unisono.cluster.restarts import Restarts
from unisono.frontend.classifier import Classifier
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.frontend.pooling import pooling_of
from unisono.frontend.scores import head_of
from unisono.http.adapters import AdapterRegistry
from unisono.http.answers.drafts import AcceptanceReport
from unisono.http.app import create_app
from unisono.http.connection import ReadAhead
from unisono.http.limits.connections import LimitedProtocol, Limits, open_files
from unisono.http.limits.overload import Admission, LoadLimits
from unisono.http.observability.metrics import ProgressLine, ServerMetrics, check_prefix
from unisono.http.observability.traces import RequestTracer, check_endpoint
from unisono.http.openai.chat import ChatFormat
from unisono.http.openai.hosted_tools import HostedTools
from unisono.http.openai.serving import Serving
from unisono.http.security.auth import Keys
from unisono.http.security.hosts import KnownHosts
from unisono.http.security.key_file import keys_of, reread
from unisono.http.service import INSPECT_LIMIT, ServedWeights, Service
from unisono.http.settings import HttpSettings
from unisono.media.loader import MediaLoader
from unisono.media.settings import MediaSettings
from unisono.text.reasoning import parser_named
from unisono.text.tokenizer import Tokenizer, import_without_torch
from unisono.text.tool_parsers.formats import format_named
from unisono.types import ConfigError, EngineDead, UnisonoError
from unisono.types.acceptance import LEVELS

T = TypeVar("T")

logger = logging.getLogger(__name__)

ENGINE = "unisono.engine.engine:Engine"
PROGRESS_SECONDS = 10.0
CONNECTION_LIMIT = 3
"""Seconds for open connections to close after every request has been answered or failed."""
INTERRUPTED = 130
"""Exit status after a second signal: a shell's for a program that Ctrl-C ended."""


@dataclass(frozen=True)
class ServerSettings:
    """The server's flags.

    model_path: the checkpoint's directory. tokenizer: directory of the tokenizer, if not that. chat_template: text of a
    template that replaces the checkpoint's. http: TLS and CORS.
    names: accepted model names; answers carry the one in the request.
    metrics_prefix: of the names in /metrics, a key of ``metrics.PREFIXES``.
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


def serve(config: Any, settings: ServerSettings, progress: Progress = lambda stage, share: None) -> None:
    """Serve until a signal, then drain.

    ``config`` is the engine's: a dataclass that can be pickled.

    ``progress`` is called with a stage of the engine's start and its completed fraction, 0 … 1.

    Raises ConfigError if the port is taken, a parser or the metrics' prefix is unknown, or spans have no endpoint; and
    the UnisonoError that keeps the engine from starting.
    """
    parser_named(settings.reasoning_parser)  # these raise before anything starts
    format_named(settings.tool_call_parser)
    keys_of(settings.api_key, settings.api_key_file)
    check_prefix(settings.metrics_prefix)
    if settings.otlp_traces_endpoint is not None:
        check_endpoint(settings.otlp_traces_endpoint)
    settings.restarts()
    with bind(settings.host, settings.port) as listener:
        loop_factory = _uvicorn_config(None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(settings.client(config, progress), config, settings, listener))


BACKLOG = 2048
"""Connections that may wait for the server to accept them; uvicorn's own default."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises ConfigError with the port and the flag."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on host {host!r}, port {port}: {error.strerror}. Choose another with --port or --host."
        ) from None
    return listener


async def _serve(client: Engines, config: Any, settings: ServerSettings, listener: socket.socket) -> None:
    return_freed_memory()
    client.start()
    stop = _stop_on_signal(client)
    try:
        service = await _unless(stop, _prepare(client, config, settings))
        if service is None:
            return
        app = settings.http.with_cors(create_app(service))
        server = _Uvicorn(_uvicorn_config(app, settings.limits, settings.http, service.metrics.refused))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reporting = [asyncio.create_task(_report_progress(service))]
        if settings.api_key_file is not None:
            work = reread(service.keys, settings.api_key, settings.api_key_file)
            reporting.append(asyncio.create_task(work))
        # uvicorn listens a moment later, and a client that reads the next line may connect at once
        listener.listen(BACKLOG)
        freeze_heap()
        host, port = listener.getsockname()[:2]
        where = f"{settings.http.scheme}://{host}:{port}/v1"
        logger.info("Serving %s on %s (Ctrl-C stops)", ", ".join(service.names), where)
        await stop.wait()
        await _drain(service, settings.drain_timeout)
        for task in reporting:
            task.cancel()
        server.should_exit = True
        await serving
        if service.tracer is not None:
            await service.tracer.close()
    finally:
        await client.shutdown()


async def start_application(config: Any, settings: ServerSettings) -> tuple[ASGIApp, Service]:
    """Start the engines for an external server; returns the application and its service.

    ``service.client.shutdown()`` ends them. Raises the errors of :func:`serve`.
    """
    client = settings.client(config, lambda stage, share: None)
    client.start()
    try:
        service = await _prepare(client, config, settings)
    except BaseException:
        await client.shutdown()
        raise
    return settings.http.with_cors(create_app(service)), service


async def _prepare(client: Engines, config: Any, settings: ServerSettings) -> Service:
    """Load the tokenizer while the engine loads the model."""
    tokenizer = await _in_daemon(_load_tokenizer, settings)
    info = await client.ready()
    facts = ModelFacts.of(info, tokenizer)
    if tokenizer is None:
        logger.warning("%s has no tokenizer: only token ids are taken, on /v1/completions.", settings.model_path)
    else:
        tokenizer.check_vocabulary(facts.vocab_size)
    hosts = KnownHosts(settings.http.allowed_hosts, settings.host)
    keys = Keys(keys_of(settings.api_key, settings.api_key_file), hosts)
    infos = client.infos
    metrics = ServerMetrics(
        settings.names[0], lambda: client.samples, settings.metrics_prefix, facts.max_model_len, len(infos)
    )
    for number, one in enumerate(infos):
        metrics.cache_config(one, number)
    _log_drafter(info)
    adapters = AdapterRegistry(client, settings.names, settings.allowed_lora_path)
    adapters.take(info)

    weights = ServedWeights()

    def restarted(info: dict[str, Any], number: int) -> None:
        weights.version = info.get("weight_version", "0")
        metrics.cache_config(info, number)
        adapters.take(info)

    client.stepped, client.restarted = metrics.step, restarted
    for one in getattr(client, "clients", [client]):
        one.amended = adapters.amended
    media = MediaLoader(facts.vision, settings.model_path, settings.media, facts.dtype, facts.max_model_len - 1)
    await _in_daemon(media.prepare)
    inputs = InputProcessor(tokenizer, facts, media)
    hosted = HostedTools(settings.ignore_hosted_tools, metrics.ignored_tool)
    variables = settings.default_chat_template_kwargs
    chat = ChatFormat.of(inputs, settings.reasoning_parser, settings.tool_call_parser, hosted, variables)
    return Service(
        client=client,
        serving=Serving(client, inputs, metrics, chat, settings.trust_request_chat_template, adapters),
        metrics=metrics,
        adapters=adapters,
        names=settings.names,
        root=str(settings.model_path),
        fingerprint=_fingerprint(config),
        hosted=hosted,
        settings=_public(settings, facts) | {"keys": keys.names},
        drain_timeout=settings.drain_timeout,
        allow_unknown_fields=settings.allow_unknown_fields,
        weights=weights,
        acceptance=AcceptanceReport.of(settings.per_request_spec_decode_metrics, info),
        profile_dir=settings.profile_dir,
        tracer=None if settings.otlp_traces_endpoint is None else RequestTracer(settings.otlp_traces_endpoint),
        pooling=await asyncio.to_thread(pooling_of, settings.model_path),
        classifier=await asyncio.to_thread(_head, config, settings, tokenizer),
        keys=keys,
        admission=Admission(settings.load, sum(one["settings"].get("max_num_seqs", 1) for one in infos)),
    )


def _head(config: Any, settings: ServerSettings, tokenizer: Tokenizer | None) -> Classifier | None:
    """The checkpoint's classifier, if it has one. Raises CheckpointError."""
    if not (settings.model_path / "config.json").is_file():
        return None
    overrides, load_format = getattr(config, "hf_overrides", {}), getattr(config, "load_format", "auto")
    return head_of(settings.model_path, overrides, tokenizer, load_format)


async def _in_daemon(work: Callable[..., T], *args: Any) -> T:
    """The result of ``work`` in a daemon thread: a signal can end the process even if it never returns."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            result, error = work(*args), None
        except BaseException as caught:
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: _settle(done, result, error))

    threading.Thread(target=run, daemon=True).start()
    return await done


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def _load_tokenizer(settings: ServerSettings) -> Tokenizer | None:
    """The tokenizer, after a trial of its chat template. Raises CheckpointError."""
    import_without_torch()
    tokenizer = Tokenizer.load(settings.tokenizer or settings.model_path)
    if tokenizer is not None:
        if settings.chat_template is not None:
            tokenizer.backend.chat_template = settings.chat_template
        tokenizer.check_template()
    return tokenizer


def _log_drafter(info: dict[str, Any]) -> None:
    """Log the engine's drafter, and the reason."""
    if (speculation := info.get("speculation")) is None:
        return
    reasons = [row["reason"] for row in info["decisions"] if row["name"] == "speculative"]
    if speculation["drafter"] != "none":
        why = reasons[0] if reasons else "as requested"
        logger.info("Speculation: %s, k = %d (%s)", speculation["drafter"], speculation["num_speculative_tokens"], why)
    else:
        why = reasons[0] if reasons else "--speculative-method chooses a drafter"
        logger.info("Speculation: none (%s)", why)


def _fingerprint(config: Any) -> str:
    """OpenAI's system_fingerprint: equal for equal engine configs, across restarts."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _public(settings: ServerSettings, facts: ModelFacts) -> dict[str, Any]:
    """The server's part of /server_info: everything but its keys."""
    shown: dict[str, Any] = dataclasses.asdict(settings)
    for fields in (shown, shown["media"]):
        fields |= {name: str(value) for name, value in fields.items() if isinstance(value, Path)}
    del shown["api_key"]
    return shown | {"model": dataclasses.asdict(facts)}


async def _drain(service: Service, limit: float) -> None:
    """Wait up to ``limit`` seconds for requests in flight; then end them with an error."""
    service.draining = True
    if service.in_flight:
        count = service.in_flight
        noun = "request" if count == 1 else "requests"
        logger.info("Finishing %d %s, %g s at most (Ctrl-C stops at once)", count, noun, limit)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            while service.in_flight and (service.client.death is None or service.client.restarting):
                await asyncio.sleep(0.02)
    service.client.fail_all(
        UnisonoError(f"The server was stopped and the request did not finish within {limit:g} s (--drain-timeout).")
    )


async def _report_progress(service: Service) -> None:
    """Log a line every PROGRESS_SECONDS while requests run."""
    progress = ProgressLine()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        with contextlib.suppress(EngineDead, TimeoutError):
            stats = await service.client.inspect(INSPECT_LIMIT)
            if line := progress.line(stats.samples):
                logger.info("%s", line)


def _stop_on_signal(client: Engines) -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second ends both processes at once."""
    stop = asyncio.Event()

    def handle() -> None:
        if stop.is_set():
            client.kill()
            os._exit(INTERRUPTED)
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, handle)
    return stop


async def _unless(stop: asyncio.Event, work: Any) -> Any:
    """The result of ``work``, or None if ``stop`` is set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return None
    return task.result()


def _uvicorn_config(
    app: ASGIApp | None,
    limits: Limits | None = None,
    http: HttpSettings | None = None,
    refused: Callable[[str], None] = lambda reason: None,
) -> uvicorn.Config:
    limits = limits or Limits()
    limits = dataclasses.replace(limits, connections=min(limits.connections, open_files()))
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=functools.partial(  # type: ignore[arg-type]
            LimitedProtocol, limits=limits, refused=refused, ahead=ReadAhead(limits.ahead_bytes)
        ),
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=CONNECTION_LIMIT,
        **(http or HttpSettings()).uvicorn(),
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
