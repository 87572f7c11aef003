"""GGUF files: values are those of llama.cpp's package, logits are float64's, the text depends on the weights alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from tests.models.gguf_files import (
    BIG,
    PLAIN_ROPE,
    PROMPT,
    SCALES,
    Tokens,
    answers,
    blocks,
    error,
    reference,
    write_gguf,
)
from tests.models.harness import load, whole
from tests.models.make import make_checkpoint
from unisono.config.gguf.directory import described, source
from unisono.config.gguf.header import TYPES, read_gguf
from unisono.config.gguf.model import llama3_factors
from unisono.config.preflight.model import check_model
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.gguf import DECODERS
from unisono.text.tokenizer import Tokenizer
from unisono.types import CheckpointError, SpeculativeConfig


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "model"
    fields = {"num_hidden_layers": 2, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": True}
    return make_checkpoint(directory, "llama", tokenizer=False, **fields, **BIG)


@pytest.fixture(scope="module")
def q4(llama, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """(a file in Q4_1, its weights)."""
    file = tmp_path_factory.mktemp("q4") / "tiny-Q4_1.gguf"
    return file, write_gguf(llama, file, Type.Q4_1)


@pytest.mark.parametrize("name", DECODERS)
def test_values_are_those_of_llama_cpps_package(name: str) -> None:
    raw = blocks(np.random.default_rng(1).normal(0, 0.06, (6, 512)).astype(np.float32), Type[name], 2)
    want = torch.from_numpy(dequantize(raw, Type[name]))
    kind = next(each for each in TYPES.values() if each.name == name)
    got = DECODERS[name](torch.from_numpy(raw).view(-1, kind.nbytes)).view(6, 512)
    assert torch.equal(got, want)
    assert 0.02 < got.std() < 0.2


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q5_1, Type.Q8_0, *SCALES])
def test_logits_are_those_of_the_dequantised_weights(kind: Type, llama: Path, tmp_path: Path) -> None:
    file = tmp_path / f"{kind.name}.gguf"
    want = reference(llama, write_gguf(llama, file, kind))
    (got,) = whole(load(file), [PROMPT])
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_families(family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    more = experts if family == "qwen3_moe" else {}
    fields = {"num_hidden_layers": 2, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": False}
    made = make_checkpoint(tmp_path / "model", family, tokenizer=False, **{**fields, **BIG, **more})
    want = reference(made, write_gguf(made, tmp_path / "m.gguf", Type.Q5_0))
    (got,) = whole(load(tmp_path / "m.gguf"), [PROMPT])
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_are_recognised(factor: float, tmp_path: Path) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **more}
    fields = {"num_hidden_layers": 1, "rope_parameters": rope, "max_position_embeddings": 131072}
    made = make_checkpoint(tmp_path / "model", "llama", tokenizer=False, **fields, **BIG)
    factors = llama3_factors(500000.0, 64, factor)
    write_gguf(made, tmp_path / "m.gguf", Type.F32, rope_factors=factors)
    assert json.loads((described(tmp_path / "m.gguf") / "config.json").read_text())["rope_parameters"] == rope
    (got,), (want,) = whole(load(tmp_path / "m.gguf"), [PROMPT]), whole(load(made), [PROMPT])
    assert torch.equal(got, want), "F32 weights are those of the safetensors"


def test_other_factors_are_refused(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "m.gguf", rope_factors=[1.5] * 32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        described(tmp_path / "m.gguf")


def test_the_text_depends_on_the_weights_alone(q4) -> None:
    prompts = ["one two one two one", "abcabcab", "x"]
    together = answers(q4[0], prompts)
    assert answers(q4[0], prompts[1:2]) == together[1:2]
    assert answers(q4[0], prompts, speculative=SpeculativeConfig("ngram", num_speculative_tokens=3)) == together
    assert answers(q4[0], prompts, speculative=SpeculativeConfig("suffix", num_speculative_tokens=3)) == together


def test_the_tokenizer_and_its_template_are_the_files(q4) -> None:
    directory = described(q4[0])
    assert source(directory) == q4[0]
    tokenizer = Tokenizer.load(directory)
    vocabulary = Tokens().all
    ids = tokenizer.encode("ab é<|end|>c")
    assert [vocabulary[i] for i in ids] == ["ab", "Ġ", "Ã", "©", "<|end|>", "c"]
    assert tokenizer.decode(ids) == "ab éc"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).startswith("<|user|>hi<|end|>")
    assert Checkpoint.open(q4[0]).eos_token_ids == (258,)


SPLITTING = "It's 12345 o'clock…\n\n  and  THE Qwen2Model_x=3.14 ça, 你好\t!?\r\n  end  "


@pytest.mark.parametrize(("pre", "want"), [
    ("smollm", ["1", "2", "3", "4", "5"]), ("llama-bpe", ["123", "45"]), ("qwen2", ["1", "2", "3", "4", "5"]),
    ("gpt-2", ["12345"]), ("tekken", ["1", "2", "3", "4", "5"]),
])  # fmt: skip
def test_digit_split_follows_the_pre_tokenizer_name(pre: str, want: list[str], llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "m.gguf", tokens=Tokens(pre))
    split = Tokenizer.load(described(tmp_path / "m.gguf")).backend.backend_tokenizer.pre_tokenizer
    parts = [part for part, _ in split.pre_tokenize_str(SPLITTING)]
    assert [part.strip("Ġ") for part in parts if part.strip("Ġ").isdigit()][: len(want)] == want
    assert "".join(parts).replace("Ġ", " ").replace("Ċ", "\n").startswith("It's 12345 o'clock")


def test_a_text_is_split_as_transformers_splits_it(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for pre in ("llama-bpe", "qwen2", "tekken"):
        file = tmp_path / f"{pre}.gguf"
        write_gguf(llama, file, tokens=Tokens(pre))
        theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name).backend_tokenizer
        ours = Tokenizer.load(described(file)).backend.backend_tokenizer
        assert ours.pre_tokenizer.pre_tokenize_str(SPLITTING) == theirs.pre_tokenizer.pre_tokenize_str(SPLITTING)
        assert ours.encode(SPLITTING).ids == theirs.encode(SPLITTING, add_special_tokens=False).ids


REFUSED = {
    "architecture": ({"general.architecture": "gptj"}, "architecture 'gptj'"),
    "a part of several": ({"split.count": 3}, "llama-gguf-split --merge"),
    "an adapter": ({"general.type": "adapter"}, "holds a GGUF adapter"),
    "an unknown key": ({"attention.clamp_kqv": 3.5}, "llama.attention.clamp_kqv=3.5"),
    "a window": ({"attention.sliding_window": 16}, "llama.attention.sliding_window=16"),
    "half a head": ({"rope.dimension_count": 32}, "llama.rope.dimension_count=32"),
    "a missing key": ({"context_length": None}, "llama.context_length=None"),
    "long rope": ({"rope.scaling.type": "longrope"}, "rope.scaling.type=longrope"),
    "experts": ({"expert_count": 8}, "llama.expert_count=8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_gguf_keys_raise(name: str, llama: Path, tmp_path: Path) -> None:
    keys, named = REFUSED[name]
    write_gguf(llama, tmp_path / "m.gguf", keys=keys)
    with pytest.raises(CheckpointError) as caught:
        check_model(tmp_path / "m.gguf")
    assert named in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_another_split_is_refused(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "m.gguf", tokens=Tokens("falcon"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre='falcon'"):
        described(tmp_path / "m.gguf")


def test_another_type_is_refused(q4, tmp_path: Path) -> None:
    data = bytearray(q4[0].read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    assert data[at] == Type.Q4_1
    data[at] = Type.IQ4_XS
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has type IQ4_XS"):
        described(tmp_path / "m.gguf")


def test_damaged_files_are_refused(q4, tmp_path: Path) -> None:
    """A header cut anywhere, or with any byte set to 255, is refused or read; nothing else is raised."""
    data, file, refused = q4[0].read_bytes(), tmp_path / "m.gguf", 0
    ends = read_gguf(q4[0]).tensors["token_embd.weight"].start
    generator = random.Random(0)
    for _ in range(60):
        cut = generator.randrange(ends)
        file.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="truncated"):
            read_gguf(file)
        broken = bytearray(data)
        broken[generator.choice([generator.randrange(400), generator.randrange(ends)])] = 255
        file.write_bytes(broken)
        try:
            described(file)
        except CheckpointError:
            refused += 1
    assert refused > 10
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        check_model(file)


def test_only_the_cache_names_other_files(q4, tmp_path: Path) -> None:
    """A checkpoint with a file like the cache's reads its own weights, not the named ones."""
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "source.json").write_text(json.dumps({"file": str(q4[0])}))
    assert source(tmp_path / "gguf") is None


