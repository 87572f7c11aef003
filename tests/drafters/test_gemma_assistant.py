"""The assistants of Gemma 4: every draft against their formulas in plain PyTorch, and the same text with and without.

Targets have values from keys, layers that share keys, inputs of layers, experts; assistants a sliding and a full layer,
with and without clusters of tokens. Checkpoints are written by transformers, as the hub's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

from tests.drafters.make_assistant import EPS, TYPES, WIDTH, make_assistant
from tests.drafters.proposals import GREEDY, mistakes, record
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_INPUTS, GEMMA4_SHARED
from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_mtp import norm, rotate
from unisono.config.preflight.model import with_method
from unisono.drafters.mtp.frozen_kv_model import FrozenCheckpoint
from unisono.entrypoints.llm import LLM
from unisono.layers.formats.fp8 import ONLINE_FP8
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError, SpeculativeConfig

CLUSTERED = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5}
VOCABULARY = 272
"""A multiple of the clusters."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "values from keys": ({}, {}),
    "clusters": ({}, CLUSTERED),
    "shared keys": (GEMMA4_SHARED, {}),
    "layer inputs, clusters": ({**GEMMA4_INPUTS, "vocab_size_per_layer_input": VOCABULARY}, CLUSTERED),
    "experts": (GEMMA4_EXPERTS, {}),
}


