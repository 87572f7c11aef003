"""Base classes of features: everything the engine needs to know about one. See docs/extend/feature.md.

There is one :class:`Feature` per engine and one :class:`RequestState` per request that uses it.

::

    the engine starts     Feature.start            set up on all ranks              (host)
    a request arrives     Feature.begin            validate, create its state       (host)
    a slot is free        RequestState.ready       admit the request, or wait       (host)
    prompts are due       Feature.pre_pass         a pass that must run first       (host)
    a pass is built       Feature.fill             batch fields, graph key          (host)
    the pass runs         override_embeddings, rotary, around_target,
                          allowed_tokens, report                                    (device, captured in graphs)
    the pass is read      Feature.read_prompt, RequestState.deliver                 (host)

Device code follows the rules of graphs: it writes in place, to fixed addresses, with shapes that do not depend on data,
and never waits for the host. Shapes: R requests of a pass, W sampled positions per request, N = R times the paths of a
tree, T tokens of a prompt pass, H hidden size, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unisono.attention.context import Rotary
from unisono.distributed.columns import Columns, whole
from unisono.graphs import NO_FEATURES, Buffers, Dimension, Features, Field, GraphKey, Program
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.blocks.router_recorder import RouterRecorder
from unisono.models.config import DecoderConfig
from unisono.models.lora.host_adapters import HeldAdapters
from unisono.models.vision.config import VisionConfig
from unisono.models.vision.tower import AnyTower
from unisono.sampling.pipeline import EditFields, ReportedValues, Sampled
from unisono.types import EngineRequest, SamplingParams, TokenDelta

PassKind = Literal["extend", "mixed", "round", "verify"]
"""Prompt passes; mixed passes; rounds in one pass; second passes of draft-verify rounds (``Feature.reads_drafts``)."""


Metric = tuple[str, str, dict[str, str], float, str]
"""(name, "counter" or "gauge", labels, value, help)."""


@dataclass(frozen=True)
class OwnProgram:
    """A program of a feature, whose passes run before prompt passes.

    multiple: the rows of a pass are a multiple of this. least, most: rows of the smallest and largest captured pass.
    passes: expected number per prompt pass.
    share: share of the graphs' memory budget.
    ms: milliseconds per row on a CPU, where nothing is measured.
    """

    program: Program
    multiple: int
    least: int
    most: int
    passes: float = 0.1
    share: float = 0.4
    ms: float = 0.1


@dataclass(frozen=True)
class PrePass:
    """A pass of a feature's own program that must run before a prompt pass."""

    key: GraphKey
    batch: Mapping[str, Any]


@dataclass(frozen=True)
class Room:
    """Time available for pre-passes.

    ms: returns the milliseconds of a pass. left: milliseconds left.
    least: True if the smallest useful pass may run although it takes longer.
    """

    ms: Callable[[GraphKey], float]
    left: float
    least: bool

    def has(self, key: GraphKey) -> bool:
        """Return True if there is time for this pass."""
        return self.ms(key) <= self.left


@dataclass(frozen=True)
class FeatureContext:
    """Engine data available to each feature, set once before any pass.

    directory: directory of the checkpoint.
    eos: end-of-sequence ids.
    max_rows: requests in one prompt pass, at most.
    paths: paths of a draft tree; 1 for chains.
    reported: values that ``logprobs`` reports.
    synthetic: for benchmarks: drafts are accepted without verification.
    slots: slot fields on the device.
    logits: the LM head, [N, H] -> [N, V].
    vision, tower: of a model with a vision tower.
    drafts: True if a drafter reads the inputs of prompt passes.
    max_tokens: tokens in a prompt pass, at most.
    max_model_len: positions of a request, at most.
    cache_bytes: value of ``--mm-encoder-cache-gb``; None if not set.
    decide: called with (name, value, reason) of each choice made by the feature; ``explain`` shows them.
    adapters: the target's adapter slots, and the adapters held by this rank; None: off.
    adapter_modules: (name, directory) of adapters loaded at start.
    routers: the target's MoE layers.
    whole_logits: features that a pass must have if whole rows of logits are read; empty if each rank has them anyway.
    whole_text: tokens of the model see later ones, too.
    pools: the model writes no text: prompts return their hidden states, to be pooled.
    """

    directory: Path
    eos: Sequence[int]
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    max_rows: int
    paths: int
    reported: ReportedValues
    synthetic: bool
    slots: EditFields
    logits: Callable[[torch.Tensor], torch.Tensor]
    vision: VisionConfig | None
    tower: AnyTower | None
    device: torch.device
    drafts: bool
    max_tokens: int
    max_model_len: int
    cache_bytes: int | None
    decide: Callable[[str, object, str], None]
    routers: RouterRecorder
    adapters: HeldAdapters | None = None
    adapter_modules: Sequence[tuple[str, str]] = ()
    whole_logits: Features = NO_FEATURES
    whole_text: bool = False
    pools: bool = False

    def sampled(self, kind: PassKind) -> tuple[Dimension, Dimension]:
        """Dimensions [R, W] of a field with one value per sampled position in such a pass."""
        if kind == "mixed":
            return ("decodes", self.max_rows), 1
        return (self.max_rows, 1) if kind == "extend" else ("rows", "width")


