"""Embeddings in requests, hidden states in answers: as the offline interface has them, gated, and refused with 400."""

from __future__ import annotations

import base64
import io
import pickle
import random
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.http.conftest import PLAIN, Server, Start, servers, serving
from unisono.entrypoints.llm import LLM
from unisono.http.openai.embeds import load_embeds
from unisono.types import BadRequest, SamplingParams

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
FLAGS = ("--enable-prompt-embeds", "--enable-return-hidden-states")


def encoded(value: Any, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-num-seqs", "4", *FLAGS, "--served-model-name", "tiny", "--max-model-len", "256", *PLAIN]
    with serving(tmp_path_factory.mktemp("tiny"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", max_num_seqs=2, max_model_len=256, enforce_eager=True) as llm:
        yield llm


def complete(server: Server, **body: Any) -> list[dict[str, Any]]:
    answer = server.http.post(TEXT, json={"max_tokens": 8, "seed": 3, "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_prompt_embeds(tiny: Server, llm: LLM) -> None:
    """Alone, several, and before a text prompt, the openai package's way; in the text of their ids."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in ("Tom has 3 boxes of", "def add(a, b):")]
    rows = [llm.engine.worker.model.embed.weight[i] for i in ids]
    params = SamplingParams(seed=3, max_tokens=8)
    wanted = [o.outputs[0] for o in llm.generate([*ids, "And"], params)]
    for count in (1, 2):
        given = [encoded(r.clone()) for r in rows[:count]]
        choices = complete(tiny, prompt="", prompt_embeds=given[0] if count == 1 else given)
        assert [c["token_ids"] for c in choices] == [o.token_ids for o in wanted[:count]]
        assert [c["text"] for c in choices] == [o.text for o in wanted[:count]]
    answer = tiny.openai.completions.create(
        model="tiny", prompt="And", max_tokens=8, seed=3, extra_body={"prompt_embeds": encoded(rows[0].clone())}
    )
    assert [c.text for c in answer.choices] == [wanted[0].text, wanted[2].text]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids[0]) + len(tokenizer.encode("And"))


def test_embedding_overrides(tiny: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "Tom has 3 boxes of"
    ids, row = llm.tokenizer.encode(text), llm.engine.worker.model.embed.weight[40:41].clone()
    (wanted,) = llm.generate(
        [{"prompt_token_ids": ids, "embedding_overrides": ([2], row)}], SamplingParams(seed=3, max_tokens=8)
    )
    overrides = {"positions": [2], "embeddings": encoded(row)}
    for prompt in (text, ids):
        (choice,) = complete(tiny, prompt=prompt, embedding_overrides=overrides)
        assert choice["token_ids"] == wanted.outputs[0].token_ids


def test_hidden_states(tiny: Server, llm: LLM) -> None:
    text, params = "Tom has 3 boxes of", SamplingParams(seed=3, max_tokens=8, n=2, return_hidden_states=True)
    (wanted,) = llm.generate([text], params)
    choices = complete(tiny, prompt=text, n=2, return_hidden_states=True)
    for choice, output in zip(choices, wanted.outputs, strict=True):
        assert choice["token_ids"] == output.token_ids
        assert choice["hidden_states"] == output.hidden_states.tolist()
    assert choices[0]["prompt_hidden_states"] == wanted.prompt_hidden_states.tolist()
    assert "prompt_hidden_states" not in choices[1]
    assert "hidden_states" not in complete(tiny, prompt=text)[0]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "return_hidden_states": True}
    answer = tiny.http.post(CHAT, json=body).json()
    assert len(answer["choices"][0]["hidden_states"]) == answer["usage"]["completion_tokens"] - 1
    assert len(answer["choices"][0]["prompt_hidden_states"]) == answer["usage"]["prompt_tokens"]


def test_logprob_start_len(tiny: Server, llm: LLM) -> None:
    text = "Tom has 3 boxes of pens"
    (wanted,) = llm.generate([text], SamplingParams(seed=3, max_tokens=1, prompt_logprobs=1, logprob_start_len=4))
    (choice,) = complete(tiny, prompt=text, max_tokens=1, prompt_logprobs=1, logprob_start_len=4)
    assert wanted.prompt_logprobs is not None
    given = choice["prompt_logprobs"]
    assert given[:4] == [None] * 4
    assert [entry is None for entry in given] == [entry is None for entry in wanted.prompt_logprobs]
    for entry, own in zip(given[4:], wanted.prompt_logprobs[4:], strict=True):
        assert {int(k): v["logprob"] for k, v in entry.items()} == {k: v.logprob for k, v in own.items()}
    answer = tiny.http.post(TEXT, json={"prompt": text, "echo": True, "logprobs": 1, "logprob_start_len": 4})
    assert_refused(answer, "logprob_start_len", "echo")


# ---- refusals ---------------------------------------------------------------------------------------


def assert_refused(answer: Any, param: str, *says: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert all(word in error["message"] for word in says), error["message"]


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("boo",)


def hostile() -> str:
    """An archive as torch.save's whose pickle calls a function."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(), 2))
        archive.writestr("archive/version", "3\n")
    return base64.b64encode(file.getvalue()).decode()


def bomb() -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 24))
    return base64.b64encode(file.getvalue()).decode()


def claims_more() -> str:
    """A tensor of 1000 rows on a file with 1: torch would make room for them."""
    data = base64.b64decode(encoded(torch.zeros(1, 6)))
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
        for entry in before.infolist():
            content = before.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert content.count(b"K\x01K\x06\x86") == 1
                content = content.replace(b"K\x01K\x06\x86", b"M\xe8\x03K\x06\x86")  # 1 → 1000, 6
            after.writestr(entry, content)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(enable_prompt_embeds=True, enable_return_hidden_states=True)


ROWS = torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("embeds", "says"),
    [
        ("%%%", ["not base64"]),
        (base64.b64encode(b"junk").decode(), ["not what torch.save writes"]),
        (encoded(ROWS, _use_new_zipfile_serialization=False), ["not what torch.save writes"]),
        (encoded({"a": ROWS}), ["holds a dict"]),
        (encoded([ROWS]), ["holds a list"]),
        (hostile(), ["cannot be loaded"]),
        (bomb(), ["unpacks to 16777216 bytes", "is the most"]),
        (claims_more(), []),
        (encoded(torch.zeros(20_000, 6)), ["512 vectors of 6 numbers"]),
        (encoded(torch.zeros(600, 6)), ["600 tokens", "512"]),
        (encoded(torch.zeros(1, 6).expand(400, 6)), ["shape (400, 6)", "9600 bytes"]),
        (encoded(torch.zeros(0, 6)), ["no rows"]),
        (encoded(torch.zeros(6)), ["shape (6,)", "[tokens, hidden]"]),
        (encoded(torch.zeros(2, 2, 6)), ["shape (2, 2, 6)"]),
        (encoded(ROWS.double()), ["dtype torch.float64", "float32, float16, bfloat16"]),
        (encoded(ROWS.to_sparse()), ["dense"]),
        ([encoded(ROWS), "%%%"], ["not base64"]),
    ],
)
def test_broken_embeds(fake: Server, embeds: Any, says: list[str]) -> None:
    answer = fake.http.post(TEXT, json={"prompt_embeds": embeds})
    assert_refused(answer, "prompt_embeds", *says)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt_embeds": 5}, "prompt_embeds", ["base64 of a tensor"]),
        ({"prompt_embeds": []}, "prompt", ["missing"]),
        ({"prompt_embeds": ""}, "prompt", ["missing"]),
        ({"prompt_embeds": encoded(ROWS), "echo": True}, "echo", ["no text"]),
        ({"prompt_embeds": [encoded(ROWS)] * 1000, "n": 2}, "n", ["2000 sequences"]),
        ({"prompt": [1], "embedding_overrides": {"positions": [0]}}, "embedding_overrides", ["an object"]),
        (
            {"prompt": [1, 2], "embedding_overrides": {"positions": [0, 2], "embeddings": encoded(ROWS)}},
            "embedding_overrides",
            ["position 2; the prompt's are 0 to 1"],
        ),
        (
            {"prompt": [[1], [2]], "embedding_overrides": {"positions": [0], "embeddings": encoded(ROWS)}},
            "embedding_overrides",
            ["one prompt"],
        ),
        ({"prompt": [1], "return_hidden_states": True, "stream": True}, "return_hidden_states", ["whole answers"]),
        ({"prompt": [1], "return_hidden_states": 1}, "return_hidden_states", ["true or false"]),
        ({"prompt": [1], "logprob_start_len": -1}, "logprob_start_len", ["-1", "≥ 0"]),
    ],
)
def test_refusals(fake: Server, body: dict[str, Any], param: str, says: list[str]) -> None:
    assert_refused(fake.http.post(TEXT, json=body), param, *says)


