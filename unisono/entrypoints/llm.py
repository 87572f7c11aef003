"""The offline interface: ``LLM(model=…).generate(prompts, params)``, as vLLM's."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.config import EngineConfig
from unisono.config.preflight.model import check_engine_model
from unisono.engine.engine import Engine
from unisono.engine.loop import EngineLoop, Inbox
from unisono.entrypoints.llm_arguments import check_constructor, engine_arguments, media_arguments
from unisono.entrypoints.llm_calls import (
    as_conversations,
    as_params,
    as_priorities,
    as_prompt,
    as_prompts,
    check_bar,
    check_kind,
    check_template_arguments,
)
from unisono.entrypoints.pooled_calls import PooledCalls
from unisono.entrypoints.progress_bar import Bar, prompts_bar, start_bars
from unisono.entrypoints.weight_calls import WeightCalls
from unisono.frontend.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, check_beams
from unisono.frontend.collector import Collector
from unisono.frontend.input_processor import SEED_BITS, InputProcessor, ModelFacts, PromptType
from unisono.frontend.pooling import pooling_of
from unisono.frontend.scores import head_of
from unisono.media.inputs import offline_mapping
from unisono.media.loader import MediaLoader
from unisono.media.parts import read_messages, with_request
from unisono.media.settings import MediaSettings
from unisono.text.chat_parsers import ChatParsers
from unisono.text.tokenizer import Tokenizer
from unisono.types import (
    BadRequest,
    CheckpointError,
    ConfigError,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    request_failure,
)
from unisono.types.lora import LoRARequest, one_each

Conversation = Sequence[Mapping[str, Any]]

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""``lora_request``: one for all prompts, or one each."""


@dataclass(frozen=True)
class Metric:
    """One sample of :meth:`LLM.get_metrics`. kind: "counter" or "gauge"."""

    name: str
    kind: str
    labels: dict[str, str]
    value: float
    help: str


