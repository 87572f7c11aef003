"""What one pass tells every layer: where its tokens stand, where their pages are, whose outputs are read.

Passes and drafters make one :class:`PassContext` for each pass of a model; layers only read it.
Shapes: T tokens, R rows, E rows whose last token alone is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from unisono.attention.base import AttentionBackend, AttentionInputs, LastTokens
from unisono.kv.recurrent_state import TailPass
from unisono.kv.specs import ALL
from unisono.layers.rotary import angles_of


@dataclass(frozen=True)
class Rotary:
    """Where the tokens of a prompt pass stand on the axes of time, height and width.

    positions [T, 3] int32. after [E, 3] int32: of the token that follows each row's last one, which the pass does not
    compute; None where no drafter asks.
    """

    positions: torch.Tensor
    after: torch.Tensor | None = None

    def of_entries(self, entries: torch.Tensor) -> torch.Tensor:
        """[N, 3] of the entries of a draft head. entries [N]: see ``drafters.base.PromptPass``."""
        assert self.after is not None
        return torch.cat((self.positions, self.after)).index_select(0, entries)


@dataclass
class PassContext:
    """One pass of a model.

    groups: by page lifetime, where the pass's tokens stand and where their pages are; ALL is always there. A lifetime
        without a group of its own reads that of ALL.
    rotary_positions: the positions that queries and keys are turned by: [T], or [T, 3] on the axes of time, height and
        width; None: the absolute positions.
    last_tokens: the only tokens whose outputs are read after the last layer; None: all are.
    tails: where the rows' recurrences begin; None where the model has none.
    """

    groups: Mapping[int, AttentionInputs]
    rotary_positions: torch.Tensor | None = None
    last_tokens: LastTokens | None = None
    tails: TailPass | None = None
    _plans: dict[tuple[AttentionBackend, int, int], AttentionInputs] = field(default_factory=dict, repr=False)
    _angles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    _queries: PassContext | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        last_tokens: LastTokens | None = None,
        rotary_positions: torch.Tensor | None = None,
    ) -> PassContext:
        """A pass whose pages are all in one group."""
        return cls({ALL: inputs}, rotary_positions, last_tokens)

    def inputs(self, lifetime: int = ALL) -> AttentionInputs:
        """The group of a page lifetime, without a plan."""
        return self.groups.get(lifetime, self.groups[ALL])

    def plan(self, backend: AttentionBackend, lifetime: int = ALL, window: int = 0) -> AttentionInputs:
        """The group of a page lifetime with the backend's plan for layers with this window.

        It is made once for each backend, group and window of a pass.
        """
        lifetime = lifetime if lifetime in self.groups else ALL
        key = backend, lifetime, window
        if key not in self._plans:
            planned = dataclasses.replace(self.groups[lifetime])
            backend.plan(planned, window)
            self._plans[key] = planned
        return self._plans[key]

    def rotary(
        self, table: torch.Tensor, axes: torch.Tensor | None, lifetime: int = ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of angles that the pass's tokens turn by, and the row of it for each token [T] int32.

        table, axes: see :func:`unisono.layers.rotary.angles_of`. With positions on three axes it is a table of the
        pass's own, made once for each table and its axes.
        """
        positions = self.rotary_positions
        if positions is None:
            return table, self.inputs(lifetime).positions
        if positions.dim() == 1:
            return table, positions
        key = id(table), id(axes)
        if key not in self._angles:
            self._angles[key] = angles_of(table, positions, axes)
        return self._angles[key]

    @property
    def queries(self) -> PassContext:
        """The context of the tokens that attend: this one, or that of ``last_tokens``, a round of width 1."""
        if self.last_tokens is None:
            return self
        if self._queries is None:
            last = self.last_tokens.last
            self._queries = PassContext({g: inputs.last_tokens(last).inputs for g, inputs in self.groups.items()})
        return self._queries

    @property
    def all_tokens(self) -> PassContext:
        """The same pass for a layer before the last one: the outputs of all tokens are read. Shares the plans."""
        return self if self.last_tokens is None else dataclasses.replace(self, last_tokens=None, _queries=None)

    @property
    def positions(self) -> torch.Tensor:
        """[T] int32: absolute positions, -1 for padding tokens."""
        return self.groups[ALL].positions

    @property
    def slots(self) -> torch.Tensor:
        """[R] int32: each row's slot."""
        return self.groups[ALL].slots

    @property
    def width(self) -> int | None:
        """Tokens per row of a round, None in an extend pass."""
        return self.groups[ALL].width

    @property
    def query_start(self) -> torch.Tensor | None:
        """[R + 1] int32: where each row's tokens begin in an extend pass, None in a round."""
        return self.groups[ALL].query_start