def test_half_of_the_rows_on_each_of_two_ranks(q4) -> None:
    from unisono.layers.formats.base import Slices
    from unisono.models.load.tensor_files import read

    tensors = Checkpoint.open(q4[0]).tensors()
    name = "model.layers.0.self_attn.q_proj.weight"
    ((_, all_rows),) = read({name: None}, tensors, "cpu")
    ((_, half),) = read({name: Slices(0, ((128, 256),))}, tensors, "cpu")
    assert torch.equal(half, all_rows[128:])
    torch.testing.assert_close(all_rows.double(), q4[1][name.removesuffix(".weight")], rtol=0, atol=0)


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "▁b", "1", "2", "12"]


def sentence_piece(llama: Path, file: Path, **keys: Any) -> Path:
    """A file with SentencePiece's vocabulary: special tokens, a byte each, pieces with scores."""
    from gguf import GGUFWriter, TokenType

    class Pieces(Tokens):
        def write(self, writer: GGUFWriter) -> None:
            tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES[:4]]
            pieces = PIECES[4:]
            scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
            types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_token_list(tokens + pieces)
            writer.add_token_scores(scores)
            writer.add_token_types(types + [TokenType.NORMAL] * (len(tokens + pieces) - len(types)))
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_unk_token_id(0)
            for name, value in keys.items():
                writer.add_bool(f"tokenizer.ggml.{name}", value)

    write_gguf(llama, file, tokens=Pieces())
    return file


def test_sentence_piece_is_transformers(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = sentence_piece(llama, tmp_path / "m.gguf")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name)
    ours = Tokenizer.load(described(file))
    for text in ("abc ab bc a", "cab é 12", "a", "abcabc\nab"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("ab")[0] == 1
    file = sentence_piece(llama, tmp_path / "n.gguf", add_bos_token=False, add_space_prefix=False)
    ours = Tokenizer.load(described(file))
    assert ours.backend.convert_ids_to_tokens(ours.encode("ab c")) == ["ab", "▁", "c"]
    assert ours.decode(ours.encode(" ab")) == " ab"
