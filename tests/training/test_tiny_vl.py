"""``training/tiny_vl``: scenes and answers are right and repeat, the model is transformers', the head is the served."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from training.tiny_vl import measure as measuring
from training.tiny_vl import train as training
from training.tiny_vl.batches import LABELS, Packing, labels_of, stream
from training.tiny_vl.checkpoint import PROCESSOR, special_ids
from training.tiny_vl.head import AUX, STEPS, Head, Taught, acceptance, teach
from training.tiny_vl.measure import _Rows
from training.tiny_vl.model import TinyVL, patchify
from training.tiny_vl.problems import held_out_problems, lines
from training.tiny_vl.questions import ask
from training.tiny_vl.scenes import SIZES, is_held_out, random_scene
from training.tiny_vl.text import CHAT_TEMPLATE, Format, train_tokenizer
from training.tiny_vl.train import TOY, Tensors, model_loss
from unisono.drafters.eagle.checkpoint import open_eagle3
from unisono.tools.draft_training.attention import TrainingAttention, new_pass
from unisono.tools.eval.picture_problems import COUNT, FILE, PictureProblem, picture_problems
from unisono.tools.eval.scenes import COLOURS, SHAPES, Bar, Scene, Thing, draw


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(0, 400)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> TinyVL:
    torch.manual_seed(0)
    made = TinyVL(TOY.config(special_ids(tokenizer))).eval()
    with torch.no_grad():  # weights that make the parts matter
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
    return made.requires_grad_(False)


# ---- scenes and questions -----------------------------------------------------------------------


def test_stored_problems_equal_the_generator() -> None:
    assert FILE.read_text(encoding="utf-8").splitlines() == lines()
    assert picture_problems(COUNT) == held_out_problems(COUNT)
    assert len({json.dumps(one.scene.as_json()) for one in picture_problems(COUNT)}) > 0.98 * COUNT
    assert set(Counter(one.kind for one in picture_problems(COUNT))) == {
        "describe", "count", "colour", "sum", "position", "digits", "chart",
    }  # fmt: skip


def test_the_pixels_of_the_problems() -> None:
    """No version of a library may move one: the bars are measured on these very pictures."""
    digest = hashlib.blake2b(digest_size=8)
    for one in picture_problems(COUNT):
        digest.update(draw(one.scene).tobytes())
    assert digest.hexdigest() == "08f901a5486c86dc"


def test_training_never_sees_a_held_out_composition() -> None:
    rng = Random(5)
    for _ in range(300):
        assert not is_held_out(random_scene(rng, rng.choice(SIZES), 1.0, held_out=False))
    assert all(is_held_out(one.scene) for one in picture_problems(COUNT))


def expected(question: str, scene: Scene) -> str | None:
    """The answer by other code than the generator's; None for questions that it does not know."""
    shapes = [one for one in scene.things if one.kind in SHAPES]
    digits = [one.kind for one in scene.in_order() if one.kind not in SHAPES]
    heights = {bar.colour: bar.height for bar in scene.bars}
    both = re.search(r"(?:many|Add the) (\w+) and (?:the )?(\w+) shapes", question)
    bars = re.search(r"the (\w+) and the (\w+) bar", question)
    if both:
        return str(sum(one.colour in both.groups() for one in shapes))
    if bars:
        return str(heights[bars[1]] + heights[bars[2]])
    if match := re.search(r"(?:many|Count the) (\w+) shapes", question):
        return str(sum(one.colour == match[1] for one in shapes))
    if re.search(r"(?:many|Count the) shapes", question):
        return str(len(shapes))
    if match := re.search(r"(?:many|Count the) (\w+?)(?:es)?s?(?: are there\?|\.)$", question):
        if match[1] == "bar":
            return str(len(scene.bars))
        return str(sum(one.kind.startswith(match[1]) for one in shapes))
    if match := re.search(r"the (\w+) bar\?|How high is the (\w+) bar", question):
        colour = match[1] or match[2]
        if colour in ("highest", "lowest"):
            return (max if colour == "highest" else min)(heights, key=lambda name: heights[name])
        return str(heights[colour])
    if "sum of the digits" in question or "Add the digits" in question or "add up to" in question:
        return str(sum(map(int, digits)))
    if "largest" in question:
        return max(digits)
    return "".join(digits) if "digits" in question else None


def test_answers_are_right() -> None:
    rng, known = Random(3), 0
    for _ in range(600):
        scene = random_scene(rng, rng.choice(SIZES), 1.0, held_out=False)
        asked = ask(rng, scene)
        answer = expected(asked.question, scene)
        known += answer is not None
        assert answer in (None, asked.final_answer), (asked, scene)
    assert known > 300


