"""Sampling parameters over HTTP: several sequences, log-probabilities in both wordings, stop strings that stay.

The fake engine repeats the prompt; every token is the likeliest, at -0.25 (tests/http/fake_engine.py).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, Start
from tests.http.fake_engine import Trick
from tests.http.tokenizers_ import byte_fallback, byte_level
from unisono.frontend.sequence_output import SequenceOutput
from unisono.text.tokenizer import Tokenizer
from unisono.types import EngineRequest, FinishReason, SamplingParams, TokenDelta, TokenLogprobs, Vectors
from unisono.types.expert_ids import ExpertIds

TEXT = "naïve 🙂 fox"
TOKENIZER = byte_level()
IDS = TOKENIZER.encode(TEXT)
NAMES = [TOKENIZER.decode([i]) for i in IDS]
OFFSETS = [0, 2, 5, 6, 6, 7, 10]
"""Characters before each token: "na" and half of "ï"; its other half and "ve"; a space and half of the emoji; …"""
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def test_completion_logprobs(server: Server) -> None:
    create = server.openai.completions.create
    answer = create(model="fake", prompt=TEXT, max_tokens=len(IDS), logprobs=2)
    got = answer.choices[0].logprobs
    assert got is not None
    assert got.tokens == NAMES
    assert got.token_logprobs == [-0.25] * len(IDS)
    assert got.text_offset == OFFSETS
    second = [TOKENIZER.decode([i + 1]) for i in IDS]
    assert got.top_logprobs == [{a: -0.25} | {b: -0.75} for a, b in zip(NAMES, second, strict=True)]
    assert create(model="fake", prompt=TEXT, max_tokens=3, logprobs=0).choices[0].logprobs.tokens == NAMES[:3]
    assert create(model="fake", prompt=TEXT, max_tokens=3).choices[0].logprobs is None


def test_impossible_tokens_have_a_finite_logprob(server: Server) -> None:
    answer = server.openai.completions.create(model="fake", prompt=[5], max_tokens=1, logprobs=6)
    assert min(answer.choices[0].logprobs.top_logprobs[0].values()) == -9999.0


def test_chat_logprobs(server: Server) -> None:
    create = server.openai.chat.completions.create
    answer = create(model="fake", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 5
    for entry in content:
        assert entry.bytes == entry.top_logprobs[0].bytes == list(entry.token.encode())
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.75, -1.25]
        assert (entry.top_logprobs[0].token, entry.logprob) == (entry.token, -0.25)
    bare = create(model="fake", messages=MESSAGES, max_tokens=2, logprobs=True).choices[0].logprobs
    assert [entry.top_logprobs for entry in bare.content] == [[], []]
    assert create(model="fake", messages=MESSAGES, max_tokens=2).choices[0].logprobs is None


def test_deltas_that_pile_up_keep_everything() -> None:
    """A client that lags gets several deltas as one."""
    first, second = (TokenLogprobs(-float(i), 1, []) for i in (1, 2))
    delta = TokenDelta("r", [7], cached_tokens=4, logprobs=[first], prompt_logprobs=[second])
    delta.absorb(TokenDelta("r", [8], logprobs=[second], drafted_tokens=3))
    delta.absorb(TokenDelta("r", [9], FinishReason.STOP, 0, "e", [first], drafted_tokens=2, accepted_tokens=1))
    expected = TokenDelta("r", [7, 8, 9], FinishReason.STOP, 4, "e", [first, second, first], [second], 5, 1)
    expected.joined = [(1, 0, 0), (1, 3, 0), (1, 2, 1)]
    assert delta == expected
    row, prompt = Vectors("float32", 1, b"abcd"), Vectors("float32", 1, b"efgh")
    delta = TokenDelta("r", [7], prompt_hidden_states=prompt)
    for data in (b"abcd", b"wxyz"):
        delta.absorb(TokenDelta("r", [8], hidden_states=dataclasses.replace(row, data=data)))
    delta.absorb(TokenDelta("r", [9]))
    assert (delta.hidden_states, delta.prompt_hidden_states) == (dataclasses.replace(row, data=b"abcdwxyz"), prompt)
    delta = TokenDelta("r", [7])
    for value in (1, 2):
        delta.absorb(TokenDelta("r", [8], extra={"top": [value]}))
    assert delta.extra == {"top": [1, 2]}
    delta = TokenDelta("r", [7], queued_seconds=0.5)
    delta.absorb(TokenDelta("r", [8]))
    assert delta.queued_seconds == 0.5, "of the first one"
    delta = TokenDelta("r", [7])
    for data in (b"ab", b"cd"):
        delta.absorb(TokenDelta("r", [8], routed_experts=ExpertIds("uint8", 1, 2, data)))
    assert delta.routed_experts == ExpertIds("uint8", 1, 2, b"abcd")
    delta = TokenDelta("r", [7], fewer=2)
    delta.absorb(TokenDelta("r", [8]))
    assert delta.fewer_drafts == [2, 0]
    fields = list(TokenDelta.__struct_fields__)
    assert len(fields) == 19, "a new field: does absorb() merge it?"


def test_streamed_logprobs_are_the_whole_ones(server: Server) -> None:
    """Tokens that complete no character yet come with theirs too."""
    options: dict[str, Any] = {"model": "fake", "max_tokens": 2 * len(IDS)}
    whole = server.openai.completions.create(prompt=TEXT, logprobs=1, **options).choices[0].logprobs
    stream = server.openai.completions.create(prompt=TEXT, logprobs=1, stream=True, **options)
    parts = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)
    chat: dict[str, Any] = {**options, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    expected = server.openai.chat.completions.create(**chat).choices[0].logprobs.content
    stream = server.openai.chat.completions.create(stream=True, **chat)
    assert [x for c in stream for p in [c.choices[0].logprobs] if p for x in p.content] == expected


def test_bytes_of_tokens_join_to_the_text(server: Server) -> None:
    """Tokens that have a part of a character have its bytes, not those of a replacement character."""
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    answer = server.openai.chat.completions.create(
        model="fake", messages=messages, max_tokens=40, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.startswith(f"<|im_start|>user\n{TEXT}")
    assert any("\ufffd" in entry.token for entry in entries)
    assert [top.bytes for entry in entries for top in entry.top_logprobs[:1]] == [entry.bytes for entry in entries]
    include: Any = ["message.output_text.logprobs"]
    response = server.openai.responses.create(model="fake", input=TEXT, include=include, max_output_tokens=40)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr, index]
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode().startswith(text[: len(TEXT)])


def test_offsets_after_special_tokens_and_stops(server: Server) -> None:
    create = server.openai.completions.create
    start, end = TOKENIZER.encode("<|im_start|>")[0], TOKENIZER.encode("<|endoftext|>")[0]
    prompt = [start, *IDS[:3], end, *IDS[5:]]
    skipped = [0, 0, 2, 5, 6, 7, 10]  # a part of the emoji that no token completes is one character
    text = TOKENIZER.decode(prompt, skip_special_tokens=True)
    for stream in (False, True):

        def found(stream: bool = stream, **more: Any) -> tuple[str, list[int]]:
            given = create(**{"model": "fake", "prompt": prompt, "logprobs": 0, "stream": stream, **more})
            choices = [chunk.choices[0] for chunk in (given if stream else [given])]
            offsets = [x for one in choices if one.logprobs is not None for x in one.logprobs.text_offset]
            return "".join(one.text for one in choices), offsets

        assert found(max_tokens=len(prompt)) == (text, skipped)
        echoed, offsets = found(max_tokens=len(prompt), echo=True)
        assert echoed == text * 2
        assert offsets == [*skipped, *(len(text) + one for one in skipped)]
        shown = found(max_tokens=2, extra_body={"skip_special_tokens": False})
        assert shown == ("<|im_start|>na\ufffd", [0, len("<|im_start|>")])
        stopped, offsets = found(max_tokens=len(prompt), stop=["ve"])
        assert (stopped, offsets) == ("naï", skipped[:3]), "the stop string's tokens begin where they did"
        echoed, offsets = found(prompt=f"<|im_start|>{TEXT}", max_tokens=0, echo=True)
        assert (echoed, offsets) == (f"<|im_start|>{TEXT}", [0, *(12 + one for one in OFFSETS)])


def test_bytes_and_offsets_of_byte_fallback() -> None:
    """As Llama 2: spaces are part of the words' tokens, characters without a token come in bytes."""
    tokenizer = Tokenizer(byte_fallback())
    text = "the 🙂é a"
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(i) for i in ids] == [
        b" the", b" ", b"\xf0", b"\x9f", b"\x99", b"\x82", "é".encode(), b" a",
    ]  # fmt: skip
    assert tokenizer.offsets(text, ids) == [0, 3, 4, 4, 4, 4, 5, 6]
    assert tokenizer.offsets(text, ids[1:]) is None
    request = EngineRequest("r", ids, SamplingParams(), ())
    assert SequenceOutput(request, tokenizer).prompt_offsets("other") == [0, 3, 4, 4, 4, 4, 5, 6]
    assert Tokenizer(byte_level()).offsets("a<|im_end|>", TOKENIZER.encode("a<|im_end|>")) == [0, 1]


