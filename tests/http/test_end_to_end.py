"""``unisono serve`` with the bundled model: the real engine behind the real server, driven by the openai package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.http.conftest import Server, serving, until
from unisono.config.catalog import bundled
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams

QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"

TOKENS = 12
HOT = 5.0
"""So hot that no two seeds agree, however sure the model is."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--served-model-name", "tiny")
    flags += ("--per-request-spec-decode-metrics", "detailed", "--enable-sleep-mode")
    # k does not adapt: on a busy machine rounds without drafts may look faster.
    drafts = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3, "adaptive": False}
    flags += ("--speculative-config", json.dumps(drafts))
    with serving(tmp_path_factory.mktemp("tiny"), *flags) as server:
        yield server


def chat(server: Server, content: str, max_tokens: int = 64, **options: Any) -> tuple[str, int]:
    messages = [{"role": "user", "content": content}]
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=max_tokens, **options)
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def test_chat_answers_and_hits_the_prefix_cache(tiny: Server) -> None:
    text, cached = chat(tiny, QUESTION, temperature=0)
    assert "####" in text
    again, cached_again = chat(tiny, QUESTION, temperature=0)
    assert again == text
    assert cached_again > cached


def test_same_bytes_alone_streamed_and_concurrent(tiny: Server) -> None:
    """Sampled with a seed: alone, streamed, and among 64 clients at once the same text comes."""
    requests = [(f"{QUESTION} {'And why? ' * (i % 2)}", 100 + i % 4) for i in range(64)]
    alone = {(text, seed): chat(tiny, text, TOKENS, temperature=HOT, seed=seed)[0] for text, seed in set(requests)}

    def streamed(request: tuple[str, int]) -> str:
        stream = tiny.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": request[0]}],
            max_tokens=TOKENS,
            temperature=HOT,
            seed=request[1],
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert len(set(alone.values())) == len(alone)
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(streamed, requests)) == [alone[request] for request in requests]
    info = tiny.info()
    assert info["requests"] == {"running": 0, "waiting": 0}
    assert info["kv_cache"]["usage"] == 0


def test_a_client_that_leaves_frees_its_pages(tiny: Server) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with tiny.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        while '"text":""' in next(lines):  # the opening: no token yet
            next(lines)
        assert tiny.info()["kv_cache"]["usage"] > 0
    until(lambda: tiny.info()["kv_cache"]["usage"] == 0)
    assert tiny.info()["requests"] == {"running": 0, "waiting": 0}


def test_prompt_logprobs_are_the_offline_ones(tiny: Server) -> None:
    """To the bit: in vLLM's wording, and echoed by each of several sequences."""
    llm = LLM("tiny", device="cpu", max_num_seqs=8)
    with llm:
        params = SamplingParams(temperature=1, seed=3, max_tokens=5, n=3, logprobs=2, prompt_logprobs=2)
        (expected,) = llm.generate(QUESTION, params)
    options: dict[str, Any] = {"model": "tiny", "prompt": QUESTION, "temperature": 1, "seed": 3, "max_tokens": 5}
    choices = tiny.openai.completions.create(
        n=3, echo=True, logprobs=2, extra_body={"prompt_logprobs": 2}, **options
    ).choices
    assert expected.prompt_logprobs is not None
    named = [None if e is None else {str(i): dataclasses.asdict(lp) for i, lp in e.items()}
             for e in expected.prompt_logprobs]  # fmt: skip
    prompt_values = [None if e is None else e[i].logprob
                     for i, e in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)]  # fmt: skip
    for choice, output in zip(choices, expected.outputs, strict=True):
        assert choice.text == QUESTION + output.text
        assert choice.model_extra["prompt_logprobs"] == named
        assert output.logprobs is not None
        values = [e[i].logprob for i, e in zip(output.token_ids, output.logprobs, strict=True)]
        assert choice.logprobs.token_logprobs == prompt_values + values
    assert len({c.text for c in choices}) > 1


