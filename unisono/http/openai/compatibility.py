"""Every field of the chat and completion bodies of OpenAI, vLLM and SGLang, and its treatment here.

``protocol.parse`` refuses fields by this table, and docs/reference/request-fields.md is generated from it
(tests/http/test_compatibility.py). A field is

* honoured: it is a field of the request models of ``protocol.py``, and ``HONOURED`` has its description,
* a label: it describes the caller and cannot change an answer (``LABELS``),
* or refused (``REFUSED``): with the reason, the nearest supported field, and the values without effect, which are
  accepted (null always is).

Owners are letters: o OpenAI, v vLLM, s SGLang.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unisono.http.errors import ApiError, show
from unisono.http.limits.fields import check_name
from unisono.types.unknown_fields import dropped

CHAT, TEXT = "chat", "text"
PATHS = {CHAT: "/v1/chat/completions", TEXT: "/v1/completions"}

LABELS: Mapping[str, str] = {
    "user": "ovs",
    "metadata": "o",
    "store": "o",
    "service_tier": "o",
    "safety_identifier": "o",
    "prompt_cache_key": "o",
    "prompt_cache_retention": "o",
    "session_id": "vs",
}
"""Labels that do not affect the answer, and their owners."""

HONOURED: Mapping[str, tuple[str, str]] = {
    # ---- prompt ----
    "messages": (
        "ovs",
        "the conversation; contents are text or parts, with images and videos ([Images](../guide/images.md))",
    ),
    "prompt": ("ovs", "text, token ids, or a list of either; a choice for each"),
    "prompt_embeds": ("v", "with `--enable-prompt-embeds`"),
    "embedding_overrides": ("", "Unisono's: embeddings in place of some tokens'"),
    "suffix": ("ovs", "what follows the answer; for tokenizers with infill tokens (`unisono/text/infill.py`)"),
    "mm_processor_kwargs": ("v", "settings of images and videos: min_pixels, max_pixels, size, fps, num_frames"),
    "media_io_kwargs": ("v", "settings of videos: fps, num_frames; of images: rgba_background_color"),
    "model": ("ovs", "a served name, or an adapter's ([Adapters](../guide/adapters.md))"),
    "documents": ("v", "passed to the chat template"),
    "chat_template": ("v", "with `--trust-request-chat-template`; rendered in a sandbox"),
    "chat_template_kwargs": ("vs", "variables of the chat template"),
    "add_generation_prompt": ("v", ""),
    "continue_final_message": ("vs", ""),
    "add_special_tokens": ("v", "default: true for prompts, false for messages, whose template writes them"),
    "truncate_prompt_tokens": ("v", "keeps this number of tokens; -1: what the context leaves beside max_tokens"),
    "truncation_side": ("v", "`left` (the default) drops the prompt's beginning, `right` its end"),
    # ---- sampling ----
    "temperature": ("ovs", "0 is greedy"),
    "top_p": ("ovs", ""),
    "top_k": ("vs", "0 or -1 keeps all"),
    "min_p": ("vs", ""),
    "seed": ("ovs", "0 to 2^63 - 1; -1: none; a choice without one gets one and reports it"),
    "presence_penalty": ("ovs", "-2 to 2"),
    "frequency_penalty": ("ovs", "-2 to 2"),
    "repetition_penalty": ("vs", "above 0"),
    "logit_bias": ("ovs", "300 entries at most"),
    "allowed_token_ids": ("v", ""),
    "bad_words": ("v", ""),
    "n": ("ovs", "choice i is what seed + i gives"),
    "best_of": ("ovs", "generates this number of sequences, returns the n of the highest cumulative log-probability"),
    "use_beam_search": ("v", "n is the beam width, 2 n at most --max-logprobs; see below"),
    "length_penalty": ("v", "of beams: cumulative log-probability / tokens ^ length_penalty, prompt tokens included"),
    "speculative": ("", "Unisono's: drafts of this request; changes when tokens come, never which"),
    "vllm_xargs": ("v", "parameters of installed features (docs/extend/feature.md); other names are refused"),
    # ---- the form of the answer ----
    "response_format": ("ovs", "text, json_object, json_schema, structural_tag"),
    "structured_outputs": ("v", "json, regex, choice, grammar, json_object, structural_tag"),
    "guided_json": ("v", "older name of structured_outputs.json"),
    "guided_regex": ("v", "older name of structured_outputs.regex"),
    "guided_choice": ("v", "older name of structured_outputs.choice"),
    "guided_grammar": ("v", "older name of structured_outputs.grammar"),
    "json_schema": ("s", "structured_outputs.json"),
    "regex": ("s", "structured_outputs.regex"),
    "ebnf": ("s", "structured_outputs.grammar"),
    # ---- stop conditions ----
    "max_tokens": ("ovs", "default: 16 for prompts, the context for messages"),
    "max_completion_tokens": ("ovs", ""),
    "min_tokens": ("vs", ""),
    "stop": ("ovs", ""),
    "stop_token_ids": ("vs", ""),
    "stop_regex": ("s", "ends the text where an expression first matches; no look-around, no references, no anchors"),
    "include_stop_str_in_output": ("v", ""),
    "no_stop_trim": ("s", "include_stop_str_in_output"),
    "ignore_eos": ("vs", ""),
    # ---- what is reported ----
    "logprobs": ("ovs", "-1: of the whole vocabulary; --max-logprobs (20) is the limit"),
    "top_logprobs": ("ovs", "-1: of the whole vocabulary; --max-logprobs (20) is the limit"),
    "logprob_token_ids": ("v", "log-probabilities of these tokens, in place of the likeliest ones'"),
    "prompt_logprobs": ("v", "20 at most; whole answers only"),
    "logprob_start_len": ("s", "first prompt position of prompt_logprobs"),
    "return_tokens_as_token_ids": ("v", "log-probabilities name tokens as `token_id:N`"),
    "return_token_ids": ("vs", "token_ids of choices, prompt_token_ids of prompts"),
    "return_drafts": (
        "",
        "Unisono's, streams only: a chunk for each token, whose `draft` says whether it is an accepted draft "
        "([HTTP API](http-api.md))",
    ),
    "return_prompt_token_ids": ("s", "prompt_token_ids alone"),
    "return_prompt_text": ("v", "what the chat template wrote"),
    "return_hidden_states": ("s", "with `--enable-return-hidden-states`"),
    "return_routed_experts": ("s", "with `--enable-return-routed-experts`; base64 of NumPy arrays; whole answers only"),
    "routed_experts_prompt_start": ("v", "first prompt position of prompt_routed_experts"),
    "routed_experts_start_len": ("s", "routed_experts_prompt_start"),
    "echo": (
        "ovs",
        "a completion begins with its prompt, a chat answer with the assistant's message that it continues",
    ),
    "skip_special_tokens": ("vs", ""),
    "spaces_between_special_tokens": ("v", "false: none between special tokens that follow each other"),
    "detokenize": ("v", "false: token ids alone, no text"),
    "stream": ("ovs", ""),
    "stream_options": ("ovs", "include_usage, continuous_usage_stats"),
    # ---- tools and thinking ----
    "tools": ("ovs", ""),
    "tool_choice": ("ovs", ""),
    "parallel_tool_calls": ("ovs", ""),
    "reasoning_effort": ("ovs", "none to max; none turns thinking off where the template can"),
    "enable_thinking": ("", "chat_template_kwargs.enable_thinking"),
    "thinking_token_budget": ("v", "most reasoning tokens"),
    "include_reasoning": ("v", "false: the answer leaves its thinking out"),
    "separate_reasoning": ("s", "false: thinking stays in the answer's text"),
    # ---- how it is served ----
    "priority": ("vs", "lower first, as vLLM's; other values than 0 need `--scheduling-policy priority`"),
    "cache_salt": ("vs", "prompts share cached prefixes only under one salt"),
    "extra_key": ("s", "part of cache_salt"),
    "request_id": (
        "v",
        "128 letters, digits, `.`, `_`, `:`, `-` at most; else the header X-Request-Id names the answer",
    ),
    "rid": ("s", "request_id"),
}
"""Honoured fields: owners and description."""


@dataclass(frozen=True)
class RefusedField:
    """A field that is not supported.

    neutral: accepted values without effect, beside null.

    why: end of a sentence that begins with "… is not supported: ". nearest: the alternative.
    """

    owners: str
    why: str
    neutral: tuple[object, ...] = ()
    nearest: str | None = None


_MEDIA = "answers are text"
_TILES = "no model here cuts images into tiles; max_pixels bounds them"
_DISAGGREGATED = "prompts and answers run in one engine here"
_ONE_REPLICA = "the header X-data-parallel-rank chooses an engine"
_CODE = "requests carry no code that would run in the server"
_CHAT_ONLY: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}

FOREIGN = {
    "do_sample": "temperature 0 is greedy, other values sample",
    "extra_body": "put its fields into the body; the openai client does so with its argument extra_body",
    "format": "use response_format",
    "guided_json_object": 'use response_format {"type": "json_object"}',
    "keep_alive": "a model stays loaded while the server runs; remove it",
    "n_predict": "use max_tokens",
    "num_beams": "use use_beam_search with n beams",
    "num_predict": "use max_tokens",
    "options": "put sampling parameters into the body",
    "return_full_text": "use echo",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "system": "send a message of the role system",
    "thinking": "use enable_thinking, reasoning_effort or thinking_token_budget",
    "top_a": "use min_p",
    "typical_p": "use top_p or min_p",
}
"""Fields of other APIs, and what to use here."""

REFUSED: Mapping[str, RefusedField] = {
    "functions": RefusedField("o", "it is the old form of tools", ([],), "tools"),
    "function_call": RefusedField("o", "it is the old form of tool_choice", ("none", "auto"), "tool_choice"),
    "modalities": RefusedField("o", _MEDIA, (["text"],)),
    "audio": RefusedField("o", _MEDIA),
    "prediction": RefusedField("o", "drafts come from the engine's own drafter", (), "speculative"),
    "verbosity": RefusedField("o", "no model here reads it", ("medium",)),
    "web_search_options": RefusedField("o", "the server reaches no network"),
    "moderation": RefusedField("o", "nothing here judges prompts or answers"),
    "reasoning": RefusedField("s", "it is another spelling", (), "reasoning_effort"),
    "reasoning_effort": RefusedField("ovs", "the prompt is used without a template", (), "prompt"),
    "thinking_token_budget": RefusedField("v", "completions know no thinking", (-1,), "max_tokens"),
    "watermarking": RefusedField("v", "it would change which tokens are picked, beside parameters and seed", (False,)),
    "repetition_detection": RefusedField("v", "answers end by tokens, strings, expressions", (), "repetition_penalty"),
    "stream_interval": RefusedField("v", "a round's tokens are sent when they are there", (1,), "stream"),
    "return_token_offsets": RefusedField("v", "it belongs to vLLM's render routes", (False,), "return_token_ids"),
    "return_mm_kwargs": RefusedField("v", "it belongs to vLLM's render routes", (True,)),
    "max_dynamic_patch": RefusedField("s", _TILES, (), "mm_processor_kwargs"),
    "min_dynamic_patch": RefusedField("s", _TILES, (), "mm_processor_kwargs"),
    "use_audio_in_video": RefusedField("s", "audio is not taken", (False,)),
    "images_config": RefusedField("s", "it is another spelling", ({},), "mm_processor_kwargs"),
    "kv_transfer_params": RefusedField("v", _DISAGGREGATED, ({},)),
    "ec_transfer_params": RefusedField("v", _DISAGGREGATED, ({},)),
    "bootstrap_host": RefusedField("s", _DISAGGREGATED),
    "bootstrap_port": RefusedField("s", _DISAGGREGATED),
    "bootstrap_room": RefusedField("s", _DISAGGREGATED),
    "disagg_prefill_dp_rank": RefusedField("s", _DISAGGREGATED),
    "routed_dp_rank": RefusedField("s", _ONE_REPLICA, (0,)),
    "data_parallel_rank": RefusedField("s", _ONE_REPLICA, (0,)),
    "lora_path": RefusedField("s", "the name of an adapter goes elsewhere", (), "model"),
    "session_params": RefusedField("s", "requests keep no session; cached prefixes are found", ({},), "messages"),
    "custom_params": RefusedField("s", "it is another spelling", ({},), "vllm_xargs"),
    "custom_logit_processor": RefusedField("s", _CODE, (), "vllm_xargs"),
    "logits_processors": RefusedField("v", _CODE, ([],), "vllm_xargs"),
    "ngram_corpus_id": RefusedField("s", "drafts do not affect the text; there is no corpus", (), "speculative"),
    "custom_labels": RefusedField("s", "labels of metrics are the server's", ({},), "metadata"),
    "task": RefusedField("s", "no template here reads it", (), "chat_template_kwargs"),
    "input_ids": RefusedField("s", "the template renders messages; token ids go to /v1/completions", (), "prompt"),
    "return_cached_tokens_details": RefusedField("s", "there is one cache", (False,), "usage.prompt_tokens_details"),
    "return_meta_info": RefusedField("s", "it is a field of /generate", (False,), "usage"),
    "stream_reasoning": RefusedField("s", "thinking is streamed as it comes", (True,), "include_reasoning"),
    "structural_tag": RefusedField("v", "it moved", (), "response_format"),
    "guided_decoding_backend": RefusedField(
        "v",
        "there is one grammar engine, llguidance",
        ("auto", "llguidance", "guidance", "xgrammar"),
        "structured_outputs",
    ),
    "guided_whitespace_pattern": RefusedField(
        "v", "blanks in JSON are free, or none", (), "structured_outputs.disable_any_whitespace"
    ),
    "max_new_tokens": RefusedField("s", "it is a name of /generate", (), "max_tokens"),
    "min_new_tokens": RefusedField("s", "it is a name of /generate", (), "min_tokens"),
    "sampling_seed": RefusedField("s", "it is a name of /generate", (), "seed"),
    "sampling_params": RefusedField("s", "it is a field of /generate; its names stand in the body", (), "temperature"),
    "best_of": RefusedField("vs", "chat answers are not chosen among", (1,), "n"),
    "suffix": RefusedField("ovs", "it belongs to /v1/completions", ("",), "prompt"),
}  # fmt: skip
"""Fields that are refused unless they are fields of the body's model."""


