"""Vision towers against transformers in fp32; a tower's outputs do not depend on the batch; how towers are loaded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.models.fields import TOWERS
from tests.models.harness import load as load_decoder
from tests.models.hybrids import reference, renamed
from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.models.load.loader import load_tower
from unisono.models.vision.config import MAX_GRID_SIDE
from unisono.models.vision.grids import Grid, patches
from unisono.models.vision.tower import VisionTower
from unisono.types import CheckpointError

GRIDS: dict[str, list[Grid]] = {
    "one": [(1, 6, 10)],
    "three of odd sizes": [(1, 2, 2), (1, 14, 6), (1, 10, 18)],
    "a video of four frames": [(2, 6, 10)],
    "a picture beside a video": [(1, 8, 4), (4, 4, 14)],
}
"""Patches. In tokens, sides are odd and even, and shorter and longer than a window of three."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    return {family: make_checkpoint(root / family, family, tokenizer=False) for family in TOWERS}


def load(directory: Path, **options) -> VisionTower:
    tower = load_tower(Checkpoint.open(directory), **{"dtype": torch.float32, "device": "cpu", **options})
    assert tower is not None
    return tower


def pixels_of(grids: list[Grid], tower: VisionTower, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(patches(grids), tower.config.patch_elements, generator=generator)


@torch.no_grad()
def run(tower: VisionTower, pixels: torch.Tensor, grids: list[Grid], rows: int | None = None) -> torch.Tensor:
    """The items' outputs of a pass of ``rows`` patches, filled up as the engine's buffers are."""
    count = len(pixels)
    rows = rows or count
    order = tower.order(grids)
    padded = torch.zeros(rows, pixels.shape[1], dtype=pixels.dtype)
    padded[:count] = pixels if order is None else pixels[order]
    made, inputs = tower.host_inputs(grids), {}
    for field in tower.fields():
        inputs[field.name] = torch.full((rows, *field.shape[1:]), field.pad, dtype=field.dtype)
        inputs[field.name][: len(made[field.name])] = torch.from_numpy(made[field.name])
    assert made.keys() == inputs.keys()
    out = tower(padded, inputs)
    assert out.shape == (rows // tower.config.unit, tower.config.hidden_size * (1 + tower.config.deepstack))
    assert out.isfinite().all()
    return out[: count // tower.config.unit]


@pytest.mark.parametrize("family", TOWERS)
@torch.no_grad()
def test_embeddings_and_levels_match_transformers(family, made, record_property):
    tower, visual, worst = load(made[family]), reference(made[family]).model.visual, 0.0
    assert tower.config.deepstack == (2 if "_vl" in family and "3" in family else 0)
    for grids in GRIDS.values():
        pixels = pixels_of(grids, tower)
        theirs = visual(pixels, grid_thw=torch.tensor(grids))
        parts = [theirs.pooler_output, *(getattr(theirs, "deepstack_features", None) or [])]
        outs = run(tower, pixels, grids).split(tower.config.hidden_size, dim=1)
        assert len(outs) == len(parts)
        for out, part in zip(outs, parts, strict=True):
            assert part.std() > 0.1, "a flat tower would prove nothing"
            torch.testing.assert_close(out, part, atol=1e-4, rtol=0)
            assert (out - part).norm() / part.norm() < 1e-5
            worst = max(worst, float((out - part).abs().max()))
    record_property("largest error", f"{worst:.1e}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_an_item_has_the_same_bits_in_any_company(family, dtype, made):
    """Alone, in any order, in passes of any size."""
    tower = load(made[family], dtype=dtype)
    items: list[Grid] = [(1, 6, 10), (2, 4, 6), (1, 2, 2)]
    pixels = [pixels_of([grid], tower, seed) for seed, grid in enumerate(items)]
    alone = [run(tower, own, [grid]) for own, grid in zip(pixels, items, strict=True)]
    for order in itertools.permutations(range(3)):
        grids = [items[i] for i in order]
        out = run(tower, torch.cat([pixels[i] for i in order]), grids, rows=128 + 4 * order[0])
        for i, got in zip(order, out.split([patches([grid]) // 4 for grid in grids]), strict=True):
            assert torch.equal(got, alone[i]), f"item {i} of {order}"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_sixteen_bits_stay_close(family, made):
    grids = GRIDS["three of odd sizes"]
    exact, tower = load(made[family]), load(made[family], dtype=torch.bfloat16)
    pixels = pixels_of(grids, tower)
    wanted, out = run(exact, pixels, grids), run(tower, pixels, grids)
    assert out.dtype is torch.bfloat16
    assert (out.float() - wanted).norm() / wanted.norm() < 0.03


# ---- what the host gives ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_fields_are_of_four_bytes_and_of_the_grids_alone(family, made):
    tower = load(made[family])
    inputs = tower.host_inputs([(1, 6, 10), (3, 4, 6)])
    for field in tower.fields():
        assert field.shape[0] == "rows"
        assert inputs[field.name].dtype == np.dtype(str(field.dtype).removeprefix("torch."))
    assert len(inputs["frame_bounds"]) == 132
    ends = [60, 84, 108, 132]
    bounds = np.unique(inputs["frame_bounds"], axis=0).tolist()
    assert bounds == [list(pair) for pair in zip([0, *ends], ends, strict=False)]


def test_windows_are_cut_from_the_upper_left_corner(made):
    """3 x 5 tokens in windows of three: nine tokens, then six; a full-attention block sees the whole frame."""
    tower = load(made["qwen2_5_vl"])
    assert (tower.config.tower.window, tower.config.tower.full_blocks) == (6, (1,))
    order = tower.order([(1, 6, 10)])
    tokens = order.reshape(-1, 4)[:, 0] // 4
    assert tokens.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12, 3, 4, 8, 9, 13, 14]
    bounds = tower.host_inputs([(1, 6, 10)])["window_bounds"]
    assert [tuple(row) for row in np.unique(bounds, axis=0)] == [(0, 36), (36, 60)]


@pytest.mark.parametrize("grid", [(1, 3, 4), (0, 2, 2), (1, 2, 0), (1, 2, MAX_GRID_SIDE + 2)])
def test_grids_that_are_not_computed(grid, made):
    with pytest.raises(ValueError, match=r"multiples of 2, at most 8192"):
        load(made["qwen3_vl"]).host_inputs([grid])


# ---- config.json ------------------------------------------------------------------------------------


def test_vision_config_from_config_json(made):
    vision = Checkpoint.open(made["qwen3_vl"]).config.vision
    told = json.loads(json.dumps(dataclasses.asdict(vision)))
    assert told["patch_elements"] == 3 * 2 * 4 * 4
    assert (told["merge"], told["deepstack"], told["hidden_size"], told["tokens_per_second"]) == (2, 2, 84, 0)
    assert (told["image_token_id"], told["video_token_id"], told["vision_start_token_id"]) == (263, 264, 261)
    assert vision.deepstack_layers == (0, 1)
    assert (vision.mrope_section, vision.mrope_interleaved) == ((5, 4, 3), True)
    older = Checkpoint.open(made["qwen2_5_vl"]).config.vision
    assert (older.tokens_per_second, older.deepstack, older.mrope_interleaved) == (4, 0, False)
    assert Checkpoint.open(made["qwen3_5"]).config.vision.tower.deepstack_blocks == ()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
@torch.no_grad()
def test_planes_turn_by_transformers_axes(family, made):
    """Angles that tell the axes apart show from which one each plane takes its own."""
    vision, theirs = Checkpoint.open(made[family]).config.vision, reference(made[family]).model.language_model
    planes = len(theirs.rotary_emb.inv_freq)
    axis = torch.arange(3.0)[:, None, None].expand(3, 1, planes).clone()
    chosen = theirs.rotary_emb.recomposition_frequencies(axis).flatten()
    assert vision.rotary_axes(planes) == tuple(chosen[:planes].int().tolist())
    assert {0, 1} <= {*vision.rotary_axes(planes)}


BAD = {
    "out_hidden_size": (83, r"out_hidden_size=83: it must be the text model's hidden_size 84"),
    "hidden_size": (70, r"num_heads=3: 70 features must be 3 heads whose size is a multiple of 4"),
    "hidden_act": ("relu", r"hidden_act='relu': it must be 'gelu_pytorch_tanh' or 'gelu'"),
    "num_position_embeddings": (24, r"num_position_embeddings=24: it must be a square number"),
    "deepstack_visual_indexes": ([0, 3], r"deepstack_visual_indexes=\(0, 3\): blocks in order, below 3"),
    "spatial_merge_size": (0, r"merge=0: it must be at least 1"),
    "image_token_id": (269, r"image_token_id=269: it must be a token of the vocabulary, whose ids are 0 to 268"),
    "depth": (10**9, r"depth=1000000000 is out of range"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_not_computed(name, made, tmp_path):
    value, message = BAD[name]
    directory = shutil.copytree(made["qwen3_vl"], tmp_path / "other", ignore=shutil.ignore_patterns(WEIGHTS))
    raw = json.loads((directory / "config.json").read_text())
    (raw if name in raw else raw["vision_config"])[name] = value
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.full)])
def test_any_value_is_read_or_refused(family, made, tmp_path):
    """No other error, and no memory for what the tensors do not have."""
    source = json.loads((made[family] / "config.json").read_text())
    (tmp_path / WEIGHTS).symlink_to(shutil.copy(made[family] / WEIGHTS, tmp_path / "weights"))
    refused = 0
    for name in (*source["vision_config"], "vision_config"):
        for value in (0, "x", 9999):
            raw = json.loads(json.dumps(source))
            (raw["vision_config"] if name != "vision_config" else raw)[name] = value
            (tmp_path / "config.json").write_text(json.dumps(raw))
            try:
                load_tower(Checkpoint.open(tmp_path), dtype=torch.float32, device="cpu")
            except CheckpointError:
                refused += 1
    assert refused > 40


def test_sections_in_blocks_are_all_planes(made, tmp_path):
    raw = json.loads((made["qwen2_5_vl"] / "config.json").read_text())
    raw["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 3]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"mrope_section=\[4, 2, 3\]: the sections have to be 8 planes"):
        Checkpoint.open(tmp_path)


def test_a_config_without_a_tower_is_a_text_models(made, tmp_path):
    raw = json.loads((made["qwen3_vl"] / "config.json").read_text())
    del raw["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config.vision is None
    assert load_tower(checkpoint, dtype=torch.float32, device="cpu", load_format="dummy") is None


HUB_QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "model_type": "qwen2_5_vl",
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 152064,
}
"""As the hub's Qwen2.5-VL-7B-Instruct spells it: the text model's fields lie flat."""


def test_the_hubs_sizes(tmp_path):
    """As many elements as transformers' towers have; heads of 72 and of 80."""
    (tmp_path / "config.json").write_text(json.dumps(HUB_QWEN2_5_VL))
    shape = Path(__file__).parent.parent.parent / "benchmarks" / "shapes" / "qwen3-vl-8b"
    sizes = {shape: (72, 1536, (24, 20, 20), (8, 16, 24), 0), tmp_path: (80, 1176, (16, 24, 24), (), 8)}
    for directory, (head_dim, elements, section, levels, window) in sizes.items():
        checkpoint = Checkpoint.open(directory)
        vision = checkpoint.config.vision
        assert (vision.tower.head_dim, vision.patch_elements, vision.mrope_section) == (head_dim, elements, section)
        assert (vision.tower.deepstack_blocks, vision.tower.window) == (levels, window)
        tower = load_tower(checkpoint, dtype=torch.bfloat16, device="meta", load_format="dummy")
        with torch.device("meta"):
            theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory)).model.visual
        assert sum(p.numel() for p in tower.parameters()) == sum(p.numel() for p in theirs.parameters())


# ---- loading ----------------------------------------------------------------------------------------


def same(one: VisionTower, other: VisionTower) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_weights_are_the_checkpoints(made):
    tensors = load_file(made["qwen3_vl"] / WEIGHTS)
    tower = load(made["qwen3_vl"])
    stored = tensors["model.visual.patch_embed.proj.weight"]
    assert stored.shape == (72, 3, 2, 4, 4)
    assert torch.equal(tower.patch_embed.proj.weight, stored.flatten(1))
    assert sum(n.startswith("model.visual.") for n in tensors) == len(list(tower.parameters()))
    assert not any(parameter.requires_grad for parameter in tower.parameters())


OTHER_NAMES = {
    "qwen3_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},  # transformers writes the short ones
}


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_names_of_other_exports(family, made, tmp_path):
    """The tower's names may have another prefix, and the text model's another one beside them."""

    def moved(name: str) -> str:
        old = next((old for old in OTHER_NAMES[family] if name.startswith(old)), "")
        return OTHER_NAMES[family].get(old, "") + name.removeprefix(old)

    other = renamed(made[family], tmp_path / "other", lambda t: {moved(n): v for n, v in t.items()})
    assert not {n for n in load_file(other / WEIGHTS) if n != "lm_head.weight"} & {*load_file(made[family] / WEIGHTS)}
    assert same(load(other), load(made[family]))
    ours, theirs = (load_decoder(directory) for directory in (other, made[family]))
    assert torch.equal(ours.layers[2].mixer.qkv.weight, theirs.layers[2].mixer.qkv.weight)


def test_shards(made, tmp_path):
    sharded = make_checkpoint(tmp_path, "qwen3_vl", tokenizer=False, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert same(load(sharded), load(made["qwen3_vl"]))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_a_quantised_checkpoint_may_keep_its_tower_plain(made, tmp_path):
    """A tower's module is quantised where the checkpoint holds scales of it, whatever config.json leaves out."""
    directory = shutil.copytree(made["qwen3_vl"], tmp_path / "fp8")
    raw = json.loads((directory / "config.json").read_text())
    for kept in (["lm_head", "model.visual"], ["lm_head"]):
        raw["quantization_config"] = {**FP8, "modules_to_not_convert": kept}
        (directory / "config.json").write_text(json.dumps(raw))
        assert same(load(directory), load(made["qwen3_vl"]))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.visual.blocks.0.attn.qkv.weight_scale_inv"] = torch.ones(2, 1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"blocks.0.attn.qkv.weight"):
        load(directory)


WRONG = {
    "missing": (lambda t: t.pop("model.visual.blocks.1.attn.qkv.bias"), r"blocks.1.attn.qkv.bias \[216\] is missing"),
    "misshapen": (
        lambda t: t.update({"model.visual.patch_embed.proj.weight": torch.zeros(72, 96)}),
        r"patch_embed.proj.weight has shape \[72, 96\]; config.json asks for \[72, 3, 2, 4, 4\]",
    ),
    "unexpected": (
        lambda t: t.update({"model.visual.blocks.9.norm1.bias": torch.zeros(72)}),
        r"blocks.9.norm1.bias \[72\] is unexpected: the vision tower of a Qwen3VL",
    ),
    "not a number": (
        lambda t: t["model.visual.merger.norm.weight"].fill_(torch.nan),
        r"merger.norm.weight has weights that are NaN",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_vision_weights_are_named(kind, made, tmp_path):
    change, message = WRONG[kind]

    def changed(tensors):
        change(tensors)
        return tensors

    with pytest.raises(CheckpointError, match=message):
        load(renamed(made["qwen3_vl"], tmp_path / "wrong", changed))


def test_a_text_models_export_has_no_tower(made, tmp_path):
    def text(tensors):
        return {n: t for n, t in tensors.items() if ".visual." not in n}

    checkpoint = Checkpoint.open(renamed(made["qwen3_vl"], tmp_path / "text", text))
    assert load_tower(checkpoint, dtype=torch.float32, device="cpu") is None
    ((beginning, count, why),) = checkpoint.unread()
    assert (beginning, count) == ("model.visual.*", "no tensors")
    assert "pictures are refused" in why
    assert Checkpoint.open(made["qwen3_vl"]).unread() == []


def test_dummy_weights(made, tmp_path):
    """Need config.json only, depend on the seed, and keep norms as they are born."""
    shutil.copy(made["qwen3_vl"] / "config.json", tmp_path)
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    assert torch.equal(first.merger.norm.weight, torch.ones(72))
    assert abs(first.blocks[0].qkv.weight.std() - 0.02) < 2e-3
    assert run(first, pixels_of(GRIDS["one"], first), GRIDS["one"]).std() > 0
