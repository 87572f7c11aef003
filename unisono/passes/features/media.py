"""Images and videos in prompts, encoded before the prompt passes that read them.

The encoder's unit is a frame, which its attention never leaves: an image is one frame, a video several. A prompt pass
of a request runs when the frames it reads are in the encoder cache, so a chunk may cut an image. The prefix cache
identifies an image's tokens by its digest and their place in it. The rotary positions of text after an image differ
from its absolute positions; keys, pages and noise use the absolute ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from unisono.attention.context import Rotary
from unisono.graphs import NO_FEATURES, Buffers, Features, Field, GraphKey, PassShape
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.blocks.rotary_positions import rotary_positions
from unisono.models.config import DecoderConfig
from unisono.models.vision.config import VisionConfig
from unisono.passes.encode import NAME, encode_program
from unisono.passes.encoder_cache import EncoderCache
from unisono.passes.features.base import (
    Feature,
    FeatureContext,
    HostPass,
    Metric,
    OwnProgram,
    PassKind,
    PrePass,
    RequestState,
    Room,
    Row,
)
from unisono.types import BadRequest, ConfigError, EngineRequest, MediaItem, Vectors, vectors

DIGEST_BYTES = 20
"""Digest size; with a token's place in its frame appended, it equals no other digest's size."""

SEEN = Features(extra=frozenset({"media"}))

MOST_TOKENS = 1 << 14
"""Tokens of one frame, at most: 4096 × 4096 pixels for a model with 32 × 32 pixels per token."""

LEAST_TOKENS = 16
"""Tokens of the smallest pass with a graph of its own size."""

CACHE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Default size of the encoder cache in bytes; more if two frames of the largest size need it."""


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame of an item. key: digest of all inputs of its embeddings. rows: its rows in the item's pixels. positions:
    its prompt positions."""

    key: bytes
    item: MediaItem
    rows: slice
    positions: np.ndarray

    @property
    def grid(self) -> tuple[int, int, int]:
        return (1, *self.item.grid[1:])

    @property
    def patches(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def first(self) -> int:
        return int(self.positions[0])

    @property
    def last(self) -> int:
        return int(self.positions[-1])

    def words(self, dtype: torch.dtype) -> np.ndarray:
        """Bits of the pixels in this dtype, [patches, words] int32."""
        pixels, stored = self.item.pixels, vectors.dtype_of(self.item.pixels.dtype)
        if stored is dtype:
            words = np.frombuffer(pixels.data, dtype=np.int32)
            return words.reshape(-1, pixels.size * dtype.itemsize // 4)[self.rows]
        each = stored.itemsize * pixels.size
        part = pixels.data[self.rows.start * each : self.rows.stop * each]
        return vectors.unpack(Vectors(pixels.dtype, pixels.size, part)).to(dtype).view(torch.int32).numpy()


class Media(Feature):
    """Fields: ``media_rows``, for each token its row in the encoder cache, -1 for none; ``rotary_shift``, the offset of
    its rotary from its absolute position on each axis. If a drafter reads them too, also the same for the token after
    each request's last one in the pass.
    """

    name = "media"
    requested_by = ("media",)

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        vision, tower = context.vision, context.tower
        self._ahead = int(context.drafts)  # a drafter reads one more token
        self._both_ways = context.vision is not None and context.vision.both_ways
        if vision is None or tower is None:
            return
        self.expected = SEEN
        width = context.hidden_size * (1 + vision.deepstack)
        self.most_tokens, rows = self._sizes(width * context.dtype.itemsize)
        self.table = torch.empty(rows, width, dtype=context.dtype, device=context.device)
        self.cache = EncoderCache(rows)
        self.most_patches = vision.unit * min(max(context.max_tokens, LEAST_TOKENS), self.most_tokens)
        program = encode_program(tower, self.table)
        least = min(LEAST_TOKENS * vision.unit, self.most_patches)
        self._program = OwnProgram(program, vision.unit, least, self.most_patches, ms=0.4 / vision.unit)

    def _sizes(self, token_bytes: int) -> tuple[int, int]:
        """(tokens of a frame, at most; tokens of the whole cache). token_bytes: cache bytes per token."""
        c = self.context
        most, configured = min(MOST_TOKENS, c.max_model_len), c.cache_bytes
        size = max(CACHE_BYTES[c.device.type], 2 * most * token_bytes) if configured is None else configured
        rows = size // token_bytes
        if rows < 2:
            raise ConfigError(
                f"--mm-encoder-cache-gb {size / (1 << 30):.6f}: a token of a picture takes {token_bytes} bytes, and "
                "two have to fit. Raise it."
            )
        most = min(most, rows // 2)
        why = "a default" if configured is None else "--mm-encoder-cache-gb"
        c.decide("encoder cache", f"{rows} tokens", f"{rows * token_bytes >> 20} MiB, {why}; {most} a frame at most")
        return most, rows

    # ---- declared once --------------------------------------------------------------------------

    @staticmethod
    def slot_fields(config: DecoderConfig) -> tuple[Field, ...]:
        return () if config.vision is None else (Field("rotary_delta", torch.int32, ()),)

    def programs(self) -> Sequence[OwnProgram]:
        return () if self.context.tower is None else (self._program,)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind != "extend" or self.context.tower is None:
            return ()
        own: tuple[Field, ...] = (
            Field("media_rows", torch.int32, ("rows",), pad=-1, feature=SEEN),
            Field("rotary_shift", torch.int32, ("rows", 3), feature=SEEN),
        )
        if self._both_ways:
            own = (*own, Field("media_ahead", torch.int32, ("rows",), feature=SEEN))
        if not self._ahead:
            return own
        requests = self.context.max_rows
        return (
            *own,
            Field("media_rows_after", torch.int32, (requests,), pad=-1, feature=SEEN),
            Field("rotary_shift_after", torch.int32, (requests, 3), feature=SEEN),
        )

    # ---- host -----------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> RequestState | None:
        if not request.media:
            return None
        c = self.context
        if c.vision is None or c.tower is None:
            raise BadRequest("the model has no vision tower: leave pictures and videos out.", "media")
        check_media(request, c.vision, self.most_tokens)
        try:
            positions, delta = rotary_positions(len(request.prompt_token_ids), request.media, c.vision)
        except ValueError as error:
            raise BadRequest(f"media: {error}", "media") from None
        most = request.params.max_tokens
        length = len(request.prompt_token_ids) + (c.max_model_len if most is None else most)
        end = max(int(positions.max()) + 1, min(c.max_model_len, length) + delta)
        if end > c.max_model_len:
            raise BadRequest(
                f"media: rotary positions go up to {end}; the context has {c.max_model_len}. Give videos with less "
                "time between two frames, lower max_tokens, or raise --max-model-len.",
                "media",
            )
        frames = frames_of(request.media, c.vision)
        largest = max(frame.tokens for frame in frames)
        if self._both_ways and largest > c.max_tokens:
            raise BadRequest(
                f"media: a picture of {largest} tokens, whose tokens see each other in both directions, has to fit a "
                f"pass of {c.max_tokens} tokens: raise --max-num-batched-tokens.",
                "media",
            )
        return MediaState(
            frames, request.prompt_token_ids, positions.T, delta, self.cache, self._ahead, self._both_ways
        )

    def pre_pass(self, rows: Sequence[Row], room: Room) -> PrePass | None:
        frames: list[Frame] = []
        cache_rows: list[np.ndarray] = []
        patches = 0
        for row in rows:
            state: MediaState = row.state
            for number in state.missing(row.start, row.end):
                frame = state.frames[number]
                if not state.may_hold(frame):
                    break
                if frame.key not in self.cache:
                    total = patches + frame.patches
                    key, full = GraphKey(NAME, PassShape(total)), total > self.most_patches
                    if (full and frames) or not (room.has(key) or (room.least and not frames)):
                        return self._pass(frames, cache_rows)
                    frames.append(frame)
                    cache_rows.append(state.hold(number))
                    patches += frame.patches
                else:
                    state.hold(number)
        return self._pass(frames, cache_rows)

    def _pass(self, frames: Sequence[Frame], cache_rows: Sequence[np.ndarray]) -> PrePass | None:
        """The pass that encodes these frames into these cache rows."""
        tower, dtype = self.context.tower, self.context.dtype
        if not frames or tower is None:
            return None
        grids = [frame.grid for frame in frames]
        parts, order = [frame.words(dtype) for frame in frames], tower.order(grids)
        pixels = parts[0] if len(parts) == 1 else np.concatenate(parts)
        batch = {
            "pixels": pixels if order is None else pixels[order],
            "cache_rows": np.concatenate(cache_rows),
            **tower.host_inputs(grids),
        }
        return PrePass(GraphKey(NAME, PassShape(len(pixels))), batch)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        if host.kind != "extend":
            return NO_FEATURES, {}
        media_rows, shift = np.full(host.tokens, -1, dtype=np.int32), np.zeros((host.tokens, 3), dtype=np.int32)
        ahead = np.zeros(host.tokens, dtype=np.int32)
        rows_after, shift_after = np.full(host.count, -1, dtype=np.int32), np.zeros((host.count, 3), dtype=np.int32)
        for row in host.rows:
            state: MediaState = row.state
            here = slice(row.first, row.first + row.end - row.start)
            media_rows[here], shift[here] = state.cache_rows(row.start, row.end), state.shift(row.start, row.end)
            ahead[here] = state.later(row.start, row.end)
            rows_after[row.index] = state.cache_rows(row.end, row.end + 1)[0]
            shift_after[row.index] = state.shift(row.end, row.end + 1)[0]
            state.computed(row.end)
        fields = {"media_rows": media_rows, "rotary_shift": shift}
        if self._both_ways:
            fields["media_ahead"] = ahead
        if self._ahead:
            fields |= {"media_rows_after": rows_after, "rotary_shift_after": shift_after}
        if all((values == (-1 if "rows" in name else 0)).all() for name, values in fields.items()):
            return NO_FEATURES, {}
        return SEEN, fields

    def metrics(self) -> Sequence[Metric]:
        if self.context.tower is None:
            return ()
        cache = self.cache
        return (
            (
                "encoder_cache_queries",
                "counter",
                {},
                cache.queries,
                "Frames of images and videos looked up in the encoder cache.",
            ),
            ("encoder_cache_hits", "counter", {}, cache.hits, "Frames found in the encoder cache."),
            ("encoder_cache_evictions", "counter", {}, cache.evictions, "Frames evicted from the encoder cache."),
            (
                "encoder_cache_usage_perc",
                "gauge",
                {},
                cache.used / cache.capacity,
                "Fraction of the encoder cache's rows in use.",
            ),
        )

    def weights_changed(self) -> None:
        if self.context.vision is not None and self.context.tower is not None:
            self.cache.forget()

    def info(self) -> Mapping[str, object]:
        vision = self.context.vision
        if vision is None or self.context.tower is None:
            return {"vision": None}
        cache = self.cache
        usage = {"tokens": cache.capacity, "used": cache.used, "held": cache.held, "bytes": self.table.nbytes}
        usage |= {"queries": cache.queries, "hits": cache.hits, "evictions": cache.evictions}
        return {"vision": {**dataclasses.asdict(vision), "max_frame_tokens": self.most_tokens, "encoder_cache": usage}}

    # ---- device ---------------------------------------------------------------------------------

    def override_embeddings(self, buffers: Buffers) -> Overriding | None:
        rows, vision = buffers.find("media_rows"), self.context.vision
        if rows is None or vision is None:
            return None
        embeddings, *levels = self.table.split(self.context.hidden_size, dim=1)
        after, looked_up = buffers.find("media_rows_after"), vision.padding_token_id
        return Overriding(embeddings, rows, after, tuple(levels), looked_up)

    def rotary(self, buffers: Buffers, positions: torch.Tensor) -> Rotary | None:
        shift, after = buffers.find("rotary_shift"), buffers.find("rotary_shift_after")
        if shift is None:
            return None
        rotary_positions = positions[:, None] + shift
        if after is None:
            return Rotary(rotary_positions)
        following = buffers.start + buffers.query_start.diff()
        return Rotary(rotary_positions, following[:, None] + after)

    def seen_until(self, buffers: Buffers, positions: torch.Tensor) -> torch.Tensor | None:
        ahead = buffers.find("media_ahead")
        return None if ahead is None else positions + ahead


class MediaState(RequestState):
    """A request's frames, and the cache rows of those that it holds.

    token_ids: the prompt's.
    rotary [prompt, 3]: rotary positions of its tokens.
    delta: offset of generated tokens' rotary positions from their absolute ones.
    ahead: tokens read beyond those that a pass computes.
    both_ways: a frame's tokens see each other in both directions, so no prompt chunk ends inside a frame.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        token_ids: Sequence[int],
        rotary: np.ndarray,
        delta: int,
        cache: EncoderCache,
        ahead: int,
        both_ways: bool = False,
    ) -> None:
        self._both_ways = both_ways
        self.frames, self._token_ids, self._delta, self._cache, self._ahead = frames, token_ids, delta, cache, ahead
        prompt = len(rotary)
        self._shift = (rotary - np.arange(prompt)[:, None]).astype(np.int32)
        self._rows = np.full(prompt, -1, dtype=np.int32)
        self._held: set[int] = set()
        largest = max(frame.tokens for frame in frames)
        self._reserve = min(2 * largest, sum(frame.tokens for frame in frames))

    @cached_property
    def prompt_keys(self) -> list[int | bytes]:  # type: ignore[override]
        """Token ids; for a frame's tokens, its digest and their place in it."""
        keys: list[int | bytes] = list(self._token_ids)
        for frame in self.frames:
            for place, position in enumerate(frame.positions.tolist()):
                keys[position] = frame.key + place.to_bytes(4, "little")
        return keys

    def slot_values(self) -> Mapping[str, int]:
        return {"rotary_delta": self._delta}

    def missing(self, start: int, end: int) -> list[int]:
        """Indices of the frames that a pass over ``start … end`` reads and the request does not hold."""
        return [
            number
            for number, frame in enumerate(self.frames)
            if number not in self._held and frame.last >= start and frame.first < end + self._ahead
        ]

    def may_hold(self, frame: Frame) -> bool:
        """Return True if there is room for one more frame."""
        return self._cache.allows(id(self), frame.tokens, self._reserve)

    def hold(self, number: int) -> np.ndarray:
        """Hold a frame and return its cache rows."""
        frame = self.frames[number]
        rows = self._cache.hold(id(self), frame.key, frame.tokens, self._reserve)
        self._rows[frame.positions] = rows
        self._held.add(number)
        return rows

    def reach(self, start: int, end: int) -> int:
        missing = self.missing(start, end)
        end = max(start, self.frames[missing[0]].first - self._ahead) if missing else end
        cut = next((f for f in self.frames if f.first < end <= f.last), None) if self._both_ways else None
        return end if cut is None else max(start, cut.first)

    def least_end(self, start: int) -> int:
        here = next((f for f in self.frames if f.first <= start <= f.last), None) if self._both_ways else None
        return start + 1 if here is None else here.last + 1

    def later(self, start: int, end: int) -> np.ndarray:
        """Number of later tokens that each of these positions sees: [end - start] int32."""
        found = np.zeros(end - start, dtype=np.int32)
        for frame in self.frames if self._both_ways else ():
            seen = frame.positions[(frame.positions >= start) & (frame.positions < end)]
            found[seen - start] = frame.last - seen
        return found

    def cache_rows(self, start: int, end: int) -> np.ndarray:
        """Cache row of each of these positions, -1 for none: [end - start] int32."""
        return _padded(self._rows[start:end], end - start, -1)

    def shift(self, start: int, end: int) -> np.ndarray:
        """Offset of rotary from absolute positions: [end - start, 3] int32."""
        return _padded(self._shift[start:end], end - start, self._delta)

    def computed(self, end: int) -> None:
        """Called when a pass up to position ``end`` is launched: release the frames before it."""
        for number in tuple(self._held):
            if self.frames[number].last < end:
                self._release(number)

    def released(self) -> None:
        for number in tuple(self._held):
            self._release(number)

    def _release(self, number: int) -> None:
        self._held.remove(number)
        frame = self.frames[number]
        self._rows[frame.positions] = -1
        self._cache.release(id(self), frame.key)


