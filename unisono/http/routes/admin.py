"""Operators' routes: cached prefixes, running requests, profiles, sleep.

Open to operators' keys; without keys, to this machine. Users may abort their own requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.cluster.commands import CommandError
from unisono.http.errors import ApiError, no_answer
from unisono.http.limits.fields import FirstError, SleepLevel, Strings
from unisono.http.openai.translation import checked
from unisono.http.request_body import load_object
from unisono.http.routes.common import described, json_response, operators_only, owners_only, parsed_body
from unisono.http.service import Service
from unisono.types import EngineDead

WEIGHTS, KV_CACHE = "weights", "kv_cache"
Tag = Literal["weights", "kv_cache"]
Tags = Annotated[list[Tag], FirstError()]
"""Parts of the memory."""
LIMIT = 60.0
"""Timeout of a command in the engine process, seconds; writing a long profile takes most."""
WEIGHTS_LIMIT = 600.0
"""Timeout of a sleep and of a wake, seconds: weights are copied, or read from a disk."""
KEPT = "weights, KV pages and graphs: graphs hold their addresses; with --enable-sleep-mode weights and pages are freed"


class AbortRequest(BaseModel):
    """Body of ``/abort``: some requests by the ids of their answers, or all."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: Strings | None = Field(None, description="a list of ids of answers")
    request_id: str | None = Field(None, description="an id of an answer")
    rid: str | None = Field(None, description="an id of an answer")
    abort_all: bool | None = Field(None, description="true or false")


class MemoryRequest(BaseModel):
    """Body of ``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tags: Tags | None = Field(None, description="a list of weights and kv_cache; null: both")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    operators = operators_only(service)
    _add_sleep(app, service)
    _add_memory(app, service)

    for path in ("/reset_prefix_cache", "/flush_cache"):  # vLLM's name and SGLang's

        @app.post(path, dependencies=operators, **described("Forget every cached prefix that no request uses."))
        async def reset() -> Response:
            return json_response({"freed_pages": await _call(service, "reset_prefix_cache")})

    for path in ("/abort", "/abort_request"):

        @app.post(path, dependencies=owners_only(service), **described("End requests early.", AbortRequest))
        async def abort(request: Request) -> Response:
            ids = await _abort_body(request)
            return json_response({"aborted": _abort(service, ids, service.keys.scope(request))})

    @app.post("/start_profile", dependencies=operators, **described("Begin to record what the engine does."))
    async def start_profile() -> Response:
        if service.profile_dir is None:
            raise ApiError(400, "Profiles are off; start the server with --profile-dir DIR.", code="profiles_off")
        await _call(service, "start_profile", directory=str(service.profile_dir))
        return json_response({"recording": True})

    @app.post("/stop_profile", dependencies=operators, **described("Write the record as a Chrome trace."))
    async def stop_profile() -> Response:
        return json_response({"recording": False, "path": await _call(service, "stop_profile")})


def _add_sleep(app: FastAPI, service: Service) -> None:
    operators = operators_only(service)

    @app.post(
        "/sleep",
        dependencies=operators,
        **described("Finish what runs, take no more requests, free what can be freed."),
    )
    async def sleep(level: SleepLevel = 1, mode: Literal["wait", "abort", "keep"] = "wait") -> Response:
        return json_response(await _fall_asleep(service, level, mode))

    @app.post("/wake_up", dependencies=operators, **described("Take requests again, by parts: weights, then kv_cache."))
    async def wake_up(
        tags: Annotated[list[Tag] | None, Query(max_length=2)] = None,
        reload: bool = True,
    ) -> Response:
        return json_response(await _wake_up(service, tags, reload))

    @app.get("/is_sleeping", dependencies=operators, **described("Whether the server sleeps."))
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": service.sleeping})


def _add_memory(app: FastAPI, service: Service) -> None:
    """Add SGLang's names of sleep. Requests that run wait; its ``/pause_generation`` may end them first."""
    operators = operators_only(service)

    async def tags_of(request: Request) -> list[Tag] | None:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), MemoryRequest))
        return body.tags or None

    @app.post(
        "/release_memory_occupation",
        dependencies=operators,
        **described("Free the memory of weights and KV cache, or of the KV cache (SGLang).", MemoryRequest),
    )
    async def release(request: Request) -> Response:
        tags = await tags_of(request)
        if tags is not None and KV_CACHE not in tags:
            raise ApiError(400, f"tags={tags}: weights are released with the kv_cache; name both.", param="tags")
        if not _frees(service):
            raise ApiError(400, "this server cannot release memory; start it with --enable-sleep-mode.", param="tags")
        found = await _fall_asleep(service, 1, "keep")
        if tags is not None and set(tags) == {KV_CACHE}:
            found |= await _wake_up(service, [WEIGHTS], True)
        return json_response(found)

    @app.post(
        "/resume_memory_occupation",
        dependencies=operators,
        **described("Get the memory back: weights, then kv_cache (SGLang).", MemoryRequest),
    )
    async def resume(request: Request) -> Response:
        return json_response(await _wake_up(service, await tags_of(request), True))


