"""Engines as Ray actors, on a cluster of several raylets of this machine. Needs Ray: ``unisono[ray]``."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.http.conftest import ROOT, Start, alive, until
from tests.http.replicas.conftest import ask, ended, engines, loads, pid, read_stream, state

pytest.importorskip("ray")
pytestmark = pytest.mark.full

STORE = 80 * 2**20
"""Bytes of a raylet's object store, which nothing here uses; the least that Ray takes is 75 MiB."""
MOVED = 90.0
"""Seconds for Ray to find a dead raylet and to place its actor elsewhere, on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors and three nodes with one each."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])  # of the workers
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    settings = {"object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **settings})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        yield cluster
    finally:
        cluster.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def node_of(cluster: Any, where: str) -> Any:
    return next(node for node in cluster.list_all_nodes() if where == f"Ray node {node.node_id}")


def test_a_raylet_dies(start: Start, pool: ThreadPoolExecutor, cluster: Any) -> None:
    """Two replicas on three nodes: a node is lost under load, its engine comes back on the third."""
    server = start(
        ready=False,
        data_parallel_size=2,
        distributed_executor_backend="ray",
        ray_address=cluster.address,
        step_seconds=0.1,
        prefill_seconds=1.0,
        heartbeat_timeout=10,
    ).wait_ready(120)
    prompts = [[i + 1, 50, 60 + i] for i in range(3)]
    quiet = [ask(server, prompt, max_tokens=40)["choices"] for prompt in prompts]
    places = [one["where"] for one in engines(server)]
    assert len(set(places)) == 2, "a replica is whole on one node, and has it to itself"

    begun = pool.submit(read_stream, server, prompts[0], 0)
    until(lambda: loads(server) == [1, 0])
    time.sleep(2)  # it has tokens now
    whole = [pool.submit(ask, server, prompt, {"X-data-parallel-rank": "0"}, max_tokens=40) for prompt in prompts]
    fresh = [pool.submit(read_stream, server, prompt, 0) for prompt in prompts]
    until(lambda: loads(server) == [7, 0])
    cluster.remove_node(node_of(cluster, places[0]), allow_graceful=False)
    got, error = begun.result(MOVED)
    assert got == quiet[0][0]["token_ids"][: len(got)]
    assert error is not None
    for one, right in zip(whole, quiet, strict=True):
        assert one.result(MOVED)["choices"] == right
    for stream, right in zip(fresh, quiet, strict=True):
        assert stream.result(MOVED) == (right[0]["token_ids"], None)
    until(lambda: state(server, 0) == "serving", MOVED)
    moved = [one["where"] for one in engines(server)]
    assert moved[0] not in places
    assert moved[1] == places[1]

    os.kill(pid(server, 1), signal.SIGKILL)  # an actor's process alone
    until(lambda: state(server, 1) == "restarting")
    assert ask(server, prompts[0], max_tokens=40)["choices"] == quiet[0]
    until(lambda: state(server, 1) == "serving", MOVED)
    assert engines(server)[1]["where"] == places[1]
    before = ended(server)
    for rank in ("0", "1"):
        assert ask(server, prompts[1], {"X-data-parallel-rank": rank}, max_tokens=40)["choices"] == quiet[1]
    assert ended(server) == {engine: count + 1 for engine, count in before.items()}

    pids = [one["info"]["pid"] for one in engines(server)]
    server.signal()
    assert server.wait(60) == 0
    until(lambda: not any(map(alive, pids)))


def test_a_cluster_that_is_not_there(start: Start) -> None:
    server = start(ready=False, distributed_executor_backend="ray", ray_address="ray://somewhere:10001")
    assert server.wait(60) == 1
    assert "must run on a machine of the cluster" in server.log.read_text()


def test_ray_serve(cluster: Any) -> None:
    """The application answers on Ray Serve's port, whole and streamed, and with errors in OpenAI's form."""
    import ray
    from ray import serve

    from unisono.entrypoints.ray_serve import Arguments, build

    cluster.add_node(num_cpus=3, object_store_memory=STORE)
    ray.init(cluster.address, log_to_driver=False)
    engine = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "graphs": "off"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        serve.run(build(Arguments(model="tiny", engine=engine)), name="unisono")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
        asked = {"model": "tiny", "prompt": "Tom has 3 boxes of", "max_tokens": 12, "seed": 3}
        text = client.completions.create(**asked).choices[0].text
        assert text
        parts = list(client.completions.create(**asked, stream=True))
        assert "".join(part.choices[0].text for part in parts) == text
        assert len(parts) > 2, "token by token"
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(**{**asked, "model": "other"})
        told = httpx.get(f"http://127.0.0.1:{port}/server_info").json()
        assert [one["where"].startswith("Ray node") for one in told["engines"]] == [True]
    finally:
        serve.shutdown()
        ray.shutdown()
