"""``unisono bench serve``: what it reports is what a server did, whose every delay a test chose."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.http.conftest import Server, servers
from tests.tools.scripted_server import END, STREAM, Answer, plain, scripted, sse, text, usage
from unisono.cli.main import app
from unisono.tools.load.mixes import MixFlags, arrivals, conversations
from unisono.tools.load.prompts import PromptSource, source_of


def bench(*arguments: object):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def results(tmp_path: Path, answer: Answer, *arguments: object) -> tuple[dict[str, Any], str]:
    """(JSON results, what was printed) of a run against a scripted server."""
    out = tmp_path / "out.json"
    with scripted(answer) as server:
        shown = bench("--base-url", server.url, "--input-len", 8, "--out", out, *arguments)
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return json.loads(out.read_text()), shown.output


async def slow_stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """An event without text at once; text after 100 ms; 50 ms later two texts in one piece; the end 150 ms later."""
    yield STREAM + sse(text(""))
    await asyncio.sleep(0.1)
    yield sse(text("a b"))
    await asyncio.sleep(0.05)
    yield sse(text(" c"), text(" d e"))
    await asyncio.sleep(0.15)
    yield sse(usage(7, 6)) + END


def test_ttft_itl_and_token_counts_match_the_server(tmp_path: Path) -> None:
    found, shown = results(tmp_path, slow_stream, "--num-prompts", 3, "--save-detailed", "--max-concurrency", 1)
    assert (found["completed"], found["failed"]) == (3, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (21, 18)
    assert found["tokens_counted_from"] == {"usage": 3}
    for ttft, gaps, e2el in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert ttft >= 0.1  # not the event without text
        assert len(gaps) == 2
        assert gaps[0] > 0.04
        assert gaps[1] == 0  # in one piece
        assert e2el >= ttft + 0.15  # 200 ms, and the first text may have come late
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * statistics.mean(sum(g) / 5 for g in found["itls"]))
    assert found["mean_ttft_ms"] == pytest.approx(1e3 * statistics.mean(found["ttfts"]))
    assert found["p99_e2el_ms"] <= found["max_e2el_ms"]
    assert found["output_throughput"] == pytest.approx(18 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(39 / found["duration"])
    assert found["duration"] >= 0.9  # one after another
    assert found["max_concurrent_requests"] == 1
    assert "| Time to first token (TTFT) |" in shown


@pytest.mark.parametrize(("known", "counted", "tokens"), [(False, "events", 4), (True, "tokenizer", 20)])
def test_tokens_without_usage(tmp_path: Path, known: bool, counted: str, tokens: int) -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        assert body["stream_options"] == {"include_usage": True}
        yield STREAM + sse(text("time way"), text(" year 1234567")) + END

    tokenizer = ["--tokenizer", "tiny"] if known else []
    found, shown = results(tmp_path, answer, "--num-prompts", 2, *tokenizer)
    expected = (
        tokens if not known else 2 * PromptSource(source_of(["tiny"], False).tokenizer).count("time way year 1234567")
    )
    assert found["total_output_tokens"] == expected
    assert found["tokens_counted_from"] == {counted: 2}
    assert "the server sent no usage with 2 answers" in shown


def failing(number: int) -> Answer:
    """What goes wrong with request ``number``."""

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if number == 0:
            yield plain("503 Busy", '{"error": "full"}')
        elif number == 1:
            yield STREAM + sse(text("a"), {"error": {"message": "the engine died"}}) + END
        elif number == 2:
            yield STREAM + sse(text("a")) + b"0\r\n\r\n"
        elif number == 3:
            yield STREAM + sse("{") + END
        elif number == 4:
            yield STREAM + sse(text("a"))  # and then nothing
        elif number == 5:
            yield STREAM
            await asyncio.sleep(30)
        elif number == 6:
            yield b"SSH-2.0-nonsense\r\n\r\n"
        elif number == 7:
            yield STREAM + END
        else:
            yield STREAM + sse(text("a"), usage(1, 1)) + END

    return answer


def test_failures_are_counted_by_kind(tmp_path: Path) -> None:
    numbers = itertools.count()

    def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        return failing(next(numbers))(body)

    found, shown = results(tmp_path, answer, "--num-prompts", 10, "--timeout", 1, "--max-concurrency", 1)
    assert found["failures"] == {
        "HTTP 503": 1,
        "error in the stream": 1,
        "cut off": 1,
        "bad event": 1,
        "connection lost": 1,
        "timeout": 1,
        "not HTTP": 1,
        "no text": 1,
    }
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 8, 2)
    assert "the engine died" in shown
    assert "full" in found["failure_examples"]["HTTP 503"]


def test_exit_code_if_all_requests_fail(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield plain("500 Oops", "{}")

    with scripted(answer) as server:
        assert bench("--base-url", server.url, "--num-prompts", 2).exit_code == 1
    with socket.socket() as probe:  # bound, so that nobody else takes it; nobody listens
        probe.bind(("127.0.0.1", 0))
        shown = bench("--base-url", f"http://127.0.0.1:{probe.getsockname()[1]}")
    assert shown.exit_code == 1
    assert "does not answer: cannot connect" in shown.output


async def quick(body: dict[str, Any]) -> AsyncIterator[bytes]:
    await asyncio.sleep(0.03)
    yield STREAM + sse(text("a"), text("b"), usage(4, 2)) + END


@pytest.mark.parametrize(("flags", "most"), [(["--max-concurrency", 3], 3), ([], 12)])
def test_requests_at_once(flags: list[Any], most: int) -> None:
    with scripted(quick) as server:
        shown = bench("--base-url", server.url, "--num-prompts", 12, *flags)
    assert shown.exit_code == 0, shown.output
    assert server.most == most


def test_requests_arrive_at_the_rate(tmp_path: Path) -> None:
    flags = ["--num-prompts", 12, "--request-rate", 20, "--burstiness", 1000, "--save-detailed"]
    found, _ = results(tmp_path, quick, *flags)
    begun = found["start_times"]
    assert 0.45 < begun[-1] - begun[0] < 2.0  # 11 gaps of 50 ms
    assert found["settings"]["request_rate"] == 20


def test_several_client_processes_are_one_load(tmp_path: Path) -> None:
    found, _ = results(tmp_path, quick, "--num-prompts", 9, "--max-concurrency", 5, "--client-processes", 2)
    assert (found["completed"], found["total_output_tokens"]) == (9, 18)
    assert found["max_concurrent_requests"] == 5


def test_goodput_counts_requests_that_keep_every_limit(tmp_path: Path) -> None:
    numbers = itertools.count()

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        number = next(numbers)
        await asyncio.sleep(0.25 if number % 4 == 0 else 0)
        yield STREAM + sse(text("a"))
        await asyncio.sleep(0.25 if number % 4 == 1 else 0)
        yield sse(text("b"), usage(4, 2)) + END

    limits = ["--goodput", "ttft:200", "tpot:200"]
    found, shown = results(tmp_path, answer, "--num-prompts", 8, "--max-concurrency", 2, *limits)
    assert found["goodput"] == {"ttft": 200, "tpot": 200}
    assert found["request_goodput"] * found["duration"] == pytest.approx(4)
    assert "(50.0 %)" in shown


def test_a_conversation_repeats_the_answers_that_it_got() -> None:
    numbers = itertools.count()

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        delta = {"choices": [{"index": 0, "delta": {"content": f"answer {next(numbers)}"}}]}
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        yield STREAM + sse(role, delta, usage(4, 2)) + END

    with scripted(answer) as server:
        flags = [
            "--dataset-name",
            "conversation",
            "--num-prompts",
            7,
            "--conversation-turns",
            3,
            "--max-concurrency",
            1,
        ]
        shown = bench("--base-url", server.url, "--backend", "openai-chat", "--conversation-num-systems", 2, *flags)
    assert shown.exit_code == 0, shown.output
    assert [len(body["messages"]) for body in server.bodies].count(6) == 2  # system, three questions, two answers
    answers = {f"answer {i}" for i in range(7)}
    for body in server.bodies:
        roles = [message["role"] for message in body["messages"]]
        assert roles == (["system"] + ["user", "assistant"] * 3)[: len(roles)]
        assert all(m["content"] in answers for m in body["messages"] if m["role"] == "assistant")
    assert len({body["messages"][0]["content"] for body in server.bodies}) <= 2
    last = max(server.bodies, key=lambda body: len(body["messages"]))
    assert last["messages"][2]["content"] != last["messages"][4]["content"]


def test_bench_flags_become_request_fields(tmp_path: Path) -> None:
    flags = ["--num-prompts", 1, "--temperature", 0.5, "--top-k", 7, "--ignore-eos", "--extra-body", '{"seed": 3}']
    with scripted(quick) as server:
        bench(
            "--base-url", f"{server.url}/v1", *flags, "--output-len", 5, "--header", "X-A=1", "X-B=2", "--api-key", "k"
        )
    (body,) = server.bodies
    expected = {"model": "m", "temperature": 0.5, "top_k": 7, "ignore_eos": True, "seed": 3, "max_tokens": 5}
    assert {name: body[name] for name in expected} == expected
    assert "X-A: 1\r\nX-B: 2\r\n" in server.headers[0]
    assert "Authorization: Bearer k" in server.headers[0]
    assert server.headers[0].startswith("POST /v1/completions ")


def test_plot(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    with scripted(quick) as server:
        shown = bench("--base-url", server.url, "--num-prompts", 3, "--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert shown.exit_code == 2
        assert 'pip install "unisono[plot]"' in shown.output
        assert not server.bodies  # said before anything ran
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


# ---- the stall ----------------------------------------------------------------------------------


def test_the_stall_is_the_pause_that_prompts_cause(tmp_path: Path) -> None:
    busy_until = 0.0

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Streams speak every 5 ms, but not while prompts are computed: 100 ms each, one after another."""
        nonlocal busy_until
        clock = asyncio.get_running_loop().time
        if body["max_tokens"] == 1:
            busy_until = max(busy_until, clock()) + 0.1
            await asyncio.sleep(busy_until - clock())
            yield STREAM + sse(text("a"), usage(500, 1)) + END
            return
        yield STREAM
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.005)
            while clock() < busy_until:
                await asyncio.sleep(busy_until - clock())
            yield sse(text("a"))

    flags = ["--scenario", "stall", "--streams", 3, "--prompts", "1,3", "--prompt-len", 20]
    found, shown = results(tmp_path, answer, *flags)
    one, three = found["stalls"]
    assert one["largest_gap_ms"] > 90
    assert three["largest_gap_ms"] > 290
    assert one["usual_gap_ms"] < 60
    for found_one in (one, three):
        assert 500 < found_one["prompt_tokens_per_s"] <= 5000
    assert three["prompt_throughput_share"] == pytest.approx(
        three["prompt_tokens_per_s"] / three["prompt_tokens_per_s_alone"]
    )
    assert (three["streams"], three["prompts"], three["prompt_len"]) == (3, 3, 20)
    assert "| 3 | 3 × 20 |" in shown


