"""16 greedy tokens of the table's rows, Llama 4 and MiniCPM3 equal transformers', with n-gram drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.helpers import lazy_engine, tokens
from tests.models.hybrids import greedy_tokens
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter, merged
from tests.models.table_cases import CASES, family_of, fields_of
from unisono.types import SamplingParams, SpeculativeConfig
from unisono.types.lora import LoRARequest

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[7, 50, 91, 7, 50, 91, 7, 50] * 9, [3, 141, 59, 26]]
"""The first one is beyond the original length (64) of the rope types with one, and repeats, so that drafts exist."""
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3)


WITH_A_FILE = {"llama4": "llama4_text", "minicpm3": "minicpm3"}
"""Families of the long tail with a file of their own: name -> model type."""
FIRST = {architecture: case for case, (architecture, _) in reversed(CASES.items())}
"""Architecture -> its first case."""
DEFAULT = {*FIRST.values(), *WITH_A_FILE, "phi3-longrope"}
"""Cases of the default suite: of other fields of a row, ``tests/models/test_table.py`` compares the logits."""
ALL = [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.full) for case in (*CASES, *WITH_A_FILE)]


@pytest.mark.parametrize("case", ALL)
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    family, fields = (WITH_A_FILE[case], {}) if case in WITH_A_FILE else (family_of(case), fields_of(case))
    path = make_checkpoint(tmp_path / "c", family, tokenizer=False, **fields)
    with lazy_engine(path, dtype="float32", max_model_len=128, enforce_eager=True) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
    with lazy_engine(path, dtype="float32", max_model_len=128, speculative=NGRAM) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain, "graphs or drafts changed a token"
    long = "longrope" in case  # transformers takes the short factors for the second prompt, this engine one table
    for prompt, answer in list(zip(PROMPTS, plain, strict=True))[: 1 if long else 2]:
        assert answer == greedy_tokens(path, prompt, len(answer))


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("starcoder2", ("q_proj", "v_proj", "c_fc", "c_proj")),
    ],
)
def test_an_adapter_of_a_row_is_its_merged_weights(case: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Heads in another order, packed projections, and an MLP without a gate."""
    path = make_checkpoint(tmp_path / "c", family_of(case), tokenizer=False, **fields_of(case))
    adapter = make_adapter(tmp_path / "a", path, targets=targets)
    together = merged(path, adapter, tmp_path / "m")
    request = LoRARequest("one", 1, str(adapter))
    with lazy_engine(path, dtype="float32", max_model_len=128, enable_lora=True) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, lora_request=request)]
        assert tokens(llm, PROMPTS, GREEDY) != found
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer == greedy_tokens(together, prompt, len(answer))