def check_fields(data: Mapping[str, object], body: str, fields: Collection[str]) -> None:
    """Refuse fields that a body's model does not have. fields: the model's. Raises ApiError (400) with the field."""
    for name, value in data.items():
        if name in fields or name in LABELS or (value is None and (name in REFUSED or name in HONOURED)):
            continue
        check_name(name)
        refused = REFUSED.get(name)
        neutral = refused.neutral if refused is not None else _CHAT_ONLY.get(name, ())
        if any(_same(value, one) for one in neutral):
            continue
        if refused is not None:
            way = f"Use {refused.nearest}, or remove {name}." if refused.nearest else f"Remove {name}."
            message = f"{name}={show(value)} is not supported: {refused.why}. {way}"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if name in HONOURED:
            other = PATHS[TEXT if body == CHAT else CHAT]
            message = f"{name}={show(value)} is not a field of {PATHS[body]}, but of {other}; remove it, or ask there."
            raise ApiError(400, message, param=name, code="unsupported_field")
        if dropped(name):
            continue
        raise ApiError(400, f"{name} is not a known field{_instead(name, fields)}", param=name, code="unknown_field")


def _instead(name: str, fields: Collection[str]) -> str:
    """The end of the sentence about an unknown field."""
    if (hint := FOREIGN.get(name)) is not None:
        return f": {hint}."
    close = difflib.get_close_matches(name, [*fields, *LABELS], 1)
    return f"; did you mean {close[0]}?" if close else "; remove it."


