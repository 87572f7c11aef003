"""Answers of a server with OpenAI's API, over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from unisono.tools.chat.answers import AnswerFigures, ChatPiece, DraftedToken, Message
from unisono.types import BadRequest, ConfigError, UnisonoError

CONNECT_SECONDS, READ_SECONDS = 10.0, 600.0
TEMPLATE_PARAMETERS = ("enable_thinking",)


class RemoteModel:
    """A server's model.

    url: with or without /v1. name: None takes the first model of the server.

    Raises ConfigError for an invalid URL, UnisonoError if no such server answers.
    """

    prompt_interrupts = True

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: give http://HOST:PORT or https://HOST:PORT.")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._url, self._http = base, httpx.Client(base_url=base, headers=headers, timeout=timeout)
        cards = self._models()
        names = [str(card.get("id")) for card in cards]
        if name is not None and names and name not in names:
            raise ConfigError(f"{base} has no model {name!r}; it serves {', '.join(names)[:200]}.")
        if name is None and not names:
            raise ConfigError(f"{base} lists no models; name one: unisono chat MODEL --url {url}.")
        self.name = name or names[0]
        self._card = next((card for card in cards if card.get("id") == self.name), {})
        self._tells_drafts = self._card.get("owned_by") == "unisono"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def banner(self) -> Sequence[str]:
        context = self._card.get("max_model_len")
        lines = [f"{self.name} at {self._url}" + (f" · context {context} tokens" if context else "")]
        if self._tells_drafts and (origin := self._speculation()):
            lines.append(origin)
        return lines

    def _speculation(self) -> str:
        """The server's speculation in words, if it reports it."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            found = self._http.get("/server_info").json()["engine"]["speculation"]
            if found["drafter"] == "none":
                return "no speculation"
            return f"speculates with {found['drafter']}, k = {found['num_speculative_tokens']}"
        return ""

    def defaults(self) -> Mapping[str, Any]:
        return {}

    def check(self, params: Mapping[str, Any]) -> None:
        """Check nothing: the server checks."""

    def answer(
        self, messages: Sequence[Message], params: Mapping[str, Any], figures: AnswerFigures, stop: Callable[[], object]
    ) -> Iterator[ChatPiece]:
        body = self._body(messages, params)
        figures.exact = False
        with self._failures(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise _refusal(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                yield from _read(json.loads(data), figures)
                if stop():
                    figures.finish = "abort"
                    break

    def _body(self, messages: Sequence[Message], params: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in params.items() if name not in (*TEMPLATE_PARAMETERS, "max_drafts")}
        sent = [{k: v for k, v in message.items() if k in ("role", "content")} for message in messages]
        body = {"model": self.name, "messages": sent, "stream": True, "stream_options": {"include_usage": True}} | own
        if template := {name: params[name] for name in TEMPLATE_PARAMETERS if name in params}:
            body["chat_template_kwargs"] = template
        if self._tells_drafts:
            body["return_drafts"] = True
            if (drafts := params.get("max_drafts")) is not None:
                body["speculative"] = {"num_speculative_tokens": drafts} if drafts else {"enabled": False}
        return body

    def _models(self) -> list[dict[str, Any]]:
        with self._failures():
            response = self._http.get("/v1/models")
            if response.status_code != 200:
                raise _refusal(response)
            found = response.json()["data"]
            return [card for card in found if isinstance(card, dict)]

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert network errors to UnisonoError."""
        try:
            yield
        except httpx.HTTPError as error:
            raise UnisonoError(f"{self._url}: {error or type(error).__name__}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnisonoError(f"{self._url}: the answer is not OpenAI's: {type(error).__name__}: {error}.") from None


def _read(chunk: Mapping[str, Any], figures: AnswerFigures) -> Iterator[ChatPiece]:
    """A chunk's text and figures."""
    if error := chunk.get("error"):
        raise UnisonoError(str(error.get("message") if isinstance(error, dict) else error))
    if usage := chunk.get("usage"):
        figures.prompt_tokens = usage.get("prompt_tokens")
        if isinstance(tokens := usage.get("completion_tokens"), int):
            figures.tokens, figures.exact = tokens, True
    for choice in chunk.get("choices", [])[:1]:
        delta = choice.get("delta") or {}
        draft = None
        if isinstance(origin := choice.get("draft"), dict):
            draft = DraftedToken(origin["position"], origin["drafted"], origin["accepted"])
            _count(draft, figures)
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content = delta.get("content") or ""
        if reasoning or content or draft:
            figures.tick(1)
        figures.finish = choice.get("finish_reason") or figures.finish
        yield ChatPiece(reasoning, content, draft)


def _count(draft: DraftedToken, figures: AnswerFigures) -> None:
    """Count a token's draft, and its round if the token is the round's first."""
    figures.accepted += draft.position is not None
    if draft.drafted and draft.position == (0 if draft.accepted else None):
        figures.rounds = (figures.rounds or 0) + 1
        figures.drafted += draft.drafted


def _refusal(response: httpx.Response) -> UnisonoError:
    """The error of a response with an error status."""
    response.read()
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = response.text[:200] or response.reason_phrase
    kind = BadRequest if response.status_code in (400, 404, 422) else UnisonoError
    return kind(f"{response.status_code}: {text}")
