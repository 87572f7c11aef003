"""Pictures and videos from bytes and objects to token ids, positions and pixels: transformers' own are the measure."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as picture_size

from tests.http import pictures_ as pics
from tests.http.conftest import until
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.media.decoding.videos import VideoRules, resized, sampled, video_rules
from unisono.media.fetching.sources import MediaSource, Options
from unisono.media.loader import MediaLoader, Vision, _LoadedCache
from unisono.media.settings import MediaSettings
from unisono.media.worker import as_dtype
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError, SamplingParams
from unisono.types.vectors import unpack

STYLES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
CONTEXT = 4096


def facts(style: str) -> ModelFacts:
    return ModelFacts(CONTEXT, 1000, 6, "float32", (), {}, False, False, vision=Vision.of(pics.vision(style)))


def inputs_of(path: Path, style: str, **settings: Any) -> InputProcessor:
    loader = MediaLoader(facts(style).vision, path, MediaSettings(**settings), "float32", CONTEXT - 1)
    return InputProcessor(Tokenizer.load(path), facts(style), loader)


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(style: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pics.write_checkpoint(tmp_path_factory.mktemp(style), style)


@pytest.fixture(scope="module")
def inputs(style: str, directory: Path) -> Iterator[InputProcessor]:
    made = inputs_of(directory, style)
    yield made
    made.media.close()


PAD = f"{pics.START}{pics.IMAGE}{pics.END}"
FILM = f"{pics.START}{pics.VIDEO}{pics.END}"


@pytest.mark.parametrize("sizes", [[(64, 48)], [(33, 70), (500, 20), (201, 203)], [(700, 900)]])
def test_pictures_as_transformers_has_them(
    sizes: list[tuple[int, int]], style: str, directory: Path, inputs: InputProcessor
) -> None:
    """Ids, grids and pixels; text before, between and after."""
    images = [pics.picture(*size, seed=i) for i, size in enumerate(sizes)]
    text = "Look: " + "".join(f"{PAD} and {i}" for i in range(len(images))) + "\nWhat is it?"
    wanted = pics.processor(directory, style)(text=[text], images=images)
    prompt = inputs.prompt({"prompt": text, "multi_modal_data": {"image": images}})
    assert prompt.token_ids == list(wanted["input_ids"][0])
    assert [list(item.grid) for item in prompt.media] == wanted["image_grid_thw"].tolist()
    pixels = torch.cat([unpack(item.pixels) for item in prompt.media])
    assert torch.equal(pixels, torch.from_numpy(wanted["pixel_values"]))
    vision = inputs.model.vision
    assert vision is not None
    positions = [p for item in prompt.media for p in item.positions]
    assert positions == [i for i, token in enumerate(prompt.token_ids) if token == vision.image_token_id]
    again = inputs.prompt({"prompt_token_ids": prompt.token_ids, "multi_modal_data": {"image": images}})
    assert (again.token_ids, again.media) == (prompt.token_ids, prompt.media)  # written out before


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_files_are_pillows(form: str, inputs: InputProcessor) -> None:
    """A file is what Pillow makes of it, in every form: data URL, plain base64 and bytes."""
    data = pics.encoded(pics.picture(80, 60), form)
    wanted = inputs.media.load(MediaSource("image", "p", Image.open(io.BytesIO(data)).convert("RGB")))
    for given in (pics.data_url(data, "image/x"), pics.base64_of(data), data):
        assert inputs.media.load(MediaSource("image", "p", given)).digest == wanted.digest


def test_objects(inputs: InputProcessor) -> None:
    """Pictures of Pillow in its modes, arrays and tensors."""
    image = pics.picture(64, 48)
    array = np.asarray(image)

    def digest(given: Any, **options: Any) -> bytes:
        return inputs.media.load(MediaSource("image", "p", given, Options(**options))).digest

    wanted = digest(image)
    for given in (array, torch.from_numpy(array.copy()), torch.from_numpy(array.copy()).permute(2, 0, 1)):
        assert digest(given) == wanted
    grey = image.convert("L")
    assert digest(grey) == digest(grey.convert("RGB")) == digest(np.asarray(grey))
    clear = image.copy()
    clear.putalpha(0)
    white, blue = Image.new("RGB", image.size, "white"), Image.new("RGB", image.size, (0, 0, 255))
    assert digest(clear) == digest(white) == digest(pics.encoded(clear))
    assert digest(clear, background=(0, 0, 255)) == digest(blue)
    wide = Image.fromarray((np.asarray(grey).astype(np.uint16) << 8) + 7)
    assert digest(wide) == digest(grey) == digest(pics.encoded(wide))
    turned = image.rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert digest(pics.encoded(turned, exif=exif)) == wanted
    palette = image.quantize(16)
    assert digest(palette) == digest(palette.convert("RGB"))
    for given, wrong in ((array.astype(np.float32), "uint8"), ("ä", "base64"), (3, "int"), (array[None], "shape")):
        with pytest.raises(BadRequest, match=wrong):
            digest(given)


def test_bounds_of_pixels(style: str, inputs: InputProcessor) -> None:
    """max_pixels and min_pixels are the processor's, whichever way they come."""
    image, factor = pics.picture(400, 300), 32 if style == "qwen3_vl" else 28
    for options in (
        Options(max_pixels=20_000),
        Options(min_pixels=190_000),
        Options(max_pixels=100_000, min_pixels=90_000),
    ):
        least = options.min_pixels or (1024 if style == "qwen3_vl" else 3136)
        most = options.max_pixels or (512 * 512 if style == "qwen3_vl" else 200_000)
        rows, columns = picture_size(300, 400, factor, least, most)
        loaded = inputs.media.load(MediaSource("image", "p", image, options))
        assert loaded.grid == (1, rows * 2 // factor, columns * 2 // factor)
    given = {"prompt": PAD, "multi_modal_data": {"image": image}}
    wanted = inputs.media.load(MediaSource("image", "p", image, Options(max_pixels=20_000))).grid
    for kwargs in (
        {"max_pixels": 20_000},
        {"size": {"longest_edge": 20_000}},
        {"images_kwargs": {"max_pixels": 20_000}},
        {"max_pixels": 20_000, "videos_kwargs": {"max_pixels": 1}, "do_resize": True},
    ):
        assert inputs.prompt(given | {"mm_processor_kwargs": kwargs}).media[0].grid == wanted
    for kwargs, wrong in (
        ({"crop": 1}, "mm_processor_kwargs.crop=1 is not supported"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels=0 is not valid"),
        ({"size": {"height": 3}}, "mm_processor_kwargs.size"),
        ({"images_kwargs": 3}, "mm_processor_kwargs.images_kwargs"),
    ):
        with pytest.raises(BadRequest, match=wrong):
            inputs.prompt(given | {"mm_processor_kwargs": kwargs})


def frames_of(count: int, width: int = 100, height: int = 80) -> list[Image.Image]:
    return [pics.picture(width, height, seed=i) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_videos_of_frames(count: int, style: str, directory: Path, inputs: InputProcessor) -> None:
    """Ids as transformers' processor writes them; pixels are those of its image processor, two frames a patch."""
    frames = frames_of(count)
    text = f"See {FILM} now {PAD}."
    image = pics.picture(64, 64)
    data = {"video": (frames, {"fps": 4.0}), "image": image}
    prompt = inputs.prompt({"prompt": text, "multi_modal_data": data})
    video, still = prompt.media
    assert (video.kind, still.kind) == ("video", "image")
    own = pics.processor(directory, style)
    replaced = [own.replace_image_token({"image_grid_thw": np.array([still.grid])}, 0)]
    listed = max(count, 2)
    metadata = SimpleNamespace(fps=4.0, frames_indices=[0, 0] if count == 1 else list(range(listed)))
    given = {"video_grid_thw": np.array([video.grid]), "video_metadata": [metadata]}
    own.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    (wanted,), _ = own.get_text_with_replacements([text], replaced, [own.replace_video_token(given, 0)])
    assert prompt.token_ids == own.tokenizer(wanted)["input_ids"]
    vision = inputs.model.vision
    assert vision is not None
    assert video.positions == [i for i, token in enumerate(prompt.token_ids) if token == vision.video_token_id]
    assert video.seconds == 0.5
    assert video.grid[0] == -(-listed // 2)
    size = 16 if style == "qwen3_vl" else 14
    rows, columns = video.grid[1] * size, video.grid[2] * size
    pixels = unpack(video.pixels).view(video.grid[0], -1, 3, 2, size * size)
    for i in range(2 * video.grid[0]):
        frame = frames[min(i, count - 1)]
        bounds = {"shortest_edge": rows * columns, "longest_edge": rows * columns}
        resized_frame = frame.resize((columns, rows), Image.Resampling.BICUBIC)
        patches = own.image_processor([resized_frame], size=bounds, do_resize=False)["pixel_values"]
        assert np.array_equal(pixels[i // 2, :, :, i % 2], patches.reshape(-1, 3, 2, size * size)[:, :, i % 2])


def test_video_digest_includes_timestamps(inputs: InputProcessor) -> None:
    """Positions of a video's tokens depend on its speed, and cached prefixes are found by digests."""
    frames = frames_of(4)
    digests = [
        inputs.media.load(MediaSource("video", "p", frames, Options(fps=fps))).digest for fps in (None, 2.0, 1.0)
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animated_files(form: str, style: str, inputs: InputProcessor) -> None:
    """As a video: frames at the processor's rate, or the request's. As a picture: the first frame."""
    frames = frames_of(40, 64, 64)
    data = pics.animated(frames, 100, form)

    def load(kind: Any, given: Any, **options: Any) -> Any:
        return inputs.media.load(MediaSource(kind, "p", given, Options(**options)))

    whole = load("video", data)
    indices = np.linspace(0, 39, 8).round() if style == "qwen3_vl" else np.arange(40)
    assert whole.grid[0] == len(indices) // 2
    if style == "qwen3_vl":
        pairs = indices.reshape(-1, 2).mean(1) / 10
        assert whole.timestamps == tuple(f"{one:.1f}" for one in pairs)
    assert whole.seconds == pytest.approx(1.0 if style == "qwen3_vl" else 0.2)
    assert load("video", data, num_frames=4).grid[0] == load("video", data, fps=1).grid[0] == 2
    first = Image.open(io.BytesIO(data)).convert("RGB")
    assert load("image", data).digest == load("image", first).digest
    with pytest.raises(BadRequest, match=r"damaged|cannot be opened|no picture"):
        load("video", data[: len(data) // 2])


def test_frames_taken_as_documented() -> None:
    """transformers' sample_frames of Qwen3-VL, which does not need torchvision by itself; Qwen2-VL's by hand."""
    import importlib

    module = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    rules = rules_of("qwen3_vl")
    for total, rate in ((40, 10.0), (3, 1.0), (100, 25.0), (5000, 2.0), (9, 30.0)):
        own = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
        metadata = SimpleNamespace(total_num_frames=total, fps=rate)
        wanted = module.Qwen3VLVideoProcessor.__dict__["sample_frames"](own, metadata, fps=2)
        assert sampled(rules, total, rate, None, None, 10**6) == wanted.tolist()
        for count, height, width in ((2, 100, 80), (4, 720, 1280), (7, 20, 31), (16, 1, 3), (128, 400, 400)):
            bounds = module.smart_resize(count, height, width, 2, 32, 4096, 1 << 20)
            assert resized(rules, count, height, width, (None, None)) == bounds
    older = rules_of("qwen2_5_vl")
    assert sampled(older, 40, 10.0, 1.0, None, 256) == [0, 10, 20, 30]
    assert sampled(older, 41, 10.0, None, None, 256) == [int(i) for i in np.arange(0, 41, 41 / 40)]
    assert sampled(older, 600, 10.0, None, None, 256)[-1] < 600
    assert resized(older, 4, 80, 100, (None, None)) == picture_size(80, 100, 28, 3136, 200_000)


def rules_of(style: str) -> VideoRules:
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        for name, content in pics.FILES[style].items():
            (Path(path) / name).write_text(json.dumps(content))
        found = video_rules(Path(path), pics.FILES[style]["preprocessor_config.json"])
    assert found is not None
    return found


def test_bfloat16_and_float16_are_rounded_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) * 3
    values[0, :4] = [0.0, 1.00390625, 1.01171875, -0.0]  # ties
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        wanted = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().tobytes()
        assert as_dtype(values, name) == wanted


def test_placeholders_must_fit(inputs: InputProcessor) -> None:
    image = pics.picture(64, 64)
    for text in ("no placeholder", PAD + PAD, f"{PAD} and {pics.IMAGE}"):
        with pytest.raises(BadRequest, match="placeholders for 1 image"):
            inputs.prompt({"prompt": text, "multi_modal_data": {"image": image}})
    with pytest.raises(BadRequest, match="0 placeholders for 1 video"):
        inputs.prompt({"prompt": PAD, "multi_modal_data": {"image": image, "video": [[image, image]]}})
    for data, wrong in (({"audio": 1}, "audio"), ({"image": {"image_embeds": 1}}, "embeddings"), (3, "int")):
        with pytest.raises(BadRequest, match=wrong):
            inputs.prompt({"prompt": PAD, "multi_modal_data": data})
    prompt = inputs.prompt({"prompt": PAD, "multi_modal_data": {"image": image}})
    with pytest.raises(BadRequest, match="truncate_prompt_tokens cuts token ids, and this prompt has images"):
        inputs.request("a", prompt, SamplingParams(truncate_prompt_tokens=3))
    assert inputs.request("a", prompt, SamplingParams()).media == prompt.media


def test_uuids_refer_to_cached_images(inputs: InputProcessor) -> None:
    """multi_modal_uuids: with a name a picture need not come again, while it is kept."""
    image = pics.picture(90, 64)
    given = {"prompt": PAD, "multi_modal_data": {"image": [image]}, "multi_modal_uuids": {"image": ["cat"]}}
    first = inputs.prompt(given)
    again = inputs.prompt(given | {"multi_modal_data": {"image": [None]}})
    assert again.media == first.media
    assert inputs.prompt({"prompt": PAD, "multi_modal_uuids": {"image": ["cat"]}}).media == first.media
    with pytest.raises(BadRequest, match="'dog' is not kept"):
        inputs.prompt({"prompt": PAD, "multi_modal_uuids": {"image": ["dog"]}})
    with pytest.raises(BadRequest, match="2 names for 1 of image"):
        inputs.prompt(given | {"multi_modal_uuids": {"image": ["a", "b"]}})
    with pytest.raises(BadRequest, match="'cat' is not kept"):  # another API key's name of another picture
        inputs.media.load(MediaSource("image", "a", None, uuid="cat", owner="bob"))


def test_preprocessed_media_is_cached(inputs: InputProcessor) -> None:
    """The same bytes with the same options are decoded once; the oldest go first."""
    asked: list[Any] = []
    workers = inputs.media.workers
    ask = workers.ask

    def counted(message: Any, payloads: Any) -> Any:
        asked.append(message)
        return ask(message, payloads)

    workers.ask = counted  # type: ignore[method-assign]
    try:
        data = pics.encoded(pics.picture(77, 66))
        for _ in range(2):
            for options in (Options(), Options(max_pixels=5000)):
                inputs.media.load(MediaSource("image", "p", data, options))
        assert len(asked) == 2
    finally:
        workers.ask = ask  # type: ignore[method-assign]
    kept = _LoadedCache(2 * 77 * 66 * 100)
    for number in range(3):
        item = inputs.media.load(MediaSource("image", "p", pics.picture(77, 66, number)))
        kept.put(bytes([number]), item, ("image", f"name {number}"))
    kept._size = len(item.pixels.data)
    kept.put(bytes([2]), item)
    assert [kept.get(("image", f"name {number}")) for number in range(3)] == [None, None, item]


def test_a_worker_that_dies_is_replaced(inputs: InputProcessor) -> None:
    """Killed while idle: nobody notices. An item that takes too much time ends alone, with a sentence."""
    load = inputs.media.load
    load(MediaSource("image", "p", pics.picture(40, 40, 1)))
    workers = inputs.media.workers
    template = workers._template
    assert template is not None
    children = Path(f"/proc/{template._process.pid}/task/{template._process.pid}/children")
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)
    until(lambda: not children.read_text())
    load(MediaSource("image", "p", pics.picture(40, 40, 2)))
    workers._seconds = 0.001
    try:
        with pytest.raises(BadRequest, match=r"p takes more than 0\.001 s of processor time"):
            load(MediaSource("image", "p", pics.encoded(pics.picture(900, 900))))
    finally:
        workers._seconds = 15.0
    load(MediaSource("image", "p", pics.picture(40, 40, 3)))


def test_broken_processors(tmp_path: Path) -> None:
    """A processor that contradicts the tower, or is another model's, keeps a server from starting."""
    style = "qwen3_vl"
    pics.write_checkpoint(tmp_path, style)
    vision = Vision.of(pics.vision(style) | {"patch_size": 8})
    with pytest.raises(CheckpointError, match=r"'patch_size': 1[46]\}, which config.json contradicts"):
        MediaLoader(vision, tmp_path, MediaSettings(), "float32", 99).prepare()
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(CheckpointError, match="CLIPImageProcessor"):
        MediaLoader(Vision.of(pics.vision(style)), tmp_path, MediaSettings(), "float32", 99).prepare()
    (tmp_path / "preprocessor_config.json").unlink()
    bare = MediaLoader(Vision.of(pics.vision(style)), tmp_path, MediaSettings(), "float32", 99)
    bare.prepare()
    with pytest.raises(BadRequest, match=r"p is an image, and this checkpoint has no preprocessor_config\.json"):
        bare.check([MediaSource("image", "p", b"")])


def test_templates_without_parts(style: str, directory: Path) -> None:
    """A template that writes contents as text gets the placeholders in it."""
    inputs = inputs_of(directory, style)
    assert inputs.tokenizer is not None
    inputs.tokenizer.backend.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    content = [{"type": "text", "text": "Hi"}, {"type": "image"}, {"type": "text", "text": "?"}]
    assert inputs.chat([{"role": "user", "content": content}]).text == f"Hi\n{PAD}\n?"


def test_base64_is_strict(inputs: InputProcessor) -> None:
    data = pics.encoded(pics.picture(40, 40))
    good = base64.b64encode(data).decode()
    for bad in (good[:-5] + "!" + good[-4:], good[:77] + "\n" + good[77:], good.rstrip("=")[:-1]):
        with pytest.raises(BadRequest, match="p is not base64"):
            inputs.media.load(MediaSource("image", "p", f"data:image/png;base64,{bad}"))
