"""From a PNG to text: the whole way through ``LLM`` and ``unisono serve``, with a random model that sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.engine.pictures import make_seeing
from tests.http import pictures_ as pics
from tests.http.conftest import Server
from tests.http.pictures_ import data_url, part, text
from unisono import LLM, AsyncLLM, SamplingParams
from unisono.types import BadRequest

VOCABULARY = 347
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CAT, DOG = pics.picture(40, 30, 1), pics.picture(25, 50, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer and processors, patches of 4 pixels."""
    path = make_seeing(tmp_path_factory.mktemp("vl"), "qwen3_vl", vocab_size=VOCABULARY)
    pics.write_checkpoint(path)
    told, config = pics.vision(), json.loads((path / "config.json").read_text())
    config |= {name: told[name] for name in config if name in told}
    (path / "config.json").write_text(json.dumps(config))
    for name in pics.FILES["qwen3_vl"]:
        given = json.loads((path / name).read_text())
        given |= {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}
        (path / name).write_text(json.dumps(given))
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    flags: dict[str, Any] = {"limit_mm_per_prompt": {"image": 3}, "mm_processor_cache_gb": 0.1}
    with LLM(str(directory), device="cpu", max_num_seqs=4, max_model_len=512, enforce_eager=True, **flags) as llm:
        yield llm


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [text("This "), part(data_url(CAT)), text(" or "), part(data_url(DOG)), text("?")]}
]


def wanted(directory: Path, words: str, images: list[Any]) -> list[int]:
    """What transformers makes of a prompt: processor and model."""
    given = pics.processor(directory)(text=[words], images=images, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    given = {name: value for name, value in given.items() if name in ("input_ids", "pixel_values", "image_grid_thw")}
    given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return ids[0, given["input_ids"].shape[1] :].tolist()


def test_text_as_transformers(llm: LLM, directory: Path) -> None:
    """Pictures as URLs, of Pillow, in ``chat`` and in ``generate``: the same text, transformers'."""
    ((answer,), shown) = llm.chat(CHAT, GREEDY), llm.chat_prompt(CHAT)
    expected = wanted(directory, shown["prompt"], [CAT, DOG])
    assert answer.outputs[0].token_ids == expected
    objects = [{"type": "image_pil", "image_pil": CAT}, {"type": "image", "image": DOG}]
    content = [text("This "), objects[0], text(" or "), objects[1], text("?")]
    data = {"prompt": shown["prompt"], "multi_modal_data": {"image": [CAT, DOG]}}
    by_id = {"prompt_token_ids": shown["prompt_token_ids"], "multi_modal_data": {"image": [CAT, DOG]}}
    outputs = [*llm.chat([{"role": "user", "content": content}], GREEDY), *llm.generate([data, by_id], GREEDY)]
    assert [one.outputs[0].token_ids for one in outputs] == [expected] * 3
    assert len(answer.prompt_token_ids) == len(outputs[1].prompt_token_ids) > len(shown["prompt_token_ids"])
    other = llm.generate(data | {"multi_modal_data": {"image": [DOG, CAT]}}, GREEDY)[0]
    assert other.outputs[0].token_ids != expected


def test_videos(llm: LLM) -> None:
    frames = [pics.picture(32, 32, i) for i in range(4)]
    part = {"type": "video_url", "video_url": {"url": [data_url(one) for one in frames]}, "fps": 4}
    (first,) = llm.chat([{"role": "user", "content": [part, text("?")]}], GREEDY)
    prompt = llm.chat_prompt([{"role": "user", "content": [part, text("?")]}])["prompt"]
    (second,) = llm.generate({"prompt": prompt, "multi_modal_data": {"video": (frames, {"fps": 4.0})}}, GREEDY)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_errors(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="is image 4 of 4"):
        llm.chat([{"role": "user", "content": [part(data_url(CAT))] * 4}], GREEDY)
    with pytest.raises(BadRequest, match=r"mm_processor_kwargs\.zoom"):
        llm.chat(CHAT, GREEDY, mm_processor_kwargs={"zoom": 1})
    (small,) = llm.chat(CHAT, GREEDY, mm_processor_kwargs={"max_pixels": 128})
    (large,) = llm.chat(CHAT, GREEDY)
    assert len(small.prompt_token_ids) < len(large.prompt_token_ids)


def test_async(llm: LLM) -> None:
    """An event loop that loads a picture goes on."""
    import asyncio

    async def run() -> list[int]:
        with AsyncLLM(llm=llm) as engine:
            shown = llm.chat_prompt(CHAT)
            async for output in engine.generate(shown, GREEDY):
                last = output.outputs[0].token_ids
            return last

    assert asyncio.run(run()) == llm.chat(CHAT, GREEDY)[0].outputs[0].token_ids


def test_served(directory: Path, llm: LLM, tmp_path: Path) -> None:
    """``unisono serve`` with the openai package; the same text, whole and in a stream."""
    command = ["unisono", "serve", str(directory), "--port", "0", "--device", "cpu"]
    flags = ["--max-num-seqs", "4", "--max-model-len", "512", "--enforce-eager", "--served-model-name", "sees"]
    server = Server([*command, *flags, "--limit-mm-per-prompt", '{"image": 2}'], tmp_path / "log", tmp_path)
    try:
        client = server.wait_ready().openai
        options: Any = {"model": "sees", "messages": CHAT, "temperature": 0, "max_tokens": 12}
        options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        answer = client.chat.completions.create(**options)
        (output,) = llm.chat(CHAT, GREEDY)
        assert answer.choices[0].model_dump()["token_ids"] == output.outputs[0].token_ids
        assert answer.choices[0].message.content == output.outputs[0].text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
        stream = client.chat.completions.create(**options, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == output.outputs[0].text
        again = client.chat.completions.create(**options, n=2)
        assert {one.message.content for one in again.choices} == {output.outputs[0].text}
        many: Any = [{"role": "user", "content": [part(data_url(CAT))] * 3}]
        error = server.http.post("/v1/chat/completions", json={"messages": many}).json()["error"]
        assert error["code"] == "too_many_media"
        assert server.http.get("/server_info").json()["server"]["media"]["limit_mm_per_prompt"] == {
            "image": 2,
            "video": 4,
        }
    finally:
        server.kill()