def _padded(values: np.ndarray, length: int, value: int) -> np.ndarray:
    """``values`` [n, …] followed by ``value``: [length, …]."""
    return np.concatenate((values, np.full((length - len(values), *values.shape[1:]), value, dtype=np.int32)))


def frames_of(media: Sequence[MediaItem], vision: VisionConfig) -> list[Frame]:
    """Frames of a request's items, in order of position."""
    frames = []
    for item in media:
        count, size = item.grid[0], item.grid[1] * item.grid[2]
        positions = np.asarray(item.positions, dtype=np.int64).reshape(count, -1)
        for number in range(count):
            # Rotary positions of a video's frames may depend on their times, which the digest does not cover.
            text = f"{item.kind} {number} {item.seconds}".encode()
            key = hashlib.blake2b(item.digest + text, digest_size=DIGEST_BYTES).digest()
            frames.append(Frame(key, item, slice(number * size, (number + 1) * size), positions[number]))
    return sorted(frames, key=lambda frame: frame.first)


def check_media(request: EngineRequest, vision: VisionConfig, most_tokens: int) -> None:
    """Raise BadRequest for items that do not fit the prompt or the model."""
    ids, taken = request.prompt_token_ids, set(() if request.overrides is None else request.overrides.positions)
    for number, item in enumerate(request.media):
        frames, rows, columns = item.grid

        def require(ok: bool, what: str, number: int = number, item: MediaItem = item) -> None:
            if not ok:
                raise BadRequest(f"media[{number}], a {item.kind} with grid {item.grid}: {what}.", "media")

        require(item.kind == "image" or vision.video_token_id >= 0, "the model takes pictures only")
        fixed = (rows, columns) == (vision.side, vision.side) or not vision.side
        require(fixed, f"every picture of this model has {vision.side} rows and columns")
        sides = min(rows, columns) >= 1 and rows % vision.merge == columns % vision.merge == 0
        require(frames >= 1 and sides, f"rows and columns have to be multiples of {vision.merge}, and a frame one")
        tokens, patches = frames * rows * columns // vision.unit, frames * rows * columns
        require(len(item.positions) == tokens, f"it has {len(item.positions)} positions; its grid has {tokens} tokens")
        each = rows * columns // vision.unit
        way_out = "Give a smaller one, lower max_pixels, or raise --mm-encoder-cache-gb"
        require(each <= most_tokens, f"a frame of {each} tokens; at most {most_tokens} are encoded at once. {way_out}")
        size, elements = item.pixels.size, vision.patch_elements
        require(size == elements, f"its patches have {size} numbers; the model's have {elements}")
        held = len(item.pixels.data) // (size * vectors.dtype_of(item.pixels.dtype).itemsize)
        require(held == patches, f"it has {held} patches; its grid has {patches}")
        placeholders = vision.image_token_id, vision.video_token_id
        wrong = next((p for p in item.positions if not (0 <= p < len(ids) and ids[p] in placeholders)), None)
        require(wrong is None, f"prompt position {wrong} holds no placeholder (token id {placeholders})")
        require(taken.isdisjoint(item.positions), "another item or embedding stands at one of its positions")
        taken.update(item.positions)
