"""The stall scenario: long prompts arrive while streams run; measures the streams' gaps and the prompts' throughput.

:func:`over_http` measures any server; :func:`in_engine` this process's engine. Both return a :class:`Stall` for each
number of prompts: the largest gap between two tokens of a stream, from the prompts' arrival until each stream has
continued after the last prompt's first token, and the prompt tokens per second, with the streams and without.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from unisono.tools.load.client import LoadClient, LoadTarget
from unisono.tools.load.mixes import Turn
from unisono.tools.load.prompts import PromptSource
from unisono.tools.load.streams import RequestResult, read
from unisono.tools.load.wire import Exchange, now
from unisono.types import ConfigError, UnisonoError

SETTLED, AFTER = 16, 4
"""Pieces of each stream before prompts are sent, and after the last prompt's first token."""


@dataclass(frozen=True)
class StallScenario:
    """The sizes of the scenario.

    streams: number of streams, each with a prompt of ``stream_input_len`` and up to ``stream_output_len`` tokens.
    prompts: numbers of simultaneous prompts, one measurement each, of ``prompt_len`` tokens.
    """

    streams: int
    prompts: Sequence[int]
    prompt_len: int
    stream_input_len: int = 64
    stream_output_len: int = 4096


@dataclass(frozen=True)
class Stall:
    """The result for ``prompts`` simultaneous prompts.

    Gaps in milliseconds, rates in prompt tokens per second.

    passes: the engine's passes meanwhile, see :func:`passes_of`; unknown over HTTP.
    """

    prompts: int
    prompt_len: int
    streams: int
    usual_gap_ms: float
    largest_gap_ms: float
    median_gap_ms: float
    prompt_tokens_per_s: float
    prompt_tokens_per_s_alone: float
    mean_ttft_ms: float
    passes: str = ""

    @property
    def share(self) -> float:
        """Fraction of the prompt throughput that is left while the streams run."""
        return self.prompt_tokens_per_s / self.prompt_tokens_per_s_alone


def table(found: Sequence[Stall]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| streams | prompts | gap before, ms | largest gap, ms | median gap, ms | prompt tokens/s | alone | share "
        "| mean TTFT, ms | passes |",
        "|---" * 10 + "|",
    ]
    for s in found:
        rates = f"{s.prompt_tokens_per_s:.0f} | {s.prompt_tokens_per_s_alone:.0f} | {s.share:.2f}"
        gaps = f"{s.usual_gap_ms:.2f} | {s.largest_gap_ms:.1f} | {s.median_gap_ms:.2f}"
        lines += [
            f"| {s.streams} | {s.prompts} × {s.prompt_len} | {gaps} | {rates} | {s.mean_ttft_ms:.0f} | {s.passes} |"
        ]
    return "\n".join(lines)


def passes_of(engine: Any, before: Counter[tuple[str, str, str]]) -> str:
    """The engine's passes since the counts ``before``: number per program, replayed or eager with its reason; and the
    reasons for passes that were not mixed, since the start.
    """
    grown = engine.runner.planner.passes - before
    shown = ((count, program, f"{kind}: {why}" if why else kind) for (program, kind, why), count in grown.items())
    counts = ", ".join(f"{count} {program} ({how})" for count, program, how in sorted(shown, reverse=True))
    mixing = engine.scheduler.mixing.info()
    return (
        f"{counts}; not mixed: {mixing['apart']}, last expected {mixing['expected_ms']}" if mixing["apart"] else counts
    )


def as_json(found: Sequence[Stall]) -> list[dict[str, Any]]:
    """The results as JSON, one mapping per number of prompts."""
    return [asdict(one) | {"prompt_throughput_share": one.share} for one in found]


# ---- over HTTP ----------------------------------------------------------------------------------


