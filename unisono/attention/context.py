"""Context of one pass of a model: positions, pages, and the tokens whose outputs are read.

Passes and drafters make one :class:`ForwardContext` for each pass; layers only read it.
Shapes: T tokens, R rows, E rows of which only the last token's output is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from unisono.attention.base import AttentionBackend, AttentionInputs, LastTokens
from unisono.attention.dp_attention import local_inputs
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import ALL
from unisono.layers.rotary import angles_of


@dataclass(frozen=True)
class Rotary:
    """Positions of a prompt pass's tokens on the axes of time, height and width.

    positions [T, 3] int32. after [E, 3] int32: position of the token after each row's last one, which the pass does not
    compute; None if no drafter needs it.
    """

    positions: torch.Tensor
    after: torch.Tensor | None = None

    def of_entries(self, entries: torch.Tensor) -> torch.Tensor:
        """Positions [N, 3] of the entries of a draft head. entries [N]: see ``drafters.base.PromptPass``."""
        assert self.after is not None
        return torch.cat((self.positions, self.after)).index_select(0, entries)


@dataclass
class ForwardContext:
    """One pass of a model.

    groups: attention inputs by window group. ALL is always there; a window group without an entry uses that of ALL.
    rotary_positions: positions that queries and keys are rotated by: [T], or [T, 3] on the axes of time, height and
        width; None: the absolute positions.
    last_tokens: the only tokens whose outputs are read after the last layer; None: all are.
    recurrent: recurrent state of the rows; None if the model has none.
    """

    groups: Mapping[int, AttentionInputs]
    rotary_positions: torch.Tensor | None = None
    last_tokens: LastTokens | None = None
    recurrent: RecurrentPass | None = None
    _plans: dict[tuple[AttentionBackend, int, int], AttentionInputs] = field(default_factory=dict, repr=False)
    _angles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    _queries: ForwardContext | None = field(default=None, repr=False)
    _after: ForwardContext | None = field(default=None, repr=False)
    _local: dict[tuple[int, int, bool], tuple[ForwardContext, torch.Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        last_tokens: LastTokens | None = None,
        rotary_positions: torch.Tensor | None = None,
    ) -> ForwardContext:
        """A pass whose pages are all in one group."""
        return cls({ALL: inputs}, rotary_positions, last_tokens)

    def inputs(self, window_group: int = ALL) -> AttentionInputs:
        """Return the attention inputs of a window group, without a plan."""
        return self.groups.get(window_group, self.groups[ALL])

    def plan(
        self, backend: AttentionBackend, window_group: int = ALL, window: int = 0, symmetric: bool = False
    ) -> AttentionInputs:
        """Return the attention inputs of a window group, with the backend's plan for layers with this window.

        The plan is made once per backend, group and window of a pass. symmetric: the window reaches as far ahead of a
        token as back.
        """
        window_group = window_group if window_group in self.groups else ALL
        key = backend, window_group, window
        if key not in self._plans:
            planned = dataclasses.replace(self.groups[window_group])
            if symmetric and window > 0 and planned.until is not None:
                planned.until = torch.minimum(planned.until, planned.positions + (window - 1))
            backend.plan(planned, window)
            self._plans[key] = planned
        return self._plans[key]

    def rotary(
        self, table: torch.Tensor, axes: torch.Tensor | None, window_group: int = ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table of rotary angles, and each token's row of it [T] int32.

        table, axes: see :func:`unisono.layers.rotary.angles_of`. With positions on three axes the pass has a table of
        its own, made once per table and axes.
        """
        positions = self.rotary_positions
        if positions is None:
            return table, self.inputs(window_group).positions
        if positions.dim() == 1:
            return table, positions
        key = id(table), id(axes)
        if key not in self._angles:
            self._angles[key] = angles_of(table, positions, axes)
        return self._angles[key]

    def local_tokens(self, rank: int, pages: int) -> tuple[ForwardContext, torch.Tensor]:
        """Return the context of a rank's local tokens (DP attention), and the attention-DP rank of each query.

        pages: pages of each rank. The context has all T tokens, of which those of other ranks are padding. The ranks
        are [E] int32 with last tokens, else [T]. Made once per pass; see ``attention/dp_attention.py``.
        """
        key = rank, pages, self.last_tokens is None
        if key not in self._local:
            local, token_ranks = local_inputs(self.groups[ALL], rank, pages)
            last_tokens = None
            if self.last_tokens is not None:
                last_tokens = local.last_tokens(self.last_tokens.last)
                token_ranks = self.last_tokens.select(token_ranks)
            self._local[key] = ForwardContext({ALL: local}, self.rotary_positions, last_tokens), token_ranks
        return self._local[key]

    @property
    def queries(self) -> ForwardContext:
        """Context of the tokens that attend: this one, or that of ``last_tokens``, a round of width 1."""
        if self.last_tokens is None:
            return self
        if self._queries is None:
            last = self.last_tokens.last
            self._queries = ForwardContext({g: inputs.last_tokens(last).inputs for g, inputs in self.groups.items()})
        return self._queries

    @property
    def after_last_keys(self) -> ForwardContext:
        """Context of ``last_tokens`` for layers without keys of their own, which follow the last layer that has some.

        Positions are absolute: there must be no ``rotary_positions``.
        """
        if self.last_tokens is None:
            return self
        if self._after is None:
            assert self.rotary_positions is None
            last = self.last_tokens.last
            groups = {
                group: dataclasses.replace(
                    inputs.last_tokens(last).inputs, slot_mapping=inputs.slot_mapping.index_select(0, last)
                )
                for group, inputs in self.groups.items()
            }
            self._after = ForwardContext(groups)
        return self._after

    @property
    def all_tokens(self) -> ForwardContext:
        """Context for layers before the last one: the outputs of all tokens are read. Shares the plans."""
        return (
            self
            if self.last_tokens is None
            else dataclasses.replace(self, last_tokens=None, _queries=None, _after=None)
        )

    @property
    def positions(self) -> torch.Tensor:
        """Absolute positions [T] int32, -1 for padding tokens."""
        return self.groups[ALL].positions

    @property
    def slots(self) -> torch.Tensor:
        """Slot of each row, [R] int32."""
        return self.groups[ALL].slots

    @property
    def width(self) -> int | None:
        """Tokens per row of a round, None in an extend pass."""
        return self.groups[ALL].width

    @property
    def query_start(self) -> torch.Tensor | None:
        """First token of each row in an extend pass, [R + 1] int32; None in a round."""
        return self.groups[ALL].query_start