def test_the_flags_gate(start: Start) -> None:
    server = start()
    assert_refused(server.http.post(TEXT, json={"prompt_embeds": "x"}), "prompt_embeds", "--enable-prompt-embeds")
    body = {"prompt": [1], "embedding_overrides": {"positions": [0], "embeddings": "x"}}
    assert_refused(server.http.post(TEXT, json=body), "embedding_overrides", "--enable-prompt-embeds")
    body = {"prompt": [1], "return_hidden_states": True}
    assert_refused(server.http.post(TEXT, json=body), "return_hidden_states", "--enable-return-hidden-states")


def test_embeddings_that_do_not_fit_the_model(tiny: Server) -> None:
    """The hidden size, and what is finite in the model's dtype."""
    answer = tiny.http.post(TEXT, json={"prompt_embeds": encoded(ROWS)})
    assert_refused(answer, "prompt_embeds", "6 numbers each", "hidden size")
    size = tiny.info()["hidden_size"]
    answer = tiny.http.post(TEXT, json={"prompt_embeds": encoded(torch.full((3, size), float("inf")))})
    assert_refused(answer, "prompt_embeds", "position 0", "not finite")
    body = {"prompt_embeds": encoded(torch.zeros(3, size)), "prompt_logprobs": 1}
    assert_refused(tiny.http.post(TEXT, json=body), "prompt_logprobs", "position 1 is an embedding")


