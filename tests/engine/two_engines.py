"""A prefill and a decode engine in one process, for tests of what goes between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.engine.helpers import lazy_engine
from unisono.entrypoints.llm import LLM


@contextlib.contextmanager
def stepping(llm: LLM) -> Iterator[threading.Event]:
    """Step an engine in a thread, as a server does. While the event is set it does nothing."""
    stop, still = threading.Event(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            if llm.engine.has_work() and not still.is_set():
                llm.engine.step()
            else:
                time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield still
    finally:
        stop.set()
        thread.join()


def prefill_engine(model: str, where: str, **flags: Any) -> LLM:
    return lazy_engine(model, role="prefill", transfer_listen=where, **{"max_num_batched_tokens": 48, **flags})


def decode_engine(model: str, prefill: LLM | str, **flags: Any) -> LLM:
    if isinstance(prefill, LLM):
        assert prefill.engine.roles.service is not None
        prefill = str(prefill.engine.roles.service.address)
    return lazy_engine(model, role="decode", prefill_urls=prefill, **{"transfer_timeout": 60.0, **flags})


def results(llm: LLM) -> dict[str, int]:
    """How the prompts ended that this engine gave away."""
    assert llm.engine.roles.client is not None
    return dict(llm.engine.roles.client.results)