def _same(a: object, b: object) -> bool:
    """Equality of JSON values: Python treats true and 1 as equal."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


OWNERS = {"o": "OpenAI", "v": "vLLM", "s": "SGLang"}
PAGE = """# Fields of request bodies

Generated from `unisono/http/openai/compatibility.py`: do not edit it, run `python scripts/reference.py fields`.

Every field of the chat and completion bodies of OpenAI, vLLM and SGLang is honoured, taken where its value asks for
nothing, or refused with an error (400) that names the field, the reason and the nearest field that exists. An unknown
field is an error too, unless the server runs with `--allow-unknown-fields`: then it is dropped, in nested objects too.
Null is always taken for a known field.

## Honoured

{honoured}

Beam search (`use_beam_search`) keeps the n sequences of the highest score, cumulative log-probability /
tokens ^ length_penalty; tokens are the prompt's and the answer's, without a final EOS, as in vLLM. Each step extends
every beam by its 2 n likeliest tokens; a beam that takes EOS is finished (unless `ignore_eos`), and the n best of
finished and running ones are returned, best first. Log-probabilities are the model's own: `temperature`, `top_p`,
`top_k`, `min_p` and `seed` have nothing to act on. What edits or ends texts in another way is refused together with it.
A stream brings each choice as a whole.

