"""``AsyncLLM``: requests as async iterators, with the names of vLLM's class. It shares its engine with an ``LLM``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from unisono.engine.loop import EngineThread, Inbox
from unisono.entrypoints.llm import LLM, Metric
from unisono.entrypoints.llm_calls import as_ids, as_params, as_prompt, check_kind
from unisono.frontend.collector import Collector
from unisono.frontend.input_processor import PromptType
from unisono.types import BadRequest, EngineDead, RequestOutput, RequestOutputKind, SamplingParams
from unisono.types.lora import LoRARequest, one_each


class AsyncEngineArgs:
    """Engine settings in vLLM's form: ``AsyncLLM.from_engine_args(AsyncEngineArgs(model=…))``."""

    def __init__(self, model: str = "tiny", **flags: Any) -> None:
        self.model, self.flags = model, flags

    def __repr__(self) -> str:
        flags = "".join(f", {name}={value!r}" for name, value in self.flags.items())
        return f"AsyncEngineArgs({self.model!r}{flags})"


class AsyncLLM:
    """A model for asyncio programs. Takes the arguments of :class:`unisono.entrypoints.llm.LLM`; ``llm`` shares the
    engine of an existing LLM.

    A thread steps the engine while there are requests, so the event loop never waits for the device. Requests of
    several event loops, and of the LLM, run together. Use as a context manager or call :meth:`shutdown`. Raises
    CheckpointError and ConfigError.
    """

    def __init__(self, model: str = "tiny", *, llm: LLM | None = None, **flags: Any) -> None:
        if llm is not None and flags:
            raise BadRequest(f"AsyncLLM(llm=…) uses the engine of that LLM; leave out {', '.join(sorted(flags))}.")
        self._owns = llm is None
        self.llm = llm or LLM(model, **flags)
        self._thread = EngineThread(self.llm.loop)
        self._active: dict[str, list[Inbox]] = {}

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **ignored: Any) -> AsyncLLM:
        """Make an engine with these settings."""
        return cls(engine_args.model, **engine_args.flags)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output as it grows; ``sampling_params.output_kind`` selects the content of each output.

        prompt: as of ``LLM.generate``. request_id: None picks one. Cancelling the task, or leaving the loop and closing
        the iterator, aborts the request. trace_headers are not used. priority: as of ``LLM.generate``. lora_request:
        the adapter to generate with.

        Raises BadRequest for a wrong request or an id that is running, EngineDead.
        """
        prompt = as_prompt(prompt)
        (params,) = as_params(sampling_params, 1, self.llm.get_default_sampling_params())
        (lora_request,) = one_each(lora_request, 1)
        check_kind("priority", priority, int, "a whole number")
        if request_id is not None:
            check_kind("request_id", request_id, str, "a string")
        if request_id is not None and request_id in self._active:
            raise BadRequest(f"request_id {request_id!r} is running already; give another one.", "request_id")
        request_id = self.llm.next_id() if request_id is None else request_id
        self._active[request_id] = []
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(news.set)

        def begin() -> tuple[Collector, Inbox]:
            collector = self.llm.prepare(prompt, params, request_id, priority, lora_request)
            return collector, self.llm.loop.submit(collector.requests, notify)

        inbox: Inbox | None = None
        try:
            begun = loop.run_in_executor(None, begin)
            try:
                collector, box = await asyncio.shield(begun)
            except asyncio.CancelledError:
                begun.add_done_callback(self._abort_begun)
                raise
            inbox = box
            self._active[request_id].append(box)
            self._thread.wake()
            async for output in self._outputs(collector, box, news, params.output_kind):
                yield output
        finally:
            self._active.pop(request_id, None)
            if inbox is not None:
                self.llm.loop.abort(*inbox.open)

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests early; their iterators end with finish_reason "abort". Unknown ids are ignored."""
        for name in as_ids(request_id):
            for inbox in self._active.get(name, ()):
                self.llm.loop.abort(*inbox.open)

    async def get_tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer, of transformers."""
        return self.llm.get_tokenizer()

    async def get_metrics(self) -> list[Metric]:
        """See ``LLM.get_metrics``."""
        return await asyncio.to_thread(self.llm.get_metrics)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raises EngineDead if the engine failed or was shut down."""
        if self.llm.loop.error is not None:
            raise self.llm.loop.error

    @property
    def is_running(self) -> bool:
        """True if requests can be served."""
        return self.llm.loop.error is None

    @property
    def errored(self) -> bool:
        """True if the engine failed or was shut down."""
        return self.llm.loop.error is not None

    @property
    def dead_error(self) -> BaseException:
        """Error that every call raises once the engine failed."""
        return self.llm.loop.error or EngineDead("the engine lives.")

    def shutdown(self) -> None:
        """Stop the thread; free the device unless the engine is another LLM's. Open iterators raise EngineDead."""
        if self._owns:
            self.llm.shutdown()
        else:
            self.llm.loop.abort(*(name for boxes in self._active.values() for box in boxes for name in box.open))
        self._thread.stop()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def _outputs(
        self, collector: Collector, inbox: Inbox, news: asyncio.Event, kind: RequestOutputKind
    ) -> AsyncIterator[RequestOutput]:
        while True:
            await news.wait()
            news.clear()
            deltas = inbox.take()
            for delta, now in deltas:
                if collector.take(delta, now):
                    self.llm.loop.abort(delta.request_id)
            if not inbox.open and not inbox.deltas:
                collector.abort_rest()  # those that :meth:`abort` ended bring no delta
            done = not collector.open
            if done or (deltas and kind is not RequestOutputKind.FINAL_ONLY):
                yield collector.output(kind)
            if done:
                return
            if inbox.has_output:  # an error came with the deltas
                news.set()

    def _abort_begun(self, begun: asyncio.Future[tuple[Collector, Inbox]]) -> None:
        """Abort a request whose caller was cancelled while it was being added."""
        if not begun.cancelled() and begun.exception() is None:
            self.llm.loop.abort(*begun.result()[1].open)


AsyncLLMEngine = AsyncLLM
"""vLLM's other name of the class."""
