"""Experts of tokens over HTTP: base64 of NumPy files in OpenAI's answers, int32 in SGLang's, and refusals."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.http.conftest import PLAIN, serving
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.http.openai.protocol import CompletionRequest
from unisono.http.openai.serving import check_reported
from unisono.types import BadRequest, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "seed": 1, "ignore_eos": True}


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "qwen3_moe", "qwen3_moe")


def test_answers_have_the_ids_of_the_offline_interface(moe: Path, tmp_path: Path) -> None:
    params = SamplingParams(**ASKED, return_routed_experts=True)
    with LLM(str(moe), enforce_eager=True, max_model_len=128) as llm:
        (wanted,) = llm.generate([PROMPT], params)
        (first, second) = llm.generate([PROMPT], SamplingParams(**ASKED, n=2, return_routed_experts=True))[0].outputs
    with serving(tmp_path, str(moe), *PLAIN, "--max-model-len", "128", "--enable-return-routed-experts") as server:
        body = {"prompt": PROMPT, **ASKED, "n": 2, "return_routed_experts": True}
        choices = server.http.post("/v1/completions", json=body).json()["choices"]
        later = server.http.post("/v1/completions", json={**body, "n": 1, "routed_experts_start_len": 3}).json()
        plain = server.http.post("/v1/completions", json={"prompt": PROMPT, **ASKED}).json()["choices"][0]
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        native = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
        meta = server.http.post("/generate", json=native).json()["meta_info"]
        stream = server.http.post("/v1/completions", json={**body, "stream": True})
        info = server.info()
    for choice, output in zip(choices, (first, second), strict=True):
        assert np.array_equal(decoded(choice["routed_experts"]), output.routed_experts)
    assert np.array_equal(decoded(choices[0]["prompt_routed_experts"]), wanted.prompt_routed_experts)
    assert "prompt_routed_experts" not in choices[1]
    assert np.array_equal(decoded(later["choices"][0]["prompt_routed_experts"]), wanted.prompt_routed_experts[3:])
    assert "routed_experts" not in plain
    shape = -1, len(info["routed_experts"]["layers"]), info["routed_experts"]["top_k"]
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(shape)
    whole = np.concatenate((wanted.prompt_routed_experts, wanted.outputs[0].routed_experts))
    assert np.array_equal(found, whole)
    assert stream.status_code == 400
    assert stream.json()["error"]["param"] == "return_routed_experts"


def test_the_flag_and_the_size_are_checked() -> None:
    name, params = "return_routed_experts", SamplingParams(max_tokens=4, return_routed_experts=True)
    with pytest.raises(BadRequest, match="--enable-return-routed-experts"):
        check_reported(name, False, 8, 10, params)
    check_reported(name, True, 8, 10, params)
    with pytest.raises(BadRequest, match="numbers; at most"):
        check_reported(name, True, 1 << 22, 10, params)


def test_both_names_of_the_start_must_agree() -> None:
    def start(**fields: int) -> int:
        return CompletionRequest(prompt="a", **fields).sampling_params({}, 4).routed_experts_prompt_start

    assert start(routed_experts_start_len=3) == start(routed_experts_prompt_start=3, routed_experts_start_len=3) == 3
    with pytest.raises(BadRequest, match="differ"):
        start(routed_experts_prompt_start=2, routed_experts_start_len=3)
