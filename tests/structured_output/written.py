"""Texts written at random under the masks of a form, for tests that what masks allow is valid."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from benchmarks.text_check import END, TextCheck
from unisono.structured_output.json_schema.refs import References
from unisono.structured_output.json_schema.values import Validator


def written(form: TextCheck, chance: random.Random, length: int = 120) -> str | None:
    """A text that masks allow, token by token; None where it did not end."""
    matcher, text = form.matcher(), bytearray()
    for _ in range(length):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if END in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return text.decode()
        allowed = [token for token in allowed if token < 128] or allowed
        closing = [token for token in allowed if chr(token) in '"]}']
        likely = [token for token in allowed if chr(token) in '"ab01,:]}'] if chance.random() < 0.6 else []
        token = chance.choice((closing if len(text) > length - 60 else likely) or allowed)
        assert matcher.consume_token(token), "a mask allows what is not taken"
        text.append(token)
    return None


def check_written(schema: Any, form: TextCheck, chance: random.Random, times: int) -> int:
    references, count = References(schema), 0
    for _ in range(times):
        text = written(form, chance)
        if text is not None:
            assert Validator(references).valid(json.loads(text), references.root), (schema, text)
            count += 1
    return count
