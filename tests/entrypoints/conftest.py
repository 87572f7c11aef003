"""One engine for all tests of ``LLM`` and ``AsyncLLM``, which leave it idle."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.engine.helpers import engine
from tests.entrypoints.shared import GREEDY, PROMPTS
from unisono import LLM


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background and the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="package")
def expected(llm: LLM) -> list[list[int]]:
    """Each prompt's tokens when it runs alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
