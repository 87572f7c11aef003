"""Decoders without an LM head: classifiers, rerankers, reward models and embedding models.

``…ForSequenceClassification`` and ``…Model`` of transformers. The decoder is that of the family. The head (``score``)
is read by ``frontend/classifier.py`` and applied to the pooled states. The engine ties the LM head that it needs to the
embedding, and refuses requests for text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from unisono.config import catalog
from unisono.config.preflight.families import HEADLESS
from unisono.models.config import DecoderConfig, Family

UNREAD = {
    "score.": "the classifier's head: it is applied to the pooled states",
    "lm_head.": "a model of this architecture writes no text",
}


def __getattr__(architecture: str) -> Family:
    """The family of an architecture without a head. Raises AttributeError."""
    if architecture not in HEADLESS:
        raise AttributeError(architecture)
    return headless_of(architecture)


@cache
def headless_of(architecture: str) -> Family:
    """The family of such an architecture."""
    family: Family = catalog.models.load(HEADLESS[architecture])

    def read(hf_config: Any) -> DecoderConfig:
        return replace(family.read(hf_config), tie_embeddings=True)

    return replace(family, read=read, unread={**family.unread, **UNREAD}, tied_unless_stored=False)
