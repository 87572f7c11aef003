"""fp8 drafts: the text is the one without drafts, they are accepted as plain ones are, and the start says what is done.

The copy of the LM head is compared with blocks that ``tests/models/quantised.py`` writes number by number.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.drafters.ledger import play
from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import lazy_engine, mixed_params, prompts, tokens
from tests.engine.matrix import DRAFTERS, TREE_DRAFTERS, TREES, config_of
from tests.models.harness import load
from tests.models.hybrid_mtp import with_module
from tests.models.make import make_checkpoint
from tests.models.mtp_pass import attention, run
from tests.models.quantised_writers import fp8_blocks
from unisono.distributed.gather import Ranks
from unisono.drafters import quantization as draft_quantization
from unisono.drafters.eagle.checkpoint import open_eagle3
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.drafters.quantization import DraftWeights
from unisono.kernels.gemm import fp8
from unisono.layers.formats.base import PLAIN
from unisono.layers.formats.fp8 import ONLINE_FP8
from unisono.layers.linear import Linear
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
BATCH, PARAMS = prompts(6, 250, low=1, high=60), mixed_params(6, max_tokens=12)
NARROW = [replace(p, allowed_token_ids=tuple(range(40, 44))) for p in PARAMS]
"""Few allowed tokens, so that every drafter is right sometimes."""


def spec(method: str, draft: Path | None, tree: dict[str, Any] | None = None, **options: Any) -> SpeculativeConfig:
    given = {"method": method, "num_speculative_tokens": 4, **(tree or {}), **options}
    return SpeculativeConfig.parse(given | ({"model": str(draft)} if draft else {}))


def modules_of(llm: Any) -> list[Any]:
    drafter = llm.engine.worker.drafter
    return [drafter.module] if hasattr(drafter, "module") else [stage.module for stage in drafter._stages]


def decision(llm: Any) -> tuple[str, str]:
    (found,) = [d for d in llm.engine.info()["decisions"] if d["name"] == "draft weights"]
    return found["value"], found["reason"]


CASES = {
    "eagle": ("eagle", DRAFTERS["eagle"], None),
    "eagle3": (
        "eagle3",
        lambda targets, folder: (
            targets["mistral"],
            make_eagle3(folder, config_of(targets["mistral"]), (2, 1, 3), aux=[2, 1, 3]).path,
        ),
        None,
    ),
    "mtp": ("mtp", TREE_DRAFTERS["mtp"], None),
    "mtp, two modules": ("mtp", DRAFTERS["mtp"], None),
    "eagle, tree": ("eagle", TREE_DRAFTERS["eagle"], TREES["binary"]),
    "mtp, tree": ("mtp", TREE_DRAFTERS["mtp"], TREES["uneven"]),
}


USUAL = ("eagle3", "mtp, tree")


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_the_text_is_the_one_without_drafts(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    method, make, tree = CASES[name]
    target, draft = make(checkpoints, tmp_path)
    with lazy_engine(target) as llm:
        want = tokens(llm, BATCH, NARROW)
    accepted = {}
    for asked in ("none", "fp8"):
        with lazy_engine(target, speculative=spec(method, draft, tree, draft_quantization=asked)) as llm:
            assert tokens(llm, BATCH, NARROW) == want
            assert tokens(llm, BATCH, NARROW) == want, "after prefix hits"
            accepted[asked] = llm.engine.counters.accept_length
            check_modules(llm, asked)
    assert accepted["none"] > 1.2
    assert accepted["fp8"] == pytest.approx(accepted["none"], rel=0.15)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "name", [pytest.param("eagle", marks=FULL), "mtp", pytest.param("mtp, two modules", marks=FULL)]
)
def test_fp8_draft_acceptance_is_batch_invariant(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Round by round: drafts in fp8 are the same in every batch, and however the prompt was cut."""
    method, make, _ = CASES[name]
    target, draft = make(checkpoints, tmp_path)
    rounds = []
    for flags in ({}, {"max_num_seqs": 2, "max_num_batched_tokens": 21}):
        with lazy_engine(target, speculative=spec(method, draft, draft_quantization="fp8"), **flags) as llm:
            rounds.append([entry.rounds for entry in play(llm, BATCH, NARROW)])
    assert rounds[0] == rounds[1]
    assert max(max(each) for each in rounds[0]) > 1


