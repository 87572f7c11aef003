"""Of a prompt pass the last layer computes only what somebody reads: the end of each row, or everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine, prompts
from tests.engine.matrix import config_of
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig

LENGTH, ROWS = 70, 8  # of a prompt, and of requests in a pass
(PROMPT,) = prompts(1, 250, low=LENGTH, high=LENGTH + 1)
SHORT = SamplingParams(max_tokens=4, temperature=0.0)


def computed(llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """(tokens that each layer's MLP computed in the prompt's pass, the answer)."""
    rows: list[int] = []

    def spy(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, *rest: (rows.append(len(x)), inner(x, *rest))[1]

    with monkeypatch.context() as patched:
        layers = llm.engine.worker.model.layers
        for layer in layers:
            patched.setattr(layer, "tail", None)  # it computes the MLP of few rows elsewhere
            patched.setattr(layer.feed_forward, "forward", spy(layer.feed_forward.forward))
        (answer,) = llm.generate([PROMPT], params)
    return rows[: len(layers)], answer.outputs[0].token_ids


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ({}, ROWS),
        ({"logprobs": 3}, ROWS),
        ({"prompt_logprobs": 1}, LENGTH),
        ({"return_hidden_states": True}, LENGTH),
    ],
    ids=["a token", "its log-probability", "those of the prompt", "hidden states"],
)
def test_last_layer_rows_by_request_parameters(
    asked: dict[str, Any], read: int, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(qwen3, graphs="off", max_num_seqs=ROWS) as llm:
        rows, answer = computed(llm, SamplingParams(max_tokens=4, temperature=0.0, **asked), monkeypatch)
        assert rows[:-1] == [LENGTH] * (len(rows) - 1)
        assert rows[-1] == read
        assert computed(llm, SHORT, monkeypatch)[1] == answer


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("ngram", ROWS),
        ("eagle", LENGTH),
        ("eagle3", LENGTH),  # reads what comes out of the last layer
        ("eagle3, inner layers", ROWS),
        ("mtp", LENGTH),
        ("mtp_frozen", ROWS),
    ],
)
def test_last_layer_rows_by_drafter(
    method: str,
    read: int,
    checkpoints: dict[str, Path],
    checkpoints_of: Callable[[str], tuple[Path, Path | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if method == "eagle3, inner layers":
        target = checkpoints["mistral"]
        model: Path | None = make_eagle3(tmp_path, config_of(target), (0, 1, 2), aux=[0, 1, 2], draft_vocab=150).path
    else:
        target, model = checkpoints_of(method)
    path = {} if model is None else {"model": str(model)}
    spec = SpeculativeConfig.parse({"method": method.split(",")[0], "num_speculative_tokens": 3, **path})
    with engine(target, graphs="off", max_num_seqs=ROWS, speculative=spec) as llm:
        rows, _ = computed(llm, SHORT, monkeypatch)
    assert rows[:-1] == [LENGTH] * (len(rows) - 1)
    assert rows[-1] == read
