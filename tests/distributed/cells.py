"""Every bundled model with every drafter that drafts for it, for runs on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.requests_ import spec
from tests.drafters.make_blocks import make_dflash, make_dspark
from tests.drafters.make_frozen import random_weights
from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.engine.matrix import TREES, config_of
from tests.models.make_mtp import write_alone
from unisono.config import catalog
from unisono.types import SpeculativeConfig

COUNT = int(os.environ.get("UNISONO_CELL_REQUESTS", "200"))
"""Requests of a cell; each runs twice, the second time with prefix hits."""

Cell = Callable[[Path], tuple[str, SpeculativeConfig]]
"""From an empty folder to a model and its drafter."""


def _bundled(target: str, method: str, /, **given: Any) -> Cell:
    given = given if method == "none" or "topk" in given else {"num_speculative_tokens": 3, **given}
    return lambda folder: (target, spec(method, **given))


def _made(model: str, method: str, make: Callable[[Path, Path], Path]) -> Cell:
    """With a head of random weights. make: (directory of the target, empty folder) -> the head's directory."""
    return lambda folder: (
        model,
        spec(method, model=str(make(catalog.bundled_path(model), folder / "head")), num_speculative_tokens=3),
    )


def _eagle(target: Path, folder: Path) -> Path:
    return make_eagle(folder, config_of(target), num_attention_heads=4).path


def _eagle3(target: Path, folder: Path) -> Path:
    return make_eagle3(folder, config_of(target), (2, 1, 3), aux=[2, 1, 3], num_attention_heads=4).path


def _dflash(target: Path, folder: Path) -> Path:
    return make_dflash(folder, config_of(target), (0, 1), num_attention_heads=8, num_key_value_heads=4).path


def _dspark(target: Path, folder: Path) -> Path:
    return make_dspark(folder, config_of(target), (0, 1), num_attention_heads=8, num_key_value_heads=4).path


def _frozen(target: Path, folder: Path) -> Path:
    return write_alone(folder, random_weights(target, heads=4))  # as many as four ranks can share


TREE = TREES["binary"]

CELLS: dict[str, Cell] = {
    "tiny": _bundled("tiny", "none"),
    "tiny-hybrid": _bundled("tiny-hybrid", "none"),
    "tiny-hybrid, mtp": _bundled("tiny-hybrid", "mtp", num_speculative_tokens=2),
    "tiny, eagle3": _bundled("tiny", "eagle3", model="tiny-eagle3"),
    "tiny, eagle3 tree": _bundled("tiny", "eagle3", model="tiny-eagle3", **TREE),
    "tiny, mtp": _bundled("tiny", "mtp", model="tiny-mtp"),
    "tiny, ngram": _bundled("tiny", "ngram"),
    "tiny, suffix": _bundled("tiny", "suffix"),
    "tiny, standalone": _bundled("tiny", "standalone", model="tiny-draft"),
    "tiny, eagle": _bundled("tiny", "eagle", model="tiny-eagle"),
    "tiny, mtp_frozen": _made("tiny", "mtp_frozen", _frozen),
    "tiny, dflash": _made("tiny", "dflash", _dflash),
    "tiny, dspark": _made("tiny", "dspark", _dspark),
    "tiny-hybrid, dflash": _made("tiny-hybrid", "dflash", _dflash),
    "tiny-hybrid, dspark": _made("tiny-hybrid", "dspark", _dspark),
    "tiny-hybrid, ngram": _bundled("tiny-hybrid", "ngram"),
    "tiny-hybrid, suffix": _bundled("tiny-hybrid", "suffix"),
    "tiny-hybrid, standalone": _bundled("tiny-hybrid", "standalone", model="tiny-draft"),
    "tiny-hybrid, eagle": _made("tiny-hybrid", "eagle", _eagle),
    "tiny-hybrid, eagle3": _made("tiny-hybrid", "eagle3", _eagle3),
    "tiny, ngram tree": _bundled("tiny", "ngram", **TREE),
    "tiny, standalone tree": _bundled("tiny", "standalone", model="tiny-draft", **TREE),
    "tiny, eagle tree": _bundled("tiny", "eagle", model="tiny-eagle", **TREE),
    "tiny-hybrid, ngram tree": _bundled("tiny-hybrid", "ngram", **TREE),
}

UNTRAINED = (
    "tiny, mtp_frozen", "tiny, dflash", "tiny, dspark", "tiny-hybrid, dflash", "tiny-hybrid, dspark",
    "tiny-hybrid, eagle", "tiny-hybrid, eagle3", "tiny-hybrid, standalone",
)  # fmt: skip
"""Cells in which a draft may never be accepted."""