def test_acceptance_of_each_request(tiny: Server) -> None:
    """vLLM's metrics.speculative_decoding: whole, and with the usage of a stream; n = 2 has null."""
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": QUESTION}]}
    whole = tiny.http.post("/v1/chat/completions", json=body).json()
    told, details = whole["metrics"]["speculative_decoding"], whole["usage"]["completion_tokens_details"]
    assert (told["drafter"], told["num_spec_tokens"]) == ("eagle3", 3)
    assert told["num_accepted_draft_tokens"] == details["accepted_prediction_tokens"] > 0
    assert told["num_draft_tokens"] - told["num_accepted_draft_tokens"] == details["rejected_prediction_tokens"]
    accepted, drafted = told["per_step_accepted"], told["per_step_drafted"]
    assert len(accepted) == len(drafted) == told["num_spec_steps"]
    assert (sum(accepted), sum(drafted)) == (told["num_accepted_draft_tokens"], told["num_draft_tokens"])
    assert told["acceptance_histogram"] == [accepted.count(j) for j in range(4)]
    assert told["drafts_histogram"] == [told["num_steps_without_drafts"], *(drafted.count(j) for j in range(1, 4))]
    assert told["accepted_per_position"] == [sum(count > j for count in accepted) for j in range(3)]
    assert told["drafted_per_position"] == [sum(count > j for count in drafted) for j in range(3)]
    assert told["mean_draft_tokens"] == pytest.approx(sum(drafted) / len(drafted))
    assert 'drafter="eagle3"' in tiny.http.get("/metrics").text
    # Every step adds a token of the model's own, and the prompt's pass the first one; the last step may be cut.
    steps = told["num_spec_steps"] + told["num_steps_without_drafts"]
    assert 39 <= steps + told["num_accepted_draft_tokens"] <= 40
    assert told["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    stream = tiny.http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    events = [json.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
    assert [("metrics" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    two = tiny.http.post("/v1/chat/completions", json={**body, "n": 2, "temperature": 1}).json()
    assert two["metrics"] == {"speculative_decoding": None}


def test_acceptance_offline(tiny: Server) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM("tiny", max_num_seqs=2, enforce_eager=True) as llm:
        [output] = llm.generate([QUESTION], params)
        counters = llm.engine.counters
    with LLM("tiny", max_num_seqs=2, enforce_eager=True, speculative_config={"method": "none"}) as llm:
        assert llm.generate([QUESTION], params)[0].outputs[0].acceptance is None
    told = output.outputs[0].acceptance
    assert told is not None
    assert told.num_draft_tokens == sum(told.per_step_drafted) > 0
    assert told.num_accepted_draft_tokens <= counters.accepted_tokens <= told.num_accepted_draft_tokens + 3


def test_weights_change_between_two_answers(tiny: Server) -> None:
    """The directory of the served weights changes nothing but the version in answers."""
    path, text = str(bundled["tiny"]), chat(tiny, QUESTION, temperature=0)[0]
    for body, says in (
        ({"model_path": "/nowhere"}, "no directory"),
        ({"model_path": path, "flush_cache": False}, "flush_cache"),
        ({"model_path": path, "load_format": "dummy"}, "load_format"),
        ({}, "model_path is missing"),
        ({"model_path": str(bundled["tiny-eagle3"])}, "is a draft head"),
        ({"model_path": str(bundled["tiny-hybrid"])}, "is not the config of"),
    ):
        refused = tiny.http.post("/update_weights_from_disk", json=body)
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
    assert tiny.http.get("/get_weight_version").json() == {"weight_version": "0"}
    body = {"model_path": path, "draft_path": str(bundled["tiny-eagle3"]), "weight_version": "step-7"}
    done = tiny.http.post("/update_weights_from_disk", json=body).json()
    assert done["success"] is True
    assert tiny.http.get("/get_weight_version").json() == {"weight_version": "step-7"}
    again, cached = chat(tiny, QUESTION, temperature=0)
    assert (again, cached) == (text, 0), "keys of the old weights are gone"
    answer = tiny.http.post("/v1/completions", json={"model": "tiny", "prompt": "1", "max_tokens": 1}).json()
    assert answer["system_fingerprint"].endswith("-step-7")
    native = tiny.http.post("/generate", json={"text": "1", "sampling_params": {"max_new_tokens": 1}}).json()
    assert native["meta_info"]["weight_version"] == "step-7"


def test_weights_change_by_name_and_back(tiny: Server, tmp_path: Path) -> None:
    name, text = "model.norm.weight", chat(tiny, QUESTION, temperature=0)[0]
    own = load_file(bundled["tiny"] / "model.safetensors")[name]
    changed = {"changed": {name: -own}, "own": {name: own}, "unknown": {"model.nowhere.weight": own}}
    for file, tensors in changed.items():
        save_file(tensors, tmp_path / file)

    def update(file: str) -> httpx.Response:
        return tiny.http.post("/update_weights_from_tensor", json={"files": [str(tmp_path / file)]})

    for file, says in (("missing", "is no file of weights"), ("unknown", "model.nowhere.weight")):
        refused = update(file)
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
    assert chat(tiny, QUESTION, temperature=0)[0] == text, "refused updates change nothing"
    assert update("changed").json()["success"] is True
    assert chat(tiny, QUESTION, temperature=0)[0] != text
    assert update("own").json()["success"] is True
    assert chat(tiny, QUESTION, temperature=0)[0] == text


def test_pause_generation_holds_requests(tiny: Server) -> None:
    text = chat(tiny, QUESTION, temperature=0)[0]
    assert tiny.http.post("/pause_generation", json={"mode": "keep"}).json() == {"status": "paused"}
    with ThreadPoolExecutor() as pool:
        held = pool.submit(chat, tiny, QUESTION, temperature=0)
        until(lambda: tiny.http.get("/load").json()["server_load"] == 1)
        assert tiny.http.get("/health").status_code == 200
        assert not held.done()
        assert tiny.http.post("/continue_generation").json() == {"status": "ok"}
        assert held.result(60)[0] == text
    refused = tiny.http.post("/pause_generation", json={"mode": "stop"})
    assert refused.status_code == 400
    assert "mode" in refused.json()["error"]["message"]


def test_memory_occupation_has_sglangs_routes(tiny: Server) -> None:
    body = {"prompt": "2 + 3 =", "max_tokens": 4, "temperature": 0}
    text = tiny.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    refused = tiny.http.post("/release_memory_occupation", json={"tags": ["weights"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
    released = tiny.http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).json()
    assert (released["is_sleeping"], released["asleep"]) == (True, ["kv_cache"])
    assert tiny.http.post("/resume_memory_occupation", json={}).json() == {"is_sleeping": False}
    assert tiny.http.post("/release_memory_occupation", json={}).json()["is_sleeping"]
    assert tiny.http.post("/resume_memory_occupation", json={"tags": ["weights"]}).json()["asleep"] == ["kv_cache"]
    assert tiny.http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json() == {"is_sleeping": False}
    assert tiny.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.full), 2])
def test_sleep_frees_memory_and_answers_go_on(tiny: Server, level: int) -> None:
    """A running request waits; new ones are refused; weights wake before pages."""
    tiny.http.post("/update_weights_from_disk", json={"model_path": str(bundled["tiny"])})  # not those of a push
    asks = {"model": "tiny", "prompt": "2 + 3 =", "max_tokens": 150, "seed": 3, "ignore_eos": True}
    expected = tiny.http.post("/v1/completions", json=asks).json()["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(tiny.http.post, "/v1/completions", json=asks)
        until(lambda: tiny.http.get("/load").json()["server_load"] == 1)
        slept = tiny.http.post("/sleep", params={"level": level, "mode": "keep"}).json()
        assert (slept["is_sleeping"], slept["level"]) == (True, level)
        assert slept["freed_bytes"]["kv_cache"] > 0
        assert (slept["freed_bytes"]["weights"] > 0) == (level == 2)
        refused = tiny.http.post("/v1/completions", json=asks)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
        again = tiny.http.post("/sleep", params={"mode": "keep"})
        assert (again.status_code, "sleeps already" in again.text) == (409, True)
        first = tiny.http.post("/wake_up", params={"tags": "weights"}).json()
        assert first == {"is_sleeping": True, "asleep": ["kv_cache"]}
        assert tiny.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert tiny.http.post("/wake_up", params={"tags": "graphs"}).status_code == 400
        assert tiny.http.post("/wake_up").json() == {"is_sleeping": False}
        assert running.result(60).json()["choices"][0]["text"] == expected
    assert tiny.http.post("/v1/completions", json=asks).json()["choices"][0]["text"] == expected


def test_server_shuts_down_cleanly(tiny: Server) -> None:
    tiny.signal()
    assert tiny.wait() == 0
    assert "Traceback" not in tiny.log.read_text()
    assert not list(tiny.temp.glob("unisono-*"))
