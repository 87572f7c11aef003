"""Gemma and transformers: 28 greedy tokens, batched, alone, in chunks, after prefix hits, with drafts and without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.helpers import lazy_engine, prompts, tokens
from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_INPUTS, GEMMA4_SHARED
from tests.models.harness import load, whole
from tests.models.hybrids import reference, renamed
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.layers.activations import InputFormat
from unisono.models.families.gemma4 import key_heads
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
PROMPTS = prompts(6, 250, low=2, high=70, seed=5)
PROMPTS[3] = PROMPTS[3][:4] * 12  # something that n-grams find, longer than the window

IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 192, "global_head_dim": 256, "moe_intermediate_size": 64}
"""Sizes of which fp8's blocks of 128 take part: gate and up fill one and a half, a full layer's heads two."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "gemma4": ("gemma4_text", {}),
    "gemma4-shared-keys": ("gemma4_text", GEMMA4_SHARED),
    "gemma4-layer-inputs": ("gemma4_text", GEMMA4_INPUTS),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
}


@torch.inference_mode()
def greedy_of(path: Path) -> list[list[int]]:
    """What transformers continues the prompts with."""
    model = reference(path)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=28, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    path = make_checkpoint(tmp_path, family, **fields)
    expected = greedy_of(path)
    with lazy_engine(path, dtype="float32") as llm:
        assert tokens(llm, PROMPTS, GREEDY) == expected, "batched"
        hits = llm.engine.scheduler.prefix_hits
        assert tokens(llm, PROMPTS, GREEDY) == expected, "after a prefix hit"
        assert llm.engine.scheduler.prefix_hits > hits
    with lazy_engine(path, dtype="float32", max_num_batched_tokens=16) as llm:
        assert [tokens(llm, [p], GREEDY)[0] for p in PROMPTS[:4]] == expected[:4], "alone, in chunks of 16"
    spec = SpeculativeConfig("ngram", num_speculative_tokens=3)
    with lazy_engine(path, dtype="float32", speculative=spec) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == expected, "with n-gram drafts"
        assert llm.engine.counters.drafted_tokens > 0


