"""Unisono as an application of Ray Serve.

    serve run unisono.entrypoints.ray_serve:build model=tiny data_parallel_size=2

One deployment takes the HTTP requests; it has the API, the router and no model. The engines are Ray actors
(``cluster/replicas/on_ray.py``), so that the router, which knows prefixes, places requests, not Ray Serve's. Ray Serve
listens, restarts a failed deployment, and rolls out new versions. Needs ``ray[serve]``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.cluster.replicas.plan import ReplicaSettings
from unisono.config import EngineConfig, catalog
from unisono.http.server import ServerSettings, start_application
from unisono.types import EngineDead


class Arguments(BaseModel):
    """Arguments of the application; names are those of flags. engine: fields of ``EngineConfig``."""

    model_config = ConfigDict(extra="forbid")

    model: str = "tiny"
    served_model_name: str | None = None
    data_parallel_size: int = 1
    ray_address: str | None = None
    api_key: str | None = Field(None, repr=False)
    metrics_prefix: str = "unisono"
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    engine: dict[str, Any] = {}

    def config(self) -> EngineConfig:
        """The engines' settings. Raises ConfigError."""
        return EngineConfig(model=self.model, **self.engine)

    def settings(self) -> ServerSettings:
        """The server's settings. Raises ConfigError."""
        return ServerSettings(
            model_path=catalog.resolve_name(self.model),
            names=(self.served_model_name or self.model,),
            api_key=self.api_key,
            metrics_prefix=self.metrics_prefix,
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            scale=ReplicaSettings(self.data_parallel_size, "ray", self.ray_address),
        )


class _Forward(Response):
    """Forward a request to another application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@serve.deployment
class Unisono:
    """The deployment."""

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]
        self._app, self._service = await start_application(arguments.config(), arguments.settings())

    async def __call__(self, request: Request) -> Response:
        """Answer every route with the API's application."""
        return _Forward(self._app)

    async def check_health(self) -> None:
        """Raise if no engine serves and none will be back: Ray Serve then restarts the deployment."""
        client = self._service.client
        if client.death is not None and not client.restarting:
            raise EngineDead(client.death)

    async def __del__(self) -> None:
        """End the engines."""
        if (service := getattr(self, "_service", None)) is not None:
            await service.client.shutdown()


def build(arguments: Arguments) -> serve.Application:
    """Return the application."""
    return Unisono.bind(arguments)  # type: ignore[attr-defined]