## Labels

Taken and not read, for they cannot change an answer: {labels}.

## Refused

{refused}
"""


def page(chat: Collection[str], text: Collection[str]) -> str:
    """docs/reference/request-fields.md, for the fields of the two request models."""
    rows = ["| Field | Of | Chat | Completions | |", "|---|---|---|---|---|"]
    for name, (owners, note) in HONOURED.items():
        if name in chat or name in text:
            where = " | ".join("yes" if name in fields else "–" for fields in (chat, text))
            rows.append(f"| `{name}` | {_names(owners)} | {where} | {note} |")
    refusals = ["| Field | Of | Where | Why | Nearest | Taken values |", "|---|---|---|---|---|---|"]
    for name, refused in REFUSED.items():
        missing = [label for label, fields in (("chat", chat), ("completions", text)) if name not in fields]
        if missing:
            nearest = f"`{refused.nearest}`" if refused.nearest else "–"
            taken = ", ".join(f"`{show(value)}`" for value in refused.neutral) or "–"
            place = "both" if len(missing) == 2 else missing[0]
            row = (f"`{name}`", _names(refused.owners), place, refused.why, nearest, taken)
            refusals.append(f"| {' | '.join(row)} |")
    labels = ", ".join(f"`{name}`" for name in LABELS)
    return PAGE.format(honoured="\n".join(rows), labels=labels, refused="\n".join(refusals))


def _names(owners: str) -> str:
    return ", ".join(OWNERS[letter] for letter in owners) or "–"