async def over_http(target: LoadTarget, source: PromptSource, scene: StallScenario, seed: int) -> list[Stall]:
    """Measure a server. Raises UnisonoError for a request that fails, ConfigError for streams that end too early."""
    client, rng = LoadClient(target, source, None), random.Random(seed)
    await _prompts(client, source, rng, 1, scene.prompt_len)  # warm up
    alone = {}
    for count in scene.prompts:
        answers = await _prompts(client, source, rng, count, scene.prompt_len)
        alone[count] = _rate(answers)
    streams = [Exchange(now()) for _ in range(scene.streams)]
    tasks = [asyncio.create_task(_stream(client, one, source, rng, scene)) for one in streams]
    try:
        found = []
        for count in scene.prompts:
            await _more(streams, tasks, SETTLED)
            began = now()
            answers = await _prompts(client, source, rng, count, scene.prompt_len)
            await _more(streams, tasks, AFTER)
            found.append(_stall(scene, count, streams, began, answers, alone[count]))
        return found
    finally:
        for task in tasks:
            task.cancel()  # closes the connection, which ends the request
        await asyncio.gather(*tasks, return_exceptions=True)
        client.wire.close()


async def _stream(
    client: LoadClient, into: Exchange, source: PromptSource, rng: random.Random, scene: StallScenario
) -> None:
    """Run a stream until it is cancelled."""
    turn = Turn(source.prompt(rng, scene.stream_input_len), scene.stream_input_len, scene.stream_output_len)
    into.sent = now()
    await client.wire.exchange(client.wire.request("POST", client.target.endpoint, _body(client, turn)), into)


def _body(client: LoadClient, turn: Turn) -> bytes:
    chat = [{"role": "user", "content": turn.prompt}]
    return client.body(chat if client.target.chats else turn.prompt, turn)


async def _prompts(
    client: LoadClient, source: PromptSource, rng: random.Random, count: int, length: int
) -> list[RequestResult]:
    """Send simultaneous prompts with one output token each. Raises UnisonoError for one that fails."""
    turns = [Turn(source.prompt(rng, length), length, 1) for _ in range(count)]
    requests = [client.wire.request("POST", client.target.endpoint, _body(client, turn)) for turn in turns]
    exchanges = await asyncio.gather(*(client.wire.exchange(request) for request in requests))
    answers = [read(exchange, length, None)[0] for exchange in exchanges]
    for answer in answers:
        if answer.failure is not None and answer.failure[0] != "no text":  # a token may spell half a character
            raise UnisonoError(f"a prompt of {length} tokens failed: {': '.join(answer.failure)}")
        answer.times = answer.times or [answer.ended]
    return answers


def _rate(answers: Sequence[RequestResult]) -> float:
    """Prompt tokens per second from the first prompt sent to the last first token."""
    tokens = sum(answer.prompt_tokens for answer in answers)
    return tokens / (max(a.times[0] for a in answers) - min(a.sent for a in answers))


async def _more(streams: Sequence[Exchange], tasks: Sequence[asyncio.Task[None]], count: int) -> None:
    """Wait until each stream has received ``count`` more pieces."""
    goals = [len(one.pieces) + count for one in streams]
    while any(len(one.pieces) < goal for one, goal in zip(streams, goals, strict=True)):
        for one, task in zip(streams, tasks, strict=True):
            if task.done():
                answer = read(one, 0, None)[0]
                if answer.failure is not None:
                    raise UnisonoError(f"a stream failed: {': '.join(answer.failure)}")
                raise ConfigError("a stream ended before the prompts were done: raise --stream-output-len.")
        await asyncio.sleep(0.001)


def _stall(
    scene: StallScenario,
    count: int,
    streams: Sequence[Exchange],
    began: float,
    answers: Sequence[RequestResult],
    alone: float,
) -> Stall:
    arrivals = [[at for at, _ in one.pieces] for one in streams]
    done = max(answer.times[0] for answer in answers)
    return _measured(scene, count, arrivals, began, done, [a.ttft for a in answers], _rate(answers), alone)


def _measured(
    scene: StallScenario,
    count: int,
    arrivals: Sequence[Sequence[float]],
    began: float,
    done: float,
    ttfts: Sequence[float],
    rate: float,
    alone: float,
) -> Stall:
    """The result of one measurement. arrivals: times of each stream's tokens. began, done: of the prompts."""
    before, during = [], []
    for times in arrivals:
        pairs = list(pairwise(times))
        before += [b - a for a, b in pairs if b <= began][-SETTLED:]
        during += [b - a for a, b in pairs if b > began and a <= done]
    return Stall(
        count,
        scene.prompt_len,
        scene.streams,
        1e3 * statistics.median(before),
        1e3 * max(during),
        1e3 * statistics.median(during),
        rate,
        alone,
        1e3 * statistics.fmean(ttfts),
    )


