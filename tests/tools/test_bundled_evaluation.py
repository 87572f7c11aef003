"""Slices of evaluations of bundled models: right often enough, and the same answers with drafts and without."""

from __future__ import annotations

import pytest

from unisono.entrypoints.llm import LLM
from unisono.tools.eval.command import Evaluation, evaluate
from unisono.types import SpeculativeConfig
from unisono.types.outputs import RequestOutput

DRAFTERS = {"tiny-hybrid": "mtp", "tiny-gemma": "mtp_frozen"}


def run(
    model: str, count: int, spec: SpeculativeConfig | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Evaluation, list[list[int]]]:
    """The evaluation and the tokens of each answer."""
    answers: list[list[int]] = []
    ask = LLM.chat

    def recorded(self: LLM, *given: object) -> list[RequestOutput]:
        outputs = ask(self, *given)  # type: ignore[arg-type]
        answers.extend(output.outputs[0].token_ids for output in outputs)
        return outputs

    flags = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    with monkeypatch.context() as patched, LLM(model, speculative=spec, enforce_eager=True, **flags) as llm:
        patched.setattr(LLM, "chat", recorded)
        found = evaluate(llm, count, 200)
        assert llm.engine.info()["speculation"]["drafter"] == ("none" if spec else DRAFTERS[model])
    return found, answers


@pytest.mark.parametrize("model", DRAFTERS)
@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.full)])
def test_the_same_answers_with_speculation_and_without(model: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It speculates with what the checkpoint carries, unless a flag says otherwise."""
    drafted, answers = run(model, count, None, monkeypatch)
    plain, expected = run(model, count, SpeculativeConfig("none"), monkeypatch)
    assert answers == expected
    assert (drafted.right, drafted.by_kind) == (plain.right, plain.by_kind)
    assert plain.accept_length is None
    assert drafted.right >= 0.6 * count
    assert drafted.accept_length is not None
    assert drafted.accept_length > 3
