"""The training model of ``tiny-hybrid``: against transformers, against formulas token by token, and its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.tiny.documents import END, START, STOP, standard_library
from training.tiny.tokenizer import train_tokenizer
from training.tiny_hybrid import delta
from training.tiny_hybrid.checkpoint import Save, round_, tensors
from training.tiny_hybrid.documents import MARKS, THINK, THOUGHT, conversation, document, thought_and_answer
from training.tiny_hybrid.evaluate import accept_length, generate, prompt
from training.tiny_hybrid.model import HybridConfig, TinyHybrid
from unisono.entrypoints.llm import LLM
from unisono.text.tokenizer import Tokenizer
from unisono.types import SamplingParams, SpeculativeConfig

ROOT = Path(__file__).parent.parent.parent
SMALL = HybridConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=32, rotary_dims=8, linear_key_head_dim=16,
    linear_value_head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> TinyHybrid:
    """Random weights, every parameter away from its initial value, rounded as a checkpoint's."""
    torch.manual_seed(0)
    made = TinyHybrid(SMALL)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name or parameter.ndim < 2 else 0.08))
    round_(made)
    return made.eval()


@pytest.fixture(scope="module")
def saved(model: TinyHybrid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid")
    Save(out, train_tokenizer(0, 50, document, MARKS), {"seed": 0})(model, {"steps": 1})
    return out


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def test_delta_rule_in_chunks_is_the_recurrence() -> None:
    """Also with equal keys, full gates and no decay, where powers of the chunk's matrix are large."""
    torch.manual_seed(1)
    rows, length, keys, values, size = 2, 192, 2, 4, 16
    q, k = torch.randn(2, rows, length, keys, size).unbind()
    v, beta = torch.randn(rows, length, values, size), torch.rand(rows, length, values)
    g = -torch.rand(rows, length, values) * 0.1
    k[:, 64:128], beta[:, 64:128], g[0, 64:128] = k[:, 64:65], 1.0, 0.0
    given = [x.requires_grad_() for x in (q, k, v, g, beta)]
    state, outs = torch.zeros(rows, values, size, size), []
    for t in range(length):
        state, out = delta.step(state, *(x[:, t] for x in given))
        outs.append(out)
    expected, weights = torch.stack(outs, 1), torch.randn(rows, length, values, size)
    found = delta.chunked(*given)
    assert torch.allclose(found, expected, atol=2e-6)
    wanted_gradients, gradients = (torch.autograd.grad((x * weights).sum(), given) for x in (expected, found))
    for wanted, got in zip(wanted_gradients, gradients, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5 * wanted.abs().max().item())


def test_transformers_computes_the_same_logits(model: TinyHybrid, saved: Path) -> None:
    ids = random_ids(3, 128)
    reference, loading = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert type(reference).__name__ == "Qwen3_5MoeForCausalLM"
    assert not loading["missing_keys"] | loading["mismatched_keys"]
    with torch.no_grad():
        hidden, _ = model.hidden(ids, torch.arange(128).expand(3, -1))
        found, expected = model.head(hidden), reference(ids).logits
    assert expected.std() > 0.3
    assert torch.allclose(found, expected, atol=1e-4)


def test_tokens_one_by_one_are_the_whole_row(model: TinyHybrid) -> None:
    """Greedy generation of rows of different lengths, against the whole forward pass."""
    prompts = [random_ids(1, n)[0].tolist() for n in (5, 17, 30)]
    answers = generate(model, prompts, [SMALL.vocab_size], 20, float("inf"))
    for given, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 20
        text = torch.tensor([given + answer + [0] * (64 - len(given) - 20)])
        with torch.no_grad():
            best = model.head(model.hidden(text, torch.arange(64)[None])[0]).argmax(-1)[0]
        assert best[len(given) - 1 : len(given) + 19].tolist() == answer
    stop = answers[0][3]
    assert generate(model, prompts[:1], [stop], 20, float("inf")) == [answers[0][: answers[0].index(stop) + 1]]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def draft(stored: dict[str, Tensor], context: Tensor, tokens: list[int], hidden: Tensor) -> Tensor:
    """The logits of one draft from the formulas of the MTP module: the whole sequence is computed anew.

    context [n, H]: the inputs of the layer so far. hidden [H] and the last of ``tokens`` give the next one.
    """
    embedded = norm(stored["model.embed_tokens.weight"][tokens[-1]], stored["mtp.pre_fc_norm_embedding.weight"])
    pair = torch.cat((embedded, norm(hidden, stored["mtp.pre_fc_norm_hidden.weight"])))
    return torch.cat((context, (pair @ stored["mtp.fc.weight"].T)[None]))


def layer(stored: dict[str, Tensor], x: Tensor) -> Tensor:
    """The last state [H] of the MTP module for layer inputs [n, H], head by head and expert by expert."""
    block = {name.removeprefix("mtp.layers.0."): t for name, t in stored.items() if name.startswith("mtp.layers.0.")}
    n, d, heads = len(x), SMALL.head_dim, SMALL.num_attention_heads
    normed, attended = norm(x, block["input_layernorm.weight"]), []
    half = SMALL.rotary_dims // 2
    angles = torch.arange(n)[:, None] / SMALL.rope_theta ** (torch.arange(half) / half)

    def turned(y: Tensor) -> Tensor:
        a, b, rest = y[:, :half], y[:, half : 2 * half], y[:, 2 * half :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), dim=1)

    for head in range(heads):
        shared = head // (heads // SMALL.num_key_value_heads)
        query, gate = (normed @ block["self_attn.q_proj.weight"].T)[:, 2 * d * head : 2 * d * (head + 1)].chunk(
            2, dim=1
        )
        key, value = (
            (normed @ block[f"self_attn.{kind}_proj.weight"].T)[:, d * shared : d * (shared + 1)] for kind in "kv"
        )
        query, key = (
            turned(norm(query, block["self_attn.q_norm.weight"])),
            turned(norm(key, block["self_attn.k_norm.weight"])),
        )
        scores = ((query[-1] @ key.T) * d**-0.5).softmax(-1)
        attended.append((scores @ value) * gate[-1].sigmoid())
    last = x[-1] + torch.cat(attended) @ block["self_attn.o_proj.weight"].T
    normed = norm(last, block["post_attention_layernorm.weight"])

    def expert(prefix: str) -> Tensor:
        gate, up, down = (block[f"mlp.{prefix}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        return (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    best, chosen = (normed @ block["mlp.gate.weight"].T).softmax(-1).topk(SMALL.num_experts_per_tok)
    out = sum(w * expert(f"experts.{e}") for w, e in zip(best / best.sum(), chosen.tolist(), strict=True))
    out = out + (normed @ block["mlp.shared_expert_gate.weight"].T).sigmoid() * expert("shared_expert")
    return norm(last + out, stored["mtp.norm.weight"])


def test_unrolled_module_follows_the_formulas(model: TinyHybrid) -> None:
    """Three drafts from a context, token by token, with the tensors of the checkpoint."""
    ids, start = random_ids(1, 64), 9
    with torch.no_grad():
        hidden, _ = model.hidden(ids, torch.arange(64)[None])
        states = model.unroll(ids, hidden, 3)
    stored = {name: tensor.float() for name, tensor in tensors(model).items()}
    context = torch.zeros(0, SMALL.hidden_size)
    for t in range(start):
        context = draft(stored, context, [int(ids[0, t + 1])], hidden[0, t])
    state = hidden[0, start]
    for s in range(3):
        context = draft(stored, context, [int(ids[0, start + 1 + s])], state)
        state = layer(stored, context)
        assert torch.allclose(states[s][0, start], state, atol=2e-5)


def test_accept_length_counts_rounds(model: TinyHybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right at known places: 2 of 3, none, 3 of 3, then what is left of the text."""
    table = [[[0, 0, 0]] * 40]
    for t, right in {4: [1, 1, 0], 7: [0, 0, 0], 8: [1, 1, 1], 12: [1, 1, 1]}.items():
        table[0][t] = right
    monkeypatch.setattr("training.tiny_hybrid.evaluate._matches", lambda model, texts, drafts: table)
    length, by_position = accept_length(model, [[1] * 5], [[2] * 10])
    assert length == 9 / 4  # rounds of 3 + 1 + 4 + 1 tokens follow the first one
    assert by_position == [3 / 4, 2 / 4, 1 / 4]


def test_experts_and_tensor_names(saved: Path) -> None:
    """The names of released checkpoints, and files that fit a repository."""
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", "pt") as file:
        shapes = {
            name: (tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype())
            for name in file.keys()  # noqa: SIM118 (it is no dict)
        }
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == ((8, 64, 64), "BF16")
    assert shapes["model.layers.0.linear_attn.A_log"] == ((4,), "F32")
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == ((128, 1, 4), "BF16")
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == ((256, 64), "BF16")
    assert shapes["mtp.layers.0.mlp.experts.7.up_proj.weight"] == ((32, 64), "BF16")
    assert shapes["mtp.fc.weight"] == ((64, 128), "BF16")
    assert "lm_head.weight" not in shapes
    assert len(list(saved.iterdir())) == 7
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(TinyHybrid(HybridConfig())).values())
    assert size < (16 << 20) - 100_000


def test_chat_template_opens_and_closes_reasoning(saved: Path) -> None:
    tokenizer = Tokenizer.load(saved)
    assert tokenizer is not None
    ids = tokenizer.encode(f"{THINK}\n1 + 1 = 2\n{THOUGHT}\n\n2{STOP}", add_special_tokens=False)
    assert ids[0] == tokenizer.size - 2
    assert ids.count(tokenizer.size - 1) == 1
    assert tokenizer.decode(ids) == f"{THINK}\n1 + 1 = 2\n{THOUGHT}\n\n2"
    asked = [{"role": "user", "content": "1 + 1?"}]
    assert tokenizer.apply_chat_template(asked) == prompt("1 + 1?")
    off = tokenizer.apply_chat_template(asked, template_kwargs={"enable_thinking": False})
    assert (
        off
        == prompt("1 + 1?", thinking=False)
        == f"{START}user\n1 + 1?{STOP}\n{START}assistant\n{THINK}\n\n{THOUGHT}\n\n"
    )
    more = [
        *asked,
        {"role": "assistant", "content": f"{THINK}\nstep\n{THOUGHT}\n\n2"},
        {"role": "user", "content": [{"type": "text", "text": "ok"}]},
    ]
    assert tokenizer.apply_chat_template(more) == (
        f"{START}user\n1 + 1?{STOP}\n{START}assistant\n2{STOP}\n{START}user\nok{STOP}\n{START}assistant\n{THINK}\n"
    )
    assert AutoTokenizer.from_pretrained(saved).eos_token == STOP


def test_documents_think_before_they_answer() -> None:
    assert thought_and_answer("1 + 1 = 2\n2 + 1 = 3\n#### 3") == ("1 + 1 = 2\n2 + 1 = 3", "The answer is 3.\n#### 3")
    rng, library = Random(3), standard_library()
    texts = ["".join(part for part, _ in conversation(rng)) for _ in range(300)]
    for text in texts:
        assert text.endswith(f"{STOP}\n{END}")
        assert text.count(THINK) == text.count(THOUGHT) == 1
        assert text.rindex(f"{START}assistant\n{THINK}\n") == text.rindex(START), "only the last turn has a thought"
    assert sum("#### " in text.rpartition(THOUGHT)[2] for text in texts) > 200
    off = sum(f"{THINK}\n\n{THOUGHT}\n\n" in text and " = " in text.rpartition(THOUGHT)[2] for text in texts)
    assert 10 < off < 60, "some worked answers stand after an empty thought"
    assert any("def " in "".join(part for part, _ in document(rng, library)) for _ in range(100))


def test_the_engine_serves_it(model: TinyHybrid, saved: Path) -> None:
    """Greedy tokens are the training model's, with the MTP module (the default for this checkpoint) and without."""
    prompts = [random_ids(1, n)[0].tolist() for n in (5, 40, 70)]
    expected = generate(model, prompts, [SMALL.vocab_size], 24, float("inf"))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for spec in (None, SpeculativeConfig("none")):
        flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
        with LLM(str(saved), speculative=spec, **flags) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            assert llm.engine.info()["speculation"]["drafter"] == ("none" if spec else "mtp")
            assert (llm.engine.counters.drafted_tokens > 0) == (spec is None)
        assert found == expected


@pytest.mark.full
def test_one_command_trains_and_measures(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "training.tiny_hybrid.train", "--out", str(tmp_path), "--minutes", "1", "--rows", "2",
        "--length", "64", "--workers", "1", "--documents", "300", "--problems", "2", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "training.json").read_text())
    assert min(figures["trunk_steps"], figures["mtp_steps"], figures["problems"]) >= 2
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 17 << 20
