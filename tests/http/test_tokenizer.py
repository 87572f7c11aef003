"""The detokenizer: pieces join to the text, whatever the tokens; stop strings end it wherever tokens split them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.http import tokenizers_
from unisono.text.detokenizer import MAX_WINDOW, Detokenizer
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError, FinishReason, SamplingParams

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
TEXTS = [
    "",
    "a",
    "Hello, world",
    "Grüße 你好，世界 🙂👍🏽 naïve",
    "  spaces   kept ",
    "\N{REPLACEMENT CHARACTER}x",
    "def f():\n    0",
]


@pytest.fixture(scope="module")
def bytes_() -> Tokenizer:
    return Tokenizer(tokenizers_.byte_level())


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return Tokenizer(tokenizers_.byte_fallback())


def pieces(tokenizer: Tokenizer, ids: list[int], *, chunk: int = 1, stop: tuple[str, ...] = (), **options) -> list[str]:
    """What a detokenizer gives for ``ids`` in deltas of ``chunk`` tokens, the last of which finishes."""
    prompt = options.pop("prompt_token_ids", [])
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop, **options), prompt)
    starts = range(0, len(ids), chunk)
    return [detokenizer.feed(ids[i : i + chunk], LENGTH if i + chunk >= len(ids) else RUNNING) for i in starts]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("chunk", [1, 4])
def test_any_tokens_join_to_their_decoding(bytes_: Tokenizer, skip: bool, chunk: int) -> None:
    """Random tokens: broken UTF-8, special tokens, ids beyond the tokenizer."""
    rng = random.Random(0)
    for _ in range(300):
        ids = rng.choices(range(bytes_.size + 5), k=rng.randrange(1, 60))
        given = pieces(bytes_, ids, chunk=chunk, skip_special_tokens=skip)
        assert "".join(given) == bytes_.backend.decode(ids, skip_special_tokens=skip)


def test_endless_broken_text_comes_promptly_and_cheaply(bytes_: Tokenizer) -> None:
    """Bytes that never make a character: the text may lag by three characters, the window stays small."""
    start = bytes_.encode("🙂")[0]
    for ids in ([start] * 300, bytes_.encode("🙂")[1:2] * 300):
        detokenizer = Detokenizer(bytes_, SamplingParams(), [])
        text = ""
        for count, token_id in enumerate(ids, 1):
            text += detokenizer.feed([token_id])
            assert len(text) >= count - 3
            assert len(detokenizer._window._ids) <= MAX_WINDOW + 1
        assert text + detokenizer.feed([], LENGTH) == bytes_.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(bytes_: Tokenizer, fallback: Tokenizer, text: str) -> None:
    for tokenizer in (bytes_, fallback):
        ids = tokenizer.encode(text)
        given = pieces(tokenizer, ids)
        assert "".join(given) == tokenizer.decode(ids)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in given)


def test_sentencepiece_spaces_depend_on_the_neighbour(fallback: Tokenizer) -> None:
    """The first token of a text loses its space; the first of a continuation must not."""
    prompt, rest = fallback.encode("in a"), fallback.encode("the é thin")
    assert "".join(pieces(fallback, rest)) == "the é thin"
    assert "".join(pieces(fallback, rest, prompt_token_ids=prompt)) == " the é thin"


def test_a_character_begun_in_the_prompt_is_finished(bytes_: Tokenizer) -> None:
    ids = bytes_.encode("x🙂y")
    for split in range(1, len(ids)):
        head = bytes_.decode(ids[:split]).rstrip("\N{REPLACEMENT CHARACTER}")
        assert head + "".join(pieces(bytes_, ids[split:], prompt_token_ids=ids[:split])) == "x🙂y"


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (("wor",), "Hello, ", "wor"),
        (("xyz",), "Hello, world 🙂", None),
        (("d 🙂!", "ld 🙃"), "Hello, world 🙂", None),
        (("o", "ello"), "H", "ello"),
        (("lo, world 🙂?", "lo, w"), "Hel", "lo, w"),
        (("🙂",), "Hello, world ", "🙂"),
        (("H",), "", "H"),
    ],
)
def test_stop_strings(bytes_: Tokenizer, chunk: int, stop: tuple[str, ...], text: str, found: str | None) -> None:
    """Every character is a token or more, so a stop string spans several; what only begins one comes in the end."""
    ids = [i for character in "Hello, world 🙂" for i in bytes_.encode(character)]
    detokenizer = Detokenizer(bytes_, SamplingParams(stop=stop), [])
    given = [detokenizer.feed(ids[i : i + chunk]) for i in range(0, len(ids), chunk)] + [detokenizer.feed([], LENGTH)]
    assert ("".join(given), detokenizer.stop_string) == (text, found)
    until = "Hello, world 🙂".find(found) + len(found) if found else len("Hello, world 🙂")
    assert detokenizer.num_tokens == sum(len(bytes_.encode(c)) for c in "Hello, world 🙂"[:until])


def test_text_that_may_become_a_stop_string_is_held_back(bytes_: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_, SamplingParams(stop=("abcX",)), [])
    ids = [bytes_.encode(c)[0] for c in "abcabcX"]
    assert [detokenizer.feed([i]) for i in ids] == ["", "", "", "abc", "", "", ""]


def test_the_stop_token_is_counted_and_not_text(bytes_: Tokenizer) -> None:
    ids = [bytes_.encode(c)[0] for c in "ab"]
    detokenizer = Detokenizer(bytes_, SamplingParams(skip_special_tokens=False), [])
    assert detokenizer.feed([*ids, bytes_.eos_token_ids[0]], STOP) == "ab"
    assert detokenizer.num_tokens == 3


def test_loading(tmp_path: Path, model_dir: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == (2,)
    with pytest.raises(CheckpointError, match="10"):
        tokenizer.check_vocabulary(10)


def test_chat_template(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, template_kwargs={"opening": "So"}).endswith("assistant\nSo")
    with pytest.raises(BadRequest, match="the user speaks first"):
        tokenizer.apply_chat_template([{"role": "assistant", "content": "hi"}])
    with pytest.raises(BadRequest, match="'chat_template'"):
        tokenizer.apply_chat_template(messages, template_kwargs={"chat_template": "x"})
    tokenizer.backend.chat_template = None
    with pytest.raises(BadRequest, match="no chat template"):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("minimum", "text", "tokens"), [(0, "x", 3), (2, "x", 3), (3, "xabx", 6), (5, "xabx", 6), (6, "xabxaby", 7)]
)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_must_end_behind_the_first_tokens(
    bytes_: Tokenizer, minimum: int, text: str, tokens: int, include: bool
) -> None:
    """One that began before may end it. Another that goes on like it keeps it held back, and does not revive it."""
    ids = [i for letter in "xabxaby" for i in bytes_.encode(letter)]
    params = SamplingParams(stop=("ab", "abQ"), min_tokens=minimum, include_stop_str_in_output=include)
    detokenizer = Detokenizer(bytes_, params, [])
    got = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.feed([], FinishReason.LENGTH)
    stopped = detokenizer.stop_string is not None
    assert got == text + ("ab" if include and stopped else "")
    assert detokenizer.num_tokens == tokens
    assert stopped == (minimum < 6)


def test_bad_words_are_spelt_alone_and_after_a_space(bytes_: Tokenizer) -> None:
    encode = bytes_.encode
    alone, spaced = tuple(encode("the")), tuple(encode(" the"))
    found = bytes_.bad_words(("the", " the", "#"))
    assert found[0] == alone
    assert (spaced in found) == (len(spaced) == len(alone) and spaced[0] != alone[0])
    assert tuple(encode("#")) in found
    assert len(set(found)) == len(found)
    assert bytes_.bad_words(()) == ()
