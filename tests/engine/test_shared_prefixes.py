"""Prefix hits of hybrids: how much of a shared beginning the second request finds, and that the bytes stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine
from tests.models.fields import END
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.kv.specs import PAGE_SIZE
from unisono.types import SamplingParams, SpeculativeConfig

FLAGS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4, "dtype": "float32", "max_num_batched_tokens": 512}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3)


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


@dataclass
class Seen:
    """Output ids, cached tokens and prompt lengths of a load's requests, in order."""

    ids: list[list[int]]
    cached: list[int]
    lengths: list[int]

    @property
    def rate(self) -> float:
        return sum(self.cached) / sum(self.lengths)


def ask(llm: LLM, seen: Seen, prompt: list[int]) -> list[int]:
    (output,) = llm.generate([prompt], PARAMS)
    ids = output.outputs[0].token_ids
    seen.ids.append(ids)
    seen.cached.append(output.num_cached_tokens)
    seen.lengths.append(len(prompt))
    return ids


def common_beginning(llm: LLM, seen: Seen) -> None:
    """Four prompts of 144 tokens with 130 in common: vLLM #54360's case in small."""
    rng = random.Random(1)
    shared = text(rng, 130)
    for _ in range(4):
        ask(llm, seen, [*shared, *text(rng, 14)])


def system_prompt(llm: LLM, seen: Seen) -> None:
    """Chats of a system prompt and one question each."""
    rng = random.Random(2)
    system = [*text(rng, 300), END]
    for _ in range(6):
        ask(llm, seen, [*system, *text(rng, 60 + rng.randrange(120)), END, 260])


def two_turns(llm: LLM, seen: Seen) -> None:
    """Chats of two turns with one system prompt; the second turn has the first one's answer."""
    rng = random.Random(3)
    system = [*text(rng, 200), END]
    for _ in range(3):
        first = [*system, *text(rng, 50), END, 260]
        ask(llm, seen, [*first, *ask(llm, seen, first), END, *text(rng, 40), END, 260])


def agent_loop(llm: LLM, seen: Seen) -> None:
    """Two agents with the same tools, four steps each; every step adds a call and its result."""
    rng = random.Random(4)
    tools = [*text(rng, 400), END]
    for _ in range(2):
        history = [*tools, *text(rng, 40), END, 260]
        for _ in range(4):
            history += [*ask(llm, seen, history), END, *text(rng, 50), END, 260]


LOADS: dict[str, Callable[[LLM, Seen], None]] = {
    load.__name__: load for load in (common_beginning, system_prompt, two_turns, agent_loop)
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", tokenizer=False, max_position_embeddings=1024
    )


def run(hybrid: Path, **flags: Any) -> dict[str, Seen]:
    """Each load on an empty cache."""
    found = {}
    with engine(hybrid, **FLAGS, **flags) as llm:
        for name, load in LOADS.items():
            llm.engine.reset_prefix_cache()
            found[name] = Seen([], [], [])
            load(llm, found[name])
        llm.engine.check_integrity()
    return found


@pytest.fixture(scope="module")
def before(hybrid: Path) -> dict[str, Seen]:
    return run(hybrid, snapshot_points=0)


@pytest.fixture(scope="module")
def after(hybrid: Path) -> dict[str, Seen]:
    return run(hybrid)


def test_the_second_request_hits(before: dict[str, Seen], after: dict[str, Seen]) -> None:
    """`-s` prints the rates of lab/2026-11-27-second-request.md."""
    assert before["common_beginning"].cached == [0, 0, 128, 128]
    assert after["common_beginning"].cached == [0, 128, 128, 128]
    assert after["system_prompt"].cached == [0] + 5 * [301 // PAGE_SIZE * PAGE_SIZE]
    for name in LOADS:
        print(f"{name}: hit rate {before[name].rate:.3f} -> {after[name].rate:.3f}")
        assert after[name].rate > before[name].rate


def test_the_bytes_are_those_without_a_cache(hybrid: Path, before: dict[str, Seen], after: dict[str, Seen]) -> None:
    plain = run(hybrid, enable_prefix_caching=False)
    assert not any(any(seen.cached) for seen in plain.values())
    for name in LOADS:
        assert before[name].ids == after[name].ids == plain[name].ids, name


@pytest.mark.full
def test_drafts_do_not_change_the_hits(hybrid: Path, after: dict[str, Seen]) -> None:
    drafted = run(hybrid, speculative=NGRAM)
    for name in LOADS:
        assert (drafted[name].ids, drafted[name].cached) == (after[name].ids, after[name].cached), name