# ---- in this process's engine -------------------------------------------------------------------


def in_engine(llm: Any, scene: StallScenario, seed: int) -> list[Stall]:
    """Measure the engine's own loop. Raises ConfigError for more streams and prompts than it supports."""
    engine, rng = llm.engine, random.Random(seed)
    limit, most = engine.config.max_model_len, engine.config.max_num_seqs
    if scene.prompt_len + 2 > limit or scene.stream_input_len + scene.stream_output_len > limit:
        raise ConfigError(f"--prompt-len {scene.prompt_len} or the streams are longer than --max-model-len {limit}.")
    if scene.streams + max(scene.prompts) > most:
        needed = scene.streams + max(scene.prompts)
        raise ConfigError(f"--streams and --prompts are {needed} requests at once; --max-num-seqs is {most}.")
    names = iter(f"stall-{i}" for i in range(1 << 30))
    _prompts_in_engine(engine, rng, names, 1, scene.prompt_len, lambda at, deltas: None)  # warm up
    alone = {}
    for count in scene.prompts:
        began, ends = _prompts_in_engine(engine, rng, names, count, scene.prompt_len, lambda at, deltas: None)
        alone[count] = count * scene.prompt_len / (max(ends) - began)
    arrivals: dict[str, list[float]] = {}

    def note(at: float, deltas: Sequence[Any]) -> None:
        for delta in deltas:
            if delta.request_id in arrivals and delta.token_ids:
                arrivals[delta.request_id].append(at)
                if delta.finish:
                    raise ConfigError("a stream ended before the prompts were done: raise --stream-output-len.")

    for _ in range(scene.streams):
        arrivals[name := next(names)] = []
        engine.add(_request(engine, rng, name, scene.stream_input_len, scene.stream_output_len))
    found = []
    for count in scene.prompts:
        _step_until_more(engine, arrivals, SETTLED, note)
        before = Counter(engine.runner.planner.passes)
        began, ends = _prompts_in_engine(engine, rng, names, count, scene.prompt_len, note)
        passes = passes_of(engine, before)
        _step_until_more(engine, arrivals, AFTER, note)
        rate = count * scene.prompt_len / (max(ends) - began)
        ttfts = [end - began for end in ends]
        one = _measured(scene, count, list(arrivals.values()), began, max(ends), ttfts, rate, alone[count])
        found.append(replace(one, passes=passes))
    for name in arrivals:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    return found


def _request(engine: Any, rng: random.Random, name: str, length: int, output: int) -> Any:
    from unisono.types import EngineRequest, SamplingParams

    vocab = engine.checkpoint.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0)
    return EngineRequest(name, [rng.randrange(vocab) for _ in range(length)], params)


Note = Callable[[float, Sequence[Any]], None]


def _prompts_in_engine(
    engine: Any, rng: random.Random, names: Any, count: int, length: int, note: Note
) -> tuple[float, list[float]]:
    """Add simultaneous prompts and step to their ends -> (time of addition, times of the first tokens)."""
    requests = [_request(engine, rng, next(names), length, 1) for _ in range(count)]
    left, ends, began = {one.request_id for one in requests}, [], now()
    for one in requests:
        engine.add(one)
    while left:
        deltas = engine.step()
        at = now()
        note(at, deltas)
        for delta in deltas:
            if delta.request_id in left and delta.token_ids:
                left.discard(delta.request_id)
                ends.append(at)
    return began, ends


def _step_until_more(engine: Any, arrivals: dict[str, list[float]], count: int, note: Note) -> None:
    goals = {name: len(times) + count for name, times in arrivals.items()}
    while any(len(arrivals[name]) < goal for name, goal in goals.items()):
        deltas = engine.step()
        note(now(), deltas)
