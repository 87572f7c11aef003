"""Draft heads are trained as they will draft, and leave training in the formats that others read.

Oracles: the papers' forward passes in plain PyTorch (``tests/drafters/make_heads.py``, ``tests/models/make_mtp.py``,
transformers), fed with what was exported; and the engine's own counters.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.drafters.make_heads import THETA, Head
from tests.drafters.make_heads import reference as eagle_reference
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_mtp import greedy_drafts
from tests.tools.untrained_drafts import SHAPE, made, prompts_file, quiet, shown, texts, unrolled
from unisono.cli.main import app
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import Checkpoint
from unisono.text.tokenizer import Tokenizer
from unisono.tools.draft_training.answers import AnswerConfig, Text, collect, read_answers
from unisono.tools.draft_training.batches import Batches
from unisono.tools.draft_training.command import Run, measure_acceptance, train, train_on_texts
from unisono.tools.draft_training.data import TrainingPrompt, read_prompts, split_held_out
from unisono.tools.draft_training.draft import loss_of
from unisono.tools.draft_training.methods import METHODS
from unisono.tools.draft_training.teacher import Teacher
from unisono.tools.draft_training.trainer import Recipe, Trainer
from unisono.types import BadRequest, CheckpointError, ConfigError, SamplingParams, SpeculativeConfig

FULL = pytest.mark.full
HEADS = [pytest.param("eagle", marks=FULL), "eagle3", "mtp", pytest.param("standalone", marks=FULL)]
FAST = {"max_num_seqs": 16, "enforce_eager": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return make_checkpoint(
        tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4, rope_parameters=rope, tie_word_embeddings=False
    )


# ---- the unroll is what serving runs, and what was exported is what others read ------------------------


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_reference_forward_reads_the_exported_checkpoint(method: str, target: Path, tmp_path: Path) -> None:
    """The exported tensors, by the formats' names, in the papers' forward, after every prefix of a text."""
    teacher, found = made(method, target, tmp_path)
    found.save()
    config = json.loads((tmp_path / "config.json").read_text())
    stored = load_file(tmp_path / "model.safetensors")
    layers = tuple(config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", ()))
    layer = {"eagle": "layers.0.", "eagle3": "midlayer."}[method]
    assert f"{layer}self_attn.q_proj.weight" in stored
    head = Head(tmp_path, {n.replace(layer, "layers.0."): t for n, t in stored.items()}, config, layers)
    tokens = texts(1, seed=3)[0].token_ids[:14]
    seen, steps = unrolled(teacher, found, tokens)
    states = seen.hidden[0] if seen.aux is None else seen.aux[0]
    embed, lm_head = teacher.decoder.embed.weight, teacher.decoder.lm_head.weight
    for committed in range(2, len(tokens) - 2):
        drafts = tokens[committed : committed + 3]
        wanted = eagle_reference(head, embed, lm_head, tokens[:committed], states[: committed - 1], drafts)
        for step in range(min(3, len(tokens) - committed + 1)):
            at = committed - 1 + step  # predicts the next
            torch.testing.assert_close(
                steps[step][at - 1 - step].double(), wanted[step][1], rtol=1e-4, atol=1e-4, msg=f"{committed} {step}"
            )
    if method == "eagle3":
        ids = torch.arange(131) + stored["d2t"]
        assert torch.equal(found.draft.ids.long(), ids)
        assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)
        assert config["draft_vocab_size"] == 131
        assert layers == (2, 2, 1)


@pytest.mark.parametrize(("layout", "modules"), [("deepseek", 3), ("qwen", 1)])
def test_reference_forward_reads_the_exported_mtp_checkpoint(
    layout: str, modules: int, target: Path, tmp_path: Path
) -> None:
    teacher, found = made("mtp", target, tmp_path, replace(SHAPE, layout=layout, modules=modules))
    found.save()
    stored, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    weights = []
    for i in range(modules):
        block = {"deepseek": f"model.layers.{4 + i}.", "qwen": f"mtp.layers.{i}."}[layout]
        parts = {
            "deepseek": {"enorm": block + "enorm", "hnorm": block + "hnorm", "proj": block + "eh_proj",
                         "norm": block + "shared_head.norm"},
            "qwen": {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "proj": "mtp.fc",
                     "norm": "mtp.norm"},
        }[layout]  # fmt: skip
        own = {part: stored.pop(f"{name}.weight").float() for part, name in parts.items()}
        weights.append(own | {n[len(block) :]: stored.pop(n) for n in list(stored) if n.startswith(block)})
    assert not stored
    assert config[{"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}[layout]] == modules
    tokens = texts(1, seed=3)[0].token_ids[:14]
    seen, steps = unrolled(teacher, found, tokens)
    embed, lm_head, c = teacher.decoder.embed.weight, teacher.decoder.lm_head.weight, teacher.decoder.config
    for committed in range(4, len(tokens) - 2):
        wanted = greedy_drafts(
            weights, layout, c, embed, lm_head, tokens[:committed], seen.hidden[0, : committed - 1], 3,
        )  # fmt: skip
        # Only step 0 sees nothing but the text: compare it everywhere, later steps where the drafts are the text.
        torch.testing.assert_close(steps[0][committed - 2], wanted[0], rtol=1e-4, atol=1e-4)
    follow_the_drafts(teacher, found, weights, layout)


def follow_the_drafts(teacher: Teacher, found: Any, weights: Any, layout: str) -> None:
    """Steps 1 and 2: let the text *be* what the plain reader drafts, then compare them too."""
    c, embed, lm_head = teacher.decoder.config, teacher.decoder.embed.weight, teacher.decoder.lm_head.weight
    prefix = texts(1, seed=5)[0].token_ids[:8]
    seen = shown(teacher, found, prefix)
    wanted = greedy_drafts(weights, layout, c, embed, lm_head, prefix, seen.hidden[0, :7], 3)
    tokens = prefix + [int(logits.argmax()) for logits in wanted]
    _, steps = unrolled(teacher, found, tokens)
    for step in range(3):
        at = 7 + step
        torch.testing.assert_close(steps[step][at - 1 - step], wanted[step], rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_exported_draft_model(target: Path, tmp_path: Path) -> None:
    teacher, found = made("standalone", target, tmp_path)
    found.save()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = texts(1, seed=3)[0].token_ids
    seen = shown(teacher, found, tokens)
    with torch.no_grad():
        ((first, logits),) = found.draft.unroll(seen, torch.float32)
        wanted = theirs(seen.token_ids.long()).logits
    assert first == 0
    torch.testing.assert_close(logits[0, : len(tokens)], wanted[0, : len(tokens)], rtol=1e-4, atol=1e-4)
    assert (tmp_path / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()


def test_teacher_hidden_states_and_logits_match_transformers(target: Path, tmp_path: Path) -> None:
    teacher, found = made("eagle3", target, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = texts(1, seed=4)[0].token_ids
    seen = shown(teacher, found, tokens)
    with torch.no_grad():
        out = theirs(seen.token_ids.long(), output_hidden_states=True)
    count = len(tokens)
    torch.testing.assert_close(seen.logits, out.logits[0, 1 : count - 1], rtol=1e-4, atol=1e-4)
    aux = torch.cat([out.hidden_states[i][0] for i in (2, 2, 1)], 1)
    torch.testing.assert_close(seen.aux[0, :count], aux[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_blocks_learn_from_soft_caps_sinks_and_latent_attention(family: str, tmp_path: Path) -> None:
    """The target's logits are transformers', and a head for it is written, opened and drafts."""
    target = make_checkpoint(tmp_path / "target", family)
    teacher, found = made("dflash", target, tmp_path / "head")
    theirs = reference(target)
    tokens = texts(1, seed=4)[0].token_ids
    seen = shown(teacher, found, tokens)
    with torch.no_grad():
        wanted = theirs(seen.token_ids.long()).logits[0, 1 : len(tokens) - 1]
        steps = list(found.draft.unroll(seen, torch.float32))
    torch.testing.assert_close(seen.logits, wanted, rtol=1e-4, atol=1e-4)
    assert steps
    assert all(logits.isfinite().all() for _, logits in steps)
    found.save()
    spec = SpeculativeConfig("dflash", str(tmp_path / "head"), 3, adaptive=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(target), speculative=spec, **FAST) as llm:
        drafted = llm.generate([tokens], params)[0].outputs[0].token_ids
        assert llm.engine.counters.draft_rounds > 0
    with LLM(str(target), **FAST) as llm:
        assert llm.generate([tokens], params)[0].outputs[0].token_ids == drafted
    if family == "deepseek_v3":
        with pytest.raises(CheckpointError, match="eagle3 is not trained for targets with latent attention"):
            made("eagle3", target, tmp_path / "other")


@pytest.mark.parametrize("sharded", [False, True])
def test_modules_beside_the_target(sharded: bool, tmp_path: Path) -> None:
    """A copy of the target that holds its modules: it loads as a model, and its drafter needs no directory."""
    path = make_checkpoint(tmp_path / "t", "qwen3", **({"max_shard_size": "200KB"} if sharded else {}))
    _, found = made("mtp", path, tmp_path / "both", replace(SHAPE, beside_target=True, modules=2))
    found.save()
    prompt, params = list(range(20)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), max_model_len=64, **FAST) as llm:
        plain = llm.generate([prompt], params)[0].outputs[0].token_ids
    spec = SpeculativeConfig("mtp", None, 2)
    with LLM(str(tmp_path / "both"), max_model_len=64, speculative=spec, **FAST) as llm:
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == plain
        assert llm.engine.counters.drafted_tokens > 0


# ---- training ------------------------------------------------------------------------------------------


def certain(target: Path, out: Path) -> Path:
    """The target, made to write sixteen letters only, each by the last one mostly: what a head learns in seconds."""
    weights = {n: t.clone() for n, t in load_file(target / "model.safetensors").items()}
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.15)
    weights["lm_head.weight"][:80] = 0
    weights["lm_head.weight"][96:] = 0
    out.mkdir(parents=True)
    for file in target.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def a_run(method: str, target: Path, out: Path, **recipe: Any) -> Run:
    fast = {"steps": 40, "batch_tokens": 256, "lr": 1e-2, "muon_lr": 0.05, "save_every": 1e9}
    asking = AnswerConfig(temperature=0.0, max_tokens=30, longest=96)
    return Run(method, str(target), out, Recipe(**{**fast, **recipe}), SHAPE, asking, "cpu")


@pytest.mark.parametrize("method", HEADS)
def test_training_raises_acceptance_and_reports_the_served_length(method: str, target: Path, tmp_path: Path) -> None:
    path = certain(target, tmp_path / "target")
    run, said = a_run(method, path, tmp_path / "out"), list[str]()
    data = prompts_file(tmp_path / "data.jsonl")
    trained = train(run, data, held_out=8, report=quiet, log=said.append, **FAST)
    assert f"mean accept length {trained.length:.2f} at k = 3" in said[-1]
    assert trained.length == pytest.approx(1 + sum(trained.positions), abs=1e-6)

    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    learnt, held = split_held_out(read_prompts(data, tokenizer, 96), 8, 0)
    fresh = a_run(method, path, tmp_path / "fresh", steps=1, lr=1e-9, muon_lr=1e-9)
    fresh.check(resume=False)
    train_on_texts(fresh, [Text([*p.token_ids, 1, 2, 3], len(p.token_ids)) for p in learnt], False, quiet, quiet)
    assert trained.length > measure_acceptance(fresh, held, **FAST).length + 0.15

    spec = SpeculativeConfig(method, str(tmp_path / "out"), 3)
    params, prompts = SamplingParams(temperature=0, max_tokens=30, seed=0), [p.token_ids for p in held]
    with LLM(str(path), max_model_len=96, speculative=spec, device=run.device, **FAST) as llm:
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        served = llm.engine.info()["speculation"]["avg_spec_accept_length"]  # type: ignore[index]
    assert served == pytest.approx(trained.length, rel=0.05)
    assert trained.answers == outputs
    if method == "eagle3":
        with LLM(str(path), max_model_len=96, device=run.device, **FAST) as llm:
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == outputs


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_resumed_run_ends_with_the_same_bytes(method: str, target: Path, tmp_path: Path) -> None:
    """On a CPU, ended by steps. The interrupted run saved after 5 steps and went on to 9 before it was lost."""
    for name, parts in (("whole", [9]), ("parts", [5, 9])):
        for steps in parts:
            run = a_run(method, target, tmp_path / name, steps=9)
            run.check(resume=steps != parts[0])
            torch.manual_seed(0)
            teacher = Teacher(Checkpoint.open(target), "cpu", 64)
            found = METHODS[method](teacher, SHAPE, texts(), run.out)
            trainer = Trainer(teacher, found, Batches(texts(), 128, 0), run.recipe, run.folder)
            assert trainer.resume() == (steps != parts[0])
            while trainer.figures.step < steps:
                trainer._step()
                trainer.figures.step += 1
            trainer.save()
    whole, parts_ = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts_.keys()
    assert all(torch.equal(whole[name], parts_[name]) for name in whole)


def test_interrupted_run_resumes(target: Path, tmp_path: Path) -> None:
    """No answers are added (the run had as many as its time allowed), no step is repeated."""
    data, said = prompts_file(tmp_path / "data.jsonl", 10), list[str]()
    options = {"held_out": 2, "report": quiet, "log": said.append, **FAST}
    train(a_run("eagle", target, tmp_path / "out", steps=2), data, **options)
    file = tmp_path / "out" / "training" / "answers.jsonl"
    answers = "".join(file.read_text().splitlines(keepends=True)[:-1])
    file.write_text(answers)
    (tmp_path / "out" / "model.safetensors").unlink()
    train(a_run("eagle", target, tmp_path / "out", steps=5), data, resume=True, **options)
    assert any(line.startswith("resumed at step 2 ") for line in said)
    assert any(line.startswith("100%  step 5 ") for line in said)
    assert file.read_text() == answers
    assert len(answers.splitlines()) == 7


def test_truncated_answers_are_regenerated(target: Path, tmp_path: Path) -> None:
    file, asking = tmp_path / "answers.jsonl", AnswerConfig(max_tokens=5, longest=64)
    prompts = [TrainingPrompt([i, i + 1, i + 2]) for i in range(5)] + [TrainingPrompt([7, 8, 9], complete=True)]

    def llm() -> LLM:
        return LLM(str(target), max_model_len=64, **FAST)

    collect(llm, prompts, asking, file, quiet)
    whole = read_answers(file)
    assert [text.token_ids[:3] for text in whole] == [p.token_ids for p in prompts]
    assert [text.answer_start for text in whole] == [3] * 5 + [1]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:-4])
    collect(llm, prompts, asking, file, quiet)
    assert read_answers(file) == whole


def test_shared_weights_are_left_alone(target: Path, tmp_path: Path) -> None:
    run = a_run("eagle", target, tmp_path, steps=3)
    run.check(resume=False)
    train_on_texts(run, texts(), False, quiet, quiet)
    stored = load_file(tmp_path / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    teacher, found = made("eagle", target, tmp_path / "again")
    before = teacher.decoder.embed.weight.clone(), teacher.decoder.lm_head.weight.clone()
    run = a_run("eagle", target, tmp_path / "again", steps=2)
    run.folder.mkdir()
    Trainer(teacher, found, Batches(texts(), 128, 0), run.recipe, run.folder).run(quiet, quiet)
    assert torch.equal(before[0], teacher.decoder.embed.weight)
    assert torch.equal(before[1], teacher.decoder.lm_head.weight)


def test_only_learnt_positions_count(target: Path, tmp_path: Path) -> None:
    """What stands behind a row's end, and the prompt's own predictions, move no weight."""
    teacher, found = made("eagle3", target, tmp_path)
    long, short = Text(list(range(40)), 30), Text(list(range(50, 70)), 4)
    both = Batches([long, short], 256, 0)[0]
    alone = [Batches([text], 256, 0)[0] for text in (long, short)]
    losses = [
        loss_of(found.draft, teacher.run(batch, found.draft.aux_layers), torch.float32) for batch in (both, *alone)
    ]
    counts = [int(batch.loss_mask.sum()) for batch in alone]
    assert counts == [9, 15]
    mean = sum(n * loss.value for n, loss in zip(counts, losses[1:], strict=True)) / sum(counts)
    torch.testing.assert_close(losses[0].value, mean, rtol=1e-5, atol=1e-5)


def test_loss_and_agreement_by_hand(target: Path, tmp_path: Path) -> None:
    """A reduced vocabulary: column i is token ids[i], and what it lacks of the target's distribution is lost."""
    teacher, found = made("eagle3", target, tmp_path)
    tokens = texts(1, seed=6)[0].token_ids
    seen, steps = unrolled(teacher, found, tokens)
    loss, ids = loss_of(found.draft, seen, torch.float32), found.draft.ids.tolist()
    total, agreed = 0.0, []
    for step in range(3):
        entropies, same = [], []
        for at in range(1 + step, len(tokens) - 1):
            wanted, said = seen.logits[at - 1].softmax(0), steps[step][at - 1 - step].log_softmax(0)
            entropies.append(-sum(float(wanted[token] * said[i]) for i, token in enumerate(ids)))
            same.append(ids[int(said.argmax())] == int(wanted.argmax()))
        total += 0.8**step * sum(entropies) / len(entropies)
        agreed.append(sum(same) / len(same))
    assert float(loss.value) == pytest.approx(total / (1 + 0.8 + 0.64), rel=1e-4)
    assert loss.agreed.tolist() == pytest.approx(agreed)
    with torch.no_grad():  # a head whose first column always wins, of a token that the target picks somewhere
        found.draft.module.ids[0] = int(seen.logits[0].argmax())
        found.draft.module.lm_head.weight.zero_()
    assert float(loss_of(found.draft, seen, torch.float32).agreed[0]) > 0