def test_echo(server: Server) -> None:
    create = server.openai.completions.create
    answer = create(model="fake", prompt=TEXT, max_tokens=len(IDS), echo=True, n=2)
    assert [c.text for c in answer.choices] == [TEXT * 2] * 2
    assert answer.usage.completion_tokens == 2 * len(IDS)
    stream = create(model="fake", prompt=[IDS, IDS[:3]], max_tokens=1, echo=True, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0].startswith(TEXT)
    assert texts[1].startswith(TOKENIZER.decode(IDS[:3]))


@pytest.mark.parametrize("extra", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(server: Server, extra: int) -> None:
    """Without a new token (max_tokens=0) it does nothing else."""
    answer = server.openai.completions.create(model="fake", prompt=TEXT, max_tokens=extra, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text.startswith(TEXT), choice.finish_reason) == (True, "length")
    assert (choice.text == TEXT) == (extra == 0)
    got, count = choice.logprobs, len(IDS) + extra
    assert got.tokens == (NAMES * 2)[:count]
    assert got.token_logprobs == [None] + [-0.25] * (count - 1)
    assert got.top_logprobs[0] is None
    assert got.text_offset == [*OFFSETS, *(len(TEXT) + offset for offset in OFFSETS)][:count]
    assert answer.usage.completion_tokens == extra
    stream = server.openai.completions.create(
        model="fake", prompt=TEXT, max_tokens=extra, echo=True, logprobs=1, stream=True
    )
    parts = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs is not None]
    assert [x for part in parts for x in part.token_logprobs] == got.token_logprobs
    assert [x for part in parts for x in part.text_offset] == got.text_offset


