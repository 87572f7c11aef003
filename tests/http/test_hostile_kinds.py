"""Kinds of hostile values: the largest lists that are taken are cheap, and no name of a template's variable is special.

The event loop prepares short prompts itself, so what a request costs there is what everybody waits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http import fuzz
from tests.http.largest_ import LISTS, largest
from unisono.frontend.input_processor import InputProcessor, ModelFacts, PreparedPrompt
from unisono.text.detokenizer import Detokenizer
from unisono.text.templates.renderer import Renderer
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, FinishReason, SamplingParams
from unisono.types.limits import SAMPLING

SECONDS = 0.5
"""Processor time that the event loop may spend on a request."""


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("name", LISTS)
def test_the_largest_lists_are_cheap(tokenizer: Tokenizer, name: str, many: bool) -> None:
    """100,000 stop strings or bad words were worked through before their number was looked at, or for each token."""
    inputs = InputProcessor(tokenizer, ModelFacts(4096, 300_000, 6, "float32", (), {}, False, False, max_logprobs=-1))
    value = largest(SAMPLING[name], many)
    assert SAMPLING[name].problem(value) is None
    if name == "logit_bias":
        value = {int(key): one for key, one in value.items()}
    begun, refused = time.process_time(), None
    try:
        params = SamplingParams(**{name: value, "max_tokens": 50})
        request = inputs.request("r", PreparedPrompt([5, 6, 7]), params)
        text = Detokenizer(tokenizer, request.params, request.prompt_token_ids)
        for _ in range(50):
            text.feed([tokenizer.encode("z")[0]])
        text.feed([], FinishReason.LENGTH)
    except BadRequest as error:
        refused = error
    assert refused is None or refused.param == name
    assert time.process_time() - begun < SECONDS


# ---- names ------------------------------------------------------------------------------------------


def arguments(*functions: Callable[..., Any]) -> set[str]:
    """Names of the functions' parameters and of their local variables."""
    return {name for one in functions for name in (*inspect.signature(one).parameters, *one.__code__.co_varnames)}


MESSAGES = [{"role": "user", "content": "a"}]
OWN = arguments(Tokenizer.apply_chat_template, Tokenizer._rendered, Renderer.render)
OF_TEMPLATES = ("cls", "args", "kwargs", "raise_exception", "loop", "range")
NAMES = st.sampled_from(sorted({*OWN, *OF_TEMPLATES, *(name for name in fuzz.ODD_NAMES if len(name) < 100)}))


@settings(max_examples=150, deadline=None)
@given(NAMES | st.text(max_size=8), st.sampled_from(["x", 1, None, [], {}]))
def test_any_template_variable_name_is_accepted(tokenizer: Tokenizer, name: str, value: Any) -> None:
    """``messages`` and ``self`` were arguments of a function of ours: an internal error."""
    with suppress(BadRequest):
        text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, template_kwargs={name: value})
        assert "user\na" in text
