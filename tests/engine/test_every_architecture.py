"""One cell for every architecture: an EAGLE-3 head changes no byte, and an adapter is its merged weights.

The cells are made of the table of decoders and of the families with a file, so that a new one has its cell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import lazy_engine, tokens
from tests.engine.matrix import config_of
from tests.models.fields import FAMILIES
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter, merged
from tests.models.table_cases import CASES, family_of, fields_of
from unisono.config.decoder_table import ROWS
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SamplingParams, SpeculativeConfig
from unisono.types.lora import LoRARequest

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
"""Noise is a function of seed and position, so that equal logits give equal tokens."""
PROMPTS = [[7, 50, 91, 7, 50, 91, 7, 50] * 5, [3, 141, 59, 26]]

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{architecture: (family_of(case), fields_of(case)) for case, (architecture, _) in reversed(CASES.items())},
}
"""Name -> (model type, fields of its config): of a row the first case."""

ATTENTION = ("qkv.q", "qkv.k", "qkv.v", "o", "a.q", "a.q_a", "a.kv", "q_b")
DENSE = ("gate_up.gate", "gate_up.up", "up", "down")

DEFAULT = {
    "ArceeForCausalLM", "CohereForCausalLM", "Glm4ForCausalLM", "InternLM2ForCausalLM", "Olmo2ForCausalLM",
    "OlmoeForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM", "bailing_moe", "deepseek_v3", "gemma4_text",
    "llama4_text",
}  # fmt: skip
"""Cells of the default suite: each order of norms, packing of projections, feed-forward and mixer once.

The other cells are in the long matrix. ``test_table_parity.py`` runs every row in the engine with drafts, and adapters
of packed, reordered and ungated projections; ``test_adapters.py`` compares adapters with merged weights.
"""


def targets(path: Path) -> list[str]:
    """Last parts of the names of the projections that an adapter may change: of attention, and of a model without
    experts the feed-forward's."""
    names = Checkpoint.open(path).family.names
    keys = [f"layers.*.mixer.{part}" for part in ATTENTION]
    if not any(".experts." in key for key in names):
        keys += [f"layers.*.feed_forward.{part}" for part in DENSE]
    found = (names.get(key) for key in keys)
    return sorted({name.rpartition(".")[2] for name in found if isinstance(name, str)})


def test_every_row_has_a_cell() -> None:
    assert ROWS.keys() | DEFAULT <= CELLS.keys()


@pytest.mark.parametrize("cell", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.full) for c in CELLS])
def test_a_head_and_an_adapter(cell: str, tmp_path: Path) -> None:
    family, fields = CELLS[cell]
    path = make_checkpoint(tmp_path / "c", family, tokenizer=False, **fields)
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 96}
    head = make_eagle3(tmp_path / "head", config_of(path), (2, 1, 3), aux=[2, 1, 3])
    speculative = SpeculativeConfig("eagle3", model=str(head.path), num_speculative_tokens=3)
    adapter = make_adapter(tmp_path / "a", path, targets=targets(path), size=0.8)
    request = LoRARequest("one", 1, str(adapter))
    with lazy_engine(path, **flags, speculative=speculative, enable_lora=True) as llm:
        plain = tokens(llm, PROMPTS, SAMPLED)
        adapted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SAMPLED, lora_request=request)]
        assert llm.engine.info()["speculation"]["drafter"] == "eagle3"
    with lazy_engine(path, **flags, enforce_eager=True) as llm:
        assert tokens(llm, PROMPTS, SAMPLED) == plain, "the head changed a token"
    with lazy_engine(merged(path, adapter, tmp_path / "m"), **flags, enforce_eager=True) as llm:
        assert tokens(llm, PROMPTS, SAMPLED) == adapted
    assert adapted != plain
