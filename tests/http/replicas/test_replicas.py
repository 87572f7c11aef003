"""A server with several engines, from outside: where requests run, what is told, and what operators do."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.changed_weights import other
from tests.engine.helpers import engine
from tests.http.conftest import PLAIN, Server, Start, serving, until
from tests.http.fake_engine import FakeConfig
from tests.http.replicas.conftest import TEXT, ask, ended, engines, loads
from unisono.cluster.replicas.client import ReplicaClient
from unisono.cluster.replicas.plan import ReplicaSettings, plan
from unisono.config import EngineConfig, catalog
from unisono.types import SamplingParams

PREFIX = list(range(100, 164))
"""Four pages."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two engines whose steps take 20 ms; tests leave no request running."""
    from tests.http.conftest import servers

    with servers(tmp_path_factory) as start:
        yield start(step_seconds=0.02, data_parallel_size=2, max_model_len=4096)


def since(server: Server, before: dict[str, int]) -> dict[str, int]:
    """Sequences by engine since ``before``."""
    return {
        engine: count - before.get(engine, 0) for engine, count in ended(server).items() if count != before.get(engine)
    }


def test_the_same_prefix_goes_to_the_same_engine(server: Server) -> None:
    before = ended(server)
    for i in range(6):
        ask(server, [*PREFIX, i])
    assert list(since(server, before).values()) == [6]


def test_distinct_prompts_are_shared_out(server: Server, pool: ThreadPoolExecutor) -> None:
    """None of them ends before the last has arrived, however slow the machine is."""
    until(lambda: loads(server) == [0, 0])
    held = [pool.submit(ask, server, [200 + i] * 40, max_tokens=4000) for i in range(20)]
    until(lambda: sum(loads(server)) == 20)
    shares = loads(server)
    server.http.post("/abort", json={"abort_all": True})
    assert {one.result()["choices"][0]["finish_reason"] for one in held} == {"abort"}
    assert shares == [10, 10]


