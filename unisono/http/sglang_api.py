"""SGLang's native ``/generate``: its body to a completion request, and pieces to its answers.

A stream's events carry the text so far instead of the new text, as SGLang's do.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from unisono.http.answers.generation import Generation, OutputPiece, merge
from unisono.http.answers.writer import error_event
from unisono.http.errors import show
from unisono.http.limits.fields import AdapterNames, Strings, TokenIdLists, TokenIds
from unisono.http.openai.responses import DONE, LEAST_LOGPROB
from unisono.http.openai.translation import Renames
from unisono.media.fetching.sources import IMAGE, VIDEO, MediaSource, Options
from unisono.media.parts import with_request
from unisono.types import BadRequest

logger = logging.getLogger(__name__)

DEFAULT_TOKENS = 128
"""Default ``max_new_tokens``: SGLang's."""
SAMPLING = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed", "regex": "guided_regex",
    "json_schema": "guided_json", "ebnf": "guided_grammar", "no_stop_trim": "include_stop_str_in_output",
}  # fmt: skip
"""Names in ``sampling_params`` -> names in a completion body; the others are the same."""


MISPLACED = frozenset(
    {"prompt", "prompt_embeds", "embedding_overrides", "model", "stream", "stream_options", "request_id", "rid"}
)
"""Fields of a completion body that ``sampling_params`` must not set."""


class GenerateRequest(BaseModel):
    """Body of ``/generate``. Fields of a completion body that are not listed here are taken too."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str | Strings | None = Field(None, description="a string or a list of strings")
    input_ids: TokenIds | TokenIdLists | None = Field(None, description="a list of token ids, or of such lists")
    sampling_params: dict[str, Any] | None = Field(None, description="an object, the same for all prompts")
    stream: bool | None = Field(None, description="true or false")
    return_logprob: bool | None = Field(None, description="true or false")
    top_logprobs_num: int | None = Field(None, description="a whole number")
    logprob_start_len: int | None = Field(None, description="a whole number; -1: no prompt token")
    return_text_in_logprobs: bool | None = Field(None, description="true or false")
    return_hidden_states: bool | None = Field(None, description="true or false")
    rid: str | None = Field(None, description="a string")
    log_metrics: bool | None = Field(None, description="true or false")
    image_data: str | list[Any] | None = Field(
        None,
        description="a picture (URL or base64) or a list of them; of a list of prompts a list of these",
    )
    video_data: str | list[Any] | None = Field(None, description="a video as image_data has pictures")
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="an object of settings for pictures")
    lora_path: str | AdapterNames | None = Field(
        None, description="the name of an adapter, or a list that names the same one for each prompt"
    )

    @property
    def adapter(self) -> str | None:
        """The adapter of all prompts. Raises BadRequest for several."""
        value = self.lora_path if isinstance(self.lora_path, list) else [self.lora_path]
        if len(set(value)) > 1:
            raise BadRequest(
                f"lora_path={show(self.lora_path)} names several adapters; send a request for each of them.",
                "lora_path",
            )
        return value[0] if value else None


def completion_body(request: GenerateRequest, data: Mapping[str, Any]) -> tuple[dict[str, Any], Renames]:
    """The completion body of a request, and the origins of its parts. Raises BadRequest."""
    own = GenerateRequest.model_fields.keys()
    body = {name: value for name, value in data.items() if name not in own and value not in (None, False, [], {})}
    if (request.text is None) == (request.input_ids is None):
        raise BadRequest("text and input_ids: give one of them.", "text")
    fields, prompt = ("text", request.text) if request.text is not None else ("input_ids", request.input_ids)
    body["prompt"] = prompt
    if (adapter := request.adapter) is not None:
        body["model"] = adapter
    renames = {"prompt": fields, "prompt_logprobs": "logprob_start_len", "logprobs": "top_logprobs_num"}
    misplaced = next((name for name in request.sampling_params or {} if name in MISPLACED), None)
    if misplaced is not None:
        message = f"sampling_params has {misplaced}, which is a field of the body; move it there."
        raise BadRequest(message, "sampling_params")
    for name, value in {"max_new_tokens": DEFAULT_TOKENS, **(request.sampling_params or {})}.items():
        if value is not None:
            body[SAMPLING.get(name, name)] = value
        renames[SAMPLING.get(name, name)] = f"sampling_params.{name}"
    if request.return_hidden_states:
        if request.stream:
            raise BadRequest(
                "return_hidden_states comes with whole answers only; leave out stream.", "return_hidden_states"
            )
        body["return_hidden_states"] = True
    if request.return_logprob:
        body["logprobs"] = request.top_logprobs_num or 0
        if request.logprob_start_len is not None and request.logprob_start_len >= 0:
            body |= {"prompt_logprobs": body["logprobs"], "logprob_start_len": request.logprob_start_len}
    elif request.top_logprobs_num:
        raise BadRequest(
            f"top_logprobs_num={show(request.top_logprobs_num)} needs return_logprob; set it.", "top_logprobs_num"
        )
    return body, Renames(renames)


def media_sources(request: GenerateRequest) -> list[list[MediaSource]]:
    """The images and videos of each prompt; empty if there are none. Raises BadRequest."""
    if not request.image_data and not request.video_data:
        return []
    several = request.text if isinstance(request.text, list) else request.input_ids
    many = isinstance(several, list) and bool(several) and not isinstance(several[0], int)
    count = len(several) if many and several else 1
    found: list[list[MediaSource]] = [[] for _ in range(count)]
    for name, kind in (("image_data", IMAGE), ("video_data", VIDEO)):
        value = getattr(request, name)
        if not value:
            continue
        each = [value] if not many else value
        if not isinstance(each, list) or len(each) != count:
            raise BadRequest(f"{name}={show(value)} is not valid: give a list with an entry for each prompt.", name)
        for number, items in enumerate(each):
            where = f"{name}[{number}]" if many else name
            found[number] += _items(items, where, kind)
    return [with_request(one, request.mm_processor_kwargs, None) for one in found]


def _items(items: Any, where: str, kind: Any) -> list[MediaSource]:
    """One prompt's items: a string, a list of strings, or nothing."""
    made = []
    for i, one in enumerate(items if isinstance(items, list) else [] if items is None else [items]):
        place = f"{where}[{i}]" if isinstance(items, list) else where
        one = one.get("url") if isinstance(one, dict) else one
        if not isinstance(one, str) or not one:
            raise BadRequest(f"{place}={show(one)} is not valid: it must be a URL or base64.", place)
        made.append(MediaSource(kind, place, one, Options()))
    return made


