"""Requests made of an OpenAPI document: valid ones by its schemas, and ones that are wrong in some place."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.http import fuzz

SKIPPED = ("/sleep",)
"""Routes that would end the test: the server takes no more requests."""
TEXTS = ("Hi", "", "a", "x" * 300, "é💥", "\x00", "auto", "none", "text", "user", "fake", "resp_1", "../../etc/passwd")
NUMBERS = (0, 1, 2, -1, 3, 0.5, 1.5, 20, 128, 129, 2**31, 2**53, -(2**63), 1e300)
HINTS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "text": "Hi", "max_tokens": 2,
    "max_completion_tokens": 2, "max_output_tokens": 2, "model": "fake", "tokens": [1, 2],
    "sampling_params": {"max_new_tokens": 2},
}  # fmt: skip
"""Values of fields whose schema says too little to make one that is likely to be taken."""
DEEPEST = 4


@dataclass(frozen=True)
class Sent:
    """A request. body: None for none; else what is sent as it is."""

    method: str
    path: str
    body: bytes | None
    content_type: str = "application/json"


class Maker:
    """Makes requests of ``document``, the same ones for the same seed."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._chance = random.Random(seed)
        self._odd = fuzz.odd_values()
        self._schemas = document["components"]["schemas"]
        self._operations = [
            (method, path, operation)
            for path, operations in sorted(document["paths"].items())
            for method, operation in sorted(operations.items())
            if path not in SKIPPED
        ]

    @property
    def operations(self) -> int:
        return len(self._operations)

    def requests(self, count: int) -> Iterator[Sent]:
        """Every operation in turn; those with bodies several times as often."""
        made = 0
        while made < count:
            for method, path, operation in self._operations:
                for _ in range(6 if "requestBody" in operation else 1):
                    yield self._request(method, path, operation)
                    made += 1

    def _request(self, method: str, path: str, operation: dict[str, Any]) -> Sent:
        chance = self._chance
        query = []
        for parameter in operation.get("parameters", ()):
            value = self._text_of(parameter.get("schema", {}))
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", value or "x")
            elif chance.random() < 0.5:
                query.append(f"{parameter['name']}={value}")
        if query:
            path += "?" + "&".join(query)
        if chance.random() < 0.02:
            method = chance.choice(["get", "post", "put", "delete", "patch", "head", "options"])
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            return Sent(method, path, b"[1]" if chance.random() < 0.2 and method == "post" else None)
        text = fuzz.write(self._body(content["schema"]))
        if chance.random() < 0.05:  # garbled
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", "\x00", "]", '"', "\\ud800"]) + text[at + chance.randrange(3) :]
        kind = "application/json" if chance.random() < 0.98 else chance.choice(["text/plain", "", "application/xml"])
        return Sent(method, path, text.encode("utf-8", "replace"), kind)

    def _body(self, schema: dict[str, Any]) -> Any:
        """A body: valid as far as the schema says, or with some odd values in it, or none of that."""
        chance = self._chance
        if chance.random() < 0.03:
            return chance.choice(self._odd)
        body = self._value(schema, "", 0)
        for _ in range(chance.choice([0, 0, 1, 1, 2, 4])):
            if where := list(fuzz.places(body)):
                body = fuzz.replaced(body, chance.choice(where), chance.choice(self._odd))
        if chance.random() < 0.05 and isinstance(body, dict):
            body[chance.choice(["wibble", "", "\x00", "stream", "n", "model"])] = chance.choice(self._odd)
        return body

    def _value(self, schema: dict[str, Any], name: str, depth: int) -> Any:
        """A value of a schema. name: the field's."""
        chance = self._chance
        if name in HINTS and chance.random() < 0.8:
            return HINTS[name]
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return chance.choice(schema["enum"])
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return self._value(chance.choice(options), "", depth)
        kind = schema.get("type") or chance.choice(["string", "integer", "array", "object", "null"])
        if isinstance(kind, list):
            kind = chance.choice(kind)
        match kind:
            case "null":
                return None
            case "boolean":
                return chance.random() < 0.5
            case "integer":
                return int(min(chance.choice(NUMBERS), 2**63))
            case "number":
                return chance.choice(NUMBERS)
            case "string":
                return chance.choice(TEXTS)
            case "array" if depth < DEEPEST:
                return [self._value(schema.get("items", {}), "", depth + 1) for _ in range(chance.choice([0, 1, 1, 2]))]
            case "object" if depth < DEEPEST:
                return self._object(schema, depth)
        return [] if kind == "array" else {}

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """The required fields, with those that make a body be taken, and a few others."""
        chance, fields = self._chance, schema.get("properties", {})
        few = chance.choice([0.0, 0.02, 0.05, 0.1])
        chosen = [
            name
            for name in fields
            if (name in schema.get("required", ()) and chance.random() < 0.97)
            or (name in HINTS and chance.random() < 0.9)
            or chance.random() < few
        ]
        found = {name: self._value(fields[name], name, depth + 1) for name in chosen}
        if not fields and isinstance(schema.get("additionalProperties"), dict):
            found[chance.choice(TEXTS)] = self._value(schema["additionalProperties"], "", depth + 1)
        return found

    def _text_of(self, schema: dict[str, Any]) -> str:
        """A parameter in an address."""
        value = self._value(schema, "", 0) if self._chance.random() < 0.7 else self._chance.choice(TEXTS)
        quoted = json.dumps(value) if not isinstance(value, str) else value
        return "".join(c if c.isalnum() and c.isascii() else f"%{b:02X}" for c in quoted[:200] for b in c.encode()[:1])
