"""Bodies of ``unisono bench soak`` that need more than words: schemas, tools and their results, pictures, adapters.

All of it follows from a random generator, so a case asks the same whenever it is made with the same seed.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = ("Tom", "has", "three", "boxes", "of", "twelve", "pens", "and", "gives", "four", "away", "how", "many", "are")
FIELDS = ("name", "count", "price", "tags", "owner", "when", "ready", "note")
PATTERNS = ("[a-z]{2,6}", "[A-Z][0-9]{1,3}", "(yes|no)", "a+b?")
DEPTH = 2
"""Objects within objects of a schema."""
SIZES = (32, 48, 64)
"""Pixels of a picture's sides."""
PICTURES = 8
"""Different pictures, so that requests share some."""


@dataclass(frozen=True)
class Abilities:
    """Features of a server that some kinds of requests need. adapters: names of those that it has loaded."""

    adapters: tuple[str, ...] = ()
    pictures: bool = False

    @classmethod
    def read(cls, models: Mapping[str, Any], state: Mapping[str, Any]) -> Abilities:
        """The abilities that ``/v1/models`` and ``/page/state`` tell."""
        adapters = (str(one["id"]) for one in models["data"] if one.get("parent") is not None)
        return cls(tuple(adapters), state["model"]["pictures"] is not None)


def words(rng: random.Random, count: int) -> str:
    """A text of ``count`` words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


# ---- schemas and tools --------------------------------------------------------------------------


def schema(rng: random.Random, depth: int = DEPTH, most: int = 4) -> dict[str, Any]:
    """A JSON schema of an object with one to ``most`` properties, some of them optional."""
    names = rng.sample(FIELDS, rng.randint(1, most))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if depth == DEPTH and rng.random() < 0.3:
        made["$defs"] = {"shared": _value(rng, 0)}
        made["properties"]["more"] = {"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": 2}
    return made


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    """The schema of a property."""
    ways: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": rng.randint(1, 8)},
        lambda: {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"},
        lambda: {"enum": rng.sample([*WORDS[:6], 1, 2.5, True, None], 3)},
        lambda: {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 900)},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
        lambda: {"type": "string", "format": "date"},
        lambda: {"type": "array", "items": _value(rng, 0), "minItems": 1, "maxItems": rng.randint(1, 3)},
    ]
    if depth > 0:
        ways.append(lambda: schema(rng, depth - 1))
    return rng.choice(ways)()


def tools(rng: random.Random) -> list[dict[str, Any]]:
    """One or two functions with a few parameters, some of them strict: small models have small contexts."""
    return [
        {"type": "function", "function": {"name": name, "parameters": schema(rng, 0, 2), "strict": rng.random() < 0.6}}
        for name in ("add", "sell")[: rng.randint(1, 2)]
    ]


def choice(rng: random.Random, given: Sequence[Mapping[str, Any]]) -> Any:
    """A ``tool_choice`` for chat."""
    named: Any = {"type": "function", "function": {"name": given[0]["function"]["name"]}}
    return rng.choice(["auto", "required", named])


def called(rng: random.Random, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a conversation in which a function was called and has answered."""
    call = {"id": "call_1", "type": "function", "function": {"name": given[-1]["function"]["name"], "arguments": "{}"}}
    return [
        {"role": "system", "content": words(rng, 4)},
        {"role": "user", "content": words(rng, 8)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": words(rng, 3)},
        {"role": "user", "content": words(rng, 5)},
    ]


def tools_elsewhere(rng: random.Random, most: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request with tools in another API than chat. most: tokens of the answer."""
    name, parameters, text = "add", schema(rng, 1, 3), words(rng, 6)
    if rng.random() < 0.5:
        tool: dict[str, Any] = {"name": name, "input_schema": parameters}
        chosen: Any = rng.choice([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": name}])
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0}
        return "/v1/messages", {**body, "tools": [tool], "tool_choice": chosen}
    tool = {"type": "function", "name": name, "parameters": parameters, "strict": rng.random() < 0.5}
    chosen = rng.choice(["auto", "required", {"type": "function", "name": name}])
    body = {"input": text, "max_output_tokens": most, "temperature": 0, "store": False}
    return "/v1/responses", {**body, "tools": [tool], "tool_choice": chosen}


# ---- pictures -----------------------------------------------------------------------------------


def picture(number: int) -> str:
    """Base64 of a PNG with a coloured frame and a rectangle; ``number`` decides its size, colours and place."""
    rng = random.Random(f"picture {number % PICTURES}")
    width, height = rng.choice(SIZES), rng.choice(SIZES)
    colours = [bytes(rng.choice((0, 128, 255)) for _ in range(3)) for _ in range(2)]
    left, top = rng.randrange(width // 2), rng.randrange(height // 2)
    right, bottom = rng.randrange(left + 4, width), rng.randrange(top + 4, height)
    rows = []
    for y in range(height):
        inside = top <= y < bottom
        row = (colours[inside and left <= x < right] for x in range(width))
        rows.append(b"\0" + b"".join(row))  # no filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"".join(rows))), chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def seen(rng: random.Random) -> list[dict[str, Any]]:
    """Messages for chat with one or two pictures."""
    urls = [f"data:image/png;base64,{picture(rng.randrange(PICTURES))}" for _ in range(rng.randint(1, 2))]
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": words(rng, 5)}]}]


def seen_elsewhere(rng: random.Random, most: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request with a picture in another API than chat. most: tokens of the answer."""
    data, text = picture(rng.randrange(PICTURES)), words(rng, 5)
    if rng.random() < 0.5:
        image: dict[str, Any] = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }
        message = {"role": "user", "content": [image, {"type": "text", "text": text}]}
        return "/v1/messages", {"messages": [message], "max_tokens": most, "temperature": 0}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    items = [{"role": "user", "content": [image, {"type": "input_text", "text": text}]}]
    return "/v1/responses", {"input": items, "max_output_tokens": most, "temperature": 0, "store": False}