# ---- batches -------------------------------------------------------------------------------------------


def test_batches_are_a_function_of_seed_and_step() -> None:
    some = texts(30)
    ahead, back = Batches(some, 200, 7), Batches(some, 200, 7)
    wanted = [ahead[n].token_ids for n in range(25)]
    for n in (24, 3, 11, 0):
        assert torch.equal(back[n].token_ids, wanted[n])
    assert not all(torch.equal(Batches(some, 200, 8)[n].token_ids, wanted[n]) for n in range(5))
    per_epoch = len(ahead._order)
    assert per_epoch > 2
    rows = [tuple(row.tolist()) for n in range(per_epoch) for row in Batches(some, 200, 7)[n].token_ids]
    assert len(rows) == 30
    padded = {tuple(t.token_ids) for t in some}
    assert {
        tuple(x for i, x in enumerate(row) if i < len(t)) for row in rows for t in padded if row[: len(t)] == t
    } == padded
    assert all(n.shape[0] * n.shape[1] <= 200 for n in wanted)


# ---- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 holds list, not an object with one of messages, prompt, text"),
        ('{"question": "a"}', r"line 2 has \['question'\], but none of messages, prompt, text"),
        ('{"prompt": 3}', "line 2: prompt is int; it must be a string"),
        ('{"text": ""}', "line 2: text makes 0 tokens; at least 2"),
        ('{"messages": "hi"}', "line 2: messages must be a list"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\].content must be a string"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 2: messages has no user turn"),
    ],
)
def test_lines_that_are_wrong(line: str, words: str, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "good one"}\n' + line + "\n")
    tokenizer = Tokenizer.load(target)
    assert tokenizer is not None
    with pytest.raises(BadRequest, match=words) as caught:
        read_prompts(file, tokenizer, 64)
    assert str(file) in str(caught.value)


