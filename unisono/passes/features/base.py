"""What a feature is: one file that says all that the engine needs to know of it. See docs/adding-a-feature.md.

A :class:`Feature` exists once for each engine, a :class:`RequestState` for each request that asked for the feature.

::

    the engine starts     Feature.start            what all ranks have to do        (host)
    a request arrives     Feature.begin            checks it, makes its state       (host)
    it is to get a slot   RequestState.ready       whether it can; then admitted    (host)
    prompts are due       Feature.pass_ahead       a pass that has to run before    (host)
    a pass is built       Feature.fill             fields of the batch, graph key   (host)
    the pass runs         override_embeddings, rotary, around_target,
                          allowed_tokens, report                                    (device, captured in graphs)
    the pass is read      Feature.read_prompt, RequestState.deliver                 (host)

Device code follows the rules of graphs: it writes in place, to fixed addresses, with shapes that do not depend on data,
and never waits for the host. Shapes: R requests of a pass, W positions sampled for each, N = R times the paths of a
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
from unisono.graphs import NO_FEATURES, Buffers, Dimension, Features, Field, Key, Program
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.config import DecoderConfig
from unisono.models.lora.host_adapters import HeldAdapters
from unisono.models.vision.config import VisionConfig
from unisono.models.vision.tower import VisionTower
from unisono.sampling.pipeline import EditFields, Sampled
from unisono.types import EngineRequest, SamplingParams, TokenDelta

PassKind = Literal["extend", "mixed", "round", "verify"]
"""Prompt passes; rounds in one pass; the second pass of rounds whose drafts the host reads
(``Feature.reads_drafts``)."""


Metric = tuple[str, str, dict[str, str], float, str]
"""(name, "counter" or "gauge", labels, value, help)."""


@dataclass(frozen=True)
class OwnProgram:
    """A program of a feature's own, whose passes run ahead of prompt passes.

    multiple: rows of a pass are a multiple of it. least, most: rows of the smallest and of the largest pass that may be
    captured. passes: how many are to be expected, for each that an engine has of prompt passes. share: of the graphs'
    memory that its graphs may take. ms: on a CPU, where nothing is measured: milliseconds of a row.
    """

    program: Program
    multiple: int
    least: int
    most: int
    passes: float = 0.1
    share: float = 0.4
    ms: float = 0.1


@dataclass(frozen=True)
class Ahead:
    """A pass of a feature's own program that has to run before a prompt pass can."""

    key: Key
    batch: Mapping[str, Any]


@dataclass(frozen=True)
class Room:
    """How long passes ahead of prompts may take now. ms: what a pass takes. left: milliseconds; least: whether the
    smallest useful pass may run though it takes longer."""

    ms: Callable[[Key], float]
    left: float
    least: bool

    def has(self, key: Key) -> bool:
        """Whether there is time for this pass."""
        return self.ms(key) <= self.left


@dataclass(frozen=True)
class FeatureContext:
    """What the engine tells and lends each feature, once, before any pass.

    directory: the checkpoint's. eos: end-of-sequence ids. max_rows: requests of one prompt pass at most. paths: of a
    tree of drafts; 1 for chains. processed_logprobs: report log-probabilities of what tokens are drawn from, not of the
    model's own logits. synthetic: benchmarks: drafts are accepted without being verified.
    slots: fields of the slots on the device. logits: the LM head, [N, H] -> [N, V].
    vision, tower: of a model that sees. drafts: whether a drafter reads what prompt passes read. max_tokens: of a
    prompt pass. max_model_len: of a request. cache_bytes: what ``--mm-encoder-cache-gb`` says; None: nothing.
    decide: called with (name, value, reason) of each choice that the feature made by itself; ``explain`` shows them.
    adapters: the target's room for adapters, and those that this rank holds; None: they are off.
    adapter_modules: (name, directory) of those that are loaded at start. whole_logits: what a pass has to ask for where
    whole rows of logits are read: nothing where each rank has them anyway.
    """

    directory: Path
    eos: Sequence[int]
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    max_rows: int
    paths: int
    processed_logprobs: bool
    synthetic: bool
    slots: EditFields
    logits: Callable[[torch.Tensor], torch.Tensor]
    vision: VisionConfig | None
    tower: VisionTower | None
    device: torch.device
    drafts: bool
    max_tokens: int
    max_model_len: int
    cache_bytes: int | None
    decide: Callable[[str, object, str], None]
    adapters: HeldAdapters | None = None
    adapter_modules: Sequence[tuple[str, str]] = ()
    whole_logits: Features = NO_FEATURES

    def sampled(self, kind: PassKind) -> tuple[Dimension, Dimension]:
        """The dimensions [R, W] of a field with a value for each sampled position of such a pass."""
        if kind == "mixed":
            return ("decodes", self.max_rows), 1
        return (self.max_rows, 1) if kind == "extend" else ("rows", "width")


