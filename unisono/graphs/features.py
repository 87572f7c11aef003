"""Key of a graph: program, shape, and the optional parts of a pass."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class PassShape:
    """Shape that a graph is captured for.

    rows: padded number of requests (rounds) or of tokens (extend, mixed).
    width: tokens per row: 1 + k in a round, 1 in an extend pass. In a mixed pass, 1 + the number of requests that
        decode in it, one token each; the other tokens belong to prompts.
    """

    rows: int
    width: int = 1


class Hidden(enum.IntEnum):
    """Hidden states that a pass must return. Ordered: each level includes the levels before, except AUX."""

    NULL = 0  # none
    LAST = 1  # of each row's last token in a prompt pass; in a round as FULL
    FULL = 2  # of every token, after the last layer
    AUX = 3  # of every token, from the layers in Features.aux_layers


class Logits(enum.IntEnum):
    """Prompt tokens that get logits. Ordered: each level includes the ones before."""

    LAST = 0  # each row's last token, for sampling
    SELECTED = 1  # also up to selected_rows(rows) tokens named by the batch
    ALL = 2  # also any number of tokens named by the batch


def selected_rows(rows: int) -> int:
    """Number of tokens with logits under Logits.SELECTED, in a pass of ``rows``: a quarter, but at least one GEMM
    tile."""
    return min(rows, max(16, -(-rows // 4)))


@dataclass(frozen=True)
class Features:
    """Optional parts of a pass; part of the graph's key.

    hidden, aux_layers: hidden states read by the drafter.
    logits: prompt tokens that get logits.
    embeddings: the batch contains embeddings that replace those of token ids.
    returned: final hidden states are copied to the host.
    masks: positions are sampled under token masks in the batch.
    whole_logits: each rank has whole rows of logits. Only set if the LM head is divided among ranks; otherwise they are
        always whole.
    extra: names of features added by other packages (docs/extend/feature.md).
    """

    hidden: Hidden = Hidden.NULL
    aux_layers: tuple[int, ...] = ()
    logits: Logits = Logits.LAST
    embeddings: bool = False
    returned: bool = False
    masks: bool = False
    whole_logits: bool = False
    extra: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Label for reports: ``NULL``, ``FULL+embeddings`` …"""
        logits = (f"{self.logits.name} logits",) if self.logits else ()
        flags = (name for name in ("embeddings", "returned", "masks", "whole_logits") if getattr(self, name))
        return "+".join((self.hidden.name, *logits, *flags, *sorted(self.extra)))

    def __or__(self, other: Features) -> Features:
        """Features of a pass that serves both. If the auxiliary layers differ, this object's are kept."""
        shown = other if other._covers_hidden(self) else self
        return Features(
            shown.hidden,
            shown.aux_layers,
            max(self.logits, other.logits),
            self.embeddings or other.embeddings,
            self.returned or other.returned,
            self.masks or other.masks,
            self.whole_logits or other.whole_logits,
            self.extra | other.extra,
        )

    def covers(self, other: Features) -> bool:
        """Return True if a graph captured with these features also serves a pass with ``other``."""
        inputs = self.embeddings >= other.embeddings and self.masks >= other.masks
        outputs = self.returned >= other.returned and self.logits >= other.logits
        outputs = outputs and self.whole_logits >= other.whole_logits
        return inputs and outputs and self.extra >= other.extra and self._covers_hidden(other)

    def _covers_hidden(self, other: Features) -> bool:
        """Return True if the hidden states of ``other`` are among these."""
        if other.hidden is Hidden.NULL:
            return True
        if Hidden.AUX in (self.hidden, other.hidden):
            return self.hidden is other.hidden and set(other.aux_layers) <= set(self.aux_layers)
        return self.hidden >= other.hidden


NO_FEATURES = Features()


@dataclass(frozen=True)
class GraphKey:
    """Key of a captured graph. A pass replays only a graph whose key covers its own."""

    program: str
    shape: PassShape
    features: Features = NO_FEATURES

    def covers(self, other: GraphKey) -> bool:
        return (
            self.program == other.program
            and self.shape.width == other.shape.width
            and self.shape.rows >= other.shape.rows
            and self.features.covers(other.features)
        )