class LLM(PooledCalls, WeightCalls):
    """A model in this process. Keyword arguments are :class:`unisono.config.EngineConfig`'s fields and vLLM's names.

    ``chat_template`` stands in for the checkpoint's, ``revision`` picks one of a checkpoint on the Hugging Face hub.
    A keyword of vLLM is honoured, accepted where it changes nothing, or refused with the reason: docs/guide/offline.md.
    The start shows a progress bar on a terminal and in a notebook; ``use_tqdm_on_load=False`` shows none, and
    ``progress(stage, share)`` is called in place of it. Use as a context manager, or call
    :meth:`shutdown`, to free the device. Every method may be called in any thread, and several at once: all share one
    engine (``engine/loop.py``), and the text of a request does not depend on the others. Ctrl-C ends a call after the
    engine's step in flight; the model stays usable.

    Raises CheckpointError and ConfigError; calls raise EngineDead once the engine failed or was shut down.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        progress: Callable[[str, float], None] | None = None,
        use_tqdm_on_load: bool = True,
        **flags: Any,
    ) -> None:
        revision, template = flags.pop("revision", None), flags.pop("chat_template", None)
        check_constructor(model, revision, template, progress)
        model = str(model)
        media = MediaSettings.of(**media_arguments(flags))
        config = EngineConfig(f"{model}@{revision}" if revision else model, **engine_arguments(flags))
        check_engine_model(config, headers=False)  # the engine reads them after it has checked its flags
        with start_bars(use_tqdm_on_load and progress is None) as report:
            engine = Engine(config, progress or report)
        try:
            self.tokenizer = Tokenizer.load(config.tokenizer or engine.checkpoint.path)
            directory = Path(engine.checkpoint.path)
            self._classifier = head_of(directory, config.hf_overrides, self.tokenizer, config.load_format)
        except BaseException:
            engine.shutdown()  # the caller has no object to do it with
            raise
        if template is not None and self.tokenizer is not None:
            self.tokenizer.backend.chat_template = template
        self.loop = EngineLoop(engine, engine.config.device)
        self._model, self._facts = model, _facts(engine)
        facts = ModelFacts.of(engine.info(), self.tokenizer)
        self._speculation = (engine.worker.drafter.name, engine.runner.width - 1)
        loader = MediaLoader(facts.vision, directory, media, facts.dtype, facts.max_model_len - 1)
        self._inputs = InputProcessor(self.tokenizer, facts, loader)
        if any(flags.get(name) is not None for name in ("seed", "random_seed")):
            self._inputs.draw_seed = partial(random.Random(config.seed).getrandbits, SEED_BITS)
        self._default_params, self._pooling = engine.default_params(), pooling_of(directory)
        self.eos_token_ids = self._inputs.model.eos_token_ids
        self._ids = itertools.count()
        self._loading, self._adapters = threading.Lock(), dict[str, LoRARequest]()
        self._pushed_adapters = {}

    def __repr__(self) -> str:
        facts = self._facts if self.loop.alive else "shut down"
        return f"{type(self).__name__}({self._model!r}: {facts})"

    @property
    def engine(self) -> Engine:
        """The engine itself. Use it only while no other thread uses this object. Raises EngineDead after shutdown."""
        return self.loop.engine

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return one RequestOutput each, in order.

        A prompt is a string, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``. These mappings may
        have ``"embedding_overrides"``, embeddings in place of those of some tokens: {position: vector} or (positions,
        tensor [n, hidden]). ``{"prompt_embeds": tensor [tokens, hidden]}`` is a prompt of embeddings alone. A
        ``"cache_salt"`` in a mapping is a secret: only prompts with the same salt share cached prefixes.
        ``"multi_modal_data"`` has images (``{"image": image or list}``, of Pillow or arrays) and videos, with a
        placeholder in the prompt for each; ``"multi_modal_uuids"`` names them, ``"mm_processor_kwargs"`` has settings.
        sampling_params: one for all prompts, or one each; None takes generation_config.json's. priority: one per
        prompt, lower ones run first; for an engine with ``scheduling_policy="priority"``. lora_request: the adapter of
        all prompts, or one each (None: no adapter); for an engine with ``enable_lora=True``. Raises BadRequest, before
        anything runs, if any of them is wrong.
        """
        batch = as_prompts(prompts)
        check_bar(use_tqdm)
        params = as_params(sampling_params, len(batch), self._default_params)
        adapters = one_each(lora_request, len(batch))
        ranks = as_priorities(priority, len(batch))
        each = zip(batch, params, ranks, adapters, strict=True)
        collectors = [self.prepare(p, q, priority=r, lora_request=a) for p, q, r, a in each]
        self._run(collectors, use_tqdm)
        return [collector.output() for collector in collectors]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
        *,
        reasoning_parser: str | None = None,
        tool_parser: str | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": …, "content": …}``.

        reasoning_parser, tool_parser: names of ``unisono serve``'s parsers, or ``auto`` for the chat template's; they
        set ``reasoning``, ``content`` and ``tool_calls`` of each output. template: arguments of :meth:`chat_prompt`.
        """
        parsers = ChatParsers.of(self.tokenizer, reasoning_parser, tool_parser)
        conversations = as_conversations(messages)
        prompts = [self.chat_prompt(one, **template) for one in conversations]
        params = [parsers.sampling(one) for one in as_params(sampling_params, len(prompts), self._default_params)]
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        for conversation, output in zip(conversations, outputs, strict=True):
            last = conversation[-1].get("content") if template.get("continue_final_message") else None
            parsers.parse(output, template.get("tools"), last if isinstance(last, str) else None)
        return outputs

    def chat_prompt(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Render one conversation with the chat template. Names are vLLM's.

        add_generation_prompt: end with the beginning of the assistant's answer. continue_final_message: let the last
        message go on; use it with add_generation_prompt=False. tools: functions that the model may call, in OpenAI's
        form. chat_template_kwargs: variables of the template, for example ``{"enable_thinking": False}``.
        chat_template: a Jinja template in place of the checkpoint's. documents: for templates that read them. Contents
        may be lists of parts, including images and videos (docs/guide/images.md); mm_processor_kwargs are for these.
        """
        (messages,) = as_conversations([messages] if isinstance(messages, (list, tuple)) else messages)
        check_template_arguments(locals())
        if add_generation_prompt and continue_final_message:
            raise BadRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one: "
                "set add_generation_prompt=False.",
                "continue_final_message",
            )
        options: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        written, sources = read_messages(messages)
        sources = with_request(sources, mm_processor_kwargs, None)
        self._inputs.media.check(sources)
        prompt = self._inputs.chat(
            written,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            documents=documents,
            **options,
        )
        return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids, **offline_mapping(sources)}

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt by beam search (``frontend/beam_search.py``), as vLLM's.

        Raises BadRequest, before anything runs, if any prompt is wrong.
        """
        check_kind("params", params, BeamSearchParams, "BeamSearchParams(beam_width=…, max_tokens=…)")
        searches = []
        for each in as_prompts(prompts):
            prompt, sampling = self._inputs.prompt(each), params.sampling()
            check_beams(sampling, self._inputs.model.max_logprobs, self._inputs.model.logprobs_mode)
            request = self._inputs.request(self.next_id(), prompt, sampling)
            self.loop.engine.check(request.sequences()[0])
            searches.append(BeamSearch(request, params.length_penalty))
        while steps := [(one, requests) for one in searches if (requests := one.requests())]:
            reports = self._last_logprobs([request for _, requests in steps for request in requests])
            for search, requests in steps:
                search.take([reports[request.request_id] for request in requests])
        return [search.output(self.tokenizer, params) for search in searches]

    def _last_logprobs(self, requests: list[EngineRequest]) -> dict[str, TokenLogprobs]:
        """Run requests of one token each; return their log-probabilities by id."""
        reports: dict[str, TokenLogprobs] = {}
        inbox: Inbox | None = None
        try:
            inbox = self._submit(requests)
            while deltas := self.loop.read(inbox):
                for delta, _ in deltas:
                    if delta.error is not None:
                        raise request_failure(delta.error, delta.error_param)
                    for one in delta.logprobs or ():
                        reports[delta.request_id] = one
        finally:
            if inbox is not None:
                self.loop.abort(*inbox.open)
        return reports

    def stream(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> Iterator[TokenDelta]:
        """Yield one request's tokens as they come. Leaving the loop early aborts it. Several streams may be read in
        turn.
        """
        (params,) = as_params(params, 1, self._default_params)
        request = self._request(as_prompt(prompt_token_ids), params)
        inbox: Inbox | None = None
        try:
            inbox = self._submit([request])
            while deltas := self.loop.read(inbox):
                for delta, _ in deltas:
                    yield delta
        finally:
            if inbox is not None:
                self.loop.abort(*inbox.open)

    def get_tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer, of transformers. Raises BadRequest if there is none."""
        return self._inputs.require_tokenizer("get_tokenizer()").backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: generation_config.json's."""
        return self._default_params

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters and gauges; names are vLLM's, for example "vllm:generation_tokens"."""
        samples = self.loop.call(lambda engine: engine.metrics())
        return [Metric("vllm:" + name, kind, labels, value, text) for name, kind, labels, value, text in samples]

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses."""
        self.loop.call(lambda engine: engine.reset_prefix_cache())
        return True

    def shutdown(self) -> None:
        """Free the device's memory. Running and later calls in all threads raise EngineDead."""
        self.loop.shutdown()
        self._inputs.media.close()
        for directory in self._pushed_adapters.values():
            directory.cleanup()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # ---- also used by async_llm ---------------------------------------------------------------

    def next_id(self) -> str:
        """Return a request id that no other request of this engine has."""
        return str(next(self._ids))

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Collector:
        """Check a prompt and its parameters, and collect its ``params.n`` sequences. Raises BadRequest."""
        own_id = self.next_id()
        _ = self.loop.engine  # raises before anything is done
        prepared = self._inputs.prompt(prompt, truncates=params.truncate_prompt_tokens is not None)
        request = self._inputs.request(own_id, prepared, params, priority)
        if lora_request is not None:
            request = replace(request, adapter=self._adapter(lora_request))
        requests = request.sequences()
        self.loop.check(requests[0])
        text = prepared.text
        return Collector(request_id or own_id, requests, self.tokenizer, text, self.eos_token_ids, self._speculation)

    def _adapter(self, adapter: LoRARequest) -> str:
        """Return the name of an adapter; load it on first use. Raises BadRequest."""
        with self._loading:
            known = self._adapters.get(adapter.lora_name)
            if known is None:
                if taken := [one for one in self._adapters.values() if one.lora_int_id == adapter.lora_int_id]:
                    raise BadRequest(
                        f"lora_int_id={adapter.lora_int_id} is the adapter {taken[0].lora_name!r} already; give "
                        f"{adapter.lora_name!r} another number.",
                        "lora_request",
                    )
                self._load_adapter(adapter)
                self._adapters[adapter.lora_name] = adapter
            elif known != adapter:
                raise BadRequest(
                    f"the adapter {adapter.lora_name!r} is number {known.lora_int_id}, of {known.lora_path}; give "
                    "another one another name.",
                    "lora_request",
                )
        return adapter.lora_name

    def _load_adapter(self, adapter: LoRARequest) -> None:
        arguments = {"name": adapter.lora_name, "directory": str(adapter.lora_path)}
        try:
            self.loop.call(lambda engine: engine.command("load_adapter", arguments))
        except (CheckpointError, ConfigError) as error:
            raise BadRequest(f"lora_request: {error}", "lora_request") from None

    def _request(self, prompt: PromptType, params: SamplingParams) -> EngineRequest:
        return self._inputs.request(self.next_id(), self._inputs.prompt(prompt), params)

    def _run(self, collectors: list[Collector], use_tqdm: Bar) -> None:
        """Run all requests to their ends; abort the rest after an error or Ctrl-C."""
        owners = {request.request_id: one for one in collectors for request in one.requests}
        requests: list[EngineRequest] = [request for one in collectors for request in one.requests]
        inbox: Inbox | None = None
        try:
            inbox = self._submit(requests)
            with prompts_bar(use_tqdm, len(collectors)) as advance:
                while deltas := self.loop.read(inbox):
                    for delta, now in deltas:
                        owner = owners[delta.request_id]
                        if early := owner.take(delta, now):
                            self.loop.abort(delta.request_id)
                        if (early or delta.finish is not FinishReason.RUNNING) and not owner.open:
                            advance(1, owner.metrics.num_generation_tokens)
        finally:
            if inbox is not None:
                self.loop.abort(*inbox.open)


def _facts(engine: Engine) -> str:
    """Describe architecture, dtype, device, context and drafter."""
    info: Any = engine.info()
    settings, speculation = info["settings"], info["speculation"]
    facts = f"{info['architecture']}, {settings['dtype']} on {settings['device']}"
    facts += f", context {settings['max_model_len']} tokens"
    if speculation["drafter"] != "none":
        facts += f", speculates with {speculation['drafter']}, k={speculation['num_speculative_tokens']}"
    return facts
