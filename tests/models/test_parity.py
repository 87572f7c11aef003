"""Every family against transformers in fp32; every way of feeding tokens against one pass, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_INPUTS, GEMMA4_SHARED
from tests.models.harness import Session, chunked, load, rounds, together, whole
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint

CASES = {
    "llama-llama3-rope": ("llama", {}),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    ),
    "llama-linear-rope-default-head-dim": (
        "llama",
        {
            "head_dim": None,
            "hidden_size": 96,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral-window": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"max_shard_size": "100KB"}),
    "qwen2-window-layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"max_shard_size": "100KB"}),
    "qwen3-bias-grouped": (
        "qwen3",
        {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", {"max_shard_size": "100KB"}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"max_shard_size": "100KB"}),
    "gemma3-capped-biases": (
        "gemma3_text",
        {
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "num_key_value_heads": 6,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("gemma4_text", {"max_shard_size": "100KB"}),
    "gemma4-own-values": ("gemma4_text", {"attention_k_eq_v": False, "attention_bias": True}),
    "gemma4-shared-keys": ("gemma4_text", GEMMA4_SHARED),
    "gemma4-layer-inputs": ("gemma4_text", GEMMA4_INPUTS),
    "gemma4-unified": ("gemma4_unified_text", {}),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gpt_oss": ("gpt_oss", {}),
    "llama4": ("llama4_text", {"max_shard_size": "100KB"}),
    "llama4-plain-heads-biases": (
        "llama4_text",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": None,
        },
    ),
    "minicpm3": ("minicpm3", {}),
    "minicpm3-biases": ("minicpm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"max_shard_size": "100KB"}),
    "mixtral-one-expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": False}),
    "qwen3_moe-all-experts-some-layers": (
        "qwen3_moe",
        {
            "num_experts_per_tok": 11,
            "norm_topk_prob": False,
            "attention_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "glm4_moe": ("glm4_moe", {"max_shard_size": "100KB"}),
    "glm4_moe-groups-norms": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": False, "n_shared_experts": 2},
    ),
    "dots1": ("dots1", {}),
    "bailing_moe": ("bailing_moe", {}),
    "bailing_moe-one-group-biases": (
        "bailing_moe",
        {
            "n_group": 0,
            "topk_group": 0,
            "num_shared_experts": 2,
            "use_bias": True,
            "use_qkv_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": None,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    "bailing_moe-one-expert": (
        "bailing_moe",
        {"num_experts_per_tok": 1, "num_shared_experts": 0, "rope_theta": 600000.0, "n_group": 2, "topk_group": 1},
    ),
    "minicpm": ("minicpm", {}),
    "minicpm-biases-tied": ("minicpm", {"attention_bias": True, "tie_word_embeddings": None, "model_type": None}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {"max_shard_size": "100KB"}),
    "glm4_moe_lite-plain-queries-halves": (
        "glm4_moe_lite",
        {"q_lora_rank": None, "rope_interleave": False, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-biases": ("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False}),
    "mistral4": ("mistral4", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 1}),
}

LENGTHS = (270, 33, 5)
"""The longest crosses a KV split of 256; none is a multiple of a page, a tile or a width."""


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request, tmp_path_factory, prompts):
    family, overrides = CASES[request.param]
    directory = make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, **overrides)
    decoder = load(directory)
    return directory, decoder, whole(decoder, prompts)


@torch.no_grad()
def test_logits_match_transformers(case, prompts):
    directory, _, ours = case
    model = reference(directory)
    for prompt, logits in zip(prompts, ours, strict=True):
        theirs = model(torch.tensor([prompt])).logits[0]
        assert theirs.std() > 0.5, "a flat model would prove nothing"
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)


def test_the_ends_of_rows_alone_have_the_same_bits(case, prompts):
    """The last layer computes nothing else of these passes, but leaves every key and value behind."""
    _, decoder, expected = case
    session = Session(decoder, len(prompts), max(map(len, prompts)), seed=3)
    halves = [len(p) // 2 for p in prompts]
    for second in (False, True):
        edges = [(half, len(p) - 1) if second else (0, half) for half, p in zip(halves, prompts, strict=True)]
        logits = session.extend({i: prompts[i][a:b] for i, (a, b) in enumerate(edges)}, padding=3, last_tokens=True)
        for i, (_, end) in enumerate(edges):
            assert torch.equal(logits[i], expected[i][end - 1 : end])
    for i, last in session.round(1, {i: p[-1:] for i, p in enumerate(prompts)}).items():
        assert torch.equal(last, expected[i][-1:])


@pytest.mark.parametrize(
    "feed",
    [
        pytest.param(together, id="batched"),
        pytest.param(lambda d, p: chunked(d, p, 19), id="chunks-of-19"),
        pytest.param(lambda d, p: rounds(d, p, 1), id="rounds-of-1"),
        pytest.param(lambda d, p: rounds(d, p, 4), id="rounds-of-4"),
        pytest.param(lambda d, p: rounds(d, p[1:2], 1, padding=0), id="alone-rounds-of-1"),
    ],
)
def test_logits_are_independent_of_chunking(case, prompts, feed):
    _, decoder, expected = case
    logits = feed(decoder, prompts)
    expected = expected if len(logits) == len(expected) else expected[1:2]
    for got, want in zip(logits, expected, strict=True):
        assert torch.equal(got, want), f"rows differ: {(got != want).any(-1).nonzero().flatten().tolist()[:8]}"
