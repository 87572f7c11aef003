"""The frozen-KV drafter attends over the target's keys and values; nothing else of a request is kept but one state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.ledger import acceptance, assert_every_draft_accepted, play
from tests.drafters.make_frozen import DEPTH, HEADS, MLP, WIDTH, random_weights
from tests.drafters.proposals import GREEDY, mistakes, record
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from tests.models.make_mtp import Weights, norm, options, rotate, write_alone
from unisono.drafters.mtp.frozen_kv_model import FrozenCheckpoint
from unisono.entrypoints.llm import LLM
from unisono.kernels.cache.rotary import launch_rope_and_cache, rope_and_cache
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig


def engine(path: Path | str, **flags: Any) -> LLM:
    """In float32 everywhere, as the references compute."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


def spec(k: int, model: Path | None, **options: object) -> SpeculativeConfig:
    return SpeculativeConfig("mtp_frozen", None if model is None else str(model), k, options)


class Case:
    """A target, a random drafter for it, and the drafter's forward in plain PyTorch."""

    def __init__(self, root: Path, family: str, **overrides: object) -> None:
        self.path = make_checkpoint(root / "target", family, **options(**overrides))
        self.weights = random_weights(self.path)
        self.drafter = write_alone(root / "drafter", self.weights)
        self.config = Checkpoint.open(self.path).config
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def greedy(self, batch: Sequence[list[int]]) -> list[list[int]]:
        with engine(self.path) as llm:
            return tokens(llm, batch, GREEDY)

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]:
        """Logits of k greedy drafts after ``ids``: every step stands at the last of them and sees those before."""
        out = self.model.model(torch.tensor([ids[:-1]]), use_cache=True)
        hidden = out.last_hidden_state[0, -1]
        layer = out.past_key_values.layers[-1]  # rotated keys
        token, logits = ids[-1], []
        for _ in range(k):
            embedding = self.model.get_input_embeddings().weight[token]
            x = torch.cat((embedding, hidden)) @ self.weights["pre_projection.weight"].T
            for i in range(DEPTH):
                x = self.layer(i, x, layer.keys[0], layer.values[0], len(ids) - 1)
            x = norm(x, self.weights["model.norm.weight"], self.config.rms_eps)
            hidden = x @ self.weights["post_projection.weight"].T
            logits.append(x @ self.weights["model.embed_tokens.weight"].T)
            token = int(logits[-1].argmax())
        return logits

    def layer(self, i: int, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
        """x [H]; keys, values [Hkv, n, D] of the positions before ``at``."""
        c, w = self.config, {k.split(f"layers.{i}.")[-1]: v for k, v in self.weights.items()}
        q = (norm(x, w["input_layernorm.weight"], c.rms_eps) @ w["self_attn.q_proj.weight"].T).view(1, HEADS, -1)
        q = norm(q, w["self_attn.q_norm.weight"], c.rms_eps)
        q = rotate(q, c.hf_config.rope_parameters["rope_theta"], torch.tensor([at]))[0]
        most = c.windows[-1] - 1 if c.windows[-1] else at  # a window counts the query's own position
        keys, values = (t[:, -most:].repeat_interleave(HEADS // c.attention.num_kv_heads, 0) for t in (keys, values))
        p = ((keys @ q[..., None])[..., 0] / c.attention.head_dim**0.5).softmax(-1)
        x = x + (p[:, None] @ values).flatten() @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"], c.rms_eps)
        gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
        return x + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


@pytest.fixture(scope="module", params=["llama", "mistral"], ids=["full attention", "window of 19"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize(
    "flags",
    [{}, {"max_num_batched_tokens": 21, "max_num_seqs": 2}, {"max_model_len": 80, "num_pages": 1 + 6}],
    ids=["one pass", "chunks of 21", "preempted"],
)
def test_every_draft_is_the_references(case: Case, flags: dict) -> None:
    batch = prompts(4, 250, low=1, high=50, seed=3)
    texts = [p + t for p, t in zip(batch, case.greedy(batch), strict=True)]
    with engine(case.path, speculative=spec(3, case.drafter), enforce_eager=True, **flags) as llm:
        seen = record(llm, texts)
        for _ in range(2):  # the second time behind cached prefixes
            assert [p + t for p, t in zip(batch, tokens(llm, batch, GREEDY), strict=True)] == texts
        assert (llm.engine.scheduler.preemptions if "num_pages" in flags else llm.engine.scheduler.prefix_hits) > 0
        assert llm.engine.counters.accept_length > 1.5
    assert mistakes(case, seen[::2]) == [0] * 3


# ---- a drafter that is right by construction ------------------------------------------------------


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose next token depends on the last one alone, and a drafter that passes its embedding on.

    The target's keys of the last layer are alike and its values are all zero in their first dimension, but for what is
    no key of the request: there the cache is poisoned. The drafter's attention spreads that dimension over the logits.
    """
    root = tmp_path_factory.mktemp("sure")
    path = make_checkpoint(root / "target", "llama", **options(rms_norm_eps=1e-12))
    config = Checkpoint.open(path).config
    generator = torch.Generator().manual_seed(0)
    target = load_file(path / WEIGHTS)
    for name, weight in target.items():
        weight.fill_(1) if "norm" in name else weight.zero_()
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    target["model.embed_tokens.weight"] = embed / embed.square().mean(1, keepdim=True).sqrt()
    target["lm_head.weight"] = 0.3 * torch.randn(embed.shape, generator=generator)
    save_file(target, path / WEIGHTS, metadata={"format": "pt"})

    w: Weights = {}
    hidden, queries = config.hidden_size, HEADS * config.attention.head_dim
    w["lm_head.weight"] = target["lm_head.weight"]
    w["model.norm.weight"] = torch.ones(hidden)
    w["pre_projection.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    w["post_projection.weight"] = torch.zeros(hidden, hidden)
    layer = {
        "input_layernorm": torch.ones(hidden),
        "self_attn.q_proj": torch.zeros(queries, hidden),
        "self_attn.o_proj": torch.randn(hidden, queries, generator=generator),
        "post_attention_layernorm": torch.ones(hidden),
        "mlp.gate_proj": torch.zeros(MLP, hidden),
        "mlp.up_proj": torch.zeros(MLP, hidden),
        "mlp.down_proj": torch.zeros(hidden, MLP),
    }
    w |= {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    return path, write_alone(root / "drafter", w)


@pytest.mark.parametrize(
    ("k", "flags"), [(1, {}), (4, {}), (4, {"max_num_batched_tokens": 21, "max_num_seqs": 3})], ids=["1", "4", "chunks"]
)
@torch.inference_mode()
def test_a_right_drafter_is_always_accepted(sure: tuple[Path, Path], k: int, flags: dict) -> None:
    """In graphs, greedy and sampled, behind cached prefixes; and the text is the target's own."""
    target, drafter = sure
    batch, params = prompts(6, 250, low=1, high=70), mixed_params(6)
    with engine(target) as llm:
        expected = tokens(llm, batch, params)
    with engine(target, speculative=spec(k, drafter), **flags) as llm:
        for cache in llm.engine.worker.store.view("target").tree[-1]:
            cache.fill_(100)  # a key that no request wrote must not be seen
        for _ in range(2):
            entries = play(llm, batch, params)
            assert_every_draft_accepted(llm, entries)
            assert [entry.tokens for entry in entries] == expected
        assert llm.engine.scheduler.prefix_hits > 0
        for _, values in llm.engine.worker.store.view("target").tree:
            values[1:].fill_(100)
        play(llm, batch, params)
        assert acceptance(llm) < 0.9, "the construction can fail: what is in the target's cache is read"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("pre_projection.weight"), ("pre_projection.weight", "missing")),
        (lambda w: w.pop("model.layers.1.self_attn.o_proj.weight"), ("layers.1.self_attn.o_proj.weight", "missing")),
        (lambda w: w.update({"pre_projection.weight": torch.zeros(WIDTH, 64)}), ("[44, 64]", "180", "another model")),
        (lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(2, 2)}), ("keys of its own",)),
        (lambda w: w.update({"model.layers.0.layer_scalar": torch.zeros(1)}), ("layer_scalar", "unexpected")),
        (
            lambda w: w.update({"model.layers.1.pre_feedforward_layernorm.weight": torch.zeros(WIDTH)}),
            ("layers.0.pre_feedforward_layernorm.weight", "missing"),
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4 * 24, WIDTH)}),
            ("4 query heads",),
        ),
        (lambda w: w.update({"extra.weight": torch.zeros(1)}), ("extra.weight", "unexpected")),
    ],
    ids=["no projection", "no output", "other target", "own keys", "scale", "norms", "heads", "unexpected"],
)
def test_incompatible_frozen_drafter_weights_are_named(change, words, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", **options())
    weights = random_weights(target)
    change(weights)
    with pytest.raises(CheckpointError) as error:
        engine(target, speculative=spec(3, write_alone(tmp_path / "drafter", weights)))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_the_config_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match='needs "model"'):
        engine(case.path, speculative=spec(3, None))
    with pytest.raises(ConfigError, match=r"has no option 'topk'. Its options: draft_quantization"):
        engine(case.path, speculative=spec(3, case.drafter, topk=4))