# ---- nothing is unpickled ---------------------------------------------------------------------------


def archive(described: bytes, data: bytes = b"", pad: int = 0, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as torch.save's, with a pickle of one's own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + described + b".")
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/data/0", data)
        made.writestr("archive/pad", bytes(pad))
    return file.getvalue()


def call(module: str, name: str, arguments: bytes) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n(" + arguments + b"tR"


def number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (archive(call("builtins", "bytearray", number(1 << 40))), "builtins.bytearray"),
        (archive(call("torch", "FloatTensor", number(1) + number(6)), pad=4096), "torch.FloatTensor"),
        (archive(call("torch", "FloatStorage", number(1 << 30))), "torch.FloatStorage"),
        (archive(b"]" + b"q\x00h\x00" * 100 + b"2" * 9), "DUP describes no tensor"),
        (archive(b"}", compression=zipfile.ZIP_DEFLATED), "compressed"),
        (archive(b"N" * 20_000), "description has 20003 bytes"),
        (archive(b"t"), "cannot be loaded"),
    ],
    ids=["bytearray", "FloatTensor", "FloatStorage", "DUP", "deflated", "long", "no mark"],
)
def test_pickles_are_followed_not_run(data: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        load_embeds(base64.b64encode(data).decode(), 512, 6, "prompt_embeds")


def test_every_number_comes_from_the_body() -> None:
    """A tensor of a changed archive is a part of its bytes, whatever it claims."""
    rows = torch.arange(60, dtype=torch.float32).reshape(10, 6) + 1
    plain = base64.b64decode(encoded(rows))
    with zipfile.ZipFile(io.BytesIO(plain)) as opened:
        described = next(opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))[2:-1]
    chance, taken, known = random.Random(3), 0, {0.0, *rows.flatten().tolist()}
    for _ in range(3000):
        changed = bytearray(described)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.choice(
                [0, 1, 2, 6, 10, 60, 61, 255, chance.randrange(256)]
            )
        try:
            found = load_embeds(base64.b64encode(archive(bytes(changed), rows.numpy().tobytes())).decode(), 512, 6, "p")
        except BadRequest:
            continue
        taken += 1
        assert found.numel() * found.element_size() <= rows.nbytes
        if found.dtype is torch.float32:
            assert set(found.flatten().tolist()) <= known
    assert taken > 100


def test_forms_of_tensors() -> None:
    """safetensors, and torch.save of views, parameters and half precision."""
    rows = torch.randn(10, 6)
    for one in (rows, rows.half(), rows.bfloat16(), rows[2:5], torch.randn(6, 10).t(), torch.nn.Parameter(rows)):
        written = safetensors.torch.save({"x": one.detach().contiguous()})
        for text in (encoded(one), base64.b64encode(written).decode()):
            found = load_embeds(text, 512, 6, "prompt_embeds")
            assert found.dtype == one.dtype
            assert torch.equal(found, one.detach())


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"a":{"dtype":"F32","shape":[1000000,6],"data_offsets":[0,48]}}', r"shape \(1000000, 6\)"),
        (b'{"a":{"dtype":"F32","shape":[2,6],"data_offsets":[0,480]}}', "48 bytes of numbers"),
        (b'{"a":{"dtype":"F32","shape":[-2,-6],"data_offsets":[0,48]}}', "48 bytes of numbers"),
        (b'{"a":{"dtype":"I64","shape":[6],"data_offsets":[0,48]}}', "one tensor of F32"),
        (b'{"a":1}', "one tensor of F32"),
        (b"{" * 60_000, "one tensor of F32"),
    ],
)
def test_broken_safetensors(header: bytes, says: str) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(48)
    with pytest.raises(BadRequest, match=says):
        load_embeds(base64.b64encode(data).decode(), 512, 6, "prompt_embeds")


def test_so_many_hidden_states(fake: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.http.openai import serving

    monkeypatch.setattr(serving, "MAX_REPORTED_NUMBERS", 60)
    asked = SamplingParams(return_hidden_states=True, max_tokens=4)
    serving.check_reported("return_hidden_states", True, 6, 6, asked)
    with pytest.raises(BadRequest, match="7 prompt tokens with max_tokens=4 and n=1 may have 66 numbers; at most 60"):
        serving.check_reported("return_hidden_states", True, 6, 7, asked)