def test_a_loaded_engine_is_avoided(server: Server, pool: ThreadPoolExecutor) -> None:
    prompt = [*PREFIX, 900]
    before = ended(server)
    ask(server, prompt)
    [home] = since(server, before)
    long = [
        pool.submit(ask, server, [i + 1] * 48, {"X-data-parallel-rank": home}, max_tokens=100, user="x")
        for i in range(4)
    ]
    until(lambda: loads(server)[int(home)] == 4)
    before = ended(server)
    ask(server, prompt)
    assert home not in since(server, before), "its queue costs more than the prefix saves"
    for one in long:
        assert one.result()["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize("header", ["x-session-id", "X-SMG-Routing-Key", "x-user-id"])
def test_a_session_stays_on_its_engine(server: Server, header: str) -> None:
    before = ended(server)
    for i in range(6):
        ask(server, [300 + i] * 40, {header: f"{header} of mine"})
    assert list(since(server, before).values()) == [6]


def test_a_rank_is_obeyed(server: Server) -> None:
    for rank in ("0", "1"):
        before = ended(server)
        for i in range(3):
            ask(server, [400 + i] * 40, {"X-data-parallel-rank": rank})
        assert since(server, before) == {rank: 3}
    for rank, says in (("2", "this server has the engines 0 to 1"), ("x", "give the number of an engine")):
        answer = server.http.post(TEXT, json={"prompt": [5]}, headers={"X-data-parallel-rank": rank})
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "X-data-parallel-rank"


@pytest.mark.parametrize("more", [{"n": 6, "temperature": 1}, {"n": 3, "use_beam_search": True, "temperature": 0}])
def test_one_answer_is_made_by_one_engine(server: Server, more: dict[str, Any]) -> None:
    before = ended(server)
    ask(server, [500, *range(37)], max_tokens=6, **more)
    assert list(since(server, before).values()) == [more["n"]]
    reasons = re.findall(r'reason="group".*? (\S+)$', server.http.get("/metrics").text, re.M)
    assert sum(map(float, reasons)) >= 5


def test_one_page_of_metrics(server: Server) -> None:
    ask(server, [5, 6], {"X-data-parallel-rank": "0"})
    ask(server, [5, 6], {"X-data-parallel-rank": "1"})
    text = server.http.get("/metrics").text
    for name in (
        "num_requests_running", "generation_tokens_total", "passes_total", "engine_up", "outstanding_work",
        "request_success_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_sum",
        "cache_config_info", "engine_sleep_state", "iteration_tokens_total_count", "routed_requests_total",
        "request_prompt_tokens_count", "router_matched_tokens_total",
    ):  # fmt: skip
        found = set(re.findall(rf'^unisono:{name}{{.*?engine="(\d+)"', text, re.M))
        assert found == {"0", "1"}, name
    counted = re.findall(r"^unisono:time_to_first_token_seconds_count{.*} (\S+)$", text, re.M)
    assert all(float(count) >= 1 for count in counted)


def test_info_and_load_report_each_engine(server: Server) -> None:
    told = engines(server)
    assert [(one["engine"], one["state"], one["restarts"]) for one in told] == [(0, "serving", 0), (1, "serving", 0)]
    assert len({one["info"]["pid"] for one in told}) == 2
    assert server.info()["pid"] in {one["info"]["pid"] for one in told}
    until(lambda: loads(server) == [0, 0])
    body = server.http.get("/load").json()
    assert [one["outstanding_work"] for one in body["engines"]] == [0, 0]
    assert server.http.get("/server_info").json()["server"]["scale"]["data_parallel_size"] == 2


def test_commands_go_to_all(server: Server) -> None:
    ask(server, PREFIX)
    resets = [one["info"]["resets"] for one in engines(server)]
    assert server.http.post("/reset_prefix_cache").json() == {"freed_pages": 10}, "five of each"
    assert [one["info"]["resets"] for one in engines(server)] == [count + 1 for count in resets]
    assert [one["router_pages"] for one in engines(server)] == [0, 0]


def test_aborts_find_their_engine(server: Server, pool: ThreadPoolExecutor) -> None:
    aborted = sum(one["info"]["aborted"] for one in engines(server))
    long = [
        pool.submit(
            ask, server, [600 + i] * 20, {"X-data-parallel-rank": str(i % 2)}, max_tokens=400, request_id=f"q{i}"
        )
        for i in range(4)
    ]
    until(lambda: loads(server) == [2, 2])
    assert server.http.post(TEXT, json={"prompt": [1], "request_id": "q1"}).status_code == 400, "the id is taken"
    assert len(server.http.post("/abort", json={"abort_all": True}).json()["aborted"]) == 4
    assert {one.result()["choices"][0]["finish_reason"] for one in long} == {"abort"}
    until(lambda: sum(one["info"]["aborted"] for one in engines(server)) == aborted + 4)
    assert loads(server) == [0, 0]


def test_a_replica_that_cannot_start_ends_the_server(start: Start) -> None:
    server = start(ready=False, data_parallel_size=2, load_error="a bad file")
    assert server.wait(60) == 1
    assert "CheckpointError: a bad file" in server.log.read_text()
    assert not list(server.temp.glob("unisono-*"))


def test_flags(served: Any) -> None:
    for flag in ("--data-parallel-size", "--dp", "--dp-size", "-dp"):
        code, _, _, settings = served("tiny", flag, "3")
        assert (code, settings.scale.data_parallel_size) == (0, 3)
        assert settings.restarts() is not None, "engines are started again"
    for flags in ([], ["--dp", "3"]):
        assert served("tiny", *flags)[3].restarts() is not None
        assert served("tiny", *flags, "--no-restart-engine")[3].restarts() is None
    assert served("tiny", "--dp", "0")[0] == 2
    code, output, _, _ = served("tiny", "--distributed-executor-backend", "moon")
    assert code == 2
    assert "choose one of mp, ray" in " ".join(output.split())


def test_each_process_has_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    async def start() -> list[Any]:
        replicas = plan(ReplicaSettings(2), EngineConfig(), heartbeat_timeout=0)
        replicas.configs = [FakeConfig()] * 2
        client = ReplicaClient("tests.http.fake_engine:FakeEngine", None, replicas)
        client.start()
        await client.ready()
        await client.shutdown()
        return [info["gpus"] for info in client.infos]

    assert asyncio.run(start()) == ["5", "6"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_each_replica_has_files_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", cpu_offload_gb=1, kv_offload_dir=str(tmp_path))
    plans = plan(ReplicaSettings(2), config).configs
    assert [one.kv_offload_dir for one in plans] == [f"{tmp_path}/engine-0", f"{tmp_path}/engine-1"]
    plain = EngineConfig(device="cpu")
    assert plan(ReplicaSettings(2), plain).configs == [plain] * 2


def test_an_llm_is_one_engine() -> None:
    from unisono.entrypoints.llm_arguments import engine_arguments
    from unisono.types import ConfigError

    assert engine_arguments({"data_parallel_size": 1, "dp_size": 1}) == {}
    for name in ("data_parallel_size", "dp_size"):
        with pytest.raises(ConfigError, match="only `unisono serve` runs several engines"):
            engine_arguments({name: 2})


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of a bundled model."""
    flags = ("--max-num-seqs", "4", "--max-model-len", "256", "--enable-sleep-mode", *PLAIN)
    with serving(tmp_path_factory.mktemp("real"), "tiny", "--dp", "2", *flags) as server:
        yield server


PROMPTS = ["Tom has 3 boxes of", "Anna buys 4 pens and", "There are 12 birds in"]
SAMPLED: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 11, "logprobs": 1}


def choices(server: Server, prompt: str, rank: str | None) -> Any:
    """The answer of the replica ``rank``; None: of any."""
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    return server.http.post(TEXT, json={"model": "tiny", **SAMPLED, "prompt": prompt}, headers=headers).json()[
        "choices"
    ]


def test_real_engines_give_the_bytes_of_one(real: Server, pool: ThreadPoolExecutor) -> None:
    """Each replica gets the same requests; then both share them."""
    first = [choices(real, prompt, "0") for prompt in PROMPTS]
    assert [choices(real, prompt, "1") for prompt in PROMPTS] == first
    mixed = list(pool.map(lambda prompt: choices(real, prompt, None), PROMPTS * 4))
    assert mixed == first * 4
    assert set(ended(real)) == {"0", "1"}
    told = engines(real)
    assert [one["info"]["kv_cache"]["page_size"] for one in told] == [16, 16]


def test_replicas_sleep_and_get_new_weights(real: Server, tmp_path: Path) -> None:
    """All of them: afterwards each one's answers are those of an engine with the same weights."""
    old, new = catalog.bundled_path("tiny"), other(catalog.bundled_path("tiny"), tmp_path / "new")
    expected = {}
    for path in (old, new):
        with engine(path, enforce_eager=True) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(**SAMPLED))
            expected[path] = [output.outputs[0].text for output in outputs]
    assert expected[old] != expected[new]

    def check(path: Path) -> None:
        for rank in ("0", "1"):
            assert [choices(real, prompt, rank)[0]["text"] for prompt in PROMPTS] == expected[path]

    check(old)
    assert real.http.post("/sleep?level=2").status_code == 200
    assert real.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert real.http.post("/wake_up").status_code == 200
    check(old)
    assert real.http.post("/update_weights_from_disk", json={"model_path": str(new)}).status_code == 200
    check(new)
    assert real.http.post("/update_weights_from_disk", json={"model_path": str(old)}).status_code == 200
    check(old)
