"""The API process's life: bind, start the engine, serve, drain, stop.

:func:`serve` is what ``unisono serve`` calls. Signals are handled here and nowhere else: the first one drains,
the second ends both processes at once.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.heap import freeze_heap
from unisono.server.app import INSPECT_LIMIT, Service, create_app
from unisono.server.client import EngineClient, Progress
from unisono.server.limits import LimitedProtocol, Limits, open_files
from unisono.server.metrics import ProgressLine, ServerMetrics
from unisono.server.reasoning import parser_named
from unisono.server.serving import Serving
from unisono.tokenizer import Tokenizer
from unisono.types import ConfigError, EngineDead, UnisonoError

T = TypeVar("T")

logger = logging.getLogger(__name__)

ENGINE = "unisono.engine.engine:Engine"
PROGRESS_SECONDS = 10.0
CONNECTION_LIMIT = 3
"""Seconds that open connections get once every request has been answered or failed."""
INTERRUPTED = 130
"""Exit status after a second signal: what a shell reports of a program that Ctrl-C ended."""


@dataclass(frozen=True)
class ServerSettings:
    """The server's flags.

    model_path: directory with the tokenizer. names: what clients may call the model; answers carry the one they used.
    drain_timeout: seconds that running requests get to finish after the first signal.
    limits: what a connection may cost before its key is looked at.
    reasoning_parser: how thinking is told from what is said in chat answers (``reasoning.PARSERS``), if at all.
    engine: ``"module:Class"``, called with the engine's config in the engine process.
    """

    model_path: Path
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    drain_timeout: float = 30.0
    limits: Limits = field(default_factory=Limits)
    reasoning_parser: str | None = None
    engine: str = ENGINE


def serve(config: Any, settings: ServerSettings, progress: Progress = lambda stage, share: None) -> None:
    """Serve until a signal, then drain. ``config`` is the engine's: a dataclass that pickles.

    ``progress`` is called with a stage of the engine's start and its share done, 0 … 1.

    Raises ConfigError if the port is taken or the reasoning parser is unknown, and what keeps the engine from starting
    (a UnisonoError).
    """
    parser_named(settings.reasoning_parser)  # raises before anything starts
    with bind(settings.host, settings.port) as listener:
        loop_factory = _uvicorn_config(None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(EngineClient(settings.engine, config, progress), config, settings, listener))


BACKLOG = 2048
"""Connections that may wait for the server to accept them; uvicorn's own default."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises ConfigError naming port and flag."""
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


async def _serve(client: EngineClient, config: Any, settings: ServerSettings, listener: socket.socket) -> None:
    client.start()
    stop = _stop_on_signal(client)
    try:
        service = await _unless(stop, _prepare(client, config, settings))
        if service is None:
            return
        server = _Uvicorn(_uvicorn_config(create_app(service), settings.limits))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reporting = asyncio.create_task(_report_progress(service))
        listener.listen(
            BACKLOG
        )  # uvicorn listens a moment later, and a client that reads the next line may connect at once
        freeze_heap()
        host, port = listener.getsockname()[:2]
        logger.info("Serving %s on http://%s:%d/v1 (Ctrl-C stops)", ", ".join(service.names), host, port)
        await stop.wait()
        await _drain(service, settings.drain_timeout)
        reporting.cancel()
        server.should_exit = True
        await serving
    finally:
        await client.shutdown()


async def _prepare(client: EngineClient, config: Any, settings: ServerSettings) -> Service:
    """Load the tokenizer while the engine loads the model."""
    tokenizer = await _in_daemon(_load_tokenizer, settings.model_path)
    info = await client.ready()
    facts = ModelFacts.of(info, tokenizer)
    if tokenizer is None:
        logger.warning("%s has no tokenizer: only token ids are taken, on /v1/completions.", settings.model_path)
    else:
        tokenizer.check_vocabulary(facts.vocab_size)
    metrics = ServerMetrics(settings.names[0], lambda: client.samples)
    return Service(
        client=client,
        serving=Serving(client, InputProcessor(tokenizer, facts), metrics, parser_named(settings.reasoning_parser)),
        metrics=metrics,
        names=settings.names,
        root=str(settings.model_path),
        fingerprint=_fingerprint(config),
        settings=_public(settings, facts),
        api_key=settings.api_key,
    )


async def _in_daemon(work: Callable[..., T], *given: Any) -> T:
    """The result of ``work`` in a thread that does not keep the process alive: a signal ends one that never returns."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            result, error = work(*given), None
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


def _load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer, its chat template tried. Raises CheckpointError."""
    tokenizer = Tokenizer.load(path)
    if tokenizer is not None:
        tokenizer.check_template()
    return tokenizer


def _fingerprint(config: Any) -> str:
    """OpenAI's system_fingerprint: equal for equal engine configs, across restarts."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _public(settings: ServerSettings, facts: ModelFacts) -> dict[str, Any]:
    """What /server_info tells of the server: everything but its key."""
    shown = dataclasses.asdict(settings) | {"model_path": str(settings.model_path)}
    shown["api_key"] = settings.api_key is not None
    return shown | {"model": dataclasses.asdict(facts)}


async def _drain(service: Service, limit: float) -> None:
    """Wait up to ``limit`` seconds for requests in flight; then end them with an error."""
    service.draining = True
    if service.in_flight:
        logger.info("Finishing %d requests, %g s at most (Ctrl-C stops at once)", service.in_flight, limit)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            while service.in_flight and service.client.death is None:
                await asyncio.sleep(0.02)
    service.client.fail_all(
        UnisonoError(f"The server was stopped and the request did not finish within {limit:g} s (--drain-timeout).")
    )


async def _report_progress(service: Service) -> None:
    """Log a line every PROGRESS_SECONDS while there is work."""
    progress = ProgressLine()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        with contextlib.suppress(EngineDead, TimeoutError):
            stats = await service.client.inspect(INSPECT_LIMIT)
            if line := progress.line(stats.samples):
                logger.info("%s", line)


def _stop_on_signal(client: EngineClient) -> asyncio.Event:
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
    """The result of ``work``, or None if ``stop`` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return None
    return task.result()


def _uvicorn_config(app: ASGIApp | None, limits: Limits | None = None) -> uvicorn.Config:
    limits = limits or Limits()
    limits = dataclasses.replace(limits, connections=min(limits.connections, open_files()))
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=functools.partial(LimitedProtocol, limits=limits),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=CONNECTION_LIMIT,
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
