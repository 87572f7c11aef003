"""Scores and classes of texts, and pooled values in general: vLLM's routes, and the rerankers' of Jina and Cohere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.frontend.pooling import encoded
from unisono.frontend.scores import Steps, check_one_label, check_task, cosine, pair_ids, paired, pooled_by_task
from unisono.http.answers.answer import Answer
from unisono.http.answers.generation import Generation
from unisono.http.answers.pooled import Pool, pooled_values
from unisono.http.limits.fields import FirstError, Strings, TokenIdLists, TokenIds
from unisono.http.openai.protocol import CompletionRequest, parse_fields
from unisono.http.openai.serving import HiddenUse
from unisono.http.openai.translation import Renames, checked
from unisono.http.request_body import load_object, off_loop
from unisono.http.routes.common import described, new_id, parsed_body, placement_of, when_ready
from unisono.http.service import Service
from unisono.types import BadRequest

STRICT = ConfigDict(strict=True, extra="forbid")
MODEL = Field(None, description="the name of a served model")
TRUNCATE = Field(None, description="a whole number: last tokens that are kept")
ACTIVATION = Field(None, description="true (the default) or false")
USER = Field(None, description="a string")
TEXTS = ("text_1", "text_2")
OTHER_TEXTS = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""vLLM's other names of TEXTS."""


class PooledRequest(BaseModel):
    """Body of ``/pooling``."""

    model_config = STRICT

    input: str | Strings | TokenIds | TokenIdLists = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    model: str | None = MODEL
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None, description='"embed", "classify", "token_embed" or "token_classify"'
    )
    encoding_format: Literal["float", "base64"] | None = Field(None, description='"float" or "base64"')
    dimensions: int | None = Field(None, description="a whole number")
    normalize: bool | None = ACTIVATION
    use_activation: bool | None = ACTIVATION
    truncate_prompt_tokens: int | None = TRUNCATE
    step_tag_id: int | None = Field(None, description="a token id: only tokens with it are in the answer")
    returned_token_ids: TokenIds | None = Field(None, description="a list of whole numbers: the labels that count")
    prompt_name: str | None = Field(None, description="a string: the model card's prompt that goes before each text")
    user: str | None = USER


class ClassificationRequest(BaseModel):
    """Body of ``/classify``."""

    model_config = STRICT

    input: str | Strings | TokenIds | TokenIdLists = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    model: str | None = MODEL
    use_activation: bool | None = ACTIVATION
    truncate_prompt_tokens: int | None = TRUNCATE
    user: str | None = USER


class ScoreRequest(BaseModel):
    """Body of ``/score``."""

    model_config = STRICT

    text_1: str | Strings = Field(
        description="a string or a list of strings: the queries; also named data_1 or queries"
    )
    text_2: str | Strings = Field(
        description="a string or a list of strings: the documents; also named data_2, documents or items"
    )
    model: str | None = MODEL
    use_activation: bool | None = ACTIVATION
    truncate_prompt_tokens: int | None = TRUNCATE
    user: str | None = USER


class RankedText(BaseModel):
    """A document of ``/rerank`` as an object."""

    model_config = STRICT

    text: str = Field(description="a string")


class RerankRequest(BaseModel):
    """Body of ``/rerank``: Jina's and Cohere's fields."""

    model_config = STRICT

    query: str = Field(description="a string")
    documents: Annotated[list[str | RankedText], FirstError()] = Field(
        description="a list of strings, or of objects with a text"
    )
    model: str | None = MODEL
    top_n: int | None = Field(None, description="a whole number: best documents that are returned; 0 or null: all")
    return_documents: bool | None = Field(None, description="true (the default) or false")
    use_activation: bool | None = ACTIVATION
    truncate_prompt_tokens: int | None = TRUNCATE
    user: str | None = USER


Write = Callable[[list[np.ndarray]], dict[str, Any]]


