"""The router by itself: what a request costs where, and what it remembers of each replica."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from unisono.cluster.engines import ANYWHERE, Placement
from unisono.cluster.replicas.devices import environments
from unisono.cluster.replicas.prefixes import PrefixIndex, page_hashes
from unisono.cluster.replicas.router import Router, Sticky
from unisono.types import BadRequest, ConfigError, EngineDead, EngineRequest, MediaItem, SamplingParams, Vectors
from unisono.types.errors import EngineUnavailable

PAGE = 16


def request(name: str, tokens: list[int], limit: int = 8, **more: object) -> EngineRequest:
    return EngineRequest(name, tokens, SamplingParams(max_tokens=limit, seed=1), **more)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def finish(router: Router, replica: int, name: str, answer: list[int]) -> None:
    router.progress(replica, name, len(answer))
    router.close(replica, name, answer, ended=True)


def test_distinct_prompts_are_shared_out_evenly() -> None:
    router = Router(4)
    places = [router.choose(request(f"r{i}", tokens(i, 100)), ANYWHERE) for i in range(40)]
    assert [places.count(i) for i in range(4)] == [10] * 4
    for i, place in enumerate(places):
        finish(router, place, f"r{i}", [1] * 8)
    assert [load.work for load in router.loads] == [0] * 4, "nothing of ended requests is left"
    idle = [Router.choose(router, request(f"s{i}", [i]), ANYWHERE) for i in range(1)]
    assert idle[0] in range(4)


def test_an_idle_server_takes_replicas_in_turn() -> None:
    router, places = Router(3), []
    for i in range(9):
        places.append(router.choose(request(f"r{i}", tokens(i, 20)), ANYWHERE))
        finish(router, places[-1], f"r{i}", [1] * 8)
    assert [places.count(i) for i in range(3)] == [3] * 3


def test_a_cached_prefix_draws_until_the_queue_costs_more() -> None:
    router = Router(2)
    prefix = tokens(0, 10 * PAGE)
    home = router.choose(request("first", prefix), ANYWHERE)
    finish(router, home, "first", [1] * 8)
    places = [router.choose(request(f"r{i}", [*prefix, i]), ANYWHERE) for i in range(40)]
    spilled = places.index(1 - home)
    assert spilled == 5, "a prefix of 160 tokens is worth the work of almost 5 requests of 1 + 2 * 8 + 16"
    assert 15 <= places.count(home) <= 25, "once both have it they share"


@pytest.mark.parametrize("turn", range(2))
def test_the_next_turn_of_a_conversation_finds_the_answer(turn: int) -> None:
    router = Router(2)
    prompt, answer = tokens(turn, 3 * PAGE), tokens(turn + 10, 5 * PAGE)
    router.choose(request("other", tokens(5, 20)), ANYWHERE, ())
    home = router.choose(request("a", prompt, 100), ANYWHERE)
    finish(router, home, "a", answer)
    again = request("b", [*prompt, *answer, 7])
    assert router.loads[home].pages.match(page_hashes(again, again.prompt_token_ids, PAGE)) == 8


def test_sequences_beams_and_sessions_share_a_replica() -> None:
    router = Router(4)
    leader = request("x-0", tokens(1, 40))
    home = router.choose(leader, ANYWHERE)
    work = router.loads[home].work
    for i in range(1, 9):
        follower = replace(leader, request_id=f"x-{i}", shares_with="x-0")
        assert router.choose(follower, ANYWHERE) == home
    assert router.loads[home].work - work == 8 * (16 + 2 * 8), "the prompt counts once"
    beams = [router.choose(request(f"b{i}", tokens(i, 50)), Placement(group="beams")) for i in range(6)]
    assert len(set(beams)) == 1
    session = [router.choose(request(f"s{i}", tokens(i, 50)), Placement("me")) for i in range(6)]
    assert len(set(session)) == 1
    router.lost(session[0])
    moved = {router.choose(request(f"t{i}", tokens(i, 50)), Placement("me")) for i in range(6)}
    assert len(moved) == 1
    assert moved.isdisjoint(session)
    router.sized(session[0], 10, PAGE)
    assert {router.choose(request("u", [1]), Placement("me"))} == moved, "a session that has moved stays"


def test_ranks() -> None:
    router = Router(2)
    assert {router.choose(request(f"r{i}", [i]), Placement(rank=1)) for i in range(4)} == {1}
    with pytest.raises(BadRequest, match="X-data-parallel-rank=2 is not valid: this server has the engines 0 to 1"):
        router.choose(request("a", [1]), Placement(rank=2))
    router.lost(1)
    with pytest.raises(EngineUnavailable, match="Engine 1, requested by X-data-parallel-rank, does not serve now"):
        router.choose(request("a", [1]), Placement(rank=1))
    router.lost(0)
    with pytest.raises(EngineDead, match="no engine serves"):
        router.choose(request("a", [1]), ANYWHERE)
    assert router.choose(request("a", [1]), ANYWHERE, waiting=[0]) == 0


def test_a_replica_that_restarts_or_is_reset_has_nothing_cached() -> None:
    router = Router(2)
    prompt = tokens(3, 100)
    home = router.choose(request("a", prompt), ANYWHERE)
    finish(router, home, "a", [])
    assert len(router.loads[home].pages) == 6
    router.forget(home)
    assert len(router.loads[home].pages) == 0
    router.loads[home].pages.add([1, 2, 3])
    router.lost(home)
    assert len(router.loads[home].pages) == 0
    assert router.choose(request("b", prompt), ANYWHERE) == 1 - home


def test_work_counts_down_and_never_drifts() -> None:
    router = Router(1)
    router.choose(request("a", tokens(1, 50), 1000), ANYWHERE)
    assert router.loads[0].work == 50 + 2 * 128 + 16
    router.progress(0, "a", 1)
    assert router.loads[0].work == 2 * 127 + 16
    router.progress(0, "a", 500)
    assert router.loads[0].work == 16, "it runs on for longer than was expected"
    router.close(0, "a", [1] * 501, ended=True)
    assert router.loads[0].work == 0
    router.close(0, "a", [1] * 501, ended=True)
    assert router.loads[0].work == 0
    router.choose(request("b", tokens(1, 50), 1000), ANYWHERE)
    assert router.loads[0].tokens == round(128 + 0.05 * (501 - 128)), "the mean has learnt"
    router.close(0, "b", [], ended=False)
    assert router.loads[0].work == 0


def test_the_index_is_bounded_and_forgets_leaves_first() -> None:
    index = PrefixIndex(10)
    index.add(range(6))
    index.add(range(100, 106))
    assert len(index) == 10
    assert index.match(range(6)) == 4, "its last pages are gone, its first ones stay"
    assert index.match(range(100, 106)) == 6
    index.add(range(1000, 1100))
    assert index.match(range(1000, 1100)) == 10


def test_page_hashes_distinguish_prompts() -> None:
    ids = tokens(1, 40)
    plain = page_hashes(request("a", ids), ids, PAGE)
    assert len(plain) == 2, "full pages only"
    assert plain == page_hashes(request("b", [*ids, 1, 2]), ids, PAGE)
    other = [*ids[:16], 1 + ids[16], *ids[17:]]
    assert [a == b for a, b in zip(plain, page_hashes(request("a", other), other, PAGE), strict=True)] == [True, False]
    salted = request("a", ids, cache_salt="mine")
    assert set(plain).isdisjoint(page_hashes(salted, ids, PAGE))
    picture = MediaItem("image", b"d", (1, 2, 2), Vectors("float32", 1, b""), [20])
    seen = page_hashes(request("a", ids, media=(picture,)), ids, PAGE)
    assert [a == b for a, b in zip(plain, seen, strict=True)] == [True, False], "the picture is in the second page"


def test_a_moved_page_is_another_page() -> None:
    page = tokens(1, PAGE)
    first, second = page_hashes(request("a", page * 2), page * 2, PAGE)
    assert first != second


def test_names_are_bounded() -> None:
    names = Sticky(2)
    for i in range(3):
        names.set(f"n{i}", i)
    assert [names.get(f"n{i}") for i in range(3)] == [None, 1, 2]
    names.set("", 1)
    assert names.get("") is None


def test_gpus_and_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    assert environments(2, "cpu", 1, {}) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert environments(20, "cpu", 1, {}) == [{"OMP_NUM_THREADS": "1"}] * 20
    assert environments(2, "cpu", 1, {"OMP_NUM_THREADS": "3"}) == [{}, {}], "who says it means it"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert environments(2, "auto", 2, {}) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    named = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}
    assert environments(2, "cuda", 1, named) == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]
    with pytest.raises(
        ConfigError, match="--data-parallel-size 3 with 2 each needs 6 GPUs and 4 are visible; lower it"
    ):
        environments(3, "auto", 2, {})
    with pytest.raises(ConfigError, match="--device cuda:1 is one GPU, and each of the 2 engines"):
        environments(2, "cuda:1", 1, {})


def test_replica_hit_rate_is_close_to_one_engine() -> None:
    """12 prefixes asked 20 times each, 16 requests at once: what is cached is what was sent there before."""
    draw = random.Random(1)
    heads = [tokens(i, 256) for i in range(12)]
    prompts = [[*head, *tokens(1000 + 20 * i + j, 24)] for i, head in enumerate(heads) for j in range(20)]
    draw.shuffle(prompts)
    rates = {}
    for count in (1, 4):
        router, running = Router(count), []
        for i, prompt in enumerate(prompts):
            running.append((router.choose(request(f"r{i}", prompt), ANYWHERE), f"r{i}"))
            if len(running) == 16:
                place, name = running.pop(draw.randrange(16))
                finish(router, place, name, [1] * 8)
        rates[count] = sum(router.matched.values()) / sum(map(len, prompts))
    assert rates[4] >= 0.9 * rates[1]
    assert rates[1] > 0.85
