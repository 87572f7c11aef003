"""Files beside a checkpoint's weights: an odd value in any place of them works, or raises an error with its reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.hostile import VALUES
from unisono.config import mistral
from unisono.config.expert_placement import placement_of, read_placement
from unisono.config.sentence_files import text_rules
from unisono.config.untrusted_files import read_json
from unisono.frontend.pooling import pooling_of
from unisono.frontend.scores import head_of
from unisono.types import UnisonoError

MORE = [2**64, "a" * 10_000, [[[]]], {"0": None}, 1e-320, [True], "/etc/passwd", {"": ""}, [{}], [{"type": 1}]]
RAW = (b"\xff\xfe{}", b"[" * 100_000, b"", b'{"a":' + b"9" * 5000 + b"}", b"null", b"[]", b"1")
DENSE = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}
MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
]
FILES: dict[str, Any] = {
    "modules.json": MODULES,
    "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True},
    "2_Dense/config.json": DENSE,
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    "sentence_bert_config.json": {"max_seq_length": 10, "do_lower_case": False},
    "config.json": {
        "architectures": ["ModernBertForSequenceClassification"], "hidden_size": 8, "norm_eps": 1e-5,
        "matryoshka_dimensions": [4, 2], "id2label": {"0": "a"}, "problem_type": "regression",
        "sentence_transformers": {"activation_fn": "Identity"}, "classifier_pooling": "mean",
    },
    "placement.json": {"layers.0": [1, 0, 2, 3]},
    "info.json": {"engine": {"info": {"expert_tokens": {"a": [1, 2, 3, 4]}}}},
}  # fmt: skip


def pool(directory: Path) -> None:
    found = pooling_of(directory)
    if found.problem is None:
        found.check_dimensions(None, 8)
        found.pool(np.ones((3, 8), np.float32), None, True)
        found.prompted(["a"], None)


READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys((*[*FILES][:5], "config.json"), pool),
    "sentence_bert_config.json": text_rules,
    "placement.json": lambda directory: read_placement(str(directory / "placement.json")),
    "info.json": lambda directory: placement_of(read_json(directory / "info.json"), 2),
}
HEADS = {"config.json": lambda directory: head_of(directory, {}, None, "auto")}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.zeros(4, 8)}, tmp_path / "2_Dense/model.safetensors")
    tensors = {"head.dense.weight": torch.zeros(8, 8), "head.norm.weight": torch.ones(8)}
    save_file({**tensors, "classifier.weight": torch.zeros(1, 8)}, tmp_path / "model.safetensors")
    return tmp_path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(content: Any) -> Iterator[bytes]:
    """The file with each odd value in each of its places, and other files in place of it."""
    for path in places(content):
        for value in (*VALUES, *MORE):
            whole = {"": copy.deepcopy(content)}
            inner: Any = whole
            for key in ("", *path)[:-1]:
                inner = inner[key]
            inner[("", *path)[-1]] = value
            yield json.dumps(whole[""]).encode()
    yield from RAW


@pytest.mark.parametrize(
    ("name", "read"), [*READERS.items(), *HEADS.items()], ids=[*READERS, "config.json of a classifier"]
)
def test_odd_values_of_side_files(directory: Path, name: str, read: Callable[[Path], object]) -> None:
    read(directory)
    taken = refused = longest = 0
    for data in changed(FILES[name]):
        (directory / name).write_bytes(data)
        try:
            read(directory)
            taken += 1
        except UnisonoError as error:
            refused += 1
            longest = max(longest, len(str(error)))
    assert taken + refused > 50
    assert longest < 1200 + len(str(directory))
    assert refused or read is pool  # pooling_of tells a problem instead


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer_config.json", "generation_config.json"])
def test_native_checkpoints_with_files_that_are_no_text(tmp_path: Path, name: str) -> None:
    (tmp_path / mistral.NATIVE).write_text(json.dumps({"moe": {}, "kv_lora_rank": 4}))
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnisonoError, match="cannot be read"):
        mistral.described(tmp_path)


@pytest.mark.parametrize("value", [*VALUES, *MORE], ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("name", ["yarn", "llama_4_scaling"])
def test_native_rotary_values(tmp_path: Path, name: str, value: Any) -> None:
    usual = {"factor": 2, "original_max_position_embeddings": 16, "beta": 0.1}
    for odd in (value, *({**usual, key: value} for key in usual)):
        try:
            mistral._rope({name: odd}, tmp_path / mistral.NATIVE)
        except UnisonoError as error:
            assert name.partition("_")[0] in str(error)  # noqa: PT017
