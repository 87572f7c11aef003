"""Checkpoints that were broken, or made to harm: each a change of a good directory."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unisono.models.load.checkpoint import INDEX, WEIGHTS

Change = Callable[[Path], None]


def config(**changes: Any) -> Change:
    """config.json with these values; NaN and Infinity are written as Python does."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def rope(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        found = json.loads(file.read_text())
        found["rope_parameters"] = {**(found.get("rope_parameters") or {}), **changes}
        file.write_text(json.dumps(found))

    return change


def generation(**changes: Any) -> Change:
    return lambda directory: (directory / "generation_config.json").write_text(json.dumps(changes)) and None


def text(name: str, content: str | bytes) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def fifo(name: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def link(name: str, target: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)

    return change


def index(weight_map: Any) -> Change:
    def change(directory: Path) -> None:
        (directory / WEIGHTS).unlink()
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """The safetensors header, edited; the data as it was."""

    def change(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + size])
        written = edit(found)
        new = written if isinstance(written, bytes) else json.dumps(found).encode()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        edit(tensors)
        save_file(tensors, directory / WEIGHTS)

    return change


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header[next(name for name in header if name != "__metadata__")]


def _overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def _poison(value: float) -> Change:
    return weights(lambda tensors: tensors["model.norm.weight"].__setitem__(3, value))


DEEP = "[" * 200_000 + "]" * 200_000

