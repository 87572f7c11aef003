"""Operators' routes for weights that change while they are served, for reinforcement learning. Names are SGLang's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.cluster.commands import CommandError
from unisono.frontend.scores import NO_UPDATE
from unisono.http.errors import ApiError, no_answer
from unisono.http.limits.fields import FirstWrongValue, Shapes, Strings, TokenIds
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


class TensorHandle(BaseModel):
    """A tensor in GPU memory of another process; see ``unisono.distributed.cuda_ipc``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    device: str = Field(description="UUID of the GPU")
    handle: str = Field(description="CUDA's IPC handle of the allocation, 64 bytes in hexadecimal")
    offset: int = Field(description="of the tensor in the allocation, bytes")
    shape: TokenIds = Field(description="a list of whole numbers")
    dtype: str = Field(description="dtype, such as bfloat16")


class UpdateTensorsRequest(BaseModel):
    """Body of ``/update_weights_from_tensor``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    files: Strings = Field([], description="safetensors files on the server's host, such as in /dev/shm; Unisono's")
    handles: Annotated[dict[str, TensorHandle], FirstWrongValue(TensorHandle)] = Field(
        {}, description="tensors in GPU memory on the server's host; Unisono's"
    )
    draft: bool = Field(False, description="true: the drafter's weights, by its checkpoint's names; Unisono's")
    weight_version: str | None = Field(None, description="its name in answers; null counts updates")
    abort_all_requests: bool = Field(False, description="true ends running requests; false lets them go on")
    flush_cache: bool = Field(True, description="true; cached prefixes of old weights cannot be kept")


class WeightGroupRequest(BaseModel):
    """Body of ``/init_weights_update_group``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    master_address: str = Field(description="host of the trainer, which is rank 0")
    master_port: int = Field(description="port of the trainer")
    rank_offset: int = Field(description="rank of the engine's first rank")
    world_size: int = Field(description="members, the trainer included")
    group_name: str = Field("weight_update_group", description="name of the group")
    backend: str = Field("nccl", description="nccl or gloo")


class LeaveGroupRequest(BaseModel):
    """Body of ``/destroy_weights_update_group``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    group_name: str = Field("weight_update_group", description="name of the group")


class ReceiveWeightsRequest(BaseModel):
    """Body of ``/update_weights_from_distributed``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    names: Strings = Field(description="the checkpoint's names of the tensors, in the order in which they are sent")
    dtypes: Strings = Field(description="dtypes, such as bfloat16")
    shapes: Shapes = Field(description="shapes")
    draft: bool = Field(False, description="true: the drafter's weights, by its checkpoint's names; Unisono's")
    group_name: str = Field("weight_update_group", description="name of the group")
    weight_version: str | None = Field(None, description="its name in answers; null counts updates")
    abort_all_requests: bool = Field(False, description="true ends running requests; false lets them go on")
    flush_cache: bool = Field(True, description="true; cached prefixes of old weights cannot be kept")


