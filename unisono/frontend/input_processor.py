"""Prompts and sampling parameters to checked engine requests: the same preparation for ``LLM`` and the server."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from unisono.frontend.classifier import HEADLESS
from unisono.frontend.embeddings import embedded_prompt, overridden
from unisono.media.fetching.sources import LoadedMedia, MediaSource
from unisono.media.inputs import KEYS, KWARGS, sources_of
from unisono.media.loader import MediaLoader, Vision
from unisono.media.parts import with_request
from unisono.media.placeholders import expanded, with_marks
from unisono.media.settings import MediaSettings
from unisono.media.templates import MediaTemplate, has_media
from unisono.text.infill import infill_prompt
from unisono.text.stop_regex import StopRegex
from unisono.text.templates.roles import RoleTemplate, merged_leading
from unisono.text.templates.tools import NO_TOOLS, ToolTemplate
from unisono.text.tokenizer import Tokenizer
from unisono.types import (
    LOGPROBS_MODES,
    MAX_LOGPROBS,
    BadRequest,
    EngineRequest,
    MediaItem,
    Overrides,
    SamplingParams,
)
from unisono.types.checks import check_request

SEED_BITS = 53
"""Bits of a random seed: JavaScript represents such a number exactly."""

PromptType = str | Sequence[int] | Mapping[str, Any]
"""A prompt as callers pass it: text, token ids, or a mapping with some of PROMPT_KEYS."""
PROMPT_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "embedding_overrides", "cache_salt", *KEYS}
FREE_CHARS, CHARS_OF_A_TOKEN = 1 << 18, 16
"""Characters of a text that is tokenized without having to fit: at least so many, and for each token of the context.

The tokenizer takes some 500 bytes of memory for each token.
"""
MAX_SALT_CHARS = 1024
"""Characters of a cache_salt; vLLM's limit."""


