"""Prompts and sampling parameters to checked engine requests: the one preparation, for ``LLM`` and the server."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from unisono.frontend.embeddings import embedded_prompt, overridden
from unisono.frontend.infill import infill_prompt
from unisono.frontend.media.inputs import KEYS, KWARGS, sources_of
from unisono.frontend.media.loader import MediaLoader, Vision
from unisono.frontend.media.parts import with_request
from unisono.frontend.media.placeholders import expanded
from unisono.frontend.media.settings import MediaSettings
from unisono.frontend.media.sources import Loaded, MediaSource
from unisono.frontend.media.templates import MediaTemplate, has_media
from unisono.frontend.role_templates import RoleTemplate, merged_leading
from unisono.frontend.stop_regex import StopRegex
from unisono.frontend.tool_templates import NO_TOOLS, ToolTemplate
from unisono.request_checks import check_request
from unisono.tokenizer import Tokenizer
from unisono.types import MAX_LOGPROBS, BadRequest, EngineRequest, MediaItem, Overrides, SamplingParams

SEED_BITS = 53
"""Bits of a seed that is chosen for a request: JavaScript reads such a number back exactly."""

PromptType = str | Sequence[int] | Mapping[str, Any]
"""A prompt as callers write it: text, token ids, or a mapping with some of PROMPT_KEYS."""
PROMPT_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "embedding_overrides", "cache_salt", *KEYS}
FREE_CHARS, CHARS_OF_A_TOKEN = 1 << 18, 16
"""Characters of a text that is tokenized without having to fit: at least so many, and for each token of the context.

The tokenizer takes some 500 bytes of memory for each token.
"""
MAX_SALT_CHARS = 1024
"""Characters of a cache_salt; vLLM's limit."""