class PauseRequest(BaseModel):
    """Body of ``/pause_generation``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Literal["abort", "in_place", "keep"] = Field(
        "abort", description="abort ends running requests; in_place (vLLM: keep) holds them"
    )


Update = UpdateWeightsRequest | UpdateTensorsRequest | ReceiveWeightsRequest
"""Bodies of the routes that write weights."""


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_groups(app, service)
    _add_pause(app, service)
    operators = operators_only(service)

    @app.post(
        "/update_weights_from_disk",
        dependencies=operators,
        **described("Replace the weights between two passes; a failure leaves the old ones.", UpdateWeightsRequest),
    )
    async def update(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), UpdateWeightsRequest))
        return json_response(await _update(service, body))

    @app.post(
        "/update_weights_from_tensor",
        dependencies=operators,
        **described("Replace some of the weights by tensors in memory of this host.", UpdateTensorsRequest),
    )
    async def from_tensor(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), UpdateTensorsRequest))
        if not body.files and not body.handles:
            raise ApiError(400, "files is missing; name files or handles of tensors.", param="files")
        sources = {"files": body.files, "handles": {name: one.model_dump() for name, one in body.handles.items()}}
        return json_response(
            await _change(service, body, "update_weights_from_tensor", "files", **sources, draft=body.draft)
        )

    @app.post(
        "/update_weights_from_distributed",
        dependencies=operators,
        **described("Receive some of the weights from a trainer's process group.", ReceiveWeightsRequest),
    )
    async def from_distributed(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), ReceiveWeightsRequest))
        arguments = {name: getattr(body, name) for name in ("names", "dtypes", "shapes", "group_name", "draft")}
        return json_response(await _change(service, body, "update_weights_from_distributed", "names", **arguments))

    @app.get("/get_weight_version", dependencies=operators, **described("Name of the weights that are served."))
    async def version() -> Response:
        return json_response({"weight_version": service.weights.version})


def _add_groups(app: FastAPI, service: Service) -> None:
    operators = operators_only(service)

    @app.post(
        "/init_weights_update_group",
        dependencies=operators,
        **described("Join a trainer's process group; waits for all members.", WeightGroupRequest),
    )
    async def join(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), WeightGroupRequest))
        if (replicas := len(service.client.infos)) > 1:
            raise ApiError(
                400,
                f"{replicas} replicas cannot join one group: a rank_offset names the ranks of one. Serve one "
                "replica per server, or use /update_weights_from_tensor.",
                param="rank_offset",
            )
        await _call(service, "init_weights_update_group", "master_address", **body.model_dump())
        return json_response({"success": True, "message": f"The engine has joined {body.group_name}."})

    @app.post(
        "/destroy_weights_update_group",
        dependencies=operators,
        **described("Leave a trainer's process group.", LeaveGroupRequest),
    )
    async def leave(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), LeaveGroupRequest))
        await _call(service, "destroy_weights_update_group", "group_name", group_name=body.group_name)
        return json_response({"success": True, "message": f"The engine has left {body.group_name}."})


def _add_pause(app: FastAPI, service: Service) -> None:
    operators = operators_only(service)

    @app.post(
        "/pause_generation",
        dependencies=operators,
        **described("Launch no more passes, until /continue_generation.", PauseRequest),
    )
    async def pause(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), PauseRequest))
        if body.mode == "abort":
            _abort_all(service)
        await _call(service, "pause", "mode", paused=True)
        return json_response({"status": "paused"})

    @app.post("/continue_generation", dependencies=operators, **described("Launch passes again."))
    async def resume() -> Response:
        await _call(service, "pause", "mode", paused=False)
        return json_response({"status": "ok"})


async def _update(service: Service, body: UpdateWeightsRequest) -> dict[str, Any]:
    if not body.model_path and not body.draft_path:
        raise ApiError(400, "model_path is missing; name a directory of weights.", param="model_path")
    return await _change(
        service, body, "update_weights", "model_path", directory=body.model_path, draft_directory=body.draft_path
    )


async def _change(service: Service, body: Update, command: str, param: str, **arguments: Any) -> dict[str, Any]:
    """Run a command that writes weights. param: field that errors name."""
    if not body.flush_cache:
        raise ApiError(400, "flush_cache=false would mix old keys with new weights; leave it out.", param="flush_cache")
    if (service.classifier is not None or service.pooling.layers) and arguments.get("directory") != "":
        raise ApiError(400, NO_UPDATE, param=param, code="weights_not_updated")
    if body.abort_all_requests:
        _abort_all(service)
    done = await _call(service, command, param, **arguments, version=body.weight_version)
    first = done[0] if isinstance(done, list) else done
    service.weights.version = first["weight_version"]
    return {"success": True, "message": "The weights are updated.", "num_paused_requests": 0, **first}


def _abort_all(service: Service) -> None:
    for generations in list(service.running.values()):
        for generation in generations:
            generation.cancel()


async def _call(service: Service, command: str, param: str, **arguments: Any) -> Any:
    try:
        return await service.client.call(command, LIMIT, **arguments)
    except CommandError as error:
        raise ApiError(400, str(error), param=param, code="weights_not_updated") from None
    except (EngineDead, TimeoutError) as error:
        raise no_answer(error) from None
