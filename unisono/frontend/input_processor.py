"""Prompts and sampling parameters to checked engine requests: the one preparation, for ``LLM`` and the server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.frontend.embeddings import embedded_prompt, overridden
from unisono.request_checks import check_request
from unisono.tokenizer import Tokenizer
from unisono.types import BadRequest, EngineRequest, Overrides, SamplingParams
from unisono.vectors import DTYPES

SEED_BITS = 53
"""Bits of a seed that is chosen for a request: JavaScript reads such a number back exactly."""

PromptType = str | Sequence[int] | Mapping[str, Any]
"""A prompt as callers write it: text, token ids, or a mapping with some of PROMPT_KEYS."""
PROMPT_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "embedding_overrides"}


@dataclass(frozen=True)
class ModelFacts:
    """What preparing a request needs to know of the model, from the engine's ``info()``.

    dtype: the model's, by name. generation_defaults: sampling parameters that generation_config.json sets.
    prompt_embeds, return_hidden_states: whether the server was started with the flags that allow them.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    prompt_embeds: bool
    return_hidden_states: bool

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
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt in token ids, with embeddings in place of some of them.

    text: the prompt's text where it was given as text. param: the caller's name of the prompt, which errors cite.
    """

    token_ids: list[int]
    text: str | None = None
    overrides: Overrides | None = None
    param: str = "prompt"


class InputProcessor:
    """Prepares requests for one model. ``tokenizer`` is None for a checkpoint without one."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelFacts) -> None:
        self.tokenizer = tokenizer
        self.model = model

    def prompt(self, given: PromptType) -> Prompt:
        """Tokenize a prompt and pack its embeddings. Raises BadRequest."""
        if isinstance(given, str):
            given = {"prompt": given}
        elif not isinstance(given, Mapping):
            given = {"prompt_token_ids": given}
        _check_keys(given)
        dtype = DTYPES[self.model.dtype]
        if "prompt_embeds" in given:
            embedded = embedded_prompt(given["prompt_embeds"], dtype)
            return Prompt(embedded[0], overrides=embedded[1], param="prompt_embeds")
        text, overrides = given.get("prompt"), None
        if "prompt_token_ids" in given:
            ids = list(given["prompt_token_ids"])
        elif isinstance(text, str):
            ids = self._encode(text, "prompt")
        else:
            raise BadRequest(
                f"a prompt mapping needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'; it has {sorted(given)}.",
                "prompt",
            )
        if "embedding_overrides" in given:
            ids, overrides = overridden(ids, given["embedding_overrides"], dtype)
        return Prompt(ids, text, overrides)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Write one conversation as a prompt. ``options``: see ``Tokenizer.apply_chat_template``. Raises BadRequest."""
        text = self.require_tokenizer("messages").apply_chat_template(messages, **options)
        return Prompt(self._encode(text, "messages", add_special_tokens=False), text, param="messages")

    def request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        """Prepare and check a request. ``EngineRequest.sequences`` splits it where ``params.n`` is above 1.

        A request without a seed gets one. Raises BadRequest.
        """
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        if params.stop:
            self.require_tokenizer("stop")
        bad_words = self.require_tokenizer("bad_words").bad_words(params.bad_words) if params.bad_words else ()
        model = self.model
        eos = () if params.ignore_eos else model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        request = EngineRequest(request_id, prompt.token_ids, params, stop_ids, bad_words, overrides=prompt.overrides)
        check_request(request, model.max_model_len, model.vocab_size, model.hidden_size, prompt.param)
        return request

    def require_tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer. Raises BadRequest where there is none to read ``param`` with."""
        if self.tokenizer is None:
            raise BadRequest(
                f"The checkpoint has no tokenizer, so {param} cannot be text; give the prompt as token ids (on a "
                "server: to /v1/completions, with return_token_ids=true to read the answer).",
                param,
            )
        return self.tokenizer

    def _encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
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
    others = sorted(given.keys() - {"prompt_embeds"})
    if "prompt_embeds" in given and others:
        raise BadRequest(f"prompt_embeds are a whole prompt by themselves; leave out {others}.", "prompt_embeds")
