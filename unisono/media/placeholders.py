"""Loaded items into token ids: each placeholder becomes as many tokens as the item has embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.media.fetching.sources import WORDS, Loaded
from unisono.media.loader import Vision
from unisono.types import BadRequest, MediaItem

Encode = Callable[[str], list[int]]


def expanded(
    token_ids: Sequence[int], items: Sequence[Loaded], vision: Vision, end: int, encode: Encode, param: str
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """The prompt with every placeholder written out, and the items with their positions, in order.

    The prompt has one placeholder for each item, as a chat template writes it; or as many as the item has embeddings,
    where it was written out before. A video whose frames are told apart by text has ``<0.5 seconds>`` and marks around
    each frame in its place, as transformers' processors write it; the marks around the placeholder stay. end: the token
    that closes a picture. Raises BadRequest where placeholders and items do not belong together.
    """
    tokens = {"image": vision.image_token_id, "video": vision.video_token_id}
    queues = {kind: [one for one in items if one.kind == kind] for kind in tokens}
    done = {kind: _written_out(token_ids, tokens[kind], queues[kind], vision) for kind in tokens}
    for kind, queue in queues.items():
        count = len(queue) if done[kind] else sum(one == tokens[kind] for one in token_ids)
        if count != len(queue):
            raise _mismatch(kind, count, len(queue), param)
    ids: list[int] = []
    placed: list[MediaItem] = []
    start, place = 0, {kind: 0 for kind in tokens}
    kinds = {token: kind for kind, token in tokens.items()}
    while start < len(token_ids):
        token = token_ids[start]
        kind_here = kinds.get(token)
        if kind_here is None or place[kind_here] == len(queues[kind_here]):
            ids.append(token)
            start += 1
            continue
        item = queues[kind_here][place[kind_here]]
        place[kind_here] += 1
        written, at = _item(item, token, vision, end, encode)
        placed.append(
            MediaItem(item.kind, item.digest, item.grid, item.pixels, [len(ids) + i for i in at], item.seconds)
        )
        ids += written
        start += len(written) if done[kind_here] else 1
    return ids, tuple(placed)


def _item(item: Loaded, token: int, vision: Vision, end: int, encode: Encode) -> tuple[list[int], list[int]]:
    """The tokens of one item, and where among them embeddings stand."""
    frames, rows, columns = item.grid
    each = rows * columns // vision.merge**2
    if not item.timestamps:
        return [token] * (frames * each), list(range(frames * each))
    ids: list[int] = []
    at: list[int] = []
    for stamp in item.timestamps:
        ids += [*encode(f"<{stamp} seconds>"), vision.vision_start_token_id]
        at += range(len(ids), len(ids) + each)
        ids += [*[token] * each, end]
    return ids, at


def _written_out(token_ids: Sequence[int], token: int, items: Sequence[Loaded], vision: Vision) -> bool:
    """Whether the prompt has as many placeholders as items have embeddings, in runs of these lengths."""
    lengths = [one.grid[0] * one.grid[1] * one.grid[2] // vision.merge**2 for one in items]
    if any(one.timestamps for one in items) or sum(lengths) == len(items):
        return False
    runs: list[int] = []
    before = None
    for one in token_ids:
        if one == token and before == token:
            runs[-1] += 1
        elif one == token:
            runs.append(1)
        before = one
    return runs == lengths


def _mismatch(kind: str, placeholders: int, items: int, param: str) -> BadRequest:
    word = WORDS[kind]
    return BadRequest(
        f"{param}: the prompt has {placeholders} placeholders for {items} {word}{'' if items == 1 else 's'}. A text "
        f"must not spell the {word}'s placeholder itself, and a prompt without a chat template must have one for each.",
        param,
    )