class RequestState:
    """A feature's host-side state of one request. Subclasses override what they need.

    stop_ids: additional token ids that end the request.
    prompt_keys: prefix-cache keys of the prompt, if they differ from its token ids.
    prefix_root: identifies what keys and values depend on besides tokens (an adapter). Only requests with the same root
        share cached prefixes.
    """

    stop_ids: tuple[int, ...] = ()
    prompt_keys: list[int | bytes] | None = None
    prefix_root: bytes | None = None

    def slot_values(self) -> Mapping[str, int]:
        """Values of the slot fields declared by the feature (:meth:`Feature.slot_fields`)."""
        return {}

    def reach(self, start: int, end: int) -> int:
        """Return the end of a prompt pass over ``start … end`` that is possible now, at most ``end``."""
        return end

    def least_end(self, start: int) -> int:
        """Least end of a prompt chunk that begins at ``start``. :meth:`reach` cuts no chunk between both."""
        return start + 1

    def ready(self) -> bool:
        """Return True if the request can take a slot now. If not, it waits, and later requests with this feature wait
        with it."""
        return True

    def admitted(self) -> None:
        """Called when the request gets a slot: acquire resources for that time. :meth:`slot_values` is called next."""

    def released(self) -> None:
        """Called when the request has released its slot: it ended, or was preempted."""

    def reusable(self, known: int) -> int:
        """Return how many of the ``known`` leading tokens the prefix cache may serve; it stores no pass outputs."""
        return known

    def forced(self) -> Sequence[int]:
        """Return the token ids that must come next, as far as known; a round proposes them as drafts."""
        return ()

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        """Add the pass's reported outputs to ``delta``, which has the request's new tokens."""