def check_modules(llm: Any, asked: str) -> None:
    """Every linear layer of the modules has the format, the target's have none, and one copy serves all modules."""
    head, modules = llm.engine.worker.model.lm_head, modules_of(llm)
    assert all(m.format is PLAIN for m in llm.engine.worker.model.modules() if isinstance(m, Linear))
    formats = {part.format for m in modules for part in m.modules() if isinstance(part, Linear)}
    value, reason = decision(llm)
    if asked == "none":
        assert formats == {PLAIN}
        assert all(module.lm_head is head for module in modules if not isinstance(module, type(head)))
        assert (value, reason) == ("as the checkpoint has them", "draft_quantization='none'")
        return
    assert formats == {ONLINE_FP8}
    assert len({module.lm_head for module in modules}) == 1
    n, k = head.weight.shape
    assert value == "fp8"
    assert f"copy of the LM head takes {n * k + 4 * -(-n // 128) * -(-k // 128)} bytes" in reason
    found = {d["name"]: d["value"] for d in llm.engine.info()["decisions"]}
    assert found["draft LM head"] == "the target's"


@torch.no_grad()
def test_a_module_in_fp8_is_nearly_the_plain_one(tmp_path: Path) -> None:
    """Over random states; its LM head is the block format's, number by number. Routers and gates of experts stay."""
    case = with_module(make_checkpoint(tmp_path / "target", "qwen3_5_moe", tokenizer=False))
    target = load(case.path)
    checkpoint, formats = MTPCheckpoint.open(case.path, target.config), DraftWeights(target, ONLINE_FP8)
    ids, hidden = torch.arange(21, dtype=torch.int32), torch.randn(21, target.config.hidden_size)
    logits = []
    for format in (DraftWeights(target), formats):
        module = checkpoint.load(target, 0, attention, torch.float32, format=format.of)
        module.lm_head = format.head(module.lm_head)
        logits.append(module.finish(run(module, ids, hidden))[1])
    want, got = logits
    assert 1e-3 < (got - want).norm() / want.norm() < 0.2
    stored, values = fp8_blocks("weight_scale_inv")(target.lm_head.weight)
    widened = fp8.widened_weight(module.lm_head.weight, module.lm_head.weight_scale_inv)
    torch.testing.assert_close(widened.double(), values, atol=0, rtol=1e-6)
    assert torch.equal(module.lm_head.weight.float(), stored["weight"].float())
    plain = {name for name, part in module.named_modules() if getattr(part, "format", None) is PLAIN}
    assert plain == {name for name in plain if "shared_gate" in name or "router" in name}
    stacks = [part for part in module.modules() if getattr(part, "experts", None) and hasattr(part, "weight")]
    assert [stack.weight.dtype for stack in stacks] == [torch.float8_e4m3fn] * 2


@pytest.mark.full
def test_a_trained_module_is_accepted_as_before() -> None:
    """Problems in the bundled hybrid's own format."""
    problem = "Tom has 3 boxes of 12 pencils. He gives away 5 pencils. How many are left?"
    params = [SamplingParams(temperature=t, seed=1, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0)]
    with lazy_engine("tiny-hybrid") as llm:
        want = tokens(llm, [problem] * 2, params)
    accepted = {}
    for asked in ("none", "fp8"):
        with lazy_engine("tiny-hybrid", speculative=spec("mtp", None, draft_quantization=asked)) as llm:
            assert tokens(llm, [problem] * 2, params) == want
            accepted[asked] = llm.engine.counters.accept_length
    assert accepted["fp8"] > max(2, 0.9 * accepted["none"])


def test_random_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target, head = DRAFTERS["eagle"](checkpoints, tmp_path)
    dummy = spec("eagle", head, load_format="dummy", draft_quantization="fp8")
    with lazy_engine(target) as llm:
        want = tokens(llm, BATCH, PARAMS)
    with lazy_engine(target, speculative=dummy) as llm:
        assert tokens(llm, BATCH, PARAMS) == want
        check_modules(llm, "fp8")