class RequestState:
    """What a feature keeps of one request, on the host. Subclasses override what they need.

    stop_ids: token ids that end the request, beside its own.
    prompt_keys: what the prefix cache knows the prompt by, where that is not its token ids.
    prefix_root: what the request's keys and values depend on beside its tokens; cached prefixes are shared by requests
    of one root only.
    """

    stop_ids: tuple[int, ...] = ()
    prompt_keys: list[int | bytes] | None = None
    prefix_root: bytes | None = None

    def slot_values(self) -> Mapping[str, int]:
        """The values of the slot fields that the feature declares (:meth:`Feature.slot_fields`)."""
        return {}

    def reach(self, start: int, end: int) -> int:
        """Of a prompt pass of positions ``start … end`` that is about to be built: up to where it can go now."""
        return end

    def ready(self) -> bool:
        """Whether the request can get a slot now. Where not, it waits, and others that ask for the feature with it."""
        return True

    def admitted(self) -> None:
        """The request gets a slot: take what it needs as long as it has one; :meth:`slot_values` follows."""

    def released(self) -> None:
        """The request has given its slot back: it ended, or it waits again."""

    def reusable(self, known: int) -> int:
        """Of ``known`` leading tokens those that may come from the prefix cache, which has no outputs of passes."""
        return known

    def forced(self) -> Sequence[int]:
        """Token ids that must come next, as far as known. A round proposes them as drafts. Empty: none are known."""
        return ()

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        """Complete ``delta``, which brings the request's new tokens, by what the pass reported of them."""


@dataclass(frozen=True)
class Row:
    """One request of a pass that asked for a feature.

    index: its row in the pass. errors: what reading its results raised. Of prompt passes only: start, end: the
    positions that are computed; first: the index of position ``start`` among the pass's tokens; samples: whether
    the prompt ends here, so that a token is sampled.
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
        """Note an error of the block as this request's own: it ends with it, and the others of the pass go on."""
        try:
            yield
        except Exception as error:
            self.errors.append(error)


@dataclass(frozen=True)
class HostPass:
    """A pass that is being built, as one feature sees it.

    rows: the requests that asked for the feature, one at least. count: all requests. tokens: of a prompt pass.
    drafts [count, P, k] int32: of a "verify" pass, -1 for none.
    """

    kind: PassKind
    rows: Sequence[Row]
    count: int
    tokens: int = 0
    drafts: np.ndarray | None = None


