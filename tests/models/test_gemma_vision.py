"""Gemma's towers and its attention inside pictures, against transformers in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.gemma_pictures import (
    SIDE,
    images_of,
    make_gemma3,
    make_gemma4,
    make_gemma4_unified,
    merged,
    padded,
    several,
    shapes,
)
from tests.engine.helpers import engine
from tests.engine.pictures import IMAGE, TEXT, VIDEO, VOCAB, Picture, prompt, run, stepped, vision_of, words, written
from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_INPUTS
from tests.models.hybrids import reference, renamed
from tests.models.picture_checks import check_refusal
from tests.models.towers import compare_embeddings
from unisono.entrypoints.llm import LLM
from unisono.models.load.build import no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model, load_tower
from unisono.models.vision.config import VisionConfig
from unisono.passes.features.media import MediaState
from unisono.types import BadRequest, SamplingParams, SpeculativeConfig, vectors

GREEDY = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, seed=0, return_hidden_states=True,
    allowed_token_ids=tuple(range(TEXT)),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@torch.no_grad()
def test_embeddings_are_transformers(path: Path) -> None:
    """Each picture's, in any pass."""
    vision = vision_of(path)
    tower = load_tower(Checkpoint.open(path), dtype=torch.float32, device="cpu")
    assert tower is not None
    pixels = torch.cat([Picture(vision.side, vision.side, seed).pixels(vision) for seed in (1, 2, 3)])
    grid = (1, vision.side, vision.side)

    def run(pixels: torch.Tensor, count: int) -> torch.Tensor:
        return tower(pixels, {name: torch.from_numpy(v) for name, v in tower.host_inputs([grid] * count).items()})

    ours = run(pixels, 3)
    theirs = reference(path).model.get_image_features(images_of(pixels, vision)).pooler_output
    torch.testing.assert_close(ours, theirs.flatten(0, 1), atol=1e-4, rtol=0)
    each = vision.side**2
    for number in range(3):
        assert torch.equal(run(pixels[number * each :][:each], 1), ours[number * 16 :][:16])


