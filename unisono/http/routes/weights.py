"""Operators' routes for weights that change while they are served, for reinforcement learning. Names are SGLang's."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.cluster.commands import CommandError
from unisono.frontend.scores import NO_UPDATE
from unisono.http.errors import ApiError, unavailable
from unisono.http.openai.translation import checked
from unisono.http.request_body import load_object
from unisono.http.routes.common import described, json_response, operators_only, parsed_body
from unisono.http.service import Service
from unisono.types import EngineDead

LIMIT = 600.0
"""Timeout of an update, seconds: the directory may be on a slow disk."""


class UpdateWeightsRequest(BaseModel):
    """Body of ``/update_weights_from_disk``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model_path: str = Field("", description="directory of the model's new weights")
    draft_path: str = Field("", description="directory of the draft head's new weights; Unisono's")
    weight_version: str | None = Field(None, description="its name in answers; null counts updates")
    abort_all_requests: bool = Field(False, description="true ends running requests; false lets them go on")
    flush_cache: bool = Field(True, description="true; cached prefixes of old weights cannot be kept")
    load_format: Literal["auto"] | None = Field(None, description="null or auto")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    operators = operators_only(service)

    @app.post(
        "/update_weights_from_disk",
        dependencies=operators,
        **described("Replace the weights between two passes; a failure leaves the old ones.", UpdateWeightsRequest),
    )
    async def update(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), UpdateWeightsRequest))
        return json_response(await _update(service, body))

    @app.get("/get_weight_version", dependencies=operators, **described("Name of the weights that are served."))
    async def version() -> Response:
        return json_response({"weight_version": service.weights.version})


async def _update(service: Service, body: UpdateWeightsRequest) -> dict[str, Any]:
    if not body.flush_cache:
        raise ApiError(400, "flush_cache=false would mix old keys with new weights; leave it out.", param="flush_cache")
    if not body.model_path and not body.draft_path:
        raise ApiError(400, "model_path is missing; name a directory of weights.", param="model_path")
    if (service.classifier is not None or service.pooling.layers) and body.model_path:
        raise ApiError(400, NO_UPDATE, param="model_path", code="weights_not_updated")
    if body.abort_all_requests:
        for generations in list(service.running.values()):
            for generation in generations:
                generation.cancel()
    arguments = {"directory": body.model_path, "draft_directory": body.draft_path, "version": body.weight_version}
    try:
        done = await service.client.call("update_weights", LIMIT, **arguments)
    except CommandError as error:
        raise ApiError(400, str(error), param="model_path", code="weights_not_updated") from None
    except (EngineDead, TimeoutError) as error:
        raise unavailable(f"The engine does not answer: {error or 'it is busy'}.", "engine_unavailable") from None
    first = done[0] if isinstance(done, list) else done
    service.weights.version = first["weight_version"]
    return {"success": True, "message": "The weights are updated.", "num_paused_requests": 0, **first}
