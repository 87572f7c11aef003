"""``tiny-gemma`` and its assistant in training: against transformers, in the engine, and their checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from training.tiny.batches import Packing, stream
from training.tiny_gemma.assistant import TinyAssistant
from training.tiny_gemma.checkpoint import ASSISTANT, MODEL, Save, load_, round_
from training.tiny_gemma.evaluate import generate, matches, prompt
from training.tiny_gemma.model import GemmaConfig, TinyGemma, attend, visible
from training.tiny_gemma.train import TOY
from training.tiny_hybrid.evaluate import count_rounds
from unisono.config import catalog
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig

ROOT = Path(__file__).parent.parent.parent
WINDOW = TOY.sliding_window


def disturbed(module: nn.Module) -> nn.Module:
    """Every parameter away from its initial value, rounded as a checkpoint's."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if "norm" in name or parameter.ndim < 2 else 0.1))
    round_(module)
    return module.eval()


@pytest.fixture(scope="module")
def pair() -> tuple[TinyGemma, TinyAssistant]:
    """Random weights of both."""
    torch.manual_seed(0)
    model, assistant = TinyGemma(TOY), TinyAssistant(TOY)
    disturbed(model)
    disturbed(assistant)
    return model, assistant


@pytest.fixture(scope="module")
def saved(pair: tuple[TinyGemma, TinyAssistant], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gemma")
    save = Save(out, Tokenizer.from_file(str(catalog.bundled_path("tiny") / "tokenizer.json")), {"seed": 0})
    save.model(pair[0], {"steps": 1})
    save.assistant(pair[1])
    return out


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, TOY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("window", [16, 15, 9])
@pytest.mark.parametrize("length", [16, 64])
def test_blocks_attend_as_a_mask_says(window: int, length: int) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    scores = q @ k.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~visible(length, length, window, q.device), -torch.inf)
    expected = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attend(q, (k, v), window, 16), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_transformers_computes_the_same_logits(pair: tuple[TinyGemma, TinyAssistant], saved: Path) -> None:
    ids = random_ids(2, 4 * WINDOW)
    reference, loading = AutoModelForCausalLM.from_pretrained(
        saved / MODEL, dtype=torch.float32, output_loading_info=True
    )
    assert type(reference).__name__ == "Gemma4ForCausalLM"
    assert not loading["missing_keys"] | loading["mismatched_keys"] | loading["unexpected_keys"]
    found = pair[0].head(pair[0](ids, torch.arange(ids.shape[1]).expand(2, -1)).hidden)
    expected = reference(ids).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_transformers_drafts_the_same_first_token(pair: tuple[TinyGemma, TinyAssistant], saved: Path) -> None:
    """Where all keys are in the window, which transformers counts in another way."""
    model, assistant = pair
    ids = random_ids(1, WINDOW)
    target = AutoModelForCausalLM.from_pretrained(saved / MODEL, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(saved / ASSISTANT, dtype=torch.float32)
    positions = torch.arange(2 * WINDOW)[None]
    padded = torch.cat((ids, torch.zeros_like(ids)), 1)
    (state,) = assistant.unroll(model, padded, positions, model(padded, positions), 1)
    for last in (1, 7, WINDOW - 2):  # the last committed token of a round
        target.config.output_hidden_states = True
        out = target.model(ids[:, :last], return_shared_kv_states=True)
        embedded = target.get_input_embeddings()(ids[:, last : last + 1])
        expected = theirs(
            inputs_embeds=torch.cat((embedded, out.last_hidden_state[:, -1:]), -1),
            position_ids=torch.tensor([[last]]),
            shared_kv_states=out.shared_kv_states,
        ).logits[0, 0]
        torch.testing.assert_close(assistant.head(state[0, last - 1]), expected, atol=1e-4, rtol=0)


def test_the_engine_serves_them(pair: tuple[TinyGemma, TinyAssistant], saved: Path) -> None:
    """Tokens and rounds are those of the training models, beyond the window too."""
    model, assistant = pair
    prompts = [random_ids(1, n)[0].tolist() for n in (5, 40, 70)]
    expected = generate(model, prompts, [TOY.vocab_size], 24, "cpu", float("inf"))
    with torch.no_grad():
        length, _ = count_rounds(lambda some: matches(model, assistant, some, 3, "cpu"), prompts, expected, 3)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    for spec in (SpeculativeConfig("mtp_frozen", str(saved / ASSISTANT), 3), SpeculativeConfig("none")):
        with LLM(str(saved / MODEL), speculative=spec, **flags) as llm:
            llm.engine.pin_drafts(llm.engine.runner.choices[-1])
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            if spec.method == "mtp_frozen":
                assert llm.engine.counters.accept_length == pytest.approx(length, abs=0.05)
        assert found == expected


def test_names_sizes_and_loading(pair: tuple[TinyGemma, TinyAssistant], saved: Path) -> None:
    parameters = sum(p.numel() for kind in (TinyGemma, TinyAssistant) for p in kind(GemmaConfig()).parameters())
    tokenizer = (saved / MODEL / "tokenizer.json").stat().st_size
    assert 2 * parameters + tokenizer < (16 << 20) - 100_000
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (saved / MODEL / name).read_text() == (catalog.bundled_path("tiny") / name).read_text()
    assert (saved / MODEL / "chat_template.jinja").is_file()
    assert prompt("1 + 1?").endswith("assistant\n")
    for module, name in zip(pair, (MODEL, ASSISTANT), strict=True):
        fresh = type(module)(TOY)
        load_(fresh, saved / name)
        for key, tensor in module.state_dict().items():
            assert torch.equal(fresh.state_dict()[key], tensor), key


def test_earlier_batches_stand_in_for_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once there are enough, and only while the next one is not ready."""
    tokenizer = Tokenizer.from_file(str(catalog.bundled_path("tiny") / "tokenizer.json"))
    monkeypatch.setattr(Future, "done", lambda self: False)
    for repeat, different in ((3, 3), (0, 8)):
        with stream(tokenizer, Packing(1, 64, 4096), 1, 1, repeat=repeat) as batches:
            given = [next(batches).ids.tobytes() for _ in range(8)]
        assert len(set(given)) == different
        assert len(set(given[:3])) == 3


@pytest.mark.full
def test_one_command_trains_and_measures_and_another_goes_on(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "training.tiny_gemma.train", "--out", str(tmp_path), "--minutes", "1", "--rows", "2",
        "--length", "128", "--workers", "1", "--problems", "2", "--device", "cpu", "--sizes", "toy",
    ]  # fmt: skip
    for more in ([], ["--start", str(tmp_path), "--model-until", "0"]):
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        figures = json.loads((tmp_path / MODEL / "training.json").read_text())
        assert figures["assistant_steps"] >= 2
        assert ("trunk_steps" in figures) != bool(more)
        assert figures["problems"] == 2
        assert ("loaded from" in done.stdout) == bool(more)