def test_streams_that_end_too_early_are_an_error() -> None:
    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        assert body["ignore_eos"] is True
        yield STREAM + sse(text("a"), usage(4, 1)) + END

    with scripted(answer) as server:
        shown = bench("--base-url", server.url, "--scenario", "stall", "--streams", 2, "--prompts", 1)
    assert shown.exit_code == 2
    assert "raise --stream-output-len" in shown.output


# ---- what is asked ------------------------------------------------------------------------------

TINY = source_of(["tiny"], False)


def asked(source: PromptSource = TINY, seed: int = 0, **flags: Any) -> list[Any]:
    return conversations(MixFlags(**{"num_prompts": 40, **flags}), source, seed)


def test_prompt_and_output_lengths_match_the_flags() -> None:
    for source in (TINY, source_of(["tiny"], True), PromptSource(None)):
        turns = [one.turns[0] for one in asked(source, random_input_len="20:60", random_output_len="5:9")]
        assert all(20 <= source.count(turn.prompt) <= 60 for turn in turns)
        assert [source.count(turn.prompt) for turn in turns] == [turn.prompt_len for turn in turns]
        assert {turn.output_len for turn in turns} == {5, 6, 7, 8, 9}
    wide = [one.turns[0].prompt_len for one in asked(random_input_len="100", random_range_ratio=0.5, num_prompts=200)]
    assert (min(wide) >= 50, max(wide) <= 150, max(wide) - min(wide) > 80) == (True, True, True)


