"""Pictures on a GPU: the time to the first token and its parts, the encoder in its graph and eagerly, rounds.

    python -m benchmarks.pictures [--shape qwen3-vl-8b] [--text qwen3-8b] [--side 1024] [--out FILE.md]
    python -m benchmarks.pictures --tiny                       a small model on the CPU, to try this file

Random weights of a shape. Prints Markdown tables, medians in ms:

*first token*: from ``Engine.add`` to the first token of a prompt of one picture and 128 tokens of text, new pixels each
time; then of the same picture again, which the encoder cache has (other text); and of as many tokens of text. Its parts
are passes that are timed alone, with a wait for the device before and after: ``encode``, and the prompt pass. Before it
the frontend loads the picture in a process of its own (a PNG of a blurred scene): all of it, there and back, and what
that process does: decoding, preprocessing, conversion to the model's dtype with the digest.
*encoder*: one pass of this picture, and of four, replayed and eager.
*rounds*: one and eight requests after a picture, against the text model's rounds at the same lengths.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unisono.entrypoints.llm import LLM
from unisono.media.worker import MediaDecoder
from unisono.models.vision.config import VisionConfig
from unisono.types import EngineRequest, SamplingParams, SpeculativeConfig, vectors
from unisono.types.media_item import MediaItem

SHAPES = Path(__file__).parent / "shapes"
TEXT, REPEATS, ROUNDS = 128, 7, 200
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)


def opened(shape: Path, tiny: bool) -> LLM:
    flags: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256 if tiny else 4096}
    return LLM(str(shape), load_format="dummy", speculative=SpeculativeConfig("none"), **flags)


def sync(llm: LLM) -> None:
    if llm.engine.config.device.type == "cuda":
        torch.cuda.synchronize()


def picture(llm: LLM, side: int, seed: int) -> tuple[list[int], MediaItem]:
    """A prompt of one square picture of ``side`` pixels between its marks, and the picture."""
    vision = llm.engine.checkpoint.config.vision
    assert isinstance(vision, VisionConfig)
    grid = 1, side // vision.patch_size, side // vision.patch_size
    tokens = grid[1] * grid[2] // vision.unit
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(grid[1] * grid[2], vision.patch_elements, generator=generator)
    packed = vectors.pack(pixels.to(llm.engine.config.dtype))
    digest = hashlib.blake2b(packed.data, digest_size=16).digest()
    ids = [vision.vision_start_token_id, *[vision.image_token_id] * tokens, vision.vision_end_token_id]
    return ids, MediaItem("image", digest, grid, packed, list(range(1, 1 + tokens)))


def load_ms(llm: LLM, side: int) -> dict[str, float]:
    """Milliseconds in which the frontend makes a :class:`MediaItem` of an encoded picture, and of parts; medians."""
    from PIL import Image, ImageFilter

    from unisono.media.fetching.sources import MediaSource
    from unisono.media.loader import MediaLoader, Vision
    from unisono.media.settings import MediaSettings

    vision = Vision.of(llm.engine.info()["vision"])
    assert vision is not None
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge}
    sizes["temporal_patch_size"] = vision.temporal_patch_size
    bounds = {"size": {"shortest_edge": 1, "longest_edge": 1 << 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        config = {"image_processor_type": "Qwen2VLImageProcessor", **bounds, **sizes}
        Path(folder, "preprocessor_config.json").write_text(json.dumps(config))
        loader = MediaLoader(vision, Path(folder), MediaSettings(), "bfloat16", 1 << 20)
        loader.prepare()
        decoder = MediaDecoder.of(loader.setup)
        for turn in range(REPEATS):
            blocks = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(turn)).byte().numpy()
            image = Image.fromarray(blocks).resize((side, side)).filter(ImageFilter.GaussianBlur(2))
            file = io.BytesIO()
            image.save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            started = time.perf_counter()
            loader.load(MediaSource("image", "picture", url))
            times.append({"there and back": 1e3 * (time.perf_counter() - started)})
            times[-1] |= decoded_ms(decoder, file.getvalue())
        loader.close()
    return {name: statistics.median(each[name] for each in times[2:]) for name in times[0]}


def decoded_ms(decoder: MediaDecoder, data: bytes) -> dict[str, float]:
    """Milliseconds of what a worker does with an encoded picture."""
    from unisono.media.decoding import images

    times = [time.perf_counter()]
    rgb = images.decoded(images.opened(data, 1 << 24), (255, 255, 255))
    times.append(time.perf_counter())
    found = decoder.images.preprocess([rgb], return_tensors="np")
    times.append(time.perf_counter())
    decoder._packed("image", found["pixel_values"], found["image_grid_thw"][0].tolist(), 0.0, [])
    times.append(time.perf_counter())
    parts = ("decoding", "preprocessing", "conversion and digest")
    return {name: 1e3 * (after - before) for name, before, after in zip(parts, times, times[1:], strict=False)}


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(count)]


def first_token(llm: LLM, ids: list[int], media: tuple[MediaItem, ...], name: str) -> float:
    """Milliseconds from the request to its first token."""
    sync(llm)
    started = time.perf_counter()
    llm.engine.add(EngineRequest(name, ids, GREEDY, media=media))
    took = 0.0
    while llm.engine.has_work():
        if llm.engine.step() and not took:
            took = 1e3 * (time.perf_counter() - started)
    return took


def timed_passes(llm: LLM, ids: list[int], media: tuple[MediaItem, ...]) -> Iterator[tuple[str, float]]:
    """(program, ms) of the passes of one prompt, each alone on the device."""
    runner = llm.engine.runner
    launch, found = runner.launch, list[tuple[str, float]]()

    def timed(key: Any, batch: Any, **how: Any) -> Any:
        sync(llm)
        started = time.perf_counter()
        outputs = launch(key, batch, **how)
        sync(llm)
        found.append((key.program, 1e3 * (time.perf_counter() - started)))
        return outputs

    runner.launch = timed  # type: ignore[method-assign]
    try:
        first_token(llm, ids, media, "timed")
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    yield from found


def settle(llm: LLM) -> None:
    while llm.engine.has_work():
        llm.engine.step()
    while llm.engine.capture_missing():
        pass


def first_tokens(llm: LLM, side: int) -> dict[str, float]:
    """The medians of the table *first token*."""
    found: dict[str, list[float]] = {}
    for turn in range(REPEATS + 2):
        ids, item = picture(llm, side, turn)
        whole = first_token(llm, ids + words(TEXT, turn), (item,), "new")
        again = first_token(llm, words(16, turn) + ids + words(TEXT, 99 + turn), (moved(item, 16),), "known")
        text = first_token(llm, words(len(ids) + TEXT, 7 + turn), (), "text")
        _, other = picture(llm, side, 1000 + turn)
        parts = dict(timed_passes(llm, ids + words(TEXT, 50 + turn), (other,)))
        times = {"new picture": whole, "known picture": again, "as much text": text}
        times |= {f"pass: {program}": ms for program, ms in parts.items()}
        settle(llm)
        if turn >= 2:
            for name, ms in times.items():
                found.setdefault(name, []).append(ms)
    return {name: statistics.median(times) for name, times in found.items()}


def moved(item: MediaItem, by: int) -> MediaItem:
    return replace(item, positions=[position + by for position in item.positions])


def encoder(llm: LLM, side: int) -> dict[str, float]:
    """The medians of the table *encoder*."""
    planner, found = llm.engine.runner.planner, dict[str, float]()
    for count in (1, 4):
        for kind in ("replayed", "eager"):
            planner.enabled = kind == "replayed"
            times = []
            for turn in range(REPEATS):
                pairs = [picture(llm, side, 10_000 + 100 * turn + i + 10 * (kind == "eager")) for i in range(count)]
                ids, media = list[int](), list[MediaItem]()
                for more, item in pairs:
                    media.append(moved(item, len(ids)))
                    ids += more
                if len(ids) >= llm.engine.config.max_model_len:
                    break
                times += [ms for program, ms in timed_passes(llm, ids, tuple(media)) if program == "encode"][:1]
                settle(llm)
            if times:
                found[f"{count} x, {kind}"] = statistics.median(times)
    planner.enabled = True
    return found


def rounds(llm: LLM, prompts: list[tuple[list[int], tuple[MediaItem, ...]]]) -> float:
    """Milliseconds of a round of these requests, the median of ROUNDS."""
    count = min(ROUNDS, llm.engine.config.max_model_len - max(len(ids) for ids, _ in prompts) - 8)
    for number, (ids, media) in enumerate(prompts):
        params = replace(GREEDY, max_tokens=count + 4)
        llm.engine.add(EngineRequest(f"round{number}", ids, params, media=media))
    times, before = [], None
    while llm.engine.has_work():
        deltas = llm.engine.step()
        now = time.perf_counter()
        if before is not None and len(deltas) == len(prompts):
            times.append(1e3 * (now - before))
        before = now if len(deltas) == len(prompts) else None
    return statistics.median(times[2:-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-vl-8b")
    parser.add_argument("--text", default="qwen3-8b")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape, text, side = SHAPES / args.shape, SHAPES / args.text, args.side
    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            from tests.engine.pictures import make_seeing
            from tests.models.make import make_checkpoint

            side = 32
            shape = make_seeing(Path(folder) / "seeing")
            text = make_checkpoint(Path(folder) / "text", "qwen3", vocab_size=270)
        lines = ["| first token | ms |", "|---|---|"]
        with opened(shape, args.tiny) as llm:
            lines += [f"| {name} | {ms:.2f} |" for name, ms in first_tokens(llm, side).items()]
            lines += [f"| before: {name} | {ms:.2f} |" for name, ms in load_ms(llm, side).items()]
            lines += ["", "| encoder | ms |", "|---|---|"]
            lines += [f"| {name} | {ms:.2f} |" for name, ms in encoder(llm, side).items()]
            prompts = []
            for number in range(8):
                ids, item = picture(llm, side, 500 + number)
                prompts.append((ids + words(TEXT, number), (item,)))
            seen = {count: rounds(llm, prompts[:count]) for count in (1, 8)}
        with opened(text, args.tiny) as llm:
            plain = {count: rounds(llm, [(words(len(ids), 1), ()) for ids, _ in prompts[:count]]) for count in (1, 8)}
        lines += ["", "| rounds | after pictures, ms | text model, ms | speed |", "|---|---|---|---|"]
        lines += [f"| {n} | {seen[n]:.3f} | {plain[n]:.3f} | {plain[n] / seen[n]:.3f} |" for n in (1, 8)]
    table = "\n".join(lines) + "\n"
    print(table)
    if args.out is not None:
        args.out.write_text(table)


if __name__ == "__main__":
    main()