HOSTILE: dict[str, Change] = {
    "10^9 layers": config(num_hidden_layers=10**9),
    "10^30 layers": config(num_hidden_layers=10**30),
    "-1 layers": config(num_hidden_layers=-1),
    "layers of text": config(num_hidden_layers="many"),
    "10^12 wide": config(hidden_size=10**12),
    "vocabulary of 10^12": config(vocab_size=10**12),
    "vocabulary of 10^7": config(vocab_size=10**7),
    "2 million wide MLP": config(intermediate_size=2 * 10**6),
    "heads without number": config(num_attention_heads=0),
    "NaN sizes": config(hidden_size=float("nan")),
    "no positions": config(max_position_embeddings=10**18),
    "EOS 10^12": config(eos_token_id=10**12),
    "EOS 10^12 in generation_config": generation(eos_token_id=[10**12]),
    "10^5 EOS ids": generation(eos_token_id=list(range(10**5))),
    "NaN temperature": generation(temperature=float("nan")),
    "generation_config that is a FIFO": fifo("generation_config.json"),
    "rope_theta NaN": rope(rope_theta=float("nan")),
    "rope_theta 0": rope(rope_theta=0),
    "rope_theta below 0": rope(rope_theta=-1e4),
    "rope_theta of text": rope(rope_theta="big"),
    "rope_theta infinite": rope(rope_theta=float("inf")),
    "unknown rope type": rope(rope_type="wibble", factor=2.0),
    "rope factor 0": rope(rope_type="linear", factor=0.0),
    "rope type of numbers": rope(rope_type=5),
    "quantization_config of a list": config(quantization_config=[1, 2]),
    "quantization_config without anything": config(
        quantization_config={"quant_method": "fp8", "weight_block_size": "x"}
    ),
    "architectures of numbers": config(architectures=[5]),
    "architectures of lists": config(architectures=[["a"]]),
    "layer_types of 10^6": config(layer_types=["full_attention"] * 10**6),
    "config.json nested deeply": text("config.json", '{"a": ' + DEEP + "}"),
    "config.json that is a FIFO": fifo("config.json"),
    "config.json of zeros": link("config.json", "/dev/zero"),
    "config.json that is a link to itself": link("config.json", "config.json"),
    "config.json of 5,000 digits": text("config.json", '{"a": ' + "9" * 5000 + "}"),
    "config.json that is no UTF-8": text("config.json", b"\xff\xfe{}"),
    "weights that are a FIFO": fifo(WEIGHTS),
    "weights that are a device": link(WEIGHTS, "/dev/zero"),
    "weights that are a link out": link(WEIGHTS, "/etc/passwd"),
    "a link out for a tokenizer": link("tokenizer.json", "/etc/passwd"),
    "a tokenizer that is a FIFO": fifo("tokenizer.json"),
    "a template that is a FIFO": fifo("chat_template.jinja"),
    "an endless template": link("chat_template.jinja", "/dev/zero"),
    "a template of 10 MB": text("chat_template.jinja", "x" * 10_000_000),
    "index of lists": index({"a": ["b"]}),
    "index of objects": index({"a": {"b": 1}}),
    "index of numbers": index({"a": 5}),
    "index that leads out": index({"a": "../../../etc/passwd"}),
    "index of absolute names": index({"a": "/etc/passwd"}),
    "index of nothing": index({}),
    "index that is a list": index(["a"]),
    "index of NUL": index({"a": "a\0b"}),
    "index nested deeply": text(INDEX, DEEP),
    "index that is a FIFO": fifo(INDEX),
    "header of 2^62 bytes": text(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"),
    "header of 100 MB": text(WEIGHTS, struct.pack("<Q", 10**8) + b" " * 100),
    "header nested deeply": header(lambda h: ('{"a": ' + DEEP + "}").encode()),
    "header of lists": header(lambda h: b'{"a": []}'),
    "header of huge shapes": header(lambda h: _first(h).update(shape=[2**40, 2**40])),
    "header of negative offsets": header(lambda h: _first(h).update(data_offsets=[-4, 0])),
    "header of offsets beyond the file": header(lambda h: _first(h).update(data_offsets=[0, 2**50])),
    "header of an unknown dtype": header(lambda h: _first(h).update(dtype="F7")),
    "overlapping tensors": header(_overlap),
    "truncated": lambda directory: os.truncate(directory / WEIGHTS, 5000),
    "NaN weights": _poison(float("nan")),
    "infinite weights": _poison(float("inf")),
}


def garble(directory: Path, chance: random.Random) -> str:
    """One random change of a file; returns what it was."""
    kind = chance.choice(["config", "config", "header", "bytes", "cut", "index"])
    if kind == "config":
        file = directory / "config.json"
        found = json.loads(file.read_text())
        name = chance.choice([*found, "rope_scaling", "quantization_config", "sliding_window", "layer_types"])
        value = chance.choice(VALUES)
        found[name] = value
        file.write_text(json.dumps(found))
        return f"{name}={str(value)[:60]}"
    if kind == "header":
        part, value = chance.choice(["dtype", "shape", "data_offsets"]), chance.choice(VALUES)
        header(lambda h: h[chance.choice([n for n in h if n != "__metadata__"])].update({part: value}))(directory)
        return f"header {part}={str(value)[:60]}"
    if kind == "index":
        names = {chance.choice(["a", "model.norm.weight"]): value for value in chance.sample(VALUES, 3)}
        index(names)(directory)
        return f"index {str(names)[:80]}"
    data = bytearray((directory / WEIGHTS).read_bytes())
    if kind == "cut":
        end = chance.randrange(len(data))
        (directory / WEIGHTS).write_bytes(data[:end])
        return f"cut at {end}"
    (size,) = struct.unpack("<Q", data[:8])
    places = [chance.randrange(8 + size) for _ in range(chance.choice([1, 1, 3, 20]))]
    for place in places:
        data[place] = chance.randrange(256)
    (directory / WEIGHTS).write_bytes(data)
    return f"bytes {places[:4]}"


VALUES: list[Any] = [
    None, True, 0, -1, 1, 7, 2**31, 2**63, 10**12, 10**40, 0.0, -1.5, 1e300, float("nan"), float("inf"), "", "x",
    "float7",
    [], [None], [1, 2], [-1], ["x"], [[1]], {}, {"a": 1}, {"rope_type": "wibble"}, {"quant_method": "fp8"},
    {"quant_method": "gptq", "bits": "four"}, {"type": ["x"]}, [10**9], "../x", "/dev/zero",
]  # fmt: skip