@pytest.fixture(scope="module", params=["one pass", "chunks of 21", "planned on the host"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    flags: dict[str, Any] = {"max_num_batched_tokens": 21 if "21" in request.param else 128}
    flags |= {"attention_backend": "torch"} if "host" in request.param else {}
    with engine(path, dtype="float32", **flags) as made:
        yield made


@torch.no_grad()
def test_logits_and_text_are_transformers(path: Path, llm: LLM) -> None:
    vision, model = vision_of(path), reference(path)
    prompts = several(vision)
    for each, (tokens, logits) in zip(prompts, written(llm, prompts, GREEDY), strict=True):
        ids = torch.tensor([each.ids + tokens[:-1]])
        given: dict[str, Any] = {"input_ids": ids, "token_type_ids": (ids == IMAGE).int()}
        if each.media:
            given["pixel_values"] = images_of(torch.cat([vectors.unpack(m.pixels) for m in each.media]), vision)
        theirs = model(**given).logits[0]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        assert theirs[len(each.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens


@torch.no_grad()
def test_comparison_fails_if_a_chunk_splits_an_image(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    monkeypatch.setattr(MediaState, "reach", lambda self, start, end: end)
    monkeypatch.setattr(MediaState, "least_end", lambda self, start: start + 1)
    vision = vision_of(path)
    made = prompt(vision, words(13, 3), Picture(vision.side, vision.side, 2), words(3, 4))
    outputs = []
    for most in (64, 21):
        with engine(path, dtype="float32", max_num_batched_tokens=most) as llm:
            outputs.append(written(llm, [made], GREEDY)[0][1])
    assert torch.equal(outputs[0][:13], outputs[1][:13])
    assert (outputs[0][14:30] - outputs[1][14:30]).abs().max() > 1e-3


def test_a_picture_waits_for_a_pass_that_holds_it(path: Path) -> None:
    """Beside running requests that leave a pass less room than a picture has tokens."""
    vision = vision_of(path)
    prompts = several(vision)
    with engine(path, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        together = run(llm, prompts, GREEDY)
    with engine(path, max_num_seqs=1) as llm:
        assert run(llm, prompts, GREEDY) == together


def test_a_picture_that_no_pass_holds_is_refused(tmp_path: Path) -> None:
    path = make_gemma3(tmp_path, tokens=64)
    with engine(path, max_num_batched_tokens=63) as llm:
        made = prompt(vision_of(path), words(3, 1), Picture(SIDE, SIDE, 1))
        with pytest.raises(BadRequest, match=r"picture of 64 tokens.*pass of 63 tokens: raise --max-num-batched"):
            stepped(llm, [made], GREEDY)
        other = prompt(vision_of(path), words(3, 1), Picture(SIDE, SIDE - 1, 1))
        with pytest.raises(BadRequest, match="every picture of this model has 8 rows and columns"):
            stepped(llm, [other], GREEDY)


BAD = {
    "mm_tokens_per_image": (15, r"mm_tokens_per_image=15: its root must divide the 8 patches of a side"),
    "image_token_index": (270, r"image_token_index=270: it must be a token; ids are 0 to 269"),
    "vision_config.layer_norm_eps": (1e-5, r"layer_norm_eps=1e-05: it must be 1e-06"),
    "vision_config.image_size": (33, r"image_size=33: it must be a multiple of 4"),
    "vision_config.hidden_act": ("relu", r"hidden_act='relu': it must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_not_computed(name: str, path: Path, tmp_path: Path) -> None:
    check_refusal(path, name, *BAD[name], tmp_path)


def test_names_of_other_exports(path: Path, tmp_path: Path) -> None:
    """As the hub's checkpoints spell them, with a head that is not read; and a text model's export."""

    def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in tensors.items()}
        return {**moved, "vision_tower.vision_model.head.probe": torch.zeros(1)}

    other = renamed(path, tmp_path / "hub", named)
    ours, theirs = (load_tower(Checkpoint.open(p), dtype=torch.float32, device="cpu") for p in (path, other))
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    flags: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "attention": no_attention, "max_positions": 64}
    mine, others = (load_model(Checkpoint.open(p), **flags) for p in (path, other))
    assert torch.equal(mine.layers[1].mixer.qkv.weight, others.layers[1].mixer.qkv.weight)
    text = renamed(path, tmp_path / "text", lambda t: {n: v for n, v in t.items() if n.startswith("language_model.")})
    assert load_tower(Checkpoint.open(text), dtype=torch.float32, device="cpu") is None
    ((_, count, why),) = Checkpoint.open(text).unread()
    assert count == "no tensors"
    assert "pictures are refused" in why


# ---- Gemma 4 ----------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "both ways in windows": {},
    "experts, bounds in the tower": {**GEMMA4_EXPERTS, "clipped": True},
    "causal, inputs of layers, shared keys": {**GEMMA4_INPUTS, "vocab_size_per_layer_input": VOCAB,
                                              "use_bidirectional_attention": None},
    "12B": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def path4(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_gemma4_unified if request.param == "12B" else make_gemma4
    return make(tmp_path_factory.mktemp("gemma4"), **KINDS[request.param])


def inputs4(pixels: list[torch.Tensor], grids: list[tuple[int, ...]], vision: VisionConfig) -> dict[str, Any]:
    """transformers' inputs of pictures."""
    sides = [(rows, columns) for _, rows, columns in grids]
    if not pixels:
        return {}
    return merged(pixels, sides) if vision.merge == 1 else padded(pixels, sides, vision)


def masks4(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """transformers' masks, as its ``generate`` makes them.

    ``forward`` of a Gemma 4 12B makes others, with attention both ways in layers without a window too.
    """
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if type(model).__name__ != "Gemma4UnifiedForConditionalGeneration":
        return {"mm_token_type_ids": kinds}
    embeds, positions = torch.zeros(*ids.shape, 1), torch.arange(ids.shape[1])[None]
    found = model.create_masks_for_generate(model.config, embeds, None, None, positions, kinds)
    return {"attention_mask": found}


@torch.no_grad()
def test_gemma4_embeddings_are_transformers(path4: Path) -> None:
    model = reference(path4).model
    tower = compare_embeddings(path4, lambda *given: model.get_image_features(**inputs4(*given)).pooler_output)
    with pytest.raises(ValueError, match="at most 16"):
        tower.host_inputs([(1, 2, 18)])


@torch.no_grad()
@pytest.mark.parametrize("most", [128, 21])
def test_gemma4_logits_and_text_are_transformers(path4: Path, most: int) -> None:
    vision, model = vision_of(path4), reference(path4)
    prompts = shapes(vision)
    with engine(path4, dtype="float32", max_num_batched_tokens=most * 4 // vision.unit) as llm:
        outputs = written(llm, prompts, GREEDY)
    for each, (tokens, logits) in zip(prompts, outputs, strict=True):
        ids = torch.tensor([each.ids + tokens[:-1]])
        patches = [vectors.unpack(item.pixels) for item in each.media]
        seen = inputs4(patches, [item.grid for item in each.media], vision)
        theirs = model(input_ids=ids, **masks4(model, ids), **seen).logits[0]
        torch.testing.assert_close(logits, theirs, atol=2e-4, rtol=0)  # 1.1e-4 with experts
        assert theirs[len(each.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens


@torch.no_grad()
@pytest.mark.parametrize("most", [128, 21])
def test_gemma4_videos_are_transformers(path4: Path, most: int) -> None:
    """Frames with text between them, beside a picture and as a prompt's end; the second time behind cached prefixes."""
    vision, model = vision_of(path4), reference(path4)
    film, still = Picture(4, 6, 1, frames=3, kind="video"), Picture(2, 2, 3)
    prompts = [
        prompt(vision, words(5, 1), film, words(3, 2), still, words(4, 3)),
        prompt(vision, still, Picture(2, 4, 5, frames=2, kind="video")),
    ]
    with engine(path4, dtype="float32", max_num_batched_tokens=most * 4 // vision.unit) as llm:
        outputs = written(llm, prompts, GREEDY)
        assert run(llm, prompts, GREEDY) == [tokens for tokens, _ in outputs]
    for each, (tokens, logits) in zip(prompts, outputs, strict=True):
        ids = torch.tensor([each.ids + tokens[:-1]])
        seen: dict[str, Any] = {}
        for item in each.media:
            frames, rows, columns = item.grid
            pixels = list(vectors.unpack(item.pixels).chunk(frames))
            made = inputs4(pixels, [(1, rows, columns)] * frames, vision)
            if item.kind == "video":
                names = {"pixel_values": "pixel_values_videos", "image_position_ids": "video_position_ids"}
                made = {names[name]: value for name, value in made.items()}
                made["num_frames_per_video"] = torch.tensor([frames])
            seen |= made
        theirs = model(input_ids=ids, **masks4(model, ids), **seen).logits[0]
        torch.testing.assert_close(logits, theirs, atol=2e-4, rtol=0)
        assert theirs[len(each.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens


# ---- ranks ------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gemma 3": (make_gemma3, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "Gemma 4": (make_gemma4, {**GEMMA4_EXPERTS, "num_key_value_heads": 2}),
    "Gemma 4 12B": (make_gemma4_unified, {"num_key_value_heads": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == "Gemma 4" else n for n in PAIRS])
def test_two_ranks_write_the_text_of_one_about_pictures(name: str, tmp_path: Path) -> None:
    """The second time after cached prefixes, the third time with drafts."""
    make, fields = PAIRS[name]
    path = make(tmp_path, **fields)
    vision = vision_of(path)
    prompts = several(vision) if name == "Gemma 3" else shapes(vision)
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, allowed_token_ids=tuple(range(TEXT))
    )
    with engine(path) as llm:
        one = run(llm, prompts, params)
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    with engine(path, tensor_parallel_size=2) as llm:
        assert run(llm, prompts, params) == one
        assert run(llm, prompts, params) == one
        assert llm.engine.scheduler.prefix_hits > 0
    with engine(path, tensor_parallel_size=2, speculative=spec, max_num_batched_tokens=96) as llm:
        assert run(llm, prompts, params) == one
