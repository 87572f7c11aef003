"""State of the server: health, version, load, configuration, metrics."""

from __future__ import annotations

import contextlib

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from unisono import __version__
from unisono.http.errors import no_answer
from unisono.http.routes.common import clients_only, described, json_response
from unisono.http.service import INSPECT_LIMIT, Service
from unisono.types import EngineDead


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_health(app, service)

    @app.get("/version", **described("The version of the server."))
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load", **described("Requests that are not fully answered."))
    async def load() -> Response:
        engines = service.client.replicas()
        return json_response({"server_load": service.in_flight, **({"engines": engines} if engines else {})})

    @app.get(
        "/server_info",
        dependencies=clients_only(service),
        **described("The flags, the model, and the engine's configuration, graphs and counters."),
    )
    async def server_info(request: Request) -> Response:
        try:
            stats = await service.client.inspect(INSPECT_LIMIT)
        except (EngineDead, TimeoutError) as error:
            raise no_answer(error) from None
        engines = zip(service.client.replicas(), service.client.infos, strict=False)
        engine_infos = [{**one, "info": info} for one, info in engines]
        settings = service.settings
        if (key := service.keys.scope(request)) is not None:  # a user must not see the names of other keys
            settings = {**settings, "keys": [key]}
        whole = {"server": settings, "engine": stats.info}
        return json_response(whole | ({"engines": engine_infos} if engine_infos else {}))

    async def model_info() -> Response:
        return json_response(
            {
                "model_path": service.root,
                "tokenizer_path": str(service.settings.get("tokenizer") or service.root),
                "is_generation": service.serving.inputs.model.generates,
                "preferred_sampling_params": None,
                "weight_version": service.weights.version,
            }
        )

    for path in ("/model_info", "/get_model_info"):  # SGLang's name and its older one
        app.get(
            path,
            dependencies=clients_only(service),
            **described("Directories of the model and the tokenizer, and the weights' version (SGLang)."),
        )(model_info)

    @app.get("/metrics", **described("Prometheus metrics."))
    async def metrics() -> Response:
        with contextlib.suppress(EngineDead, TimeoutError):  # then the last numbers are used
            await service.client.inspect(INSPECT_LIMIT)
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_health(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        refusal = service.unhealthy()
        if refusal is not None:
            raise refusal
        return json_response({"status": "ok"})

    app.get("/health", **described("200 while the server serves, 503 when its engine is dead or it shuts down."))(
        health
    )
    for method in (app.get, app.post):  # SageMaker's health check is a GET, vLLM takes both
        method("/ping", **described("The same as /health."))(health)