@dataclass
class PooledReply:
    """Pooled values in progress. They are never streamed. pool: a prompt's value of its states and token ids. write:
    the answer without usage, of the values of all prompts."""

    generations: list[Generation]
    pool: Pool
    write: Write

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises the error that ended a request early."""
        found = await asyncio.to_thread(self.write, await pooled_values(self.generations, self.pool))
        tokens = sum(generation.usage.prompt_tokens for generation in self.generations)
        return {**found, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]:
        raise NotImplementedError("pooled values are not streamed")


@dataclass
class Pooled:
    """Prompts whose pooled values are requested.

    field: the prompts' name in the body. size: of the body, bytes. fields: of the completion. by_token: the answer has
    a value for each token.
    """

    prompts: Any
    field: str
    size: int
    fields: dict[str, Any]
    by_token: bool = False


async def respond(service: Service, request: Request, pooled: Pooled, pool: Pool, write: Write) -> Response:
    """Compute the states of prompts, pool those of each with ``pool``, and answer with ``write``."""
    answer_id = new_id("pool-")
    values = {"prompt": pooled.prompts, "max_tokens": 1, "temperature": 0, "return_hidden_states": True}
    values |= pooled.fields
    values = {name: value for name, value in values.items() if value is not None}
    answer = Answer(service, request, answer_id, placement_of(request))
    use = HiddenUse.BY_TOKEN if pooled.by_token else HiddenUse.POOLED
    with Renames({"prompt": pooled.field}).errors():
        completion = await off_loop(pooled.size, lambda: parse_fields(values, CompletionRequest))
        generations = await service.serving.completion(completion, answer_id, use=use)
    return await answer.send(PooledReply(generations, pool, write), generations, False)


def listing(model: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    """A list of results in vLLM's form."""
    return {"id": new_id("pool-"), "object": "list", "created": int(time.time()), "model": model, "data": data}


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    ready = when_ready(service)

    @app.post("/pooling", dependencies=ready, **described("Pool texts.", PooledRequest))
    async def pooling(request: Request) -> Response:
        return await _pool(service, request)

    @app.post("/classify", dependencies=ready, **described("Classify texts.", ClassificationRequest))
    async def classify(request: Request) -> Response:
        return await _classify(service, request)

    @app.post("/score", dependencies=ready, **described("Score pairs of texts.", ScoreRequest))
    @app.post("/v1/score", dependencies=ready, **described("Score pairs of texts.", ScoreRequest))
    async def score(request: Request) -> Response:
        return await _score(service, request)

    @app.post("/rerank", dependencies=ready, **described("Rank documents by a query.", RerankRequest))
    @app.post("/v1/rerank", dependencies=ready, **described("Rank documents by a query.", RerankRequest))
    @app.post("/v2/rerank", dependencies=ready, **described("Rank documents by a query.", RerankRequest))
    async def rerank(request: Request) -> Response:
        return await _rerank(service, request)


async def _pool(service: Service, request: Request) -> Response:
    body, size = await parsed_body(request, lambda raw: (checked(load_object(raw), PooledRequest), len(raw)))
    model, head = service.model(body.model), service.classifier
    task = body.task or ("embed" if head is None else "classify")
    check_task(task, service.pooling, head)
    service.pooling.check_dimensions(body.dimensions, service.serving.inputs.model.hidden_size)
    labels = None if body.returned_token_ids is None else tuple(body.returned_token_ids)
    steps = Steps(body.step_tag_id, labels)
    steps.check(head, task)
    prompts = service.pooling.prompted(body.input, body.prompt_name) if task == "embed" else body.input
    active, form = body.use_activation is not False and body.normalize is not False, body.encoding_format or "float"

    def pool(states: np.ndarray, token_ids: list[int]) -> np.ndarray:
        return _pooled(service, states, task, body.dimensions, active, token_ids, steps)

    def write(values: list[np.ndarray]) -> dict[str, Any]:
        data = [{"index": i, "object": "pooling", "data": encoded(each, form)} for i, each in enumerate(values)]
        return listing(model, data)

    fields = {"model": model, "truncate_prompt_tokens": body.truncate_prompt_tokens}
    by_token = task in ("token_embed", "token_classify")
    return await respond(service, request, Pooled(prompts, "input", size, fields, by_token), pool, write)


