"""Adapters over HTTP: a real engine that serves them, loads and unloads them, and says what is wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.conftest import Server, Start, serving, until
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base model, adapters in and outside the allowed directory."""
    root = tmp_path_factory.mktemp("served")
    base = make_checkpoint(root / "base", "qwen3")
    found = {"base": base, "allowed": root / "allowed"}
    for number, name in enumerate(("first", "second")):
        found[name] = make_adapter(root / name, base, number, size=1.5)
    for number, name in enumerate(("late", "other")):
        found[name] = make_adapter(root / "allowed" / name, base, 7 + number, size=1.5)
    found["wide"] = make_adapter(root / "allowed" / "wide", base, 9, rank=17)
    (root / "allowed" / "link").symlink_to(found["first"])
    return found


@pytest.fixture(scope="module")
def server(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-num-seqs", "4", "--max-model-len", "256", "--served-model-name", "base"]
    modules = ["--lora-modules", f"first={places['first']}", f'{{"name": "second", "path": "{places["second"]}"}}']
    more = ["--max-loras", "2", "--max-cpu-loras", "3", "--allowed-lora-path", str(places["allowed"])]
    more += ["--restart-engine", "--speculative-method", "ngram", "--max-num-batched-tokens", "64"]
    directory = tmp_path_factory.mktemp("server")
    with serving(directory, str(places["base"]), "--enable-lora", *flags, *modules, *more) as server:
        yield server


def text(server: Server, model: str, path: str = "/v1/completions", **options: Any) -> Any:
    body = {"model": model, "prompt": list(range(5, 45)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = server.http.post(path, json={**body, "return_token_ids": True, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def refused(answer: httpx.Response, status: int, says: str) -> None:
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def test_models_lists_adapters_with_their_parent(server: Server, places: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["base", "first", "second"]
    assert [card["parent"] for card in cards.values()] == [None, "base", "base"]
    assert cards["second"]["root"] == str(places["second"])
    assert server.http.get("/v1/models/first").json() == cards["first"]


def test_model_field_selects_the_adapter_in_any_batch(server: Server) -> None:
    alone = {name: text(server, name) for name in ("base", "first", "second")}
    assert len({tuple(ids) for ids in alone.values()}) == 3
    with ThreadPoolExecutor(9) as pool:
        for name, ids in zip([*alone] * 3, pool.map(lambda name: text(server, name), [*alone] * 3), strict=True):
            assert ids == alone[name]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    answers = {name: server.http.post("/v1/chat/completions", json={**chat, "model": name}).json() for name in alone}
    assert {name: answer["model"] for name, answer in answers.items()} == {name: name for name in alone}
    assert answers["base"]["choices"] != answers["first"]["choices"]
    sglang = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    sglang["sampling_params"]["ignore_eos"] = True
    assert server.http.post("/generate", json={**sglang, "lora_path": "first"}).json()["output_ids"] == alone["first"]
    refused(server.http.post("/generate", json={**sglang, "lora_path": "none"}), 404, "served: first, second")


def test_an_unknown_name_is_404(server: Server) -> None:
    answer = server.http.post("/v1/completions", json={"model": "third", "prompt": "a"})
    refused(answer, 404, "use one of: base, first, second")
    assert answer.json()["error"]["code"] == "model_not_found"


def test_loading_and_unloading(server: Server, places: dict[str, Path]) -> None:
    body = {"lora_name": "late", "lora_path": str(places["late"])}
    answer = server.http.post(LOAD, json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    first = text(server, "late")
    assert first != text(server, "base")
    refused(server.http.post(LOAD, json=body), 400, "has already been loaded")
    again = {"lora_name": "late", "lora_path": "other", "load_inplace": True}
    assert server.http.post(LOAD, json=again).status_code == 200, "relative to --allowed-lora-path"
    assert text(server, "late") != first, "cached prefixes of another adapter"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(text, server, "late", max_tokens=150)
        until(lambda: server.info()["requests"]["running"])
        gone = server.http.post(UNLOAD, json={"lora_name": "late"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
        assert server.http.post("/v1/completions", json={"model": "late", "prompt": "a"}).status_code == 404
        assert len(running.result()) == 150, "what was taken is finished"
    refused(server.http.post(UNLOAD, json={"lora_name": "late"}), 404, "cannot be found")
    sglang = server.http.post("/load_lora_adapter", json=body).json()
    assert sglang["loaded_adapters"].keys() == {"first", "second", "late"}
    assert text(server, "late") == first
    assert server.http.post("/unload_lora_adapter", json={"lora_name": "late"}).json()["success"]


@pytest.mark.parametrize(
    ("name", "path", "status", "says"),
    [
        ("x", "{first}", 403, "is not below --allowed-lora-path"),
        ("x", "../first", 403, "is not below --allowed-lora-path"),
        ("x", "{allowed}/link", 403, "is not below --allowed-lora-path"),
        ("x", "none", 400, "is no directory"),
        ("x", "wide", 400, "has rank 17; --max-lora-rank is 16"),
        ("base", "late", 400, "is what the base model is called"),
        ("x", "\0", 400, "is not a path"),
    ],
)
def test_invalid_adapter_loads_are_refused(
    server: Server, places: Any, name: str, path: str, status: int, says: str
) -> None:
    body = {"lora_name": name, "lora_path": path.format(**places)}
    refused(server.http.post(LOAD, json=body), status, says)
    assert "x" not in server.http.get("/v1/models").text.split('"')


def test_metrics_and_info_report_each_adapter(server: Server) -> None:
    before = {one["name"]: one for one in server.info()["adapters"]}["first"]
    text(server, "first", prompt=[7, 8, 9] * 12, max_tokens=40)
    after = {one["name"]: one for one in server.info()["adapters"]}["first"]
    assert after["generation_tokens"] - before["generation_tokens"] == 40
    assert after["requests"] == before["requests"] + 1
    metrics = server.http.get("/metrics").text
    for name in ("requests_total", "generation_tokens_total", "accepted_tokens_total", "accept_length"):
        assert f'unisono:adapter_{name}{{adapter="first"' in metrics


@pytest.mark.full
def test_restarted_engine_reloads_adapters(server: Server, places: dict[str, Path]) -> None:
    assert server.http.post(LOAD, json={"lora_name": "kept", "lora_path": str(places["late"])}).status_code == 200
    before = text(server, "kept")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    [engine] = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(engine), signal.SIGKILL)
    until(lambda: server.http.get("/health").status_code == 503)
    until(lambda: server.http.get("/health").status_code == 200, 90)
    assert text(server, "kept") == before


def test_runtime_adapter_loading_needs_a_flag(start: Start) -> None:
    answer = start().http.post(LOAD, json={"lora_name": "a", "lora_path": "/tmp"})
    refused(answer, 403, "start with --allowed-lora-path DIR")


def test_only_operators_load(start: Start, tmp_path: Path) -> None:
    server = start(api_key="secret", allowed_lora_path=str(tmp_path))
    for path in (LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"):
        assert server.http.post(path, json={"lora_name": "a", "lora_path": "a"}).status_code == 401