@dataclass(frozen=True)
class ModelFacts:
    """What preparing a request needs to know of the model, from the engine's ``info()``.

    dtype: the model's, by name. generation_defaults: sampling parameters that generation_config.json sets.
    prompt_embeds, return_hidden_states: whether the server was started with the flags that allow them. max_logprobs:
    what logprobs may ask for at each position, -1 for any number. priorities: whether the engine schedules by them.
    vision: of a model that sees, what pictures become.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    prompt_embeds: bool
    return_hidden_states: bool
    max_logprobs: int = MAX_LOGPROBS
    priorities: bool = False
    vision: Vision | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any], tokenizer: Tokenizer | None) -> ModelFacts:
        """The facts of an engine's ``info()``. The EOS ids are the checkpoint's and the tokenizer's."""
        settings, own = info["settings"], tokenizer.eos_token_ids if tokenizer is not None else ()
        return cls(
            max_model_len=settings["max_model_len"],
            vocab_size=info["vocab_size"],
            hidden_size=info["hidden_size"],
            dtype=settings["dtype"],
            eos_token_ids=tuple(dict.fromkeys((*info["eos_token_ids"], *own))),
            generation_defaults=dict(info["generation_defaults"]),
            prompt_embeds=settings["enable_prompt_embeds"],
            return_hidden_states=settings["enable_return_hidden_states"],
            max_logprobs=settings["max_logprobs"],
            priorities=settings["scheduling_policy"] == "priority",
            vision=Vision.of(info.get("vision")),
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt in token ids, with embeddings in place of some of them.

    text: the prompt's text where it was given as text. param: the caller's name of the prompt, which errors cite.
    cache_salt, media: see ``EngineRequest``.
    """

    token_ids: list[int]
    text: str | None = None
    overrides: Overrides | None = None
    param: str = "prompt"
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()


class InputProcessor:
    """Prepares requests for one model. ``tokenizer`` is None for a checkpoint without one.

    media: loads pictures and videos; None for tests of a model that sees none.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: ModelFacts, media: MediaLoader | None = None) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.media = media or MediaLoader(None, None, MediaSettings(), model.dtype, 1)

    def prompt(
        self,
        given: PromptType,
        *,
        add_special_tokens: bool = True,
        suffix: str | None = None,
        truncates: bool = False,
        media: Sequence[Loaded] = (),
    ) -> Prompt:
        """Tokenize a prompt, pack its embeddings, load its pictures and videos. Raises BadRequest.

        suffix: what follows the answer. truncates: whether :meth:`truncated` follows, so that a text may be longer than
        the context. media: those that were loaded before, in the order of their placeholders.
        """
        if isinstance(given, str):
            given = {"prompt": given}
        elif not isinstance(given, Mapping):
            given = {"prompt_token_ids": given}
        _check_keys(given)
        salt = checked_salt(given.get("cache_salt"))
        if "prompt_embeds" in given:
            embedded = embedded_prompt(given["prompt_embeds"], self.model.dtype)
            return Prompt(embedded[0], overrides=embedded[1], param="prompt_embeds", cache_salt=salt)
        text, overrides = given.get("prompt"), None
        if "prompt_token_ids" in given:
            ids = list(given["prompt_token_ids"])
        elif isinstance(text, str):
            ids = self._encode(text, "prompt", add_special_tokens and not suffix, truncates)
        else:
            raise BadRequest(
                f"a prompt mapping needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'; it has {sorted(given)}.",
                "prompt",
            )
        if "embedding_overrides" in given:
            ids, overrides = overridden(ids, given["embedding_overrides"], self.model.dtype)
        if suffix:
            ids = infill_prompt(self.require_tokenizer("suffix"), ids, suffix, add_special_tokens)
        loaded = [*media, *self.media.load_all(self._offline_sources(given))]
        if loaded and overrides is not None:
            raise BadRequest("embedding_overrides do not go with pictures; leave out one of them.", "multi_modal_data")
        return self._with_media(Prompt(ids, text, overrides, cache_salt=salt), loaded)

    def _offline_sources(self, given: Mapping[str, Any]) -> list[MediaSource]:
        """The pictures and videos of a prompt's mapping. Raises BadRequest."""
        return self.with_settings(with_request(sources_of(given), given.get(KWARGS), None))

    def with_settings(self, sources: list[MediaSource]) -> list[MediaSource]:
        """Sources with what the flags say, where their requests do not."""
        settings = self.media.settings
        return with_request(sources, settings.mm_processor_kwargs, settings.media_io_kwargs)

    def _with_media(self, prompt: Prompt, items: Sequence[Loaded]) -> Prompt:
        """The prompt with the placeholders of ``items`` written out. Raises BadRequest."""
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
        media: Sequence[Loaded] = (),
        **options: Any,
    ) -> Prompt:
        """Write one conversation as a prompt. Raises BadRequest.

        tools: definitions in OpenAI's form. Arguments of calls in ``messages`` are objects, or text: an object in JSON
        is decoded. System messages at the beginning are written as one; :class:`RoleTemplate` says what is rewritten
        for a template that cannot write it. truncates, media: see :meth:`prompt`. A picture or video stands in a list
        of content parts as ``{"type": "image"}`` or ``{"type": "video"}``; without ``media`` its placeholder stays.
        ``options``: see ``Tokenizer.apply_chat_template``.
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
        ids = self._encode(text, "messages", add_special_tokens, truncates)
        return self._with_media(Prompt(ids, text, param="messages"), media)

    @cached_property
    def media_template(self) -> MediaTemplate:
        """How the chat template takes pictures."""
        tokenizer, vision = self.tokenizer, self.model.vision
        if tokenizer is None or vision is None:
            return MediaTemplate()
        names = {"image": vision.image_token_id, "video": vision.video_token_id}
        tokens = {kind: str(tokenizer.backend.convert_ids_to_tokens(token)) for kind, token in names.items()}
        start = str(tokenizer.backend.convert_ids_to_tokens(vision.vision_start_token_id))
        return MediaTemplate.of(tokens, start, lambda messages: tokenizer.apply_chat_template(messages))

    @cached_property
    def role_template(self) -> RoleTemplate:
        """The sequences of roles that the chat template can write."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return RoleTemplate()
        return RoleTemplate.of(lambda messages: tokenizer.apply_chat_template(messages))

    @cached_property
    def tool_template(self) -> ToolTemplate:
        """What the chat template can write of tools."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return NO_TOOLS
        return ToolTemplate.of(tokenizer.chat_template, lambda m, t: tokenizer.apply_chat_template(m, tools=t))

    def truncated(self, prompt: Prompt, params: SamplingParams, prompt_only: bool = False) -> Prompt:
        """The part of a prompt that ``params.truncate_prompt_tokens`` keeps. Raises BadRequest.

        prompt_only: no token follows it.
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
            what = "pictures or videos" if prompt.media else "embeddings"
            raise BadRequest(f"{name} cuts token ids, and this prompt has {what}; leave out one of them.", name)
        ids = prompt.token_ids[-kept:] if params.truncation_side == "left" else prompt.token_ids[:kept]
        return replace(prompt, token_ids=ids, text=None)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        wanted: str = "logprobs",
        prompt_only: bool = False,
    ) -> EngineRequest:
        """Prepare and check a request. ``EngineRequest.sequences`` splits it where ``params.n`` is above 1.

        A request without a seed gets one. wanted: the caller's name of ``logprobs``. prompt_only: as in EngineRequest.
        Raises BadRequest.
        """
        prompt = self.truncated(prompt, params, prompt_only)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        for name in ("stop", "stop_regex"):
            if getattr(params, name):
                self.require_tokenizer(name)
        StopRegex(params.stop_regex) if params.stop_regex else None
        self._check_limits(params, priority, wanted)
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
        """Raise BadRequest for what this engine was not started to give."""
        most = self.model.max_logprobs
        asked = self.model.vocab_size if params.logprobs == -1 else params.logprobs or 0
        if most != -1 and asked > most:
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
        """Return the tokenizer. Raises BadRequest where there is none to read ``param`` with."""
        if self.tokenizer is None:
            raise BadRequest(
                f"The checkpoint has no tokenizer, so {param} cannot be text; give the prompt as token ids (on a "
                "server: to /v1/completions, with return_token_ids=true to read the answer).",
                param,
            )
        return self.tokenizer

    def encode_any(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that need not fit the context. Raises BadRequest for one of too many characters."""
        tokenizer, context = self.require_tokenizer(param), self.model.max_model_len
        most = max(FREE_CHARS, CHARS_OF_A_TOKEN * context)
        if len(text) > most:
            raise BadRequest(
                f"{param} has {len(text)} characters; of a text that need not fit the context of {context} tokens at "
                f"most {most} are tokenized. Split it, or raise --max-model-len.",
                param,
            )
        return tokenizer.encode(text, add_special_tokens)

    def _encode(self, text: str, param: str, add_special_tokens: bool, truncates: bool = False) -> list[int]:
        if truncates:
            return self.encode_any(text, param, add_special_tokens)
        tokenizer, context = self.require_tokenizer(param), self.model.max_model_len
        if len(text) > context:  # it may be megabytes, which take minutes to tokenize
            least = -(-len(text) // tokenizer.longest_token)
            if least > context:
                raise BadRequest(
                    f"The prompt has {len(text)} characters, at least {least} tokens; the model's context is {context} "
                    "tokens. Shorten the prompt.",
                    param,
                    "context_length_exceeded",
                )
        return tokenizer.encode(text, add_special_tokens)


def _check_keys(given: Mapping[str, Any]) -> None:
    """Raise BadRequest for unknown keys, and for keys that exclude each other."""
    unknown = sorted(given.keys() - PROMPT_KEYS)
    if unknown:
        raise BadRequest(f"a prompt mapping has the keys {unknown}; known ones are {sorted(PROMPT_KEYS)}.", "prompt")
    others = sorted(given.keys() - {"prompt_embeds", "cache_salt"})
    if "prompt_embeds" in given and others:
        raise BadRequest(f"prompt_embeds are a whole prompt by themselves; leave out {others}.", "prompt_embeds")


def checked_salt(salt: Any, param: str = "cache_salt") -> str | None:
    """A prompt's cache_salt. Raises BadRequest."""
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS):
        return salt
    shown = repr(salt)[:80]
    raise BadRequest(f"{param}={shown} is not valid: it must be a string of 1 to {MAX_SALT_CHARS} characters.", param)


def combined_salt(cache_salt: Any, extra_key: Any) -> str | None:
    """Return one salt for the pair (vLLM's cache_salt, SGLang's extra_key), None without both. Raises BadRequest.

    Different pairs give different salts. A cache_salt alone is its own salt, as in ``LLM``; a pair with an extra_key is
    hashed as JSON, because joined strings would make ("a", "bc") and ("ab", "c") the same.
    """
    salt = checked_salt(cache_salt, "cache_salt")
    if checked_salt(extra_key, "extra_key") is None:
        return salt
    return "pair-" + hashlib.sha256(json.dumps([cache_salt, extra_key]).encode()).hexdigest()
