"""Build of the service: every import and object that a server needs beside its engine.

:mod:`unisono.http.server` imports this module in a thread once the engine process has started, so that FastAPI,
pydantic and uvicorn are imported while the engine imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from unisono.cluster.engines import Engines
from unisono.frontend.classifier import Classifier
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.frontend.pooling import pooling_of
from unisono.frontend.scores import head_of
from unisono.http.adapters import AdapterRegistry
from unisono.http.answers.drafts import AcceptanceReport
from unisono.http.app import create_app
from unisono.http.background import in_daemon
from unisono.http.connection import ReadAhead
from unisono.http.limits.connections import LimitedProtocol
from unisono.http.limits.overload import Admission
from unisono.http.observability.metrics import ProgressLine, ServerMetrics
from unisono.http.observability.traces import RequestTracer
from unisono.http.openai.chat import ChatFormat
from unisono.http.openai.hosted_tools import HostedTools
from unisono.http.openai.serving import Serving
from unisono.http.security.auth import Keys
from unisono.http.security.hosts import KnownHosts
from unisono.http.security.key_file import keys_of
from unisono.http.server_settings import ServerSettings
from unisono.http.service import INSPECT_LIMIT, ServedWeights, Service
from unisono.media.loader import MediaLoader
from unisono.text.tokenizer import Tokenizer, import_without_torch
from unisono.types import EngineDead

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
CONNECTION_LIMIT = 3
"""Seconds for open connections to close after every request has been answered or failed."""


async def build_service(client: Engines, config: Any, settings: ServerSettings) -> Service:
    """Load the tokenizer while the engine loads the model, then connect everything. Raises CheckpointError."""
    tokenizer = await in_daemon(_load_tokenizer, settings)
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
    await in_daemon(media.prepare)
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


def make_application(service: Service, settings: ServerSettings) -> ASGIApp:
    """The application of a service, with the CORS headers of the flags."""
    return settings.http.with_cors(create_app(service))


async def report_progress(service: Service) -> None:
    """Log a line every PROGRESS_SECONDS while requests run."""
    progress = ProgressLine()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        with contextlib.suppress(EngineDead, TimeoutError):
            stats = await service.client.inspect(INSPECT_LIMIT)
            if line := progress.line(stats.samples):
                logger.info("%s", line)


class HttpServer(uvicorn.Server):
    """uvicorn with the limits of the flags and without its signal handling."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, refused: Callable[[str], None]) -> None:
        """refused: called with the error code of each request or connection beyond the limits."""
        limits = settings.limits.within_open_files()
        protocol = functools.partial(
            LimitedProtocol, limits=limits, refused=refused, ahead=ReadAhead(limits.ahead_bytes)
        )
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=CONNECTION_LIMIT,
            **settings.http.uvicorn(),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``server``."""
        yield
