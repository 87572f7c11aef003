"""Bodies of other APIs to chat requests: the same checks, with errors that name the fields of the original body.

A translator builds the JSON of a ``/v1/chat/completions`` body and a :class:`Renames` with the origin of each part.
:func:`chat_request` checks it like that endpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from unisono.http.errors import ApiError, show
from unisono.http.limits.fields import check_name, validated
from unisono.http.openai.protocol import ChatRequest, parse_fields
from unisono.types import BadRequest
from unisono.types.errors import FieldPath
from unisono.types.unknown_fields import dropped


class Renames:
    """Names of a chat request's fields in the body that it was translated from."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def original(self, name: str) -> str:
        """The caller's name of ``messages[2].content``, by the longest known prefix."""
        for known in sorted((one for one in self.names if name.startswith(one)), key=len, reverse=True):
            rest = name[len(known) :]
            if not rest or rest[0] in ".[":
                return self.names[known] + rest
        return name

    def parts(self, parts: Sequence[str]) -> list[str]:
        """The parts of an error's message with the caller's names."""
        return [FieldPath(self.original(part)) if isinstance(part, FieldPath) else part for part in parts]

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate field names in the errors of a chat request, raised in the block."""
        try:
            yield
        except BadRequest as error:
            raise BadRequest(self.parts(error.parts), self._param(error), error.code) from None
        except ApiError as error:
            raise ApiError(error.status, self.parts(error.parts), error.kind, self._param(error), error.code) from None

    def _param(self, error: BadRequest | ApiError) -> str | None:
        return None if error.param is None else self.original(error.param)


def chat_request(body: Mapping[str, Any], renames: Renames) -> ChatRequest:
    """``body`` as a checked chat request. Raises BadRequest and ApiError with the caller's names."""
    with renames.errors():
        return parse_fields(body, ChatRequest)


def passed_on(data: Mapping[str, Any], own: Collection[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a body that are not the API's ``own``: sampling fields of the chat body, which are checked there.

    Raises ApiError (400) for those ``refused``, with the alternative.
    """
    extra = {name: value for name, value in data.items() if name not in own}
    for name in extra:
        if name in refused:
            message = f"{name} is not a field of this body; {refused[name]}."
            raise ApiError(400, message, param=name, code="unknown_field")
    return extra


Body = TypeVar("Body", bound=BaseModel)


def checked(data: Mapping[str, Any], kind: type[Body], only: bool = True) -> Body:
    """The fields of ``kind`` in ``data``.

    only: others are errors.

    Raises ApiError (400) with the field, its value and the rule.
    """
    for name in data if only else ():
        check_name(name)
        if name not in kind.model_fields and not dropped(name):
            raise ApiError(400, f"{name} is not a known field; remove it.", param=name, code="unknown_field")
    return validated(data, kind)


def has_kind(content: Any, kind: str) -> bool:
    """True if a list of parts has one of this type."""
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == kind for part in content)


def text_of(content: Any, where: str, kinds: Collection[str], others: str = "", first: int = 0) -> str:
    """The text of a string, or of a list of text parts of these ``kinds``, joined by newlines.

    Raises BadRequest.

    others: other accepted types, for errors. first: the number of the list's first part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}={show(content)} is not valid: it must be a string or a list of text parts.", where)
    texts = []
    for i, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds or not isinstance(text, str):
            raise BadRequest(
                f"{where}[{i}]={show(part)} is not supported; this server takes parts of the types "
                f"{', '.join(sorted({*kinds, *others.split()}))}.",
                f"{where}[{i}]",
            )
        texts.append(text)
    return "\n".join(texts)