@dataclass(frozen=True)
class ModelFacts:
    """The properties of the model that request preparation needs, from the engine's ``info()``.

    dtype: the model's, by name. generation_defaults: sampling parameters of generation_config.json. prompt_embeds,
    return_hidden_states, return_routed_experts: the server's flags allow them. routed_experts: ids that MoE layers
    choose for a token, all layers together. max_logprobs: largest ``logprobs``, -1 for no limit.
    logprobs_mode: values that they report. priorities: the engine schedules by priority. vision: image settings of a
    vision model. generates: False for a model without an LM head, whose states alone have a meaning.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    prompt_embeds: bool
    return_hidden_states: bool
    return_routed_experts: bool = False
    routed_experts: int = 0
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = LOGPROBS_MODES[0]
    priorities: bool = False
    vision: Vision | None = None
    generates: bool = True

    @classmethod
    def of(cls, info: Mapping[str, Any], tokenizer: Tokenizer | None) -> ModelFacts:
        """The facts of an engine's ``info()``. The EOS ids are the checkpoint's and the tokenizer's."""
        settings, own = info["settings"], tokenizer.eos_token_ids if tokenizer is not None else ()
        experts: Mapping[str, Any] = info.get("routed_experts", {})
        return cls(
            max_model_len=settings["max_model_len"],
            vocab_size=info["vocab_size"],
            hidden_size=info["hidden_size"],
            dtype=settings["dtype"],
            eos_token_ids=tuple(dict.fromkeys((*info["eos_token_ids"], *own))),
            generation_defaults=dict(info["generation_defaults"]),
            prompt_embeds=settings["enable_prompt_embeds"],
            return_hidden_states=settings["enable_return_hidden_states"],
            return_routed_experts=settings["enable_return_routed_experts"],
            routed_experts=len(experts.get("layers", ())) * experts.get("top_k", 0),
            max_logprobs=settings["max_logprobs"],
            logprobs_mode=settings["logprobs_mode"],
            priorities=settings["scheduling_policy"] == "priority",
            vision=Vision.of(info.get("vision")),
            generates=not str(info.get("architecture", "")).endswith(HEADLESS),
        )


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt in token ids, with embeddings in place of some of them.

    text: the prompt's text, if it was a text. param: the caller's name of the prompt, for errors. cache_salt, media:
    see ``EngineRequest``.
    """

    token_ids: list[int]
    text: str | None = None
    overrides: Overrides | None = None
    param: str = "prompt"
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()


class InputProcessor:
    """Preparation of requests for one model.

    ``tokenizer`` is None for a checkpoint without one.

    media: loader of images and videos; None in tests of text models. ``draw_seed`` returns the seed of a request
    without one.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: ModelFacts, media: MediaLoader | None = None) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.media = media or MediaLoader(None, None, MediaSettings(), model.dtype, 1)
        self.draw_seed: Callable[[], int] = partial(secrets.randbits, SEED_BITS)

    def prompt(
        self,
        prompt: PromptType,
        *,
        add_special_tokens: bool = True,
        suffix: str | None = None,
        truncates: bool = False,
        media: Sequence[LoadedMedia] = (),
    ) -> PreparedPrompt:
        """Tokenize a prompt, pack its embeddings, load its images and videos.

        Raises BadRequest.

        suffix: text after the answer. truncates: :meth:`truncated` follows, so a text may be longer than the context.
        media: items that are loaded already, in the order of their placeholders.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        _check_keys(prompt)
        salt = checked_salt(prompt.get("cache_salt"))
        if "prompt_embeds" in prompt:
            embedded = embedded_prompt(prompt["prompt_embeds"], self.model.dtype)
            return PreparedPrompt(embedded[0], overrides=embedded[1], param="prompt_embeds", cache_salt=salt)
        text, overrides, sources = prompt.get("prompt"), None, self._offline_sources(prompt)
        if "prompt_token_ids" in prompt:
            ids = list(prompt["prompt_token_ids"])
        elif isinstance(text, str):
            marked = self._with_marks(text) if media or sources else text
            ids = self._encode(marked, "prompt", add_special_tokens and not suffix, truncates)
        else:
            raise BadRequest(
                f"a prompt mapping needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'; it has {sorted(prompt)}.",
                "prompt",
            )
        if "embedding_overrides" in prompt:
            ids, overrides = overridden(ids, prompt["embedding_overrides"], self.model.dtype)
        if suffix:
            ids = infill_prompt(self.require_tokenizer("suffix"), ids, suffix, add_special_tokens)
        loaded = [*media, *self.media.load_all(sources)]
        if loaded and overrides is not None:
            raise BadRequest(
                "embedding_overrides cannot be combined with images; leave out one of them.", "multi_modal_data"
            )
        return self._with_media(PreparedPrompt(ids, text, overrides, cache_salt=salt), loaded)

    def _offline_sources(self, prompt: Mapping[str, Any]) -> list[MediaSource]:
        """The images and videos of a prompt's mapping. Raises BadRequest."""
        return self.with_settings(with_request(sources_of(prompt), prompt.get(KWARGS), None))

    def with_settings(self, sources: list[MediaSource]) -> list[MediaSource]:
        """The sources with the settings of flags; a request's own settings take precedence."""
        settings = self.media.settings
        return with_request(sources, settings.mm_processor_kwargs, settings.media_io_kwargs)

    def _with_marks(self, text: str) -> str:
        """The text with the marks of images in place of their placeholders, for a model whose prompts lack them."""
        vision = self.model.vision
        if self.tokenizer is None or vision is None or vision.placeholder_token_id < 0:
            return text
        ids = (vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id or 0)
        start, token, end = (self._token_text(one) for one in ids)
        return with_marks(text, self._token_text(vision.placeholder_token_id), (start, token, end), vision.around)

    def _token_text(self, token: int) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.backend.convert_ids_to_tokens(token))

    def _with_media(self, prompt: PreparedPrompt, items: Sequence[LoadedMedia]) -> PreparedPrompt:
        """The prompt with the placeholders of ``items`` expanded. Raises BadRequest."""
        vision = self.model.vision
        if not items or vision is None:
            return prompt
        end = vision.vision_end_token_id
        if end is None:
            end = -1 if self.tokenizer is None else self.tokenizer.special_tokens.get("<|vision_end|>", -1)

        def encode(text: str) -> list[int]:
            return self.require_tokenizer("multi_modal_data").encode(text, add_special_tokens=False)

        ids, placed = expanded(prompt.token_ids, items, vision, end, encode, prompt.param)
        return replace(prompt, token_ids=ids, media=placed)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_special_tokens: bool = False,
        truncates: bool = False,
        media: Sequence[LoadedMedia] = (),
        **options: Any,
    ) -> PreparedPrompt:
        """Render one conversation as a prompt.

        Raises BadRequest.

        tools: definitions in OpenAI's form. Arguments of calls in ``messages`` are objects, or text: JSON of an object
        is decoded. Leading system messages are merged; :class:`RoleTemplate` rewrites sequences of roles that a
        template cannot render. truncates, media: see :meth:`prompt`. An image or video is a content part ``{"type":
        "image"}`` or ``{"type":
        "video"}``; without ``media`` its placeholder stays. ``options``: see ``Tokenizer.apply_chat_template``.
        """
        tokenizer = self.require_tokenizer("messages")
        messages = merged_leading(messages)
        if has_media(messages):
            messages = self.media_template.messages(messages, self.tool_template.calls)
        if tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            messages, tools = self.tool_template.messages(messages, tools)
        if len(messages) > 1 and options.get("chat_template") is None:
            messages = self.role_template.messages(messages)
        text = tokenizer.apply_chat_template(messages, tools=tools, **options)
        marked = self._with_marks(text) if media else text
        ids = self._encode(marked, "messages", add_special_tokens, truncates)
        return self._with_media(PreparedPrompt(ids, text, param="messages"), media)

    @cached_property
    def media_template(self) -> MediaTemplate:
        """The image support of the chat template."""
        tokenizer, vision = self.tokenizer, self.model.vision
        if tokenizer is None or vision is None:
            return MediaTemplate()
        names = {"image": vision.image_token_id, "video": vision.video_token_id}
        start = "" if vision.vision_start_token_id < 0 else self._token_text(vision.vision_start_token_id)
        if vision.placeholder_token_id >= 0:
            names, start = {"image": vision.placeholder_token_id, "video": vision.video_token_id}, ""
        tokens = {kind: self._token_text(token) for kind, token in names.items() if token >= 0}
        if vision.tile_marks:
            tokens["image"] = vision.tile_marks[3]
        return MediaTemplate.of(tokens, start, lambda messages: tokenizer.apply_chat_template(messages))

    @cached_property
    def role_template(self) -> RoleTemplate:
        """The sequences of roles that the chat template can render."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return RoleTemplate()
        return RoleTemplate.of(lambda messages: tokenizer.apply_chat_template(messages))

    @cached_property
    def tool_template(self) -> ToolTemplate:
        """The tool support of the chat template."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return NO_TOOLS
        return ToolTemplate.of(tokenizer.chat_template, lambda m, t: tokenizer.apply_chat_template(m, tools=t))

    def truncated(self, prompt: PreparedPrompt, params: SamplingParams, prompt_only: bool = False) -> PreparedPrompt:
        """The part of a prompt that ``params.truncate_prompt_tokens`` keeps.

        Raises BadRequest.

        prompt_only: no token is generated.
        """
        kept, name = params.truncate_prompt_tokens, "truncate_prompt_tokens"
        if kept is None:
            return prompt
        context = self.model.max_model_len
        new = 0 if prompt_only else params.max_tokens or 1
        if kept > context - min(new, 1):
            raise BadRequest(
                f"{name}={kept} leaves no room in the context of {context} tokens; give at most "
                f"{context - min(new, 1)}, or -1 for what fits.",
                name,
            )
        kept = max(1, context - new) if kept == -1 else kept
        if len(prompt.token_ids) <= kept:
            return prompt
        if prompt.overrides is not None or prompt.media:
            what = "images or videos" if prompt.media else "embeddings"
            raise BadRequest(f"{name} cuts token ids, and this prompt has {what}; leave out one of them.", name)
        ids = prompt.token_ids[-kept:] if params.truncation_side == "left" else prompt.token_ids[:kept]
        return replace(prompt, token_ids=ids, text=None)

    def request(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        priority: int = 0,
        logprobs_field: str = "logprobs",
        prompt_only: bool = False,
    ) -> EngineRequest:
        """Prepare and check a request.

        ``EngineRequest.sequences`` splits it if ``params.n`` is above 1.

        A request without a seed gets one. logprobs_field: the caller's name of ``logprobs``. prompt_only: see
        EngineRequest. Raises BadRequest.
        """
        prompt = self.truncated(prompt, params, prompt_only)
        if params.seed is None:
            params = replace(params, seed=self.draw_seed())
        for name in ("stop", "stop_regex"):
            if getattr(params, name):
                self.require_tokenizer(name)
        StopRegex(params.stop_regex) if params.stop_regex else None
        self._check_limits(params, priority, logprobs_field)
        bad_words = self.require_tokenizer("bad_words").bad_words(params.bad_words) if params.bad_words else ()
        model = self.model
        eos = () if params.ignore_eos else model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        request = EngineRequest(request_id, prompt.token_ids, params, stop_ids, bad_words)
        request = replace(
            request,
            overrides=prompt.overrides,
            priority=priority,
            cache_salt=prompt.cache_salt,
            media=prompt.media,
            prompt_only=prompt_only,
        )
        check_request(request, model.max_model_len, model.vocab_size, model.hidden_size, prompt.param)
        return request

    def _check_limits(self, params: SamplingParams, priority: int, name: str) -> None:
        """Raise BadRequest for features that this engine was started without."""
        if not self.model.generates and not params.return_hidden_states:
            raise BadRequest(
                "This checkpoint has no LM head and writes no text: use /classify, /score, "
                "/rerank, /pooling or /v1/embeddings (LLM.classify, score, encode, embed).",
                "model",
            )
        most = self.model.max_logprobs
        requested = self.model.vocab_size if params.logprobs == -1 else params.logprobs or 0
        if most != -1 and requested > most:
            raise BadRequest(
                f"{name}={params.logprobs} is out of range: it must be a whole number from 0 to {most}. Raise "
                "--max-logprobs (-1: the whole vocabulary), or ask for fewer.",
                name,
            )
        if priority and not self.model.priorities:
            raise BadRequest(
                f"priority={priority} needs --scheduling-policy priority; this engine serves first come, first served. "
                "Leave out priority.",
                "priority",
            )

    def require_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises BadRequest, naming ``param``, if there is none."""
        if self.tokenizer is None:
            raise BadRequest(
                f"The checkpoint has no tokenizer, so {param} cannot be text; give the prompt as token ids (on a "
                "server: to /v1/completions, with return_token_ids=true to read the answer).",
                param,
            )
        return self.tokenizer

    def encode_any(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that need not fit the context. Raises BadRequest for one of too many characters."""
        return self.checked(text, param, truncates=True).encode(text, add_special_tokens)

    def checked(self, text: str, param: str, truncates: bool = False) -> Tokenizer:
        """The tokenizer, for a text that is short enough to be tokenized: megabytes take minutes.

        truncates: it need not fit the context. Raises BadRequest, also for a checkpoint without a tokenizer.
        """
        tokenizer, context = self.require_tokenizer(param), self.model.max_model_len
        most = max(FREE_CHARS, CHARS_OF_A_TOKEN * context)
        if truncates and len(text) > most:
            raise BadRequest(
                f"{param} has {len(text)} characters; of a text that need not fit the context of {context} tokens at "
                f"most {most} are tokenized. Split it, or raise --max-model-len.",
                param,
            )
        if not truncates and len(text) > context:
            least = -(-len(text) // tokenizer.longest_token)
            if least > context:
                raise BadRequest(
                    f"The prompt has {len(text)} characters, at least {least} tokens; the model's context is {context} "
                    "tokens. Shorten the prompt.",
                    param,
                    "context_length_exceeded",
                )
        return tokenizer

    def _encode(self, text: str, param: str, add_special_tokens: bool, truncates: bool = False) -> list[int]:
        return self.checked(text, param, truncates).encode(text, add_special_tokens)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise BadRequest for unknown keys, and for keys that exclude each other."""
    unknown = sorted(prompt.keys() - PROMPT_KEYS)
    if unknown:
        raise BadRequest(f"a prompt mapping has the keys {unknown}; known ones are {sorted(PROMPT_KEYS)}.", "prompt")
    others = sorted(prompt.keys() - {"prompt_embeds", "cache_salt"})
    if "prompt_embeds" in prompt and others:
        raise BadRequest(f"prompt_embeds are a whole prompt by themselves; leave out {others}.", "prompt_embeds")


def checked_salt(salt: Any, param: str = "cache_salt") -> str | None:
    """A prompt's cache_salt. Raises BadRequest."""
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS):
        return salt
    shown = repr(salt)[:80]
    raise BadRequest(f"{param}={shown} is not valid: it must be a string of 1 to {MAX_SALT_CHARS} characters.", param)


def combined_salt(cache_salt: Any, extra_key: Any) -> str | None:
    """One salt for the pair (vLLM's cache_salt, SGLang's extra_key); None without both.

    Raises BadRequest.

    Different pairs give different salts. A cache_salt alone is its own salt, as in ``LLM``. A pair with an extra_key is
    hashed as JSON, because concatenation would make ("a", "bc") and ("ab", "c") equal.
    """
    salt = checked_salt(cache_salt, "cache_salt")
    if checked_salt(extra_key, "extra_key") is None:
        return salt
    return "pair-" + hashlib.sha256(json.dumps([cache_salt, extra_key]).encode()).hexdigest()