def engine(path: Path | str, **flags: Any) -> LLM:
    """In float32 everywhere, as the references compute."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


class Case:
    """A target, a random assistant for it, and the assistant's forward in plain PyTorch."""

    def __init__(self, root: Path, of_target: dict[str, Any], of_assistant: dict[str, Any]) -> None:
        fields = {"vocab_size": VOCABULARY, **of_target}
        self.path = make_checkpoint(root / "target", "gemma4_text", tokenizer=False, **fields)
        self.drafter = make_assistant(root / "assistant", self.path, **of_assistant)
        self.weights, self.clustered = load_file(self.drafter / WEIGHTS), bool(of_assistant)
        self.model, self.window = reference(self.path), 19

    @property
    def spec(self) -> SpeculativeConfig:
        return SpeculativeConfig("mtp_frozen", str(self.drafter), 3)

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]:
        """Logits of k greedy drafts after ``ids``: every step stands at the last of them and sees those before."""
        out = self.model.model(torch.tensor([ids[:-1]]), return_shared_kv_states=True)
        hidden, token, found = out.last_hidden_state[0, -1], ids[-1], []
        for _ in range(k):
            embedding = self.model.get_input_embeddings()(torch.tensor(token))  # times the root of its size
            x = torch.cat((embedding, hidden)) @ self.weights["pre_projection.weight"].T
            for i, kind in enumerate(TYPES):
                keys, values = (each[0] for each in out.shared_kv_states[kind])
                x = self.layer(i, x, keys, values, len(ids) - 1)
            y = norm(x, self.weights["model.norm.weight"], EPS)
            hidden = y @ self.weights["post_projection.weight"].T
            found.append(self.logits(y))
            token = int(found[-1].argmax())
        return found

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        scores = y @ self.weights["model.embed_tokens.weight"].T
        if not self.clustered:
            return scores
        clusters = (y @ self.weights["masked_embedding.centroids.weight"].T).topk(5).indices
        ids = self.weights["masked_embedding.token_ordering"].view(16, -1)[clusters].flatten()
        return torch.full_like(scores, -torch.inf).index_copy(0, ids, scores[ids])

    def layer(self, i: int, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
        """x [H]; keys, values [Hkv, n, D] of the positions before ``at``."""
        w = {k.split(f"layers.{i}.")[-1].removesuffix(".weight"): v for k, v in self.weights.items()}
        q = (norm(x, w["input_layernorm"], EPS) @ w["self_attn.q_proj"].T).view(1, 6, -1)
        q = norm(q, w["self_attn.q_norm"], EPS)
        if TYPES[i] == "sliding_attention":
            q = rotate(q, 1e4, torch.tensor([at]))[0]
            keys, values = (t[:, -(self.window - 1) :] for t in (keys, values))  # a window counts its own position
        else:  # a quarter of the planes turn
            frequencies = torch.where(torch.arange(20) < 5, 1 / 1e6 ** (torch.arange(20) / 20), 0.0)
            q = rotate(q, 1.0, at * frequencies[None])[0]
        keys, values = (t.repeat_interleave(6 // len(t), 0) for t in (keys, values))
        p = (keys @ q[..., None])[..., 0].softmax(-1)  # scores are not scaled
        out = (p[:, None] @ values).flatten() @ w["self_attn.o_proj"].T
        x = x + norm(out, w["post_attention_layernorm"], EPS)
        y = norm(x, w["pre_feedforward_layernorm"], EPS)
        gate = gelu(y @ w["mlp.gate_proj"].T, approximate="tanh")
        out = (gate * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        return (x + norm(out, w["post_feedforward_layernorm"], EPS)) * w["layer_scalar"]


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("gemma"), *CASES[request.param])


@torch.no_grad()
def test_the_reference_is_transformers(case: Case) -> None:
    """Where all keys are in the window and no key is stale."""
    ids = [7 * i % 251 for i in range(15)]
    target = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32)
    target.config.output_hidden_states = True
    out = target.model(torch.tensor([ids[:-1]]), return_shared_kv_states=True)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(case.drafter, dtype=torch.float32)
    inputs = torch.cat((target.get_input_embeddings()(torch.tensor([ids[-1:]])), out.last_hidden_state[:, -1:]), -1)
    theirs = assistant(
        inputs_embeds=inputs, position_ids=torch.tensor([[len(ids) - 1]]), shared_kv_states=out.shared_kv_states
    ).logits[0, 0]
    (ours,) = case.drafts(ids, 1)
    scored = ours.isfinite()
    torch.testing.assert_close(ours[scored], theirs[scored], atol=1e-4, rtol=0)
    assert (theirs[~scored] < ours[scored].min()).all()


@pytest.mark.parametrize("flags", [{}, {"max_num_batched_tokens": 21, "max_num_seqs": 2}], ids=["one pass", "chunks"])
def test_every_draft_is_the_references(case: Case, flags: dict) -> None:
    batch = prompts(4, 250, low=1, high=50, seed=3)
    with engine(case.path) as llm:
        texts = [p + t for p, t in zip(batch, tokens(llm, batch, GREEDY), strict=True)]
    with engine(case.path, speculative=case.spec, enforce_eager=True, **flags) as llm:
        seen = record(llm, texts)
        for _ in range(2):  # the second time behind cached prefixes
            assert [p + t for p, t in zip(batch, tokens(llm, batch, GREEDY), strict=True)] == texts
        assert llm.engine.counters.accept_length > 1.5
    assert mistakes(case, seen[::3]) == [0] * 3


def test_text_equals_the_targets_own(case: Case) -> None:
    """In graphs, greedy and sampled, with pages for few requests."""
    batch, params = prompts(6, 250, low=1, high=60), mixed_params(6)
    with engine(case.path) as llm:
        expected = tokens(llm, batch, params)
    for flags in ({}, {"max_model_len": 96, "num_pages": 9}):
        with engine(case.path, speculative=case.spec, **flags) as llm:
            assert tokens(llm, batch, params) == expected
            assert llm.engine.counters.drafted_tokens > 0


def test_drafts_in_fp8_leave_the_text(case: Case) -> None:
    batch, params = prompts(3, 250, low=1, high=40), mixed_params(3)
    spec = SpeculativeConfig("mtp_frozen", str(case.drafter), 3, options={"draft_quantization": "fp8"})
    with engine(case.path) as llm:
        expected = tokens(llm, batch, params)
    with engine(case.path, speculative=spec) as llm:
        assert tokens(llm, batch, params) == expected
        assert llm.engine.counters.accepted_tokens > 0
        head = llm.engine.worker.drafter._head
        assert (head.lm_head.format.name == "plain") == case.clustered
        assert head.post_projection.format is ONLINE_FP8
        found = {d["name"]: d["value"] for d in llm.engine.info()["decisions"]}
    assert found["draft weights"] == "fp8"


def test_the_layers_it_reads(tmp_path: Path) -> None:
    """The last of each type that has keys of its own."""
    target = make_checkpoint(tmp_path / "target", "gemma4_text", tokenizer=False, **GEMMA4_SHARED)
    opened = FrozenCheckpoint.open(make_assistant(tmp_path / "a", target), Checkpoint.open(target).config)
    assert opened.reads == (2, 1)
    assert opened.config.layers[0].scaled
    assert opened.config.layers[1].mixer.scale == 1.0


def test_clusters_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "gemma4_text", tokenizer=False)  # 263 tokens
    path = make_assistant(tmp_path / "a", target)
    stored = load_file(path / WEIGHTS)
    stored["masked_embedding.centroids.weight"] = torch.zeros(16, WIDTH)
    stored["masked_embedding.token_ordering"] = torch.arange(263)
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="16 centroids of 263 tokens"):
        FrozenCheckpoint.open(path, Checkpoint.open(target).config)


def test_assistant_directory_implies_mtp_frozen(tmp_path: Path) -> None:
    """As in vLLM, where the speculative config has a model alone; and it cannot be served itself."""
    target = make_checkpoint(tmp_path / "target", "gemma4_text", tokenizer=False)
    path = str(make_assistant(tmp_path / "a", target))
    given = {"model": path, "num_speculative_tokens": 2}
    assert with_method(given) == {**given, "method": "mtp_frozen"}
    assert with_method({**given, "method": "eagle3"})["method"] == "eagle3"
    assert with_method({"model": str(target)}) == {"model": str(target)}
    with LLM(str(target), max_model_len=64, max_num_seqs=2, speculative_config=given) as llm:
        found = {d["name"]: d["value"] for d in llm.engine.info()["decisions"]}
    assert found["layers whose KV the drafter reads"] == "[2, 3]"
    with pytest.raises(CheckpointError, match=r"is a draft head .*--speculative-method mtp_frozen"):
        LLM(path)
