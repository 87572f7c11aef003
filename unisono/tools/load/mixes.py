"""Request mixes: conversations of one or several turns, with a number of output tokens for each.

``random``: random prompts of fixed or uniformly drawn lengths. ``prefix_repetition``: a few long prefixes, each
followed by many suffixes. ``conversation``: chats with shared system prompts, whose later turns repeat the earlier
ones, real answers included. ``custom``: a JSONL file. Names and flags are vLLM's where it has them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.tools.load.prompts import Prompt, PromptSource, span
from unisono.types import ConfigError


@dataclass(frozen=True)
class Turn:
    """One request.

    prompt: the user's message. prompt_len: its tokens, as far as they can be counted here.

    output_len: most tokens to generate; None: the server's default.
    """

    prompt: Prompt
    prompt_len: int
    output_len: int | None


@dataclass(frozen=True)
class Conversation:
    """Turns of one user. system: text before them. messages: a chat that is sent as it is, instead of the prompt."""

    turns: tuple[Turn, ...]
    system: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class MixFlags:
    """The flags of a mix; lengths are numbers of tokens, ``N`` or ``A:B``."""

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 1000
    random_input_len: str = "1024"
    random_output_len: str = "128"
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: str = "256"
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: str = "128"
    conversation_turns: str = "1:6"
    conversation_system_len: int = 256
    conversation_num_systems: int = 4
    conversation_input_len: str = "16:256"
    conversation_output_len: str = "32:256"
    custom_output_len: int = 256


def conversations(flags: MixFlags, source: PromptSource, seed: int) -> list[Conversation]:
    """``num_prompts`` requests in all, a function of flags, source and seed. Raises ConfigError."""
    if flags.dataset_name not in MIXES:
        raise ConfigError(
            f"--dataset-name {flags.dataset_name!r} is unknown; choose from {', '.join(MIXES)}. custom reads the "
            "prompts of a JSONL file."
        )
    found: list[Conversation] = []
    left = flags.num_prompts
    for one in MIXES[flags.dataset_name](flags, source, random.Random(seed)):
        turns = one.turns[:left]
        found.append(Conversation(turns, one.system, one.messages))
        left -= len(turns)
        if not left:
            break
    return found


def _lengths(flag: str, text: str, ratio: float, rng: random.Random) -> Iterator[int]:
    """Lengths of ``N``, ``A:B``, or N × (1 ± ratio) as in vLLM's --random-range-ratio."""
    low, high = span(flag, text)
    if ratio:
        if low != high:
            raise ConfigError(f"{flag} {text}: a range and --random-range-ratio exclude each other; give one of them.")
        if not 0 <= ratio < 1:
            raise ConfigError(f"--random-range-ratio {ratio:g}: give a number from 0 to below 1.")
        low, high = max(1, int(low * (1 - ratio))), int(high * (1 + ratio))
    while True:
        yield rng.randint(low, high)


def _random(flags: MixFlags, source: PromptSource, rng: random.Random) -> Iterator[Conversation]:
    ratio = flags.random_range_ratio
    inputs = _lengths("--random-input-len", flags.random_input_len, ratio, rng)
    outputs = _lengths("--random-output-len", flags.random_output_len, ratio, rng)
    prefix = source.prompt(rng, flags.random_prefix_len) if flags.random_prefix_len else None
    for length, output in zip(inputs, outputs, strict=True):
        own = source.prompt(rng, length)
        yield Conversation((Turn(_joined(prefix, own), flags.random_prefix_len + length, output),))


def _prefix_repetition(flags: MixFlags, source: PromptSource, rng: random.Random) -> Iterator[Conversation]:
    length, count = flags.prefix_repetition_prefix_len, flags.prefix_repetition_num_prefixes
    prefixes = [source.prompt(rng, length) for _ in range(count)]
    suffixes = _lengths("--prefix-repetition-suffix-len", flags.prefix_repetition_suffix_len, 0, rng)
    outputs = _lengths("--prefix-repetition-output-len", flags.prefix_repetition_output_len, 0, rng)
    for own, output in zip(suffixes, outputs, strict=True):
        yield Conversation((Turn(_joined(rng.choice(prefixes), source.prompt(rng, own)), length + own, output),))


def _conversation(flags: MixFlags, source: PromptSource, rng: random.Random) -> Iterator[Conversation]:
    if source.as_ids:
        raise ConfigError("--dataset-name conversation repeats answers as text; leave out --token-ids.")
    systems = [source.text(rng, flags.conversation_system_len) for _ in range(flags.conversation_num_systems)]
    turns = _lengths("--conversation-turns", flags.conversation_turns, 0, rng)
    inputs = _lengths("--conversation-input-len", flags.conversation_input_len, 0, rng)
    outputs = _lengths("--conversation-output-len", flags.conversation_output_len, 0, rng)
    for count in turns:
        chat_turns = tuple(Turn(source.text(rng, length := next(inputs)), length, next(outputs)) for _ in range(count))
        yield Conversation(chat_turns, rng.choice(systems))


def _custom(flags: MixFlags, source: PromptSource, rng: random.Random) -> Iterator[Conversation]:
    """Lines {"prompt": text or token ids} or {"messages": [...]}, with an optional "output_len" or "max_tokens"."""
    if flags.dataset_path is None:
        raise ConfigError("--dataset-name custom needs --dataset-path, a JSONL file.")
    try:
        lines = flags.dataset_path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--dataset-path {flags.dataset_path}: cannot be read: {reason}.") from None
    known = [_line(flags, source, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not known:
        raise ConfigError(f"--dataset-path {flags.dataset_path}: has no lines.")
    while True:  # a short file is repeated
        yield from known


def _line(flags: MixFlags, source: PromptSource, number: int, line: str) -> Conversation:
    where = f"--dataset-path {flags.dataset_path}, line {number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not valid JSON: {error}.") from None
    data = data if isinstance(data, dict) else {}
    prompt: Any = data.get("prompt")
    messages = data.get("messages")
    output = data.get("output_len", data.get("max_tokens", flags.custom_output_len))
    if not isinstance(output, int) or output < 1:
        raise ConfigError(f"{where}: output_len {output!r} must be a number from 1 on.")
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return Conversation((Turn("", 0, output),), messages=tuple(messages))
    ids = isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise ConfigError(f'{where}: needs "prompt", a text or a list of token ids, or "messages", a list of them.')
    return Conversation((Turn(prompt, source.count(prompt), output),))


def _joined(prefix: Prompt | None, own: Prompt) -> Prompt:
    return own if prefix is None else prefix + own  # type: ignore[operator]


Mix = Callable[[MixFlags, PromptSource, random.Random], Iterator[Conversation]]
MIXES: dict[str, Mix] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "conversation": _conversation,
    "custom": _custom,
}
"""Name of a mix -> an endless iterator of its conversations."""


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Arrival times of ``count`` requests in seconds, ``rate`` per second on average.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less is burstier, more is more
    even.
    An infinite rate: all at 0.
    """
    if rate == float("inf"):
        return [0.0] * count
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