def test_shapes_are_drawn_at_their_positions() -> None:
    rng = Random(4)
    for _ in range(60):
        scene = random_scene(rng, rng.choice(SIZES), 1.0, held_out=False)
        if not scene.things:
            continue
        picture = draw(scene)
        differs = (picture != picture[0, 0]).any(-1) if scene.in_order()[0] else None
        for thing in scene.things:
            row, column = scene.cell(thing)
            top, left = row * scene.height // scene.rows, column * scene.width // scene.columns
            inside = np.zeros_like(differs)
            inside[top : (row + 1) * scene.height // scene.rows, left : (column + 1) * scene.width // scene.columns] = 1
            assert (differs & inside.astype(bool)).any()
        cells = {scene.cell(thing) for thing in scene.things}
        assert len(cells) == len(scene.things)


# ---- the model ----------------------------------------------------------------------------------


def test_the_model_is_transformers_and_branches_are_single_turns(model: TinyVL, tokenizer: Tokenizer) -> None:
    """Logits of transformers' own forward, from its own processor, for every question of a batch by itself."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in PROCESSOR.items() if k != "processor_class"})
    format, seen = Format(tokenizer), set()
    with stream(tokenizer, Packing(2, 200, 0.5), 1, 0) as batches:
        for raw in (next(batches) for _ in range(4)):
            batch = Tensors.of(raw, "cpu")
            embeddings, levels = model.see(batch.pictures)
            x = model.merge(batch.ids, batch.places, embeddings)
            hidden, _ = model.read(x, levels, batch.places, batch.positions, batch.mask)
            got = model.head(hidden)
            for row in range(2):
                inputs = processor(images=[raw.pictures[row]], return_tensors="pt")
                patches, _ = patchify(batch.pictures[row : row + 1])
                torch.testing.assert_close(inputs["pixel_values"], patches[0], atol=2e-6, rtol=0)
                for branch in sorted({*raw.segments[row].tolist()} - {-1, 0} or {0}):
                    places = np.flatnonzero(np.isin(raw.segments[row], (0, branch)))
                    ids = batch.ids[row][places][None]
                    want = model.hf(
                        input_ids=ids,
                        mm_token_type_ids=(ids == format.image).int(),
                        pixel_values=inputs["pixel_values"],
                        image_grid_thw=inputs["image_grid_thw"],
                    ).logits[0]
                    torch.testing.assert_close(got[row][places], want, atol=1e-4, rtol=1e-4)
                    seen.add((batch.pictures.shape, branch))
    assert len({shape for shape, _ in seen}) > 1
    assert {branch for _, branch in seen} >= {0, 1, 2}


def test_prompts_equal_the_chat_template(tokenizer: Tokenizer) -> None:
    import jinja2

    problem, format = picture_problems(1)[0], Format(tokenizer)
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=problem.messages(), add_generation_prompt=True)
    ids = format.ids(text)
    at = ids.index(format.image)
    assert ids[:at] + [format.image] * 5 + ids[at + 1 :] == format.prompt(problem.question, 5)
    messages = problem.messages()
    messages[0]["content"].reverse()
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert format.ids(text) == format.prompt(problem.question, 1, first=False)


def test_patch_labels_match_the_drawing() -> None:
    things = (Thing("square", "red", 16, 16, 12), Thing("7", "blue", 48, 48, 2))
    labels = labels_of(Scene(64, 64, "black", things)).reshape(4, 4)
    red = 1 + SHAPES.index("square") * len(COLOURS) + list(COLOURS).index("red")
    assert (labels[:2, :2] == red).all()
    assert not labels[:2, 2:].any()
    blue = 1 + (len(SHAPES) + 7) * len(COLOURS) + list(COLOURS).index("blue")
    assert set(labels[2:, 2:].ravel().tolist()) == {0, blue}
    bars = labels_of(Scene(64, 64, "black", bars=(Bar("green", 8), Bar("red", 1)))).reshape(4, 4)
    assert (bars[:, 1] == LABELS - len(COLOURS) + list(COLOURS).index("green")).all()
    assert not bars[:2, 2:].any()


def test_the_loss_falls(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = TinyVL(TOY.config(special_ids(tokenizer)))
    with stream(tokenizer, Packing(4, 128, 0.0), 0, 0) as batches:
        batch = Tensors.of(next(batches), "cpu")
    losses = []
    optimizers = training._optimizers(model.hf, 0.02, 3e-3)
    for _ in range(12):
        loss = model_loss(model, batch, "cpu")
        loss.backward()
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses


# ---- the head -----------------------------------------------------------------------------------


def test_blind_head_reads_placeholder_embeddings(model: TinyVL, tokenizer: Tokenizer) -> None:
    with stream(tokenizer, Packing(2, 128, 1.0), 1, 0) as batches:
        batch = Tensors.of(next(batches), "cpu")
    given = (model, batch.pictures, batch.ids, batch.weights, batch.positions, batch.mask, batch.places)
    sees, blind = teach(*given), teach(*given, blind=True)
    differs = (sees.x != blind.x).any(-1)
    assert differs.sum() == batch.places.numel()
    assert differs.gather(1, batch.places).all()
    assert torch.equal(sees.logits, blind.logits)
    assert torch.equal(sees.aux, blind.aux)
    head = Head(TOY)
    assert not torch.equal(*(next(iter(head.unroll(one)))[1] for one in (sees, blind)))


def test_the_head_is_the_one_that_serves(model: TinyVL, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Text alone, all three steps: the serving module reads the checkpoint that training writes."""
    from unisono.layers.embedding import Embedding
    from unisono.models.load.checkpoint import Checkpoint

    head = Head(TOY).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_((torch.randn_like(parameter) * 0.1 + (parameter if parameter.ndim == 1 else 0)).bfloat16())
    training.Save(tmp_path, tokenizer, {}).head(head, model.text.config.rope_parameters)
    config = {**model.text.config.to_dict(), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = Checkpoint.open(tmp_path).config
    opened = open_eagle3(tmp_path / "tiny-vl-eagle3", target)
    assert opened.config.aux_layers == AUX

    class Target:
        embed = Embedding(TOY.vocab_size, TOY.hidden_size, torch.float32, "cpu")
        lm_head = torch.nn.Linear(TOY.hidden_size, TOY.vocab_size)
        builder = SimpleNamespace(kv_dtype=None)

    Target.embed.weight = model.text.embed_tokens.weight
    rows, length = 2, 24
    ids = torch.randint(0, 200, (rows, length))
    aux = torch.randn(rows, length, len(AUX) * TOY.hidden_size)
    x = model.text.embed_tokens(ids)
    positions = torch.arange(length).expand(rows, 3, length)
    angles = model.text.rotary_emb(x, positions.transpose(0, 1))
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    taught = Taught(x, aux, x, mask, (angles[0], angles[1]), torch.ones(rows, length, dtype=torch.bool))
    backend = TrainingAttention()
    served: Any = opened.build(Target, lambda heads, kv: backend, 64, torch.float32, "cpu")  # type: ignore[arg-type]
    from unisono.attention.context import ForwardContext

    hidden, earlier = served.encode(aux.flatten(0, 1)).view(rows, length, -1), ()
    for first, logits in head.unroll(taught):
        count = length - first
        inputs, (kv,) = new_pass(served.config, rows, count, first, count, 1, torch.float32, ids.device, earlier)
        out = served(ids[:, first:].flatten().int(), hidden[:, :count].flatten(0, 1), ForwardContext.of(inputs), kv)
        state, want = served.finish(out)
        hidden, earlier = state.view(rows, count, -1), (*earlier, kv)
        torch.testing.assert_close(logits, want.view(rows, count, -1), atol=1e-4, rtol=1e-4)
    assert len(earlier) == STEPS


def test_acceptance_counts_rounds() -> None:
    """An answer of eight tokens after a prompt of three, and what each draft would have been."""
    vocab, length = 5, 11
    taught = Taught(
        torch.zeros(1, length, 1), torch.zeros(1, length, 1), torch.zeros(1, length, vocab), torch.ones(1),
        (torch.ones(1), torch.ones(1)), torch.zeros(1, length, dtype=torch.bool),
    )  # fmt: skip
    taught.logits[..., 1] = 1
    taught.counted[0, 2:10] = True  # the tokens 3 … 10 are the answer's; 3 comes with the prompt's pass

    class Fixed:
        def __init__(self, wrong: set[tuple[int, int]]) -> None:
            self.wrong = wrong

        def unroll(self, taught: Taught):
            for step in range(STEPS):
                logits = torch.zeros(1, length - 1 - step, vocab)
                for p in range(1 + step, length):  # the entry at p of this step belongs to the round begun at p - step
                    logits[0, p - 1 - step, 0 if (p - step, step) in self.wrong else 1] = 1
                yield 1 + step, logits

    def count(wrong: set[tuple[int, int]]) -> tuple[int, int, list[int]]:
        return acceptance(Fixed(wrong), taught)  # type: ignore[arg-type]

    assert count(set()) == (7, 2, [2, 2, 1])  # rounds begin at 3 and 7; 4 tokens, and 3 to the end
    assert count({(3, 0)}) == (7, 3, [2, 1, 1])  # 1 token, then 4, then 2
    assert count({(3, 1)}) == (7, 3, [2, 1, 1])  # 2, 4, 1
    assert count({(p, 0) for p in range(length)}) == (7, 7, [0, 0, 0])


# ---- the command --------------------------------------------------------------------------------


def test_the_command_writes_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(measuring, "MAX_TOKENS", 3)
    flags = "--sizes toy --rows 2 --length 96 --steps 3 --head-steps 3 --scenes 300 --problems 2 --workers 0"
    flags += " --device cpu"
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path), *flags.split()])
    training.main()
    shown = capsys.readouterr().out
    assert "| the picture's embeddings | " in shown
    assert "| no picture | " in shown
    from transformers import AutoConfig, AutoTokenizer, Qwen3VLForConditionalGeneration

    folder = tmp_path / "tiny-vl"
    assert {file.name for file in folder.iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "tokenizer.json", "tokenizer_config.json", "training.json", "video_preprocessor_config.json",
    }  # fmt: skip
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    assert loaded.config.vision_config.deepstack_visual_indexes == [1, 3]
    image = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|image_pad|>")
    assert AutoConfig.from_pretrained(folder).image_token_id == image
    assert {file.name for file in (tmp_path / "tiny-vl-eagle3").iterdir()} == {"config.json", "model.safetensors"}
    figures = json.loads((folder / "training.json").read_text())
    assert {"model_loss", "head_loss", "accept_length", "accept_length_blind", "right", "parameters"} <= set(figures)
    again = ["--target", str(folder), "--out", str(tmp_path / "again")]
    monkeypatch.setattr(sys, "argv", ["train", *again, *flags.split()])
    training.main()
    assert (tmp_path / "again" / "tiny-vl-eagle3" / "model.safetensors").is_file()


