"""Reads prompts from a JSONL file and checks them. A line has one of three forms:

{"messages": [{"role": "user", "content": "…"}]}    the target answers the last user turn
{"prompt": "…"}                                     the target continues the text
{"text": "…"}                                       the draft model learns the text as it is
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest

FIELDS = ("messages", "prompt", "text")


@dataclass(frozen=True)
class TrainingPrompt:
    """Token ids of a prompt. complete: a ``text`` line, for which no answer is generated."""

    token_ids: list[int]
    complete: bool = False


def read_prompts(file: Path, tokenizer: Tokenizer, longest: int) -> list[TrainingPrompt]:
    """The prompts of a file in order, without duplicates.

    A text is truncated to ``longest`` tokens. Of a prompt the last ``longest`` / 2 tokens are kept. Raises BadRequest
    that names the wrong line and field.
    """
    if not file.is_file():
        raise BadRequest(f"{file} is not a file: give JSON lines with one of {', '.join(FIELDS)} each.", "data")
    found: dict[tuple[int, ...], TrainingPrompt] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt = _read_line(line, tokenizer, longest, f"{file}, line {number}")
                found.setdefault(tuple(prompt.token_ids), prompt)
    if len(found) < 2:
        raise BadRequest(
            f"{file} has {len(found)} different prompts: give at least 2, one of them to hold out.", "data"
        )
    return list(found.values())


def split_held_out(
    prompts: list[TrainingPrompt], count: int, seed: int
) -> tuple[list[TrainingPrompt], list[TrainingPrompt]]:
    """(training, held out), both in the file's order. ``count`` random prompts are held out, but at most a fifth."""
    count = max(1, min(count, len(prompts) // 5))
    held = set(Random(f"held out {seed}").sample(range(len(prompts)), count))
    return [p for i, p in enumerate(prompts) if i not in held], [prompts[i] for i in sorted(held)]


def _read_line(line: str, tokenizer: Tokenizer, longest: int, where: str) -> TrainingPrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadRequest(f"{where} is not JSON: {error}.", "data") from None
    if not isinstance(entry, dict):
        raise BadRequest(
            f"{where} holds {type(entry).__name__}, not an object with one of {', '.join(FIELDS)}.", "data"
        )
    field = next((name for name in FIELDS if name in entry), None)
    if field is None:
        raise BadRequest(f"{where} has {sorted(entry)}, but none of {', '.join(FIELDS)}.", "data")
    if field == "messages":
        text, special = _conversation(entry[field], tokenizer, where), False
    else:
        text, special = entry[field], True
        if not isinstance(text, str):
            raise BadRequest(f"{where}: {field} is {type(text).__name__}; it must be a string.", "data")
    ids = tokenizer.encode(text, add_special_tokens=special)
    if len(ids) < 2:
        raise BadRequest(f"{where}: {field} makes {len(ids)} tokens; at least 2 are needed.", "data")
    return TrainingPrompt(ids[:longest] if field == "text" else ids[-(longest // 2) :], field == "text")


def _conversation(messages: Any, tokenizer: Tokenizer, where: str) -> str:
    """The conversation up to its last user turn, in the chat template. Later turns are dropped."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRequest(f"{where}: messages must be a list of objects with role and content.", "data")
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise BadRequest(f"{where}: messages[{i}].{name} must be a string.", "data")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise BadRequest(f"{where}: messages has no user turn to answer.", "data")
    return tokenizer.apply_chat_template(messages[: users[-1] + 1])