def test_prompt_files_are_read(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "ours to say"}]
    lines = [{"messages": chat}, {"prompt": "ab"}, {"prompt": "ab"}, {"text": "x" * 100}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    tokenizer = Tokenizer.load(target)
    assert tokenizer is not None
    found = read_prompts(file, tokenizer, 40)
    assert [tokenizer.decode(p.token_ids, skip_special_tokens=False) for p in found] == [
        "<|user|>one<|end|><|assistant|>", "ab", "x" * 40,
    ]  # fmt: skip
    assert [p.complete for p in found] == [False, False, True]
    learnt, held = split_held_out([TrainingPrompt([i, i]) for i in range(20)], 100, 0)
    assert (len(learnt), len(held)) == (16, 4)
    assert not {tuple(p.token_ids) for p in learnt} & {tuple(p.token_ids) for p in held}


def cli(*arguments: str):
    return CliRunner().invoke(app, ["train-draft", *arguments])


def test_bad_flags_are_one_line_and_a_status(target: Path, tmp_path: Path) -> None:
    data = str(prompts_file(tmp_path / "data.jsonl", 4))
    common = ["--target", str(target), "--data", data, "--out", str(tmp_path / "out")]
    (tmp_path / "alone").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "alone" / file).write_bytes((target / file).read_bytes())
    cases: list[tuple[list[str], int, str]] = [
        (
            ["dspark", *common],
            2,
            "method 'dspark' cannot be trained; choose one of dflash, eagle, eagle3, mtp, mtp_frozen, standalone",
        ),
        (["dflash", *common, "--block-size", "3"], 2, "--block-size 3: give 4 to 16"),
        (["eagle", *common[:4]], 2, "--out"),
        (["eagle", *common, "--minutes", "-1"], 2, "--minutes -1.0: give a number above 0"),
        (["mtp", *common, "--layout", "qwen"], 2, "--layout qwen shares one projection: it has 1 module, not 3"),
        (["mtp", *common, "--layout", "gguf"], 2, "choose one of deepseek, qwen"),
        (["eagle3", *common, "--aux-layers", "1"], 2, "give three layer numbers"),
        (["standalone", *common, "--hidden-size", "100"], 2, "give a multiple of 64"),
        (["eagle", *common, "--max-model-len", "4096"], 2, "above the target's context of 512"),
        (["eagle", *common[:2], "--data", "no/file", *common[4:]], 1, "no/file is not a file"),
        (["eagle", "--target", "no/model", *common[2:]], 1, "no/model"),
        (["eagle", "--target", str(tmp_path / "alone"), *common[2:]], 2, "has no tokenizer"),
    ]
    for arguments, status, says in cases:
        result = cli(*arguments)
        assert result.exit_code == status, (arguments, result.output)
        assert says in " ".join(result.output.replace("│", " ").split()), arguments
        assert "Traceback" not in result.output


def test_a_directory_in_use_is_not_overwritten(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a checkpoint that was not made by train-draft"):
        a_run("eagle", target, target).check(resume=False)
    a_run("eagle", target, tmp_path).check(resume=False)
    with pytest.raises(ConfigError, match="already holds a run: give --resume"):
        a_run("eagle", target, tmp_path).check(resume=False)
    a_run("eagle", target, tmp_path, steps=99, save_every=1.0).check(resume=True)
    with pytest.raises(ConfigError, match="was started with seed=0, not 3"):
        a_run("eagle", target, tmp_path, seed=3).check(resume=True)