def test_the_full_size_fits_the_package(tokenizer: Tokenizer) -> None:
    model = TinyVL(training.Sizes().config(special_ids(tokenizer)))
    assert 2 * sum(p.numel() for p in model.parameters()) < 15 * 2**20


def test_rows_of_a_measurement_have_the_positions_of_training(tokenizer: Tokenizer) -> None:
    with stream(tokenizer, Packing(1, 160, 1.0), 2, 0) as batches:
        batch = next(batches)
    length = int((batch.segments[0] >= 0).sum())
    height, width = batch.pictures.shape[1:3]
    problem = PictureProblem("x", Scene(width, height, "black"), "", "")
    rows = _Rows(Format(tokenizer), [problem], [batch.ids[0, :length].tolist()], "cpu")
    assert np.array_equal(rows.positions[0].numpy(), batch.positions[0, :, :length])
    assert np.array_equal(rows.places[0].numpy(), batch.places[0])


def test_eval_measures_drafts_with_and_without_the_picture(
    model: TinyVL, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights, so that few drafts are accepted; what the head reads is noted at each prompt."""
    from typer.testing import CliRunner

    from unisono.cli.main import app
    from unisono.drafters.eagle.model import Eagle3Head

    given: list[tuple[Any, int]] = []
    begin = Eagle3Head.begin

    def noted(self: Any, token_ids: Any, hidden: Any, more: Any = ()) -> Any:
        given.append((self, len(more)))
        return begin(self, token_ids, hidden, more)

    monkeypatch.setattr(Eagle3Head, "begin", noted)
    save = training.Save(tmp_path, tokenizer, {})
    save.model(model, {})
    save.head(Head(TOY), model.text.config.rope_parameters)
    flags = ["--max-model-len", "128", "--max-num-seqs", "2", "--enforce-eager", "--num-speculative-tokens", "3"]
    flags += ["--speculative-method", "eagle3", "--speculative-model", str(tmp_path / "tiny-vl-eagle3")]
    asked = ["eval", str(tmp_path / "tiny-vl"), "--problems", "2", "--max-tokens", "6"]
    shown = CliRunner().invoke(app, [*asked, *flags])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("0 of 2 right")
    assert [bool(re.match(r"\d\.\d\d tokens per round", line)) for line in lines[2:4]] == [True, True]
    assert lines[3].endswith("with image embeddings withheld from the drafts")
    assert lines[4] == "0 of 2 answers differ between the two"
    heads = list(dict.fromkeys(head for head, _ in given))
    assert [any(count for head, count in given if head is one) for one in heads] == [True, False]
