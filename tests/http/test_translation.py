"""Errors of a translated body: the paths in them are renamed, and nothing else of their text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.http.errors import ApiError
from unisono.http.openai.translation import Renames
from unisono.types import BadRequest
from unisono.types.errors import FieldPath

RENAMES = Renames({
    "messages": "input", "messages[0]": "input[2]", "max_tokens": "max_output_tokens", "stop": "stop_sequences",
    "structured_outputs": "text.format", "response_format": "text.format",
})  # fmt: skip


def translated(error: BadRequest | ApiError) -> BadRequest | ApiError:
    with pytest.raises((BadRequest, ApiError)) as raised, RENAMES.errors():
        raise error
    assert type(raised.value) is type(error)
    return raised.value


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (BadRequest("messages[0].role='x' is no role.", "messages[0].role"), "input[2].role='x' is no role.",
         "input[2].role"),
        (BadRequest("messages[1]=5 is not valid.", "messages[1]"), "input[1]=5 is not valid.", "input[1]"),
        (BadRequest("messages is empty.", "messages"), "input is empty.", "input"),
        (BadRequest("max_tokens_per_day=1 is unknown.", "max_tokens"), "max_tokens_per_day=1 is unknown.",
         "max_output_tokens"),
        (BadRequest("The template refuses these messages: max_tokens.", "messages"),
         "The template refuses these messages: max_tokens.", "input"),
        (BadRequest(("5 tokens and ", FieldPath("max_tokens"), " is 7."), "max_tokens"),
         "5 tokens and max_output_tokens is 7.", "max_output_tokens"),
        (ApiError(400, "stop='messages[0]' is not valid.", param="stop"), "stop_sequences='messages[0]' is not valid.",
         "stop_sequences"),
        (ApiError(400, "The body is no JSON."), "The body is no JSON.", None),
    ],
)  # fmt: skip
def test_paths_are_renamed(error: BadRequest | ApiError, message: str, param: str | None) -> None:
    found = translated(error)
    assert (str(found), found.param) == (message, param)
    assert type(found.param) in (str, type(None))  # JSON writers take no subclass


def test_errors_of_a_form_name_the_field_that_has_it() -> None:
    """``structured_outputs`` stands in the message, ``response_format`` in param: both become one field here."""
    error = BadRequest(BadRequest("structured_outputs.json=1 is not valid.", "structured_outputs").parts,
                       "response_format")  # fmt: skip
    found = translated(error)
    assert (str(found), found.param) == ("text.format.json=1 is not valid.", "text.format")


@given(st.text(), st.sampled_from(sorted(RENAMES.names)))
def test_values_are_never_renamed(value: str, name: str) -> None:
    text = f"={value!r} max_tokens=3 messages[0] is out of range."
    assert str(translated(BadRequest(name + text, name))) == RENAMES.names[name] + text