@pytest.mark.parametrize("case", CASES)
def test_sampled_tokens_are_the_same_with_drafts_and_scarce_pages(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    path = make_checkpoint(tmp_path, family, **fields)
    params = [SamplingParams(temperature=i % 3 * 0.5, seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]
    with lazy_engine(path) as llm:
        plain = tokens(llm, PROMPTS, params)
    for spec, flags in (
        (SpeculativeConfig("ngram", num_speculative_tokens=3), {"max_num_batched_tokens": 16}),
        (SpeculativeConfig("suffix", num_speculative_tokens=2), {"max_model_len": 112, "num_pages": 11}),
    ):
        with lazy_engine(path, speculative=spec, **flags) as llm:
            assert tokens(llm, PROMPTS, params) == plain, spec.method
            assert llm.engine.counters.drafted_tokens > 0


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        (GEMMA4_INPUTS, {"quantization": "fp8"}),
        (GEMMA4_EXPERTS, {"quantization": "fp8"}),
        ({**GEMMA4_EXPERTS, **IN_BLOCKS}, {"quantization": "fp8"}),
        (GEMMA4_INPUTS, {"kv_cache_dtype": "fp8"}),
        (GEMMA4_EXPERTS, {"kv_cache_dtype": "fp8"}),
    ],
    ids=["inputs fp8", "experts fp8", "parts fp8", "inputs fp8 keys", "experts fp8 keys"],
)
def test_formats_write_one_text_with_drafts_and_chunks(
    fields: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    path, params = make_checkpoint(tmp_path, "gemma4_text", **fields), SamplingParams(max_tokens=16, ignore_eos=True)
    with lazy_engine(path, **flags) as llm:
        plain = tokens(llm, PROMPTS[:4], replace(params, temperature=0))
    spec = SpeculativeConfig("ngram", num_speculative_tokens=3)
    with lazy_engine(path, speculative=spec, max_num_batched_tokens=24, **flags) as llm:
        assert tokens(llm, PROMPTS[:4], replace(params, temperature=0)) == plain
        assert llm.engine.counters.drafted_tokens > 0


@pytest.mark.parametrize("fields", [GEMMA4_INPUTS, GEMMA4_EXPERTS], ids=["layer inputs", "experts"])
def test_two_ranks_write_the_text_of_one(fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma4_text", **fields, num_key_value_heads=2)
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]
    with lazy_engine(path) as llm:
        one = tokens(llm, PROMPTS[:4], params)
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    with lazy_engine(path, tensor_parallel_size=2, speculative=spec) as llm:
        assert tokens(llm, PROMPTS[:4], params) == one


def test_gate_and_up_of_half_a_block_are_one_product(tmp_path: Path) -> None:
    """26B-A4B's have 2112 outputs: 16 blocks and a half."""
    fields = {**GEMMA4_EXPERTS, **IN_BLOCKS}
    decoder = load(make_checkpoint(tmp_path, "gemma4_text", tokenizer=False, **fields), quantization="fp8")
    beside = decoder.layers[0].feed_forward
    assert beside.dense_norm.input_format == beside.sparse_norm.input_format == InputFormat(128)


# ---- exports ----------------------------------------------------------------------------------------

PROMPT = [7 * i % 251 for i in range(40)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 whose last layers have no keys of their own."""
    return make_checkpoint(tmp_path_factory.mktemp("shared"), "gemma4_text", tokenizer=False, **GEMMA4_SHARED)


def logits_of(path: Path) -> torch.Tensor:
    return whole(load(path), [PROMPT])[0]


def in_vision_model(source: Path, directory: Path, kind: str, architecture: str, **tensors: torch.Tensor) -> Path:
    """The checkpoint as one of the model with towers, of which it has these tensors."""

    def moved(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {re.sub(r"^model\.", "model.language_model.", n): t for n, t in found.items()} | tensors

    renamed(source, directory, moved)
    text = json.loads((directory / "config.json").read_text())
    outer = {"architectures": [architecture], "model_type": kind, "text_config": text, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(outer))
    return directory


def test_the_model_with_towers_is_read_as_text(shared: Path, tmp_path: Path) -> None:
    towers = {"model.audio_tower.x.weight": torch.zeros(2)}
    path = in_vision_model(shared, tmp_path / "v", "gemma4", "Gemma4ForConditionalGeneration", **towers)
    assert torch.equal(logits_of(path), logits_of(shared))
    found = {beginning: why for beginning, _, why in Checkpoint.open(path).unread()}
    assert "audio is refused" in found["model.audio_tower.*"]
    assert Checkpoint.open(path).config.vision is None


def test_a_gemma3_with_a_tower_is_read_as_text(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "text", "gemma3_text", tokenizer=False)
    towers = {"model.vision_tower.x.weight": torch.zeros(2), "model.multi_modal_projector.w": torch.zeros(2)}
    path = in_vision_model(source, tmp_path / "v", "gemma3", "Gemma3ForConditionalGeneration", **towers)
    assert torch.equal(logits_of(path), logits_of(source))


def test_keys_that_shared_layers_do_not_use_are_passed_over(shared: Path, tmp_path: Path) -> None:
    """The hub's E2B holds them. In other layers an unknown tensor is refused."""
    names = [f"model.layers.4.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    more = renamed(shared, tmp_path / "more", lambda t: t | {name: torch.zeros(3, 3) for name in names})
    assert torch.equal(logits_of(more), logits_of(shared))
    odd = {"model.layers.1.self_attn.v_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(CheckpointError, match=r"v_proj.weight .* is unexpected"):
        load(renamed(shared, tmp_path / "odd", lambda t: t | odd))


def test_layers_of_the_published_forms(shared: Path) -> None:
    layers = Checkpoint.open(shared).config.layers
    mixers = [layer.mixer for layer in layers]
    assert [type(mixer).__name__ for mixer in mixers] == ["AttentionSpec"] * 3 + ["QuerySpec"] * 3
    assert [(m.head_dim, m.num_kv_heads, m.window, m.scale) for m in mixers[:2]] == [(20, 3, 19, 1.0), (40, 2, 0, 1.0)]
    assert [mixer.k_is_v for mixer in mixers[:3]] == [False, True, False]
    assert [mixer.reads for mixer in mixers[3:]] == [1, 2, 1]
    assert [mixer.window_group for mixer in mixers[3:]] == [0, 19, 0]
    assert [layer.feed_forward.intermediate_size for layer in layers] == [100] * 3 + [200] * 3
    decoder = load(shared)
    assert [len(specs) for specs in decoder.state_specs()] == [2, 2, 2, 0, 0, 0]
    assert set(decoder.layers[1].mixer.qkv.projections) == {"q", "k"}


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}, "a row of its own"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ],
)
def test_fields_that_are_not_computed_are_refused(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, tokenizer=False)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Checkpoint.open(path)


def test_older_gemma3_configs(tmp_path: Path) -> None:
    """As the hub has them: a pattern in place of layer types, two bases, scaling of full layers."""
    raw = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "head_dim": 16,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96,
        "vocab_size": 64, "sliding_window": 512, "sliding_window_pattern": 3, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "cache_implementation": "hybrid", "query_pre_attn_scalar": 168, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 999,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = Checkpoint.open(tmp_path).config
    assert config.windows == (512, 512, 0, 512, 512, 0)
    near, far = (config.layers[number].mixer.rotary.table(3, "cpu") for number in (0, 2))
    torch.testing.assert_close(near[1, :8], (1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)).cos())
    torch.testing.assert_close(far[1, :8], (1.0 / 1e6 ** (torch.arange(0, 16, 2) / 16) / 8).cos())
    assert config.layers[0].mixer.scale == 168**-0.5
    assert config.tie_embeddings