@dataclass
class _Output:
    """The state of one sequence."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    finish: dict[str, Any] | None = None


@dataclass
class GenerateReply:
    """An answer in progress. many: the body had a list of prompts, or n above 1; then the answer is a list."""

    request: GenerateRequest
    answer_id: str
    generations: Sequence[Generation]
    many: bool
    start: float
    weight_version: str = "0"

    def __post_init__(self) -> None:
        self._outputs = [_Output() for _ in self.generations]

    async def whole(self) -> Any:
        """The complete answer. Raises the error that ended a generation early."""
        async with aclosing(merge(self.generations)) as pieces:
            async for piece in pieces:
                self._take(piece)
        answers = [self._worded(index) for index in range(len(self.generations))]
        if self.request.return_hidden_states:
            for answer, generation in zip(answers, self.generations, strict=True):
                states = await asyncio.to_thread(generation.hidden_states)
                assert states is not None
                answer["meta_info"]["hidden_states"] = [*([states[1]] if states[1] else []), *states[0]]
        for answer, generation in zip(answers, self.generations, strict=True):
            own, prompt = generation.routed_experts
            if own is not None:
                ids = own if prompt is None else prompt.joined(own)
                answer["meta_info"]["routed_experts"] = base64.b64encode(
                    ids.array().astype(np.int32).tobytes()
                ).decode()
        return answers if self.many else answers[0]

    async def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]:
        """The stream, ending with ``[DONE]``."""
        try:
            async with aclosing(merge(self.generations)) as pieces:
                async for piece in pieces:
                    self._take(piece)
                    answer = self._worded(piece.index)
                    if self.many:
                        answer["index"] = piece.index
                    yield b"data: " + msgspec.json.encode(answer) + b"\n\n"
        except Exception as error:
            failed(error)
            yield error_event(error)
        yield DONE

    def _take(self, piece: OutputPiece) -> None:
        output, texts = self._outputs[piece.index], self.request.return_text_in_logprobs
        output.text += piece.text
        for token_id, report in zip(piece.token_ids, piece.reports or [], strict=False):
            output.logprobs.append([_finite(report.logprob), token_id, report.text if texts else None])
            pairs = zip(report.top, report.top_ids, strict=True)
            output.tops.append([[_finite(value), one, text if texts else None] for (text, value), one in pairs])
        output.ids += piece.token_ids
        if piece.finish == "length":
            output.finish = {"type": "length", "length": len(output.ids)}
        elif piece.finish is not None:
            kind = "abort" if piece.finish == "abort" else "stop"
            matched = output.ids[-1] if piece.stop is None and output.ids else piece.stop
            output.finish = {"type": kind, "matched": matched}

    def _worded(self, index: int) -> dict[str, Any]:
        output, generation = self._outputs[index], self.generations[index]
        usage = generation.usage
        meta: dict[str, Any] = {
            "id": f"{self.answer_id}-{index}" if self.many else self.answer_id,
            "finish_reason": output.finish,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "e2e_latency": time.monotonic() - self.start,
            "seed": generation.seed,
            "weight_version": self.weight_version,
        }
        if self.request.return_logprob:
            meta["output_token_logprobs"] = list(output.logprobs)
            if self.request.top_logprobs_num:
                meta["output_top_logprobs"] = list(output.tops)
            if generation.prompt_logprobs is not None:
                texts = self.request.return_text_in_logprobs
                meta["input_token_logprobs"] = [
                    next(
                        (
                            [_finite(one.logprob), token, one.decoded_token if texts else None]
                            for token, one in entries.items()
                        ),
                        [None, None, None],
                    )
                    for entries in (value or {} for value in generation.prompt_logprobs)
                ]
        return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
