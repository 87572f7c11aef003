"""The bundled model's heads: what they are trained on is kept apart from what measures them; one command makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.tiny import data
from training.tiny.heads import NAMES, TARGETS, make_prompts
from training.tiny.prompts import questions, write_prompts
from unisono.config import catalog
from unisono.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent


def test_prompts_are_conversations(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl", "train", 50)
    write_prompts(tmp_path / "test.jsonl", "test", 50)
    asked = {}
    for split in ("train", "test"):
        lines = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert all(list(line) == ["messages"] and len(line["messages"]) == 1 for line in lines)
        assert {line["messages"][0]["role"] for line in lines} == {"user"}
        asked[split] = [line["messages"][0]["content"] for line in lines]
        assert len(set(asked[split])) == 50
    assert asked["train"] == questions("train", 50) != questions("train", 50, seed=1)
    assert asked["test"] == [problem.question for _, problem in data.test_split(50)]


def test_training_prompts_exclude_held_out_questions() -> None:
    held = {problem.question for _, problem in data.test_split(500)}
    assert not held & set(questions("train", 3000))
    tokenizer = Tokenizer.load(catalog.bundled_path("tiny"))
    assert tokenizer is not None
    prompts = make_prompts("tiny", 220, workers=1)
    texts = [tokenizer.decode(p.token_ids, skip_special_tokens=False) for p in prompts]
    assert len(set(texts)) == 220
    assert not any(question in text for text in texts for question in held)
    assert 180 <= sum(text.startswith("<|im_start|>user") and text.endswith("assistant\n") for text in texts) < 220
    assert [p.token_ids for p in make_prompts("tiny", 220, workers=2)] == [p.token_ids for p in prompts]


def test_prompts_of_the_hybrid_end_in_a_thought() -> None:
    tokenizer = Tokenizer.load(catalog.bundled_path("tiny-hybrid"))
    assert tokenizer is not None
    texts = [
        tokenizer.decode(p.token_ids, skip_special_tokens=False) for p in make_prompts("tiny-hybrid", 44, workers=1)
    ]
    assert sum(text.endswith("assistant\n<think>\n") for text in texts) >= 40


def test_bundled_names_are_directories() -> None:
    heads = {f"{target}-{NAMES[method]}" for target, methods in TARGETS.items() for method in methods}
    for name in (*TARGETS, *heads):
        directory = catalog.bundled_path("tiny").parent / name
        assert (name in catalog.bundled) == directory.is_dir()
        if directory.is_dir():
            assert catalog.resolve_name(name) == directory
            assert (directory / "model.safetensors").stat().st_size <= 16 << 20
    assert catalog.resolve_name("no-such-head") == Path("no-such-head")


@pytest.mark.full
def test_one_command_makes_and_measures_them(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "training.tiny.heads", "--out", str(tmp_path), "--minutes", "1", "--prompts", "22",
        "--problems", "2", "--steps", "1", "--batch-tokens", "512", "--workers", "1", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows] == ["method", "none", "ngram", *NAMES]
    assert all(row.endswith("| yes |") for row in rows[1:])
    files = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    assert files == sorted(
        f"tiny-{name}/{file}" for name in NAMES.values() for file in ("config.json", "model.safetensors")
    )