def test_a_seed_repeats_the_load_and_another_does_not() -> None:
    for name in ("random", "prefix_repetition", "conversation"):
        assert asked(dataset_name=name) == asked(dataset_name=name)
        assert asked(dataset_name=name) != asked(dataset_name=name, seed=1)


def test_prefixes_are_shared() -> None:
    prompts = [
        one.turns[0].prompt
        for one in asked(
            dataset_name="prefix_repetition", prefix_repetition_num_prefixes=3, prefix_repetition_suffix_len="7"
        )
    ]
    assert len({prompt[:200] for prompt in prompts}) == 3
    assert len(set(prompts)) == 40
    same = [one.turns[0].prompt for one in asked(random_prefix_len=50, random_input_len="10")]
    assert len({prompt[:40] for prompt in same}) == 1


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "one two", "output_len": 3}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    found = asked(dataset_name="custom", dataset_path=path, num_prompts=3, custom_output_len=9)
    assert [one.turns[0].output_len for one in found] == [3, 9, 3]
    assert found[1].messages == ({"role": "user", "content": "x"},)
    assert found[0].turns[0].prompt_len == TINY.count("one two")


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals(burstiness: float, spread: float) -> None:
    times = arrivals(20_000, 50.0, burstiness, Random(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05)
    assert arrivals(5, float("inf"), 1.0, Random(1)) == [0.0] * 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--input-len 9:3", "--random-input-len '9:3': give a number of tokens, or a range"),
        ("--goodput ttft", "--goodput 'ttft': give METRIC:MILLISECONDS"),
        ("--goodput itl:3", "one of ttft, tpot, e2el"),
        ("--percentile-metrics ttft,x", "--percentile-metrics 'x' is unknown"),
        ("--metric-percentiles 101", "give numbers from 0 to 100"),
        ("--dataset-name sonnet", "choose from random, prefix_repetition, conversation, custom"),
        ("--dataset-name custom", "needs --dataset-path"),
        ("--dataset-name custom --dataset-path /no/such", "cannot be read: No such file"),
        ("--scenario jam", "choose load or stall"),
        ("--scenario stall --prompts x", "--prompts 'x': give whole numbers"),
        ("--request-rate 0", "--request-rate 0: give a number above 0"),
        ("--backend grpc", "--backend 'grpc' is unknown"),
        ("--backend openai-chat --token-ids", "chat messages are text"),
        ("--token-ids", "--token-ids needs a vocabulary"),
        ("--extra-body []", "give a JSON object"),
        ("--header a", "--header 'a': give KEY=VALUE"),
        ("--out /no/such/x", "the directory /no/such does not exist"),
        ("--max-num-seqs 4", "--max-num-seqs: no such flag"),
        ("--save-result", "--save-result is not a flag of this command: --out FILE writes the results"),
        ("--dataset-name sharegpt", "custom reads the"),
        ("--port 1", "is set beside --host or --port"),
        ("--base-url ftp://x", "give http://HOST:PORT"),
    ],
)
def test_wrong_flags_are_one_line(arguments: str, says: str) -> None:
    with scripted(quick) as server:
        given = arguments.split() if "--base-url" in arguments else ["--base-url", server.url, *arguments.split()]
        shown = bench(*given)
    assert shown.exit_code == 2
    assert says in shown.output
    assert not server.bodies
    assert "Traceback" not in shown.output