def test_a_quantised_target(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With --quantization fp8 the module's layers follow the option, as without."""
    target, _ = TREE_DRAFTERS["mtp"](checkpoints, tmp_path)
    with lazy_engine(target, quantization="fp8") as llm:
        want = tokens(llm, BATCH, NARROW)
    for asked, format in (("none", PLAIN), ("fp8", ONLINE_FP8)):
        with lazy_engine(target, quantization="fp8", speculative=spec("mtp", None, draft_quantization=asked)) as llm:
            assert tokens(llm, BATCH, NARROW) == want
            assert {part.format for part in modules_of(llm)[0].modules() if isinstance(part, Linear)} == {format}


def test_a_head_of_its_own_is_converted(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target, head = DRAFTERS["eagle3"](checkpoints, tmp_path)
    with lazy_engine(target, speculative=spec("eagle3", head, draft_quantization="fp8")) as llm:
        assert modules_of(llm)[0].lm_head.format is ONLINE_FP8
        assert "the LM head is the drafter's own" in decision(llm)[1]
        assert tokens(llm, BATCH[:1], SamplingParams(max_tokens=3))


# ---- what auto chooses --------------------------------------------------------------------------------


def fake(vocab: int = 40_000, dtype: torch.dtype = torch.bfloat16, format: Any = PLAIN) -> Any:
    head = Linear(1024, vocab, False, dtype, "meta", format)
    return SimpleNamespace(lm_head=head, embed=SimpleNamespace(weight=head.weight))


@pytest.mark.parametrize(
    ("target", "own", "able", "words"),
    [
        (fake(), None, True, None),
        (fake(32_768), None, True, None),
        (fake(32_767), None, True, "67106816 bytes of the LM head; fp8 pays from 67108864 on"),
        (fake(100), 1 << 26, True, None),
        (fake(), (1 << 26) - 2048, True, "67106816 bytes of the LM head; fp8 pays from 67108864 on"),
        (fake(), None, False, "no products of e4m3"),
        (fake(dtype=torch.float32), None, True, "float32, not of 16 bits"),
        (fake(dtype=torch.float32), 1 << 26, True, "float32, not of 16 bits"),
        (fake(format=ONLINE_FP8), None, True, "stored as fp8"),
    ],
)
def test_auto_draft_quantization_choices(
    target: Any, own: int | None, able: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_quantization, "multiplies_e4m3", lambda device: able)
    chosen = DraftWeights.choose("auto", target, own_head=own)
    assert chosen.format is (ONLINE_FP8 if words is None else PLAIN)
    assert words is None or words in chosen.decision()[1]


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 1, None),
        ({}, 4, None),
        ({"head_dim": 96}, 4, "a part of 4 ranks begins inside a block"),
        ({"draft_vocab_size": 8000}, 1, "65536000 bytes of the LM head"),
        ({"draft_vocab_size": None}, 4, None),
    ],
)
def test_auto_looks_at_what_an_eagle3_head_reads(
    changes: dict[str, Any], ranks: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own LM head if it has one; and at parts of ranks, which may not begin inside a block."""
    monkeypatch.setattr(draft_quantization, "multiplies_e4m3", lambda device: True)
    config = json.loads((SHAPES / "qwen3-8b-eagle3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    opened = open_eagle3(tmp_path, config_of(SHAPES / "qwen3-8b"), dummy=True)
    chosen = opened.choose_weights("auto", fake(), Ranks(0, ranks))
    assert chosen.format is (ONLINE_FP8 if words is None else PLAIN)
    assert words is None or words in chosen.decision()[1]


def test_drafter_on_cpu_is_not_quantised_by_default(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with lazy_engine(*DRAFTERS["mtp"](checkpoints, tmp_path)[:1], speculative=spec("mtp", None)) as llm:
        assert decision(llm)[0] == "as the checkpoint has them"


def test_invalid_draft_quantization_raises(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = DRAFTERS["eagle"](checkpoints, tmp_path)
    with pytest.raises(ConfigError, match=r"draft_quantization='int4' .* choose one of auto, fp8, none"):
        lazy_engine(target, speculative=spec("eagle", head, draft_quantization="int4"))
    with pytest.raises(ConfigError, match="has no option 'draft_quantization'"):
        lazy_engine(target, speculative=spec("ngram", None, draft_quantization="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    old = fake()
    old.embed.weight = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"capability 8\.0, and e4m3 products need 8\.9"):
        DraftWeights.choose("fp8", old)
