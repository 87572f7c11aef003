"""Text of a Gemma 4 on two and four ranks, with drafts and without: that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_assistant import make_assistant
from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine, mixed_params, prompts, tokens
from tests.models.fields import GEMMA4_EXPERTS
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig

FLAGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 40, "enforce_eager": True}
BATCH, PARAMS = prompts(5, 250, low=1, high=60), mixed_params(5, 10)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 272}
"""Four ranks share the two heads of keys of layers without a window."""


class Case:
    """A random target, the text of one process, and drafters by method."""

    def __init__(self, root: Path) -> None:
        self.path = make_checkpoint(root / "target", "gemma4_text", tokenizer=False, **GEMMA4_EXPERTS, **HEADS)
        config = Checkpoint.open(self.path).config
        assistant, head = (
            make_assistant(root / "draft", self.path, (8, 4)),
            make_eagle3(root / "head", config, (1, 1, 2)),
        )
        self.drafters = {"mtp_frozen": assistant, "eagle3": head.path}
        with engine(self.path, **FLAGS) as llm:
            self.text = tokens(llm, BATCH, PARAMS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (4, "mtp_frozen"),
        *(pytest.param(*c, marks=pytest.mark.full) for c in ((2, "mtp_frozen"), (4, "eagle3"), (4, "ngram"))),
    ],
)
def test_ranks_write_the_text_of_one_with_drafts(ranks: int, method: str, case: Case) -> None:
    model = case.drafters.get(method)
    spec = SpeculativeConfig(method, model and str(model), num_speculative_tokens=3)
    with engine(case.path, **FLAGS, tensor_parallel_size=ranks, speculative=spec) as llm:
        for _ in range(2):  # the second time behind cached prefixes
            assert tokens(llm, BATCH, PARAMS) == case.text
        assert llm.engine.counters.drafted_tokens > 0
        assert llm.engine.scheduler.prefix_hits > 0
