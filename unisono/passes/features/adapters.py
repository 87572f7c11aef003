"""Adapters (LoRA): a request names one, and each of its tokens is computed with it. See docs/guide/adapters.md.

The device knows one number per request, in its slot: the place of its adapter on the device, from 1 on; 0 is none. A
pass in which a request has an adapter uses graphs of its own; all other passes replay the same graphs as without
adapters. The prefix cache keeps adapters apart: every path of such a request begins with its adapter's digest.

The device has room for ``max_loras`` adapters. A request whose adapter is not there waits until a place is free of
requests, and later requests with adapters wait with it. Host memory keeps the adapters of active requests, and beyond
that ``max_cpu_loras`` of them. Rank 0 makes all decisions; reading, forgetting and writing adapters are commands to
every rank (``models/lora/host_adapters.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakSet

import numpy as np
import torch

from unisono.graphs import Buffers, Features, Field
from unisono.kernels.lora.adapters import AdapterPlan
from unisono.models.config import DecoderConfig
from unisono.models.lora.adapters import AdapterLimits, AdapterWeights, check_adapter
from unisono.models.lora.host_adapters import AdapterCommand, HeldAdapters, KeepAdapters, ReadAdapter, WriteAdapter
from unisono.passes.features.base import (
    Committed,
    Feature,
    FeatureContext,
    HostPass,
    Metric,
    PassKind,
    RequestState,
    TargetTokens,
)
from unisono.types import BadRequest, CheckpointError, ConfigError, EngineRequest, TokenDelta

ADAPTED = Features(extra=frozenset({"adapters"}))

NOT_ENABLED = "adapters are off here; start with --enable-lora (LLM: enable_lora=True), or leave the adapter out"


class _Slots(Protocol):
    adapter: torch.Tensor


@dataclass
class Counts:
    """Counters of one adapter's requests. rounds: rounds with drafts, one per request and round."""

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per round by drafting requests, including the bonus token."""
        return 1 + self.accepted / max(1, self.rounds)


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that requests may name. number: vLLM's ``lora_int_id``, assigned here."""

    name: str
    directory: Path
    number: int
    digest: bytes
    rank: int
    counts: Counts = field(default_factory=Counts)


@dataclass(eq=False)
class AdapterPlace:
    """Room for one adapter on the device. users: requests in slots that use it. used: time of the last
    :meth:`AdapterPlaces.take`."""

    number: int
    loaded: LoadedAdapter | None = None
    users: int = 0
    used: int = 0


class AdapterPlaces:
    """Adapters on the device. A place is written only if no request uses it; passes in flight run before the write.

    write: writes the held adapter with this digest to the place with this number.
    """

    def __init__(self, count: int, write: Callable[[int, bytes], object]) -> None:
        self._write, self.all = write, [AdapterPlace(number) for number in range(count)]
        self._clock = self.writes = 0

    def of(self, loaded: LoadedAdapter) -> AdapterPlace | None:
        """The place that has the adapter or could take it; None if requests use all places."""
        own = next((place for place in self.all if place.loaded is loaded), None)
        free = (place for place in self.all if not place.users)
        return own or min(free, key=lambda place: (place.loaded is not None, place.used), default=None)

    def take(self, loaded: LoadedAdapter) -> AdapterPlace:
        """Take the adapter's place for one more request, writing the adapter if needed."""
        place = self.of(loaded)
        assert place is not None, "the scheduler asks first"
        if place.loaded is not loaded:
            place.loaded = None
            self._write(place.number, loaded.digest)
            place.loaded = loaded
            self.writes += 1
        self._clock += 1
        place.users, place.used = place.users + 1, self._clock
        return place

    def forget(self, loaded: LoadedAdapter) -> None:
        """Free the place of an adapter that is no longer served."""
        for place in self.all:
            if place.loaded is loaded and not place.users:
                place.loaded = None