@dataclass(frozen=True)
class Row:
    """One request of a pass that uses the feature.

    index: its row in the pass.
    errors: errors raised while reading its results.
    start, end: computed positions, in prompt passes.
    first: index of position ``start`` among the pass's tokens, in prompt passes.
    samples: True if a token is sampled because the prompt ends here.
    """

    index: int
    state: Any
    start: int = 0
    end: int = 0
    first: int = 0
    samples: bool = True
    errors: list[Exception] = field(default_factory=list, compare=False)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Catch an error of the ``with`` block: this request ends with the error, and the others of the pass
        continue."""
        try:
            yield
        except Exception as error:
            self.errors.append(error)


@dataclass(frozen=True)
class HostPass:
    """A pass being built, as seen by one feature.

    rows: the requests that use the feature, at least one.
    count: number of all requests.
    tokens: tokens of a prompt pass.
    drafts [count, P, k] int32: drafts of a "verify" pass, -1 for none.
    """

    kind: PassKind
    rows: Sequence[Row]
    count: int
    tokens: int = 0
    drafts: np.ndarray | None = None


@dataclass(frozen=True)
class Committed:
    """Tokens of one request committed by a pass.

    kind: kind of the pass.
    index: the request's row in it.
    tokens: the ``count`` new tokens.
    position: position of the first one.
    first: True if these are the request's first tokens.
    outputs: the pass's output fields.
    """

    kind: str
    index: int
    tokens: Sequence[int]
    position: int
    first: bool
    outputs: Mapping[str, np.ndarray]

    @property
    def count(self) -> int:
        return len(self.tokens)


class Outputs:
    """Destination of output fields in device code.

    In a chain's pass these are the buffers themselves. In a tree's round a field has a row per path, until
    :meth:`choose` copies the rows of the best paths.
    """

    def __init__(self, buffers: Buffers, paths: int = 1) -> None:
        self._buffers, self._paths = buffers, paths
        self._aside: dict[str, torch.Tensor] = {}

    def find(self, name: str) -> torch.Tensor | None:
        """The field of this name, [N, …]; None if the pass does not have it."""
        out = self._buffers.find(name)
        if out is None or self._paths == 1:
            return out
        return self._aside.setdefault(name, out.new_empty(out.shape[0] * self._paths, *out.shape[1:]))

    def choose(self, rows: torch.Tensor) -> None:
        """Keep these rows [R] of N."""
        for name, values in self._aside.items():
            getattr(self._buffers, name).copy_(values.index_select(0, rows))


@dataclass(frozen=True)
class TargetTokens:
    """The T tokens of a pass of the target, in R rows.

    slots [R]: slot of each row.
    count: T.
    width: tokens per row in a round; None in a prompt pass.
    query_start [R + 1]: where the rows of a prompt pass begin.
    last [E]: the only tokens that the last layer computes; None: all.
    """

    slots: torch.Tensor
    count: int
    width: int | None
    query_start: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def spread(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """Repeat ``values [R]`` int32 for the tokens [T], contiguous; ``padding`` for tokens of no row."""
        if self.width is not None:
            return values.repeat_interleave(self.width)
        assert self.query_start is not None
        tokens = torch.arange(self.count, dtype=torch.int32, device=values.device)
        rows = torch.searchsorted(self.query_start[1:], tokens, right=True)
        return torch.cat((values, values.new_full((1,), padding))).index_select(0, rows)


@dataclass(frozen=True)
class Computed:
    """Results of a pass after sampling and before commit.

    buffers: the batch.
    hidden: final hidden states, [N · W, H] of a round; in a prompt pass [T, H] if a feature reads all
        (``reads_all_tokens``), else [R, H] of last tokens.
    head [N · W, V]: output of the LM head, or [T, V] with ``places``.
    rows [N] int32: slot of each row, the padding slot if nothing is sampled.
    width: W.
    sampled: tokens, and the values they were drawn from.
    places [N · W]: the row of ``head`` of each sampled position, below 0 if nothing is sampled; None: its own.
    """

    buffers: Buffers
    hidden: torch.Tensor
    head: torch.Tensor | Columns
    rows: torch.Tensor
    width: int
    sampled: Sampled
    outputs: Outputs
    places: torch.Tensor | None = None

    @cached_property
    def logits(self) -> torch.Tensor:
        """Logits [N · W, V] of sampled positions. If the LM head is divided among ranks and the pass has no whole
        logits, they are gathered; ``sampled`` then has tokens only."""
        logits = whole(self.head)
        return logits if self.places is None else logits.index_select(0, self.places.clamp_min(0))


class Feature:
    """One optional request feature. Subclasses override what they need; defaults do nothing.

    name: as in the catalog.
    extra_args: keys of ``SamplingParams.extra_args`` that it reads.
    needs: Features of every pass with such a request; :meth:`fill` may add more.
    expected: Features that many prompt passes will have, so that their graphs are captured at start.
    expected_rounds: the same for rounds.
    reads_all_tokens: a prompt pass with this feature's fields computes the final hidden states of all its tokens, not
        only of last tokens.
    reads_drafts: :meth:`fill` needs a round's drafts, and the tokens before them, on the host; such rounds are split
        into two passes.
    mixes: requests with this feature may be in a mixed pass, which has its fields of that kind.
    requested_by: request fields ("media", "params.logprobs"); a request uses the feature only if one of them differs
        from its default. None: :meth:`begin` is called for every request.
    """

    name = ""
    extra_args: tuple[str, ...] = ()
    needs: Features = NO_FEATURES
    expected: Features = NO_FEATURES
    expected_rounds: Features = NO_FEATURES
    reads_all_tokens = False
    reads_drafts = False
    mixes = False
    requested_by: tuple[str, ...] | None = None

    def __init__(self, context: FeatureContext) -> None:
        self.context = context

    # ---- declared once --------------------------------------------------------------------------

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        """The fields that this feature adds to a pass, each with the Features whose passes have it."""
        return ()

    @staticmethod
    def slot_fields(config: DecoderConfig) -> tuple[Field, ...]:
        """Slot fields of this feature, in engines with this target. pad: the value for most requests."""
        return ()

    def programs(self) -> Sequence[OwnProgram]:
        """Programs of the feature's pre-passes (:meth:`pre_pass`)."""
        return ()

    # ---- host -----------------------------------------------------------------------------------

    def start(self, send: Callable[[Any], object]) -> None:
        """Called on rank 0 once every rank is built. Raises UnisonoError.

        send: makes every rank execute a command; it may be called now, in :meth:`begin`, in operator commands, and in
            methods of a request's state.
        """

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        """Start work that :meth:`begin` would block on; None if there is none."""
        return None

    def begin(self, request: EngineRequest) -> RequestState | None:
        """The request's state; None if it does not use the feature. Raises BadRequest for requests that cannot be
        served.

        The request may still be dropped, so make expensive state lazily.
        """
        return None

    def pre_pass(self, rows: Sequence[Row], room: Room) -> PrePass | None:
        """A pass that must run before prompt passes over these rows; None if none can or must run.

        Called before each prompt pass with requests of this feature, in order, until it returns None.
        """
        return None

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        """Features and input fields of this pass. Called only if a request of the pass has a state."""
        return self.needs, {}

    def read_prompt(self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
        """Called after a prompt pass with these requests was read; :meth:`RequestState.deliver` of sampled requests
        follows."""

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """Operator commands by name, run between two steps; JSON-ready data in and out. Raises UnisonoError."""
        return {}

    def weights_changed(self) -> None:
        """Called after new weights were written, while no request holds a slot: forget what the old ones computed."""

    def metrics(self) -> Sequence[Metric]:
        """Counters and gauges of the feature."""
        return ()

    def info(self) -> Mapping[str, object]:
        """Data for ``/server_info``, JSON-ready, by name."""
        return {}

    def close(self) -> None:
        """Called when the engine ends."""

    # ---- device ---------------------------------------------------------------------------------

    def override_embeddings(self, buffers: Buffers) -> Overriding | None:
        """Called before a prompt pass: embeddings that replace those of token ids."""
        return None

    def rotary(self, buffers: Buffers, positions: torch.Tensor) -> Rotary | None:
        """Called before a prompt pass: rotary positions of its tokens, if they differ from the absolute ``positions``
        [T]."""
        return None

    def seen_until(self, buffers: Buffers, positions: torch.Tensor) -> torch.Tensor | None:
        """Called before a prompt pass: ``AttentionInputs.until`` [T] of its tokens; None: each sees up to itself."""
        return None

    def around_target(self, buffers: Buffers, tokens: TargetTokens) -> AbstractContextManager[None] | None:
        """Context manager held while the target computes ``tokens``; None: nothing."""
        return None

    def allowed_tokens(self, buffers: Buffers, rows: int) -> torch.Tensor | None:
        """Called before sampling ``rows`` rows: one bit per allowed token, int32 [N · W, words]."""
        return None

    def report(self, computed: Computed) -> None:
        """Called after sampling: write output fields, found by ``computed.outputs.find(name)``."""


def words_of(size: int, dtype: torch.dtype) -> int:
    """int32 words of a vector with this number of elements. Raises ValueError if that is not a whole number."""
    words, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(f"{size} numbers of {dtype} do not fill four-byte words")
    return words


def plain_requests(features: Sequence[Feature]) -> Callable[[EngineRequest], bool]:
    """Return a fast test for requests that use none of the features. It may return False for such a request, but never
    True for one that uses a feature."""
    names = {name for feature in features for name in feature.requested_by or ()}
    if not names or any(feature.requested_by is None for feature in features):
        return lambda request: not features
    read = operator.attrgetter(*names)
    plain = read(EngineRequest("", [0], SamplingParams()))
    return lambda request: read(request) == plain
