"""Expansion of placeholders in token ids: as many tokens as the item has embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.media.fetching.sources import LoadedMedia
from unisono.media.loader import Vision
from unisono.types import BadRequest, MediaItem

Encode = Callable[[str], list[int]]


def expanded(
    token_ids: Sequence[int], items: Sequence[LoadedMedia], vision: Vision, end: int, encode: Encode, param: str
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """The prompt with every placeholder expanded, and the items with their positions, in order.

    The prompt has one placeholder per item, as a chat template writes it, or is expanded already. A video with
    timestamps becomes each frame's time (``vision.frame_time``) and marks around its tokens, as transformers'
    processors write it; the marks around the placeholder stay. With ``vision.row_end`` an image becomes rows of tokens,
    each with a token after it; with ``vision.tile_marks`` it becomes tiles of tokens, with tokens between them. end:
    the token that closes an image. Raises BadRequest if placeholders and items do not match.
    """
    tokens = {"image": vision.image_token_id, "video": vision.video_token_id}
    queues = {kind: [one for one in items if one.kind == kind] for kind in tokens}
    ends = [_one_token(text, "ends rows", encode, param) for text in (vision.row_end, vision.picture_end) if text]
    tile_marks = [_one_token(text, "marks tiles", encode, param) for text in vision.tile_marks]
    first = dict(tokens)  # of the tokens of an item that is expanded
    if tile_marks:
        first["image"], tokens["image"] = tile_marks[0], tile_marks[3]

    def written_as(item: LoadedMedia) -> tuple[list[int], list[int]]:
        if tile_marks:
            return _in_tiles(item, vision, tile_marks)
        token = tokens[item.kind]
        return _in_rows(item, token, vision, ends) if ends else _item(item, token, vision, end, encode)

    if ends or tile_marks:
        images = [written_as(one)[0] for one in queues["image"]]
        done = {"image": _has_all(token_ids, first["image"], images), "video": False}
    else:
        done = {kind: _written_out(token_ids, tokens[kind], queues[kind], vision) for kind in tokens}
    for kind, queue in queues.items():
        count = len(queue) if done[kind] else sum(one == tokens[kind] for one in token_ids)
        if count != len(queue):
            raise _mismatch(kind, count, len(queue), param)
    ids: list[int] = []
    placed: list[MediaItem] = []
    start, place = 0, {kind: 0 for kind in tokens}
    kinds = {(first if done[kind] else tokens)[kind]: kind for kind in tokens}
    while start < len(token_ids):
        token = token_ids[start]
        kind_here = kinds.get(token)
        if kind_here is None or place[kind_here] == len(queues[kind_here]):
            ids.append(token)
            start += 1
            continue
        item = queues[kind_here][place[kind_here]]
        place[kind_here] += 1
        written, at = written_as(item)
        placed.append(
            MediaItem(item.kind, item.digest, item.grid, item.pixels, [len(ids) + i for i in at], item.seconds)
        )
        ids += written
        start += len(written) if done[kind_here] else 1
    return ids, tuple(placed)


def with_marks(text: str, placeholder: str, marks: tuple[str, str, str], around: str) -> str:
    """A text in which an image's marks stand in place of its placeholder: ``around``, the start, one token of the
    image, the end, ``around``, as transformers' processors write them.

    marks: (start, token, end). A text that has them already keeps them.
    """
    full = f"{around}{''.join(marks)}{around}"
    return text.replace(full, placeholder).replace(placeholder, full)


def _item(item: LoadedMedia, token: int, vision: Vision, end: int, encode: Encode) -> tuple[list[int], list[int]]:
    """The tokens of one item, and the indices of its embeddings among them."""
    frames, rows, columns = item.grid
    each = rows * columns // vision.merge**2
    if not item.timestamps:
        return [token] * (frames * each), list(range(frames * each))
    ids: list[int] = []
    at: list[int] = []
    for number, stamp in enumerate(item.timestamps):
        text = vision.frame_time.format(stamp)
        ids += [*encode(vision.between_frames + text if number else text), vision.vision_start_token_id]
        at += range(len(ids), len(ids) + each)
        ids += [*[token] * each, end]
    return ids, at


def _in_rows(item: LoadedMedia, token: int, vision: Vision, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """:func:`_item` of an image whose rows end with a token. ends: that token, and the last row's."""
    _, rows, columns = (size // vision.merge for size in item.grid)
    ids = ([token] * columns + [ends[0]]) * rows
    ids[-1] = ends[1]
    return ids, [i for i, one in enumerate(ids) if one == token]


def _in_tiles(item: LoadedMedia, vision: Vision, marks: Sequence[int]) -> tuple[list[int], list[int]]:
    """:func:`_item` of an image that is cut into tiles. marks: see ``tile_marks`` of :class:`Vision`."""
    start, between, after, whole, end = marks
    rows, columns = item.tiles
    tile = [vision.image_token_id] * (item.grid[1] * item.grid[2] // vision.merge**2)
    ids = [start]
    for _ in range(rows if rows * columns > 1 else 0):
        for column in range(columns):
            ids += [*([between] if column else []), *tile]
        ids.append(after)
    ids += [whole, *tile, end]
    return ids, [i for i, one in enumerate(ids) if one == vision.image_token_id]


def _one_token(text: str, role: str, encode: Encode, param: str) -> int:
    """The token of a mark. Raises BadRequest for a tokenizer without it."""
    ids = encode(text)
    if len(ids) != 1:
        raise BadRequest(
            f"{param} has images, and this checkpoint's tokenizer has no token {text}, which {role} of an image; "
            "copy the tokenizer from the base model.",
            param,
        )
    return ids[0]


def _has_all(token_ids: Sequence[int], token: int, written: Sequence[Sequence[int]]) -> bool:
    """True if the prompt's placeholders are expanded to exactly these sequences, in order."""
    at = 0
    for one in written:
        at = next((i for i in range(at, len(token_ids)) if token_ids[i] == token), len(token_ids))
        if list(token_ids[at : at + len(one)]) != list(one):
            return False
        at += len(one)
    return token not in token_ids[at:]


def _written_out(token_ids: Sequence[int], token: int, items: Sequence[LoadedMedia], vision: Vision) -> bool:
    """True if the prompt's placeholders are expanded: runs with the lengths of the items' embeddings."""
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
    return BadRequest(
        f"{param}: the prompt has {placeholders} placeholders for {items} {kind}{'' if items == 1 else 's'}. A text "
        f"must not spell the {kind}'s placeholder itself, and a prompt without a chat template must have one for each.",
        param,
    )