class AdapterFeature(Feature):
    """Field: ``adapters``, the number of requests in the pass with an adapter. Only passes with such requests have
    it."""

    name = "adapters"
    requested_by = ("adapter",)
    mixes = True
    needs = ADAPTED
    _send: Callable[[AdapterCommand], object]

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self.limits: AdapterLimits | None = None
        self.loaded: dict[str, LoadedAdapter] = {}
        self._numbers = 0
        if context.adapters is None:
            return
        self.expected = self.expected_rounds = ADAPTED
        self.held: HeldAdapters = context.adapters
        self.layers = layers = self.held.layers
        self.limits = limits = layers.limits
        self.places = AdapterPlaces(limits.loaded, lambda place, digest: self._send(WriteAdapter(place, digest)))
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # digests, most recently used last
        self._states: WeakSet[Adapted] = WeakSet()
        why = f"{limits.loaded} adapters of rank {limits.rank} at most, on {len(layers.layers)} layers"
        context.decide("adapters", f"{layers.nbytes >> 20} MiB", why)
        for _, directory in context.adapter_modules:
            check_adapter(Path(directory), layers)  # report errors before compiling anything

    # ---- declared once --------------------------------------------------------------------------

    @staticmethod
    def slot_fields(config: DecoderConfig) -> tuple[Field, ...]:
        return (Field("adapter", torch.int32, ()),)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        return () if self.limits is None else (Field("adapters", torch.int32, (1,), feature=ADAPTED),)

    def start(self, send: Callable[[Any], object]) -> None:
        self._send = send
        for name, directory in self.context.adapter_modules if self.limits is not None else ():
            self.load(name, directory)

    # ---- operator commands ----------------------------------------------------------------------

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        return {"load_adapter": self.load, "unload_adapter": self.unload, "adapters": self.listed}

    def load(self, name: str, directory: str, again: bool = False) -> dict[str, Any]:
        """Serve the adapter in a directory under a name. again: replace an adapter of that name.

        Raises ConfigError, or CheckpointError if a rank cannot read it; then nothing is changed. Running requests
        continue with the adapter they began with.
        """
        if self.limits is None:
            raise ConfigError(f"{NOT_ENABLED}.")
        if not name:
            raise ConfigError("the name of an adapter is empty.")
        if (known := self.loaded.get(name)) is not None and not again:
            raise ConfigError(
                f"The lora adapter {name!r} has already been loaded, from {known.directory}. To read it again, set "
                "load_inplace to true."
            )
        weights = self._read(Path(directory))
        self._numbers += 1
        loaded = LoadedAdapter(name, weights.directory, self._numbers, weights.digest, weights.rank)
        if known is not None:
            loaded.counts = known.counts
            self.places.forget(known)
        self.loaded[name] = loaded
        return self._described(loaded)

    def unload(self, name: str) -> dict[str, Any]:
        """Stop serving an adapter; accepted requests finish with it. Raises ConfigError."""
        loaded = self.loaded.pop(name, None)
        if loaded is None:
            raise ConfigError(f"The lora adapter {name!r} cannot be found.")
        self.places.forget(loaded)
        return self._described(loaded)

    def listed(self) -> list[dict[str, Any]]:
        """The adapters that requests may name, as JSON-ready data."""
        return [self._described(loaded) for loaded in self.loaded.values()]

    def _described(self, loaded: LoadedAdapter) -> dict[str, Any]:
        return {"name": loaded.name, "path": str(loaded.directory), "id": loaded.number, "rank": loaded.rank}

    def _read(self, directory: Path, known: LoadedAdapter | None = None) -> AdapterWeights:
        """Read and hold an adapter on all ranks, this one first. Raises CheckpointError without changing anything.

        known: the adapter it must still equal.
        """
        weights = self.held.read(directory)
        if known is not None and weights.digest != known.digest:
            raise CheckpointError(f"{directory} has changed since {known.name!r} was loaded; load it again.")
        self.held.hold(weights)
        try:
            self._send(ReadAdapter(str(directory), weights.digest))
        except CheckpointError:
            self._forget_unwanted()
            raise
        self._keep(weights.digest)
        return weights

    def _keep(self, digest: bytes) -> None:
        assert self.limits is not None
        self._kept[digest] = None
        self._kept.move_to_end(digest)
        while len(self._kept) > self.limits.kept:
            self._kept.popitem(last=False)
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        """Make all ranks forget the adapters that are neither kept nor used by a request."""
        needed = {*self._kept, *(state.prefix_root for state in self._states)}
        if self.held.digests - needed:
            self._send(KeepAdapters(sorted(needed)))

    def _hold(self, loaded: LoadedAdapter) -> None:
        """Make all ranks hold an adapter, reading it again if it was forgotten. Raises CheckpointError."""
        self._forget_unwanted()  # adapters of requests that have ended
        if loaded.digest in self.held.digests:
            self._keep(loaded.digest)
        else:
            self._read(loaded.directory, loaded)

    # ---- host -----------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> RequestState | None:
        if request.adapter is None:
            return None
        if self.limits is None:
            raise BadRequest(f"adapter {request.adapter!r}: {NOT_ENABLED}.", "model")
        loaded = self.loaded.get(request.adapter)
        if loaded is None:
            names = ", ".join(sorted(self.loaded)) or "there are none"
            message = f"The adapter {request.adapter!r} is not loaded; loaded: {names}."
            raise BadRequest(message, "model", "model_not_found")
        try:
            self._hold(loaded)
        except CheckpointError as error:
            raise BadRequest(f"the adapter {loaded.name!r} cannot be read again: {error}", "model") from None
        state = Adapted(self, loaded)
        self._states.add(state)
        return state

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        return ADAPTED, {"adapters": np.array([len(host.rows)])}

    def metrics(self) -> Sequence[Metric]:
        if self.limits is None:
            return ()
        samples: list[Metric] = [
            ("adapters_loaded", "gauge", {}, len(self.loaded), "Adapters that requests may name."),
            ("adapter_writes", "counter", {}, self.places.writes, "Adapters copied to the device."),
        ]
        for loaded in self.loaded.values():
            labels, c = {"adapter": loaded.name}, loaded.counts
            of_each = (
                ("adapter_requests", "counter", c.requests, "Requests of an adapter that got a slot."),
                ("adapter_generation_tokens", "counter", c.tokens, "Tokens generated with an adapter."),
                ("adapter_draft_tokens", "counter", c.drafted, "Tokens drafted for requests of an adapter."),
                ("adapter_accepted_tokens", "counter", c.accepted, "Accepted draft tokens of requests of an adapter."),
                ("adapter_accept_length", "gauge", c.accept_length, "Mean number of tokens per round with drafts."),
            )
            samples += [(name, kind, labels, value, text) for name, kind, value, text in of_each]
        return samples

    def info(self) -> Mapping[str, object]:
        if self.limits is None:
            return {}
        on_device = {place.loaded: place for place in self.places.all if place.loaded is not None}
        return {
            "adapters": [
                {
                    **self._described(loaded),
                    "on_device": loaded in on_device,
                    "running": on_device[loaded].users if loaded in on_device else 0,
                    "requests": loaded.counts.requests,
                    "generation_tokens": loaded.counts.tokens,
                    "avg_spec_accept_length": round(loaded.counts.accept_length, 4),
                }
                for loaded in self.loaded.values()
            ]
        }

    # ---- device ---------------------------------------------------------------------------------

    def around_target(self, buffers: Buffers, tokens: TargetTokens) -> AbstractContextManager[None] | None:
        if buffers.find("adapters") is None:
            return None
        assert self.limits is not None
        count = self.limits.loaded
        of_rows = cast(_Slots, self.context.slots).adapter.index_select(0, tokens.slots)
        places = tokens.spread(of_rows, 0)
        ids = torch.where(places > 0, places - 1, count)
        rows = [ids] if tokens.last is None else [ids, ids.index_select(0, tokens.last)]
        plans = {len(each): AdapterPlan(each, count, len(self.layers.layers)) for each in rows}
        return self.layers.rows.seeing(plans)