@dataclass(frozen=True)
class Committed:
    """What a pass committed of one request. tokens: ``count`` new ones, ``position`` the first one's.

    kind: of the pass. index: the request's row in it. outputs: the pass's output fields. first: whether these are the
    request's first tokens.
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
    """Where device code writes output fields.

    In a chain's pass these are the buffers themselves. In a tree's round a field has a row for each path, until
    :meth:`choose` copies those of the best paths.
    """

    def __init__(self, buffers: Buffers, paths: int = 1) -> None:
        self._buffers, self._paths = buffers, paths
        self._aside: dict[str, torch.Tensor] = {}

    def find(self, name: str) -> torch.Tensor | None:
        """The field of this name, [N, …]; None where the pass has none."""
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
    """The tokens of a pass of the target, T of R rows.

    slots [R]: of each row. width: tokens of a row in a round; None in a prompt pass, whose rows begin at query_start
    [R + 1]. count: T. last [E]: the tokens that the last layer computes alone; None: it computes all.
    """

    slots: torch.Tensor
    count: int
    width: int | None
    query_start: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def spread(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """[T] of ``values [R]`` int32, ``padding`` for tokens of no row."""
        if self.width is not None:
            return values[:, None].expand(-1, self.width).flatten()
        assert self.query_start is not None
        tokens = torch.arange(self.count, dtype=torch.int32, device=values.device)
        rows = torch.searchsorted(self.query_start[1:], tokens, right=True)
        return torch.cat((values, values.new_full((1,), padding))).index_select(0, rows)


@dataclass(frozen=True)
class Computed:
    """What a pass has computed when its tokens are sampled and not yet committed.

    buffers: the batch. hidden: final hidden states: [N · W, H] of a round; of a prompt pass [T, H] where a feature
    reads all (``reads_all_tokens``), else [R, H] of last tokens. head [N · W, V]: what the LM head gave. rows [N]
    int32: each row's slot, the padding slot where nothing is sampled. width: W. sampled: tokens and what was drawn
    from.
    """

    buffers: Buffers
    hidden: torch.Tensor
    head: torch.Tensor | Columns
    rows: torch.Tensor
    width: int
    sampled: Sampled
    outputs: Outputs

    @cached_property
    def logits(self) -> torch.Tensor:
        """[N · W, V], of sampled positions. Where the LM head is divided among ranks they are gathered if the pass has
        not asked for whole logits; ``sampled`` then has tokens only."""
        return whole(self.head)


class Feature:
    """One feature. Subclasses override what they need; what is not overridden does nothing.

    name: as in the catalog. extra_args: the keys of ``SamplingParams.extra_args`` that it reads. asks: what every pass
    with such a request needs beside its tokens; :meth:`fill` may say more. expected: what many prompt passes will need,
    so that their graphs are captured at start; expected_rounds: the same of rounds. reads_all_tokens: a prompt pass
    with this feature's fields computes the final hidden states of all its tokens, not of last tokens only.
    reads_drafts: :meth:`fill` needs a round's drafts on the host, and the tokens before them: such rounds are two
    passes. mixes: requests that ask for it may be in a mixed pass, which has its fields of that kind. asks_by: the
    request's fields ("media", "params.logprobs") of which one is not its default where a request asks for this; None:
    :meth:`begin` is called for every request.
    """

    name = ""
    extra_args: tuple[str, ...] = ()
    asks: Features = NO_FEATURES
    expected: Features = NO_FEATURES
    expected_rounds: Features = NO_FEATURES
    reads_all_tokens = False
    reads_drafts = False
    mixes = False
    asks_by: tuple[str, ...] | None = None

    def __init__(self, context: FeatureContext) -> None:
        self.context = context

    # ---- declared once --------------------------------------------------------------------------

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        """The fields that this feature adds to a pass, each with the Features whose passes have it."""
        return ()

    @staticmethod
    def slot_fields(config: DecoderConfig) -> tuple[Field, ...]:
        """Fields that every slot has for this feature, in engines with this target; pad: what most requests have."""
        return ()

    def programs(self) -> Sequence[OwnProgram]:
        """The programs of passes that this feature wants run ahead (:meth:`pass_ahead`)."""
        return ()

    # ---- host -----------------------------------------------------------------------------------

    def start(self, send: Callable[[Any], object]) -> None:
        """Every rank is built; only rank 0's features are told. Raises UnisonoError.

        send: has every rank execute a command, now and whenever :meth:`begin`, a command of operators or a call of a
        request's state runs.
        """

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        """Begin what :meth:`begin` would wait for; None where there is nothing."""
        return None

    def begin(self, request: EngineRequest) -> RequestState | None:
        """The request's state; None where it does not ask for this. Raises BadRequest for what cannot be served.

        The request may be dropped again: what is dear is made when it is first needed.
        """
        return None

    def pass_ahead(self, wanted: Sequence[Row], room: Room) -> Ahead | None:
        """A pass that has to run before prompt passes of these positions can; None where none can or has to.

        Called until it returns None before each prompt pass with requests that asked for the feature, in order.
        """
        return None

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        """What this pass needs, and the input fields for it. Called only where a request of the pass has a state."""
        return self.asks, {}

    def read_prompt(self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
        """A prompt pass with these requests was read; :meth:`RequestState.deliver` of those that sampled follows."""

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """What operators may call by name between two steps; JSON-ready data in and out. Raises UnisonoError."""
        return {}

    def metrics(self) -> Sequence[Metric]:
        """Counters and gauges of the feature."""
        return ()

    def info(self) -> Mapping[str, object]:
        """What ``/server_info`` tells of it, as JSON-ready data by name."""
        return {}

    def close(self) -> None:
        """The engine ends."""

    # ---- device ---------------------------------------------------------------------------------

    def override_embeddings(self, buffers: Buffers) -> Overriding | None:
        """Before a prompt pass: embeddings that replace those of token ids."""
        return None

    def rotary(self, buffers: Buffers, positions: torch.Tensor) -> Rotary | None:
        """Before a prompt pass: the positions that its tokens turn by, where these are not the absolute ``positions``
        [T]."""
        return None

    def around_target(self, buffers: Buffers, tokens: TargetTokens) -> AbstractContextManager[None] | None:
        """Before the target computes ``tokens``: what holds while it does; None: nothing."""
        return None

    def allowed_tokens(self, buffers: Buffers, rows: int) -> torch.Tensor | None:
        """Before sampling ``rows`` rows: a bit for each token that a position may take, int32 [N · W, words]."""
        return None

    def report(self, computed: Computed) -> None:
        """After sampling: write output fields, found by ``computed.outputs.find(name)``."""


def words_of(size: int, dtype: torch.dtype) -> int:
    """int32 words of a vector with this number of elements. Raises ValueError where that is no whole number."""
    words, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(f"{size} numbers of {dtype} do not fill four-byte words")
    return words


def plain_requests(features: Sequence[Feature]) -> Callable[[EngineRequest], bool]:
    """A function that tells a request that asks for none of these, in one comparison; it may miss one that does not."""
    names = {name for feature in features for name in feature.asks_by or ()}
    if not names or any(feature.asks_by is None for feature in features):
        return lambda request: not features
    read = operator.attrgetter(*names)
    plain = read(EngineRequest("", [0], SamplingParams()))
    return lambda request: read(request) == plain