def named(wanted: int) -> list[Any]:
    """The fake engine's scores of TEXT in vLLM's wording: each token at -0.25, then the ids after it."""
    positions: list[Any] = [None]
    for token in IDS[1:]:
        ids = [token, *range(token + 1, token + wanted)]
        positions.append(
            {
                str(i): {
                    "logprob": -0.25 - 0.5 * place if place < 5 else -9999.0,
                    "rank": place + 1,
                    "decoded_token": TOKENIZER.decode([i]),
                }
                for place, i in enumerate(ids)
            }
        )
    return positions


@pytest.mark.parametrize("wanted", [0, 1, 3, 7])
def test_prompt_logprobs(server: Server, wanted: int) -> None:
    """In each choice of a completion, beside the answer of a chat."""
    create, extra = server.openai.completions.create, {"prompt_logprobs": wanted}
    answer = create(model="fake", prompt=TEXT, max_tokens=2, n=3, extra_body=extra)
    assert [c.model_extra["prompt_logprobs"] for c in answer.choices] == [named(wanted)] * 3
    assert "prompt_logprobs" not in answer.model_extra
    two = create(model="fake", prompt=[IDS, IDS[:2]], max_tokens=2, extra_body=extra).choices
    assert [c.model_extra["prompt_logprobs"] for c in two] == [named(wanted), named(wanted)[:2]]
    chat = server.openai.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, n=2, extra_body=extra)
    assert chat.model_extra["prompt_logprobs"][0] is None
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
    assert all(len(entry) == max(1, wanted) for entry in chat.model_extra["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in chat.choices[0].model_extra
    plain = create(model="fake", prompt=TEXT, max_tokens=2)
    assert "prompt_logprobs" not in plain.choices[0].model_extra


@pytest.mark.parametrize(("echoed", "wanted"), [(1, 3), (3, 1), (0, 2)])
def test_echo_and_prompt_logprobs_each_have_their_own_number(server: Server, echoed: int, wanted: int) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": echoed}
    (choice,) = server.openai.completions.create(**options, extra_body={"prompt_logprobs": wanted}).choices
    assert choice.model_extra["prompt_logprobs"] == named(wanted)
    assert choice.logprobs == server.openai.completions.create(**options).choices[0].logprobs


def test_without_a_tokenizer_prompt_logprobs_have_no_text(start: Start) -> None:
    answer = start().openai.completions.create(
        model="fake", prompt=[5, 6], max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert answer.choices[0].model_extra["prompt_logprobs"] == [
        None, {"6": {"logprob": -0.25, "rank": 1, "decoded_token": None}},
    ]  # fmt: skip


@pytest.mark.parametrize("extra", [0, 2])
def test_each_of_several_sequences_echoes_the_prompts_logprobs(server: Server, extra: int) -> None:
    """The engine scores a prompt once, with its first sequence."""
    options: dict[str, Any] = {"model": "fake", "prompt": [IDS, IDS[:4]], "max_tokens": extra, "echo": True}
    one = server.openai.completions.create(logprobs=1, **options).choices
    three = server.openai.completions.create(logprobs=1, n=3, **options).choices
    assert [(c.text, c.logprobs) for c in three] == [(c.text, c.logprobs) for c in one for _ in range(3)]
    streamed: list[list[Any]] = [[] for _ in range(6)]
    for chunk in server.openai.completions.create(logprobs=1, n=3, stream=True, **options):
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            streamed[choice.index] += choice.logprobs.token_logprobs
    assert streamed == [c.logprobs.token_logprobs for c in three]


def test_a_prompt_whose_first_sequence_fails_fails(server: Server) -> None:
    """Nobody waits for log-probabilities that never come."""
    body = {"prompt": [int(Trick.FAIL), 5], "max_tokens": 2, "n": 3, "echo": True, "logprobs": 1}
    response = server.http.post("/v1/completions", json={"model": "fake", **body}, timeout=10)
    assert response.status_code == 500
    assert server.info()["requests"]["running"] == 0


def test_several_sequences(server: Server) -> None:
    answer = server.openai.completions.create(model="fake", prompt=["ab", "xz"], max_tokens=4, n=3, seed=7)
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices] == ["abab"] * 3 + ["xzxz"] * 3
    assert [c.model_extra["seed"] for c in answer.choices] == [7, 8, 9] * 2
    assert answer.usage.prompt_tokens == 4  # each prompt once
    assert answer.usage.completion_tokens == 24
    chat = server.openai.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, n=2)
    assert [c.index for c in chat.choices] == [0, 1]
    assert chat.choices[0].message.content == chat.choices[1].message.content
    stream = server.openai.completions.create(model="fake", prompt="ab", max_tokens=4, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abab"] * 3
    assert server.info()["requests"]["running"] == 0


def test_usage_counts_accepted_and_rejected_drafts(start: Start, model_dir: Path) -> None:
    """Steps of four tokens, three of them drafts; the fake target takes all that there is room for."""
    create = start(model_dir, tokens_per_step=4).openai.completions.create
    usage = create(model="fake", prompt="abc", max_tokens=10).usage  # 4 + 4 + 2
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3 + 3 + 1, 2)
    several = create(model="fake", prompt=["abc", "de"], max_tokens=10, n=2).usage.completion_tokens_details
    assert (several.accepted_prediction_tokens, several.rejected_prediction_tokens) == (4 * 7, 4 * 2)
    *_, last = create(model="fake", prompt="abc", max_tokens=10, stream=True, stream_options={"include_usage": True})
    assert last.usage == usage
    stopped = create(model="fake", prompt="abcdefgh", max_tokens=10, stop="b").usage
    assert stopped.completion_tokens == 2
    assert stopped.completion_tokens_details.accepted_prediction_tokens <= 2, "what is cut off was not accepted"


@pytest.mark.parametrize(("minimum", "text"), [(0, "x1"), (2, "x1y1"), (4, "x1y1x1")])
def test_stop_strings_stay_and_wait(server: Server, minimum: int, text: str) -> None:
    extra = {"include_stop_str_in_output": True, "min_tokens": minimum}
    answer = server.openai.completions.create(model="fake", prompt="x1y1", max_tokens=40, stop="1", extra_body=extra)
    assert answer.choices[0].text == text
    assert answer.choices[0].model_extra["stop_reason"] == "1"


def test_every_field_is_taken(server: Server) -> None:
    extra = {"repetition_penalty": 1.2, "allowed_token_ids": [5, 6], "bad_words": ["no", "never"], "min_tokens": 1}
    options: dict[str, Any] = {"presence_penalty": 1, "frequency_penalty": -0.5, "logit_bias": {"5": 1, "6": -2.5}}
    for create, kind in (
        (server.openai.completions.create, {"prompt": "ab"}),
        (server.openai.chat.completions.create, {"messages": MESSAGES}),
    ):
        answer = create(model="fake", max_tokens=2, extra_body=extra, **options, **kind)
        assert math.isclose(answer.usage.completion_tokens, 2)