class Adapted(RequestState):
    """A request with an adapter. While it exists, its adapter is held in host memory."""

    def __init__(self, feature: AdapterFeature, loaded: LoadedAdapter) -> None:
        self._feature, self._loaded = feature, loaded
        self._place: AdapterPlace | None = None

    @property
    def prefix_root(self) -> bytes:  # type: ignore[override]
        """Root of the adapter's cached prefixes."""
        return self._loaded.digest

    def ready(self) -> bool:
        return self._feature.places.of(self._loaded) is not None

    def admitted(self) -> None:
        if self._place is None:
            self._place = self._feature.places.take(self._loaded)
            self._loaded.counts.requests += 1

    def released(self) -> None:
        if self._place is not None:
            self._place.users -= 1
            self._place = None
            if self._feature.loaded.get(self._loaded.name) is not self._loaded:
                self._feature.places.forget(self._loaded)

    def slot_values(self) -> Mapping[str, int]:
        assert self._place is not None
        return {"adapter": self._place.number + 1}

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        counts = self._loaded.counts
        counts.tokens += committed.count
        drafted = committed.outputs.get("drafted")
        if drafted is not None and int(drafted[committed.index]):
            counts.rounds += 1
            counts.drafted += int(drafted[committed.index])
            counts.accepted += committed.count - 1