def test_heads_by_the_fields_of_older_versions() -> None:
    text = SimpleNamespace(
        num_key_value_heads=8, head_dim=256, num_global_key_value_heads=2, global_head_dim=512, attention_k_eq_v=True
    )
    assert key_heads(text, 0, 1024) == (8, 256)
    assert key_heads(text, 5, 0) == (2, 512)
    assert key_heads(SimpleNamespace(**{**vars(text), "attention_k_eq_v": False}), 5, 0) == (8, 512)


@torch.no_grad()
def test_the_embedding_scale_is_rounded_to_the_weights_dtype(shared: Path) -> None:
    """In bf16 the root of 72 is 8.5, not 8.485…."""
    embed = load(shared, dtype=torch.bfloat16).embed
    assert embed.scale == 8.5
    ids = torch.arange(9)
    assert torch.equal(embed(ids), embed.weight[:9] * torch.tensor(8.5, dtype=torch.bfloat16))
    assert torch.equal(embed.unscaled(ids), embed.weight[:9])


@pytest.mark.parametrize("fields", [GEMMA4_SHARED, GEMMA4_INPUTS], ids=["shared keys", "inputs of layers"])
def test_prompts_skip_layers_without_keys(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for each request's last token, with the bits of a pass that computes all of them."""
    path = make_checkpoint(tmp_path, "gemma4_text", **fields)
    batch = [[7 * i % 251 for i in range(n)] for n in (70, 33, 41)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    rows: dict[int, list[int]] = {}

    def answers(skips: bool) -> Any:
        rows.clear()
        with LLM(str(path), max_num_seqs=3, max_model_len=128, max_num_batched_tokens=48, enforce_eager=True) as llm:
            model = llm.engine.worker.model
            if not skips:
                monkeypatch.setattr(type(model), "_turn", lambda self, context, deepest: len(self.layers) - 1)
            for number in (2, 4):
                model.layers[number].feed_forward.register_forward_pre_hook(
                    lambda _, given, n=number: rows.setdefault(n, []).append(len(given[1]))
                )
            found = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(batch, params)]
            llm.engine.check_integrity()
            return found

    skipped = answers(True)
    assert max(rows[4]) <= 3, "a layer without keys of its own"
    assert max(rows[2]) <= 3, "the last one with keys writes them and goes on with the last tokens"
    assert skipped == answers(False)
    assert max(rows[4]) > 30