async def _fall_asleep(service: Service, level: int, mode: str) -> dict[str, Any]:
    """Take no more requests and free what can be freed. mode: of the requests that run: wait, abort or keep."""
    frees = level > 0 and _frees(service)
    if not frees and (level == 2 or mode == "keep"):
        name, value = ("level", level) if level == 2 else ("mode", mode)
        raise ApiError(400, f"{name}={value} needs --enable-sleep-mode: otherwise sleep keeps {KEPT}.", param=name)
    slept, service.sleeping = service.sleeping, True
    service.metrics.sleeping(True)
    if mode != "keep":
        await _drain(service, service.drain_timeout if mode == "wait" else 0.0)
    if not frees:
        pages = await _call(service, "reset_prefix_cache")
        freed = await _call(service, "free_memory")
        return {"is_sleeping": True, "freed_pages": pages, "freed_bytes": freed, "kept": KEPT}
    try:
        done = await _call(service, "sleep", WEIGHTS_LIMIT, level=level)
    except ApiError:
        service.sleeping = slept
        service.metrics.sleeping(slept)
        raise
    engines = done if isinstance(done, list) else [done] * len(service.client.infos)
    freed = {tag: sum(one["freed_bytes"][tag] for one in engines) for tag in engines[0]["freed_bytes"]}
    pages = sum(one["freed_pages"] for one in engines)
    return {"is_sleeping": True, "level": level, "freed_pages": pages, "freed_bytes": freed}


async def _wake_up(service: Service, tags: Sequence[str] | None, reload: bool) -> dict[str, Any]:
    """Get memory back; take requests again if nothing sleeps any more."""
    asleep: list[str] = []
    if _frees(service):
        done = await _call(service, "wake_up", WEIGHTS_LIMIT, tags=tags, reload=reload)
        engines = done if isinstance(done, list) else [done]
        asleep = sorted({tag for one in engines for tag in one["asleep"]})
        service.weights.version = engines[0]["weight_version"]
    service.sleeping = bool(asleep)
    service.metrics.sleeping(service.sleeping)
    return {"is_sleeping": service.sleeping, **({"asleep": asleep} if asleep else {})}


def _frees(service: Service) -> bool:
    """True if the engines were started with ``--enable-sleep-mode``."""
    return bool(service.client.infos[0]["settings"].get("enable_sleep_mode"))


async def _drain(service: Service, seconds: float) -> None:
    """Wait until no answer is in progress; abort those that are left after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            while service.running:
                await asyncio.sleep(0.02)
    except TimeoutError:
        _abort(service, None)


async def _abort_body(request: Request) -> list[str] | None:
    """The ids to abort; None for all. Raises ApiError."""
    body = await parsed_body(request, lambda raw: checked(load_object(raw), AbortRequest))
    ids = [*(body.request_ids or []), *(one for one in (body.request_id, body.rid) if one is not None)]
    if not ids and not body.abort_all:
        raise ApiError(400, "request_ids is missing; name answers, or set abort_all=true.", param="request_ids")
    return None if body.abort_all else ids


def _abort(service: Service, ids: list[str] | None, key: str | None = None) -> list[str]:
    """End these answers early, or all, of the key with this name or of all clients. Returns the running ones."""
    named = list(service.running) if ids is None else ids
    found = [one for one in dict.fromkeys(named) if one in service.running]
    if key is not None:
        found = [one for one in found if all(generation.key == key for generation in service.running[one])]
    for one in found:
        for generation in service.running[one]:
            generation.cancel()
    return found


async def _call(service: Service, command: str, limit: float = LIMIT, **arguments: Any) -> Any:
    try:
        return await service.client.call(command, limit, **arguments)
    except CommandError as error:
        raise ApiError(409, str(error), "conflict_error", code="command_failed") from None
    except (EngineDead, TimeoutError) as error:
        raise no_answer(error) from None
