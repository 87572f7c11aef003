"""The training text of the bundled model: chat, maths and Python. Each part of a document has a loss weight.

This module does not import torch. The workers of ``batches`` call ``document``, and ``standard_library`` once each.
"""

from __future__ import annotations

import builtins
import keyword
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from random import Random

from training.tiny.data import train_problem
from training.tiny.retell import retell
from training.tiny.skeletons import parse
from training.tiny.stories import CHOICE, Problem

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END, START, STOP)

ASKED = 0.1
"""Loss weight of user turns. Assistant turns and plain text have weight 1."""

Document = list[tuple[str, float]]
"""(text, loss weight) of each part."""

SYSTEMS = (
    "You are a helpful assistant.",
    "You are Unisono's bundled tiny model.",
    "You solve maths word problems step by step.",
    "Answer briefly.",
    "You are a careful maths tutor. Show your work.",
    "You are a helpful assistant. Give the final answer after ####.",
    "Think step by step.",
    "Be kind and short.",
)
ASIDES = (
    "{} Think step by step.",
    "Solve this problem: {}",
    "Problem: {}",
    "{} Show your work.",
    "Question: {}",
    "Please solve: {}",
    "{} Give the final answer after ####.",
    "{}\nLet's think step by step.",
    "Can you solve this? {}",
    "{} Explain.",
)
WRITE = (
    "Write a Python function that {}.",
    "Write Python code that {}.",
    "Show me code that {}.",
    "Write a function that {}",
)
CONTINUE = (
    "{}",
    "Continue: {}",
    "Continue this code:\n{}",
    "Complete this function: {}",
    "```python\n{}\n```",
)
"""User turns that ask to continue the beginning of a function."""

_NAME = re.compile(r"\b[a-z_][a-z0-9_]{2,}\b")
_RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"})

_HERE = Path(__file__).parent
_EXCHANGES = parse((_HERE / "chat.txt").read_text(), held_out=False)
_SNIPPETS = [block.split("\n", 1) for block in ("\n" + (_HERE / "snippets.txt").read_text()).split("\n## ")[1:]]


def document(rng: Random, library: list[str], conversation: Callable[[Random], Document] | None = None) -> Document:
    """A random document: mostly maths in chat form; also small talk, code snippets and the standard library.

    conversation: makes the documents in chat form, in place of those without thinking.
    """
    draw = rng.random()
    if draw < 0.87:
        return (conversation or _conversation)(rng)
    if draw < 0.92:
        problem = train_problem(rng)
        return [(f"Question: {retell(problem.question, rng)}\nAnswer:", ASKED), (f" {problem.worked_answer}{END}", 1.0)]
    if draw < 0.96:
        picked = rng.sample(_SNIPPETS, rng.randint(1, 4))
        return [("\n\n\n".join(code.strip() for _, code in picked) + "\n" + END, 1.0)]
    return _library_part(rng, library)


def standard_library() -> list[str]:
    """The Python sources of the interpreter's standard library, without generated tables."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    texts = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - skip)
        for name in sorted(files):
            text = (Path(folder) / name).read_text(errors="replace") if name.endswith(".py") else ""
            if text.isascii() and 200 < len(text) < 400_000:
                texts.append(text)
    return texts


def _conversation(rng: Random) -> Document:
    turns = 1 if rng.random() < 0.82 else rng.randint(2, 5)
    pieces: Document = []
    if rng.random() < 0.2:
        pieces.append((f"{START}system\n{rng.choice(SYSTEMS)}{STOP}\n", 0.0))
    for _ in range(turns):
        question, answer, _ = exchange(rng)
        pieces.append((f"{START}user\n{question}{STOP}\n", ASKED))
        pieces.append((f"{START}assistant\n", 0.0))
        pieces.append((f"{answer}{STOP}\n", 1.0))
    return [*pieces, (END, 1.0)]


def exchange(rng: Random) -> tuple[str, str, Problem | None]:
    """A random user turn, its answer, and the problem that is asked, if it is one."""
    draw = rng.random()
    if draw < 0.12:
        talk = rng.choice(_EXCHANGES)
        asked = CHOICE.sub(lambda m: rng.choice(m[1].split("|")), rng.choice(talk.wordings))
        return asked.strip(), rng.choice(talk.steps), None
    if draw < 0.15:
        name, code = rng.choice(_SNIPPETS)
        first = code.strip().partition("\n")[0]
        asked = rng.choice(WRITE).format(name) if rng.random() < 0.6 else rng.choice(CONTINUE).format(first)
        return asked, f"```python\n{code.strip()}\n```", None
    problem = train_problem(rng)
    aside = rng.choice(ASIDES) if rng.random() < 0.12 else "{}"
    return aside.format(retell(problem.question, rng)), problem.worked_answer, problem


def _library_part(rng: Random, library: list[str]) -> Document:
    """A part of a source file, from its top or from a random line; some parts get other names."""
    text = rng.choice(library)
    size = rng.randint(500, 4000)
    start = 0 if rng.random() < 0.3 else text.find("\n", rng.randrange(len(text))) + 1
    part, whole = text[start : start + size], start + size >= len(text)
    if rng.random() < 0.4:
        part = _rename(part, rng, rng.choice(library))
    return [(part, 1.0), (END, 1.0 if whole else 0.0)]


def _rename(text: str, rng: Random, source: str) -> str:
    """Replace some names in a text by names from ``source``, so that the model cannot memorise the library."""
    names, others = (sorted(set(_NAME.findall(t)) - _RESERVED) for t in (text, source[:20_000]))
    if not others:
        return text
    new = {name: rng.choice(others) for name in names if rng.random() < 0.35}
    return _NAME.sub(lambda m: new.get(m[0], m[0]), text)
