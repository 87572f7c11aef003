"""The state that all routes share: the engine, preparation of requests, served models, and the server's status.

:class:`Service` is made once by ``serve``; the routes of ``http/routes`` read and change it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from unisono.cluster.engines import Engines
from unisono.frontend.classifier import Classifier
from unisono.frontend.pooling import Pooling
from unisono.http.adapters import AdapterRegistry
from unisono.http.answers.drafts import AcceptanceReport
from unisono.http.answers.generation import Generation
from unisono.http.errors import ApiError, show, unavailable
from unisono.http.limits.overload import Admission
from unisono.http.observability.metrics import ServerMetrics
from unisono.http.observability.traces import RequestTracer
from unisono.http.openai.hosted_tools import HostedTools
from unisono.http.openai.serving import Serving
from unisono.http.security.auth import Keys

INSPECT_LIMIT = 5.0
"""Timeout of /server_info and /metrics for the engine's current step, seconds."""
CLIENT_GONE = 499


@dataclass
class ServedWeights:
    """version: name of the weights that are served; "0" since the start of an engine."""

    version: str = "0"


@dataclass
class Service:
    """The state that the handlers need.

    draining, sleeping: new requests are refused. in_flight: POST requests without a complete answer. running:
    generations of each answer in progress, by the answer's id. claimed: ids of answers reserved or in progress.
    """

    client: Engines
    serving: Serving
    metrics: ServerMetrics
    names: tuple[str, ...]
    root: str
    fingerprint: str
    settings: dict[str, Any]
    keys: Keys = field(default_factory=Keys)
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    admission: Admission = field(default_factory=Admission)
    hosted: HostedTools = field(default_factory=HostedTools)
    drain_timeout: float = 30.0
    allow_unknown_fields: bool = False
    weights: ServedWeights = field(default_factory=ServedWeights)
    acceptance: AcceptanceReport = field(default_factory=AcceptanceReport)
    profile_dir: Path | None = None
    pooling: Pooling = field(default_factory=Pooling)
    classifier: Classifier | None = None
    tracer: RequestTracer | None = None
    draining: bool = False
    sleeping: bool = False
    in_flight: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    running: dict[str, Sequence[Generation]] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)

    @property
    def model_fingerprint(self) -> str:
        """OpenAI's system_fingerprint: of the engine's config, and of the weights' version once they have changed."""
        version = self.weights.version
        return self.fingerprint if version == "0" else f"{self.fingerprint}-{version}"

    def unhealthy(self) -> ApiError | None:
        """The reason why the server has stopped serving, or None."""
        if self.client.death is not None and not self.client.restarting:
            return unavailable(f"The engine is dead: {self.client.death}. Restart the server.", "engine_dead")
        if self.draining:
            return unavailable("The server is shutting down and takes no new requests.", "shutting_down")
        if self.client.restarting:
            seconds = math.ceil(self.client.start_seconds)
            message = f"The engine is restarting: {self.client.death}. The last start took {seconds} s."
            return unavailable(message, "engine_restarting", seconds)
        return None

    def refusal(self) -> ApiError | None:
        """The reason to refuse every request now, or None."""
        if self.sleeping:
            return unavailable("The server sleeps; POST /wake_up wakes it.", "sleeping")
        return self.unhealthy()

    def check_ready(self) -> None:
        """Raise ApiError (503) if no request can be taken now."""
        if (refusal := self.refusal()) is not None:
            raise refusal

    def close(self, answer_id: str, generations: Sequence[Generation], request: Request, arrival: float) -> None:
        """End the rest of an answer that has been sent, has failed, or has lost its client, and trace it."""
        self.running.pop(answer_id, None)
        for generation in generations:
            generation.close()
        if self.tracer is None:
            return
        traceparent = request.headers.get("traceparent")
        own = {"gen_ai.response.model": self.names[0], "http.route": request.url.path}
        for generation in generations:
            if (attributes := generation.span()) is not None:
                self.tracer.span(traceparent, arrival, {**own, **attributes}, generation.ended == "error")

    def model(self, name: str | None) -> str:
        """The served name in a request, also an adapter's. Raises ApiError (404) for another model's."""
        if name is None:
            return self.names[0]
        if name not in self.names and name not in self.adapters.found:
            served = ", ".join((*self.names, *self.adapters.found))
            message = f"The model {show(name)} is not served here; use one of: {served}."
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")
        return name
