"""Every field of OpenAI's, vLLM's and SGLang's bodies: honoured, taken where it asks for nothing, or refused by name.

The lists are those of vllm/entrypoints/openai/{chat_completion,completion}/protocol.py (commit 002032ee) and of
sglang/srt/entrypoints/openai/protocol.py (commit 004c82e0), with the names of older versions. The page
docs/reference/request-fields.md is written by ``python scripts/reference.py fields``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server
from unisono.http.openai.compatibility import HONOURED, LABELS, REFUSED, page
from unisono.http.openai.protocol import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs/reference/request-fields.md"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
MODELS: dict[str, Any] = {CHAT: ChatRequest, TEXT: CompletionRequest}

SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens
    skip_special_tokens echo
"""
VLLM = """
    use_beam_search watermarking length_penalty include_stop_str_in_output spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection stream_interval thinking_token_budget
    best_of guided_json guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend
    guided_whitespace_pattern logits_processors
"""
VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_prompt_text
"""
VLLM_TEXT = "prompt suffix prompt_embeds"
SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details return_token_ids
    regex ebnf stop_regex no_stop_trim lora_path session_id session_params custom_params custom_logit_processor
    images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
    rid extra_key cache_salt ngram_corpus_id priority
"""
SGLANG_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
    return_meta_info reasoning_effort task continue_final_message separate_reasoning stream_reasoning
    chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids reasoning
"""
SGLANG_TEXT = "prompt best_of suffix json_schema custom_labels"
OPENAI_CHAT = """
    audio function_call functions metadata modalities prediction prompt_cache_key prompt_cache_retention
    reasoning_effort safety_identifier service_tier store verbosity web_search_options moderation
"""
FIELDS = {
    CHAT: set((SHARED + VLLM + VLLM_CHAT + SGLANG + SGLANG_CHAT + OPENAI_CHAT).split()),
    TEXT: set((SHARED + VLLM + VLLM_TEXT + SGLANG + SGLANG_TEXT).split()),
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_field_is_in_the_table(path: str) -> None:
    fields = set(MODELS[path].model_fields)
    assert fields <= set(HONOURED), "say in HONOURED what these do"
    assert FIELDS[path] <= fields | set(LABELS) | set(REFUSED) | set(HONOURED)
    for name in REFUSED.keys() - fields:
        for word in (REFUSED[name].nearest or "model").split(".")[:1]:
            assert word in HONOURED or word in LABELS or word == "usage", f"{name}: nearest {word}"


def post(server: Server, path: str, **extra: Any) -> Any:
    return server.http.post(path, json={**BASES[path], "max_tokens": 1, **extra})


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_refusals_name_the_field_and_the_way_out(server: Server, path: str) -> None:
    for name in sorted((FIELDS[path] | set(REFUSED)) - set(MODELS[path].model_fields) - set(LABELS)):
        answer = post(server, path, **{name: "xyz"})
        error = answer.json().get("error", {})
        assert (answer.status_code, error.get("param"), error.get("code")) == (400, name, "unsupported_field"), name
        assert name in error["message"]
        refused = REFUSED.get(name)
        if refused is not None:
            assert refused.why in error["message"]
            assert refused.nearest is None or f"Use {refused.nearest}" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_null_and_neutral_values_are_taken(server: Server, path: str) -> None:
    """All at once: null for every known field, then what asks for nothing, and the labels."""
    kept = {"model", "max_tokens", *BASES[path]}
    names = (FIELDS[path] | set(HONOURED)) - kept
    nulls = dict.fromkeys(names)
    answer = post(server, path, **nulls)
    assert answer.status_code == 200, answer.text
    own = set(MODELS[path].model_fields)
    for place in range(2):
        neutral = {n: r.neutral[place] for n, r in REFUSED.items() if n not in own and len(r.neutral) > place}
        answer = post(server, path, **neutral)
        assert answer.status_code == 200, answer.text
    answer = post(server, path, **dict.fromkeys(LABELS, "x"))
    assert answer.status_code == 200, answer.text


def test_misspelt_field_error_suggests_the_closest_name(server: Server) -> None:
    error = post(server, CHAT, max_token=1).json()["error"]
    assert (error["param"], error["code"]) == ("max_token", "unknown_field")
    assert "did you mean max_tokens?" in error["message"]
    assert "remove it" in post(server, CHAT, qqqqqq=1).json()["error"]["message"]


def test_the_page_is_the_table() -> None:
    text = page(ChatRequest.model_fields, CompletionRequest.model_fields)
    assert PAGE.read_text() == text, "write it again: python scripts/reference.py fields"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("extra_body", "extra_body is not a known field: put its fields into the body"),
        ("thinking", "use enable_thinking"),
        ("stop_sequences", "stop_sequences is not a known field: use stop."),
        ("typical_p", "use top_p or min_p"),
    ],
)
def test_fields_of_other_apis_name_the_field_to_use(server: Server, name: str, says: str) -> None:
    error = post(server, CHAT, **{name: {}}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_field")
    assert says in error["message"]
