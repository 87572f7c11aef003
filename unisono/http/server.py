"""The life of the API process: bind, start the engine, serve, drain, stop.

``unisono serve`` calls :func:`serve`. The modules of the HTTP service are imported once the engine process runs
(:mod:`unisono.http.build`). Signals are handled here and nowhere else: the first one drains, the second ends both
processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cluster.engine_handle import Progress
from unisono.cluster.engines import Engines
from unisono.cluster.heap import freeze_heap, return_freed_memory, uncollected
from unisono.config.page_cache import read_ahead
from unisono.http.background import in_daemon
from unisono.http.observability.prefixes import check_prefix
from unisono.http.observability.traces import check_endpoint
from unisono.http.security.key_file import keys_of, reread
from unisono.http.server_settings import ServerSettings as ServerSettings
from unisono.text.reasoning import parser_named
from unisono.text.tool_parsers.formats import format_named
from unisono.types import ConfigError, UnisonoError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from unisono.http.service import Service

logger = logging.getLogger(__name__)

BUILD = "unisono.http.build"
"""Module of the service, imported after the engine process has started."""
INTERRUPTED = 130
"""Exit status after a second signal: a shell's for a program that Ctrl-C ended."""


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
    with bind(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings.client(config, progress), config, settings, listener))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed, as uvicorn chooses; None: asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


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
    _read_weights_ahead(config, settings)
    client.start()
    stop = _stop_on_signal(client)
    try:
        service = await _unless(stop, _build(client, config, settings))
        if service is None:
            return
        from unisono.http.build import HttpServer, make_application, report_progress

        server = HttpServer(make_application(service, settings), settings, service.metrics.refused)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reporting = [asyncio.create_task(report_progress(service))]
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


def _read_weights_ahead(config: Any, settings: ServerSettings) -> None:
    """Have the kernel read the weights of the target and of a drafter in a directory, for engines of this machine."""
    if settings.scale.distributed_executor_backend != "mp" or getattr(config, "load_format", "dummy") == "dummy":
        return
    draft = getattr(getattr(config, "speculative", None), "model", None)
    read_ahead([settings.model_path, *([Path(draft)] if draft else [])])


async def start_application(config: Any, settings: ServerSettings) -> tuple[ASGIApp, Service]:
    """Start the engines for an external server; returns the application and its service.

    ``service.client.shutdown()`` ends them. Raises the errors of :func:`serve`.
    """
    client = settings.client(config, lambda stage, share: None)
    client.start()
    try:
        service = await _build(client, config, settings)
    except BaseException:
        await client.shutdown()
        raise
    from unisono.http.build import make_application

    return make_application(service, settings), service


async def _build(client: Engines, config: Any, settings: ServerSettings) -> Service:
    """Build the service; its imports run in a thread while the engine process makes its own."""
    await in_daemon(_import_build)
    from unisono.http.build import build_service

    return await build_service(client, config, settings)


def _import_build() -> None:
    with uncollected():
        importlib.import_module(BUILD)


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
