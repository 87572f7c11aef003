"""Prints, for small models of each kind, the launches of a round without fused kernels and with them, as JSON lines."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from tests.kernels.launches import launches
from tests.models.harness import Session, load
from tests.models.make import make_checkpoint
from unisono.layers.formats.experts_quantised import Fp8Experts
from unisono.layers.formats.fp8 import _Fp8
from unisono.models.blocks.decoder import Decoder

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DENSE = {"hidden_size": 256, "intermediate_size": 384, **HEADS}
HYBRID = {"hidden_size": 128, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "head_dim": 64}
PROMPT = [7 * i % 251 for i in range(40)]


def of_round(decoder: Decoder, width: int = 1) -> Counter[str]:
    """Launches of a round of one row."""
    session = Session(decoder, 1, 64)
    session.extend({0: PROMPT[:20]})
    return launches(lambda: session.round(width, {0: PROMPT[20 : 20 + width]}))


def without_wishes(patch: Callable[..., object]) -> None:
    """No layer asks for quantised inputs, so each quantises its own. patch: as ``setattr``."""
    for kind in (_Fp8, Fp8Experts):
        patch(kind, "input_format", lambda *given: None)


def main() -> None:
    with tempfile.TemporaryDirectory() as base:
        dense = make_checkpoint(Path(base) / "dense", "qwen3", num_hidden_layers=4, tokenizer=False, **DENSE)
        hybrid = make_checkpoint(Path(base) / "hybrid", "qwen3_5_moe_text", tokenizer=False, **HYBRID)
        for name, path, quantization in (
            ("a dense model", dense, "fp8"), ("a hybrid with experts", hybrid, "fp8"),
        ):  # fmt: skip
            with ExitStack() as stack:
                without_wishes(lambda *given, stack=stack: stack.enter_context(mock.patch.object(*given)))
                before = of_round(load(path, quantization=quantization)).total()
            after = of_round(load(path, quantization=quantization)).total()
            print(json.dumps([f"{name}, {quantization or 'plain'}, 4 layers", before, after]), flush=True)


if __name__ == "__main__":
    main()