def test_layer_types_choose_the_targets_layers(tmp_path: Path) -> None:
    """Full layers read the target's last full one, sliding ones its last sliding one."""
    window = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2}
    target = make_checkpoint(tmp_path / "target", "qwen2", **options(**window))
    config = Checkpoint.open(target).config
    assert config.windows == (0, 0, 21)
    drafter = write_alone(tmp_path / "drafter", random_weights(target))
    assert FrozenCheckpoint.open(drafter, config).reads == (2, 2)
    (drafter / "config.json").write_text('{"layer_types": ["sliding_attention", "full_attention"]}')
    assert FrozenCheckpoint.open(drafter, config).reads == (2, 1)
    (drafter / "config.json").write_text('{"layer_types": ["full_attention"]}')
    with pytest.raises(CheckpointError, match="names 1 layers, the weights hold 2"):
        FrozenCheckpoint.open(drafter, config)


@pytest.mark.parametrize("normed", [True, False])
def test_query_only_rotation_equals_rotation_with_keys(normed: bool) -> None:
    """``rope_and_cache`` without KV heads, kernel and twin, gives the bits it gives with them."""
    heads, dim, count = 6, 24, 7
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(count, heads * dim, generator=generator).to(device)
    weight = torch.randn(dim, generator=generator).to(device) if normed else None
    angles = torch.randn(40, dim, generator=generator).to(device)
    positions = torch.tensor([3, 0, -1, 39, 17, 2, 5], dtype=torch.int32, device=device)
    slots = torch.arange(count, dtype=torch.int32, device=device)
    cache = torch.zeros(1, 3, 16, dim, device=device)
    whole = torch.cat((q, torch.zeros(count, 6 * dim, device=device)), 1)
    for op in (launch_rope_and_cache, rope_and_cache):
        with_keys = op(whole, weight, weight, 1e-5, angles, positions, slots, cache.clone(), cache.clone(), heads, 3)
        kept = cache.clone()
        alone = op(q, weight, weight, 1e-5, angles, positions, slots, kept[:, :0], kept[:, :0], heads, 0)
        torch.testing.assert_close(alone, with_keys, atol=1e-6, rtol=0)
        assert torch.equal(kept, cache)