def test_host_and_port_name_a_running_server() -> None:
    with scripted(quick) as server:
        host, port = server.url.removeprefix("http://").split(":")
        shown = bench("--host", host, "--port", port, "--num-prompts", 2, "--input-len", 8, "--disable-tqdm")
    assert shown.exit_code == 0, shown.output
    assert len(server.bodies) == 2
    assert "--disable-tqdm: no effect" in shown.output
    assert f"2 requests to {server.url}/v1/completions" in shown.output


def test_flags_of_a_server_that_it_would_start() -> None:
    assert "--num-promts is unknown. Did you mean --num-prompts?" in bench("--num-promts", 1).output
    shown = bench("--model", "tiny", "--no-such-flag", 1)
    assert shown.exit_code == 2
    assert "--no-such-flag is unknown" in shown.output
    assert "/no/such does not exist" in bench("--model", "/no/such").output


# ---- against this project's server --------------------------------------------------------------


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory):
    """A server with the fake engine and no tokenizer, which brings three tokens a step."""
    with servers(tmp_path_factory) as start:
        yield start(step_seconds=0.002, tokens_per_step=3)


def test_this_projects_server(fake: Server, tmp_path: Path) -> None:
    """Without a tokenizer there is no text: tokens are timed all the same. Prompts are token ids."""
    (tmp_path / "config.json").write_text('{"vocab_size": 900}')
    flags = ["--tokenizer", tmp_path, "--token-ids", "--num-prompts", 20, "--input-len", "5:20", "--output-len", 12]
    out = tmp_path / "out.json"
    shown = bench("--base-url", fake.url, *flags, "--max-concurrency", 4, "--num-warmups", 2, "--out", out)
    assert shown.exit_code == 0, shown.output
    found = json.loads(out.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (20, 240)
    assert found["tokens_counted_from"] == {"usage": 20}
    assert 0 < found["median_itl_ms"] < 200
    assert found["model_id"] == "fake"


@pytest.mark.full  # half a minute on two busy cores
def test_a_server_that_it_starts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--max-model-len", 128, "--max-num-seqs", 4, "--enforce-eager", "--out", out]
    shown = bench("--model", "tiny", "--num-prompts", 6, "--input-len", 12, "--output-len", 8, "--ignore-eos", *flags)
    assert shown.exit_code == 0, shown.output
    found = json.loads(out.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)
    assert found["max_concurrent_requests"] == 6


def test_the_page_names_flags_that_exist() -> None:
    """Commands and the table of docs/guide/benchmark.md, against the commands' own parameters."""
    from typer.main import get_command

    from unisono.tools.bench.latency import app as bench_app

    commands = get_command(bench_app).commands  # type: ignore[attr-defined]
    page = (Path(__file__).parents[2] / "docs/guide/benchmark.md").read_text()
    own = {"--max-num-seqs"}  # of `unisono serve`, which it starts
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    shown = [line for block in blocks for line in block.split("unisono bench ") if line.strip()]
    assert len(shown) == 6
    for line in shown:
        known = {name for p in commands[line.split()[0]].params for name in p.opts}
        assert not set(re.findall(r"--[a-z][\w-]+", line)) - known - own, line
    known = {name for command in commands.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert not {flag for flag in re.findall(r"`(--[a-z][\w-]*\w)[ `]", page)} - known - {"--help"}
