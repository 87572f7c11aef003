"""What a graph is captured for: a shape, and what the caller wants of the pass beside its tokens."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shape:
    """What a graph is captured for.

    rows: padded number of requests (rounds) or of tokens (extend, mixed).
    width: tokens per row: 1 + k in a round, 1 in an extend pass. In a mixed pass 1 + the requests that decode in it, a
        token each; the other tokens are prompts'.
    """

    rows: int
    width: int = 1


class Hidden(enum.IntEnum):
    """Which hidden states a pass must return; a later one covers every earlier one but AUX."""

    NULL = 0  # none
    LAST = 1  # of a prompt pass each row's last token's, of a round as FULL
    FULL = 2  # of every token, after the last layer
    AUX = 3  # of every token, from the layers in Features.aux_layers


class Logits(enum.IntEnum):
    """Of which prompt tokens a pass computes logits; a later one covers every earlier one."""

    LAST = 0  # of each row's last token, to sample from
    SELECTED = 1  # also of up to selected_rows(rows) tokens that the batch names
    ALL = 2  # also of every token, if the batch names it


def selected_rows(rows: int) -> int:
    """Of how many of a pass's ``rows`` tokens Logits.SELECTED has logits: a quarter, but at least a product's tile."""
    return min(rows, max(16, -(-rows // 4)))


@dataclass(frozen=True)
class Features:
    """What the caller wants of a pass beside its tokens; part of the graph's key.

    hidden, aux_layers: what the drafter reads. logits: of which prompt tokens. embeddings: the batch brings embeddings
    that stand in for those of token ids. returned: final hidden states go to the host. masks: positions are sampled
    under masks that come with the batch. whole_logits: each rank has whole rows of logits; asked for only where the LM
    head is divided among ranks, for elsewhere they are whole in every pass. extra: names of features that other
    packages add (docs/adding-a-feature.md).
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
        """For reports: ``NULL``, ``FULL+embeddings`` …"""
        logits = (f"{self.logits.name} logits",) if self.logits else ()
        flags = (name for name in ("embeddings", "returned", "masks", "whole_logits") if getattr(self, name))
        return "+".join((self.hidden.name, *logits, *flags, *sorted(self.extra)))

    def __or__(self, other: Features) -> Features:
        """What a pass needs that serves both. Of two different lists of auxiliary layers this one's stay."""
        shown = other if other._shows(self) else self
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
        """True when a graph captured with these features also serves a pass that needs ``other``."""
        inputs = self.embeddings >= other.embeddings and self.masks >= other.masks
        outputs = self.returned >= other.returned and self.logits >= other.logits
        outputs = outputs and self.whole_logits >= other.whole_logits
        return inputs and outputs and self.extra >= other.extra and self._shows(other)

    def _shows(self, other: Features) -> bool:
        """Whether the hidden states that ``other`` wants are among these."""
        if other.hidden is Hidden.NULL:
            return True
        if Hidden.AUX in (self.hidden, other.hidden):
            return self.hidden is other.hidden and set(other.aux_layers) <= set(self.aux_layers)
        return self.hidden >= other.hidden


NO_FEATURES = Features()


@dataclass(frozen=True)
class Key:
    """What a graph was captured for; a pass replays only a graph whose key covers its own."""

    program: str
    shape: Shape
    features: Features = NO_FEATURES

    def covers(self, other: Key) -> bool:
        return (
            self.program == other.program
            and self.shape.width == other.shape.width
            and self.shape.rows >= other.shape.rows
            and self.features.covers(other.features)
        )