async def _classify(service: Service, request: Request) -> Response:
    body, size = await parsed_body(request, lambda raw: (checked(load_object(raw), ClassificationRequest), len(raw)))
    model, head = service.model(body.model), service.classifier
    check_task("classify", service.pooling, head)

    def pool(states: np.ndarray, _: list[int]) -> np.ndarray:
        assert head is not None
        return head.of_prompt(states, body.use_activation is not False)

    def write(values: list[np.ndarray]) -> dict[str, Any]:
        assert head is not None
        data = []
        for index, probs in enumerate(values):
            label = head.labels[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return listing(model, data)

    fields = {"model": model, "truncate_prompt_tokens": body.truncate_prompt_tokens}
    return await respond(service, request, Pooled(body.input, "input", size, fields), pool, write)


async def _score(service: Service, request: Request) -> Response:
    (body, names), size = await parsed_body(request, lambda raw: (score_request(load_object(raw)), len(raw)))
    model = service.model(body.model)
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    pairs = paired(first, second, names)

    def write(scores: list[float]) -> dict[str, Any]:
        return listing(model, [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)])

    return await _scored(service, request, pairs, size, body, names, write)


def score_request(body: dict[str, Any]) -> tuple[ScoreRequest, tuple[str, str]]:
    """A body of ``/score``, and its names of TEXTS: these, or the first of OTHER_TEXTS with a name in the body.

    Raises BadRequest and ApiError with the caller's names.
    """
    others = () if body.keys() & {*TEXTS} else OTHER_TEXTS
    found = [names for names in others if body.keys() & {*names}]
    names = max(found, key=lambda each: len(body.keys() & {*each}), default=TEXTS)
    fields = {own: body[name] for own, name in zip(TEXTS, names, strict=True) if name in body}
    fields |= {name: value for name, value in body.items() if name not in names}
    with Renames(dict(zip(TEXTS, names, strict=True))).errors():
        return checked(fields, ScoreRequest), names


async def _rerank(service: Service, request: Request) -> Response:
    body, size = await parsed_body(request, lambda raw: (checked(load_object(raw), RerankRequest), len(raw)))
    model = service.model(body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs = paired([body.query], texts, ("query", "documents"))
    if body.top_n is not None and body.top_n < 0:
        raise BadRequest(f"top_n={body.top_n} is out of range: give a whole number from 0 on.", "top_n")

    def write(scores: list[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents is not False:
            results = [{**one, "document": {"text": texts[index]}} for one, index in zip(results, order, strict=True)]
        return {"id": new_id("rerank-"), "model": model, "results": results}

    return await _scored(service, request, pairs, size, body, ("query", "documents"), write)


async def _scored(
    service: Service, request: Request, pairs: Sequence[tuple[str, str]], size: int, body: ScoreRequest | RerankRequest,
    names: tuple[str, str], write: Callable[[list[float]], dict[str, Any]],
) -> Response:  # fmt: skip
    """Score pairs by the classifier's one label, or by the cosine of their embeddings. names: of the texts' fields."""
    head, active = service.classifier, body.use_activation is not False
    fields = {"model": service.model(body.model), "truncate_prompt_tokens": body.truncate_prompt_tokens}
    if head is not None:
        check_one_label(head)
        truncates, inputs = body.truncate_prompt_tokens is not None, service.serving.inputs
        ids = await off_loop(size, lambda: [pair_ids(inputs, pair, names, truncates) for pair in pairs])
        return await respond(
            service,
            request,
            Pooled(ids, names[1], size, fields),
            lambda states, _: head.of_prompt(states, active),
            lambda values: write([float(each[0]) for each in values]),
        )
    check_task("embed", service.pooling, None)
    queries = list(dict.fromkeys(query for query, _ in pairs))
    texts = service.pooling.prompted([*queries, *(document for _, document in pairs)], None)

    def cosines(vectors: list[np.ndarray]) -> dict[str, Any]:
        of_query, documents = dict(zip(queries, vectors, strict=False)), vectors[len(queries) :]
        return write([cosine(of_query[query], each) for (query, _), each in zip(pairs, documents, strict=True)])

    return await respond(
        service,
        request,
        Pooled(texts, names[1], size, fields),
        lambda states, _: _pooled(service, states, "embed", None, True),
        cosines,
    )


def _pooled(
    service: Service, states: np.ndarray, task: str, dimensions: int | None, active: bool,
    token_ids: Sequence[int] = (), steps: Steps | None = None,
) -> np.ndarray:  # fmt: skip
    if task == "embed":
        return service.pooling.pool(states, dimensions, active)
    return pooled_by_task(states, task, service.classifier, dimensions, active, token_ids, steps)
