"""Loading and unloading of adapters at run time: vLLM's endpoints and SGLang's. For operators."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.http.openai.translation import checked
from unisono.http.request_body import load_object
from unisono.http.routes.common import described, json_response, operators_only, parsed_body
from unisono.http.service import Service


class LoadAdapter(BaseModel):
    """Body of ``/v1/load_lora_adapter``. base_model_name, pinned: taken, and nothing to do."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(description="what requests call the adapter", min_length=1)
    lora_path: str = Field(description="its directory, below --allowed-lora-path", min_length=1)
    load_inplace: bool | None = Field(None, description="true: in place of one of that name")
    base_model_name: str | None = Field(None, description="a string")
    pinned: bool | None = Field(None, description="true or false")


class UnloadAdapter(BaseModel):
    """Body of ``/v1/unload_lora_adapter``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(description="an adapter's name", min_length=1)
    lora_int_id: int | None = Field(None, description="a whole number; the name decides")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    operators, adapters = operators_only(service), service.adapters

    async def loaded(request: Request) -> LoadAdapter:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), LoadAdapter))
        service.check_ready()
        await adapters.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        return body

    async def unloaded(request: Request) -> UnloadAdapter:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), UnloadAdapter))
        await adapters.unload(body.lora_name)
        return body

    def listed() -> Response:
        return json_response({"success": True, "loaded_adapters": {a.name: a.path for a in adapters.found.values()}})

    @app.post("/v1/load_lora_adapter", dependencies=operators, **described("Serve an adapter.", LoadAdapter))
    async def load(request: Request) -> Response:
        body = await loaded(request)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", dependencies=operators, **described("Forget an adapter.", UnloadAdapter))
    async def unload(request: Request) -> Response:
        body = await unloaded(request)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post("/load_lora_adapter", dependencies=operators, **described("Serve an adapter (SGLang).", LoadAdapter))
    async def load_sglang(request: Request) -> Response:
        await loaded(request)
        return listed()

    @app.post("/unload_lora_adapter", dependencies=operators, **described("Forget one (SGLang).", UnloadAdapter))
    async def unload_sglang(request: Request) -> Response:
        await unloaded(request)
        return listed()
