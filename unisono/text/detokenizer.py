"""Text from the token ids of one request, as far as later tokens cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.text.stop_regex import StopRegex
from unisono.text.stop_strings import stop_strings
from unisono.text.tokenizer import Tokenizer
from unisono.types import FinishReason, SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 3
"""Replacement characters at the text's end that later bytes may still combine into one character (UTF-8: 4 bytes)."""
MAX_WINDOW = 32
"""Tokens in a detokenizer's window before it is shortened."""
PROMPT_CONTEXT = 6
"""Prompt tokens before the first output token: enough for a space or a character that they share."""


class Detokenizer:
    """Text of one request, token by token.

    The concatenated text does not depend on the grouping of tokens.

    Holds back text that later tokens may still change: an incomplete character, the beginning of a stop string.

    params: ``stop`` strings and matches of ``stop_regex`` end the text, if they end after the first ``min_tokens``
    tokens.
    ``include_stop_str_in_output`` keeps them, and the text of a stop token. prompt_token_ids: the prompt; its last
    tokens are context (a leading space, half a character).

    ``stop_string`` is the string that ended the text, or None. ``num_tokens`` counts the tokens up to the text's end, a
    stop token included, without tokens after a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._min_tokens, self._include_stop = params.min_tokens, params.include_stop_str_in_output
        skip = params.skip_special_tokens
        self._silent = lambda token_id: tokenizer.is_silent(token_id, skip)
        self._window = _window(tokenizer, params, prompt_token_ids)
        expressions = StopRegex(params.stop_regex) if params.stop_regex else None
        self._stops = _Stops(params.stop, self._include_stop, expressions)
        self._merges = tokenizer.appends and not params.stop and expressions is None
        self.num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def feed(self, token_ids: Sequence[int], finish: FinishReason = FinishReason.RUNNING) -> str:
        """The text that ``token_ids`` complete.

        Any ``finish`` but RUNNING also releases held-back text.

        The last id of a delta that finishes with STOP is the stop token: it is counted, and part of the text only with
        ``include_stop_str_in_output``.
        """
        stopped = finish is FinishReason.STOP and not self._include_stop
        last = len(token_ids) - 1 if stopped else len(token_ids)
        text = ""
        if self._merges and last > 1:
            self.num_tokens += last
            text = self._window.push_all([one for one in token_ids[:last] if not self._silent(one)])
            token_ids, last = token_ids[last:], 0
        for index, token_id in enumerate(token_ids):
            if self.stop_string is not None:
                return text
            self.num_tokens += 1
            if index < last and not self._silent(token_id):
                text += self._stops.push(self._window.push(token_id), self.num_tokens > self._min_tokens)
        if finish is not FinishReason.RUNNING:
            text += self._stops.push(self._window.flush(), self.num_tokens > self._min_tokens)
            text += self._stops.flush()
        return text


class TokenOffsets:
    """Offsets of tokens in a text, in characters.

    Parameters: see :class:`Detokenizer`; stop strings count.

    Tokens that share a character begin where it does. Special tokens that are left out of the text have length 0.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        skip = params.skip_special_tokens
        self._silent = lambda token_id: tokenizer.is_silent(token_id, skip)
        self._window = _window(tokenizer, params, prompt_token_ids)
        self._length = 0

    def next(self, token_id: int) -> int:
        """Characters before the next token."""
        if self._silent(token_id):
            return self._length
        pending = self._window.pending
        piece = self._window.push(token_id)
        # Pending text stays if the token did not complete it; the token then begins after it.
        begin = self._length + (len(pending) if piece.startswith(pending) else 0)
        self._length += len(piece)
        return begin


def _window(tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> _Window:
    skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
    prompt = [i for i in prompt_token_ids if i >= 0][-PROMPT_CONTEXT:]  # embeddings have no text
    context = [i for i in prompt if not tokenizer.is_silent(i, skip)]
    return _Window(lambda ids: tokenizer.decode(ids, skip, spaces), context)


class _Window:
    """Decodes the newest tokens after a few tokens of context, because a token's text depends on its neighbours.

    tokens  [ context | new tokens       ]
    text    [ returned    | uncertain    ]
    """

    def __init__(self, decode: Callable[[list[int]], str], context: list[int]) -> None:
        self._decode = decode
        self._ids = context
        self._context = len(context)
        text = decode(context) if context else ""
        self._given = text[: _certain(text)]
        self.pending = text[len(self._given) :]  # uncertain text after the last push

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = _certain(text)
        whole = certain == len(text)
        piece = ""
        # A byte-fallback decoder replaces every byte of a run that is not UTF-8 as a whole, so half a character
        # makes the complete characters before it uncertain until its other half arrives.
        if whole or text.startswith(self._given):
            piece = text[len(self._given) : certain]
            self._given += piece
        self.pending = text[certain:]
        if piece and whole:
            self._slide()
        elif len(self._ids) > MAX_WINDOW:
            self._cut(text)
        return piece

    def push_all(self, token_ids: list[int]) -> str:
        """The result of calling :meth:`push` for each token, with two decodings if all text is certain."""
        text = self._decode(self._ids + token_ids)
        if len(token_ids) < 2 or REPLACEMENT in text or not text.startswith(self._given):
            return "".join([self.push(token_id) for token_id in token_ids])
        piece = text[len(self._given) :]
        self._ids += token_ids
        self._context = 1  # tokens that the last character needs
        while REPLACEMENT in (decoded := self._decode(self._ids[-self._context :])) and self._context < len(self._ids):
            self._context += 1
        self._ids, self._given = self._ids[-self._context :], decoded
        return piece

    def flush(self) -> str:
        text = self._decode(self._ids) if self._ids else ""
        piece = text[len(self._given) :]
        self._given += piece
        return piece

    def _slide(self) -> None:
        """All text is certain: make the tokens of the last piece the context."""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._given = self._decode(self._ids)

    def _cut(self, text: str) -> None:
        """Shorten a window without a clean end (a long run without UTF-8) at a place where the parts' texts join to the
        whole.
        """
        for cut in range(len(self._ids) - 1, 0, -1):
            head = self._decode(self._ids[:cut])
            if len(head) <= len(self._given) and head + self._decode(self._ids[cut:]) == text:
                self._ids = self._ids[cut:]
                self._context = 0
                self._given = self._given[len(head) :]
                return


def _certain(text: str) -> int:
    """Characters of ``text`` that later tokens cannot change: all but the last few replacement characters."""
    tail = text[-MAX_PENDING:]
    return len(text) - (len(tail) - len(tail.rstrip(REPLACEMENT)))


class _Stops:
    """Finds the first complete stop string or match of an expression; holds back text that may begin one.

    Stop strings and expressions read each character once, so positions are counted from the text's beginning.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, expressions: StopRegex | None = None) -> None:
        self._strings = stop_strings(tuple(stops)) if stops else None
        self._include, self._expressions = include, expressions
        self._state = 0
        self._held = ""
        self._given = 0  # characters returned so far
        self.found: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that is certain now. A stop string that ends in ``text`` ends the whole text, if ``may_stop``."""
        if self._strings is None and self._expressions is None:
            return text
        if self.found is not None:
            return ""
        new, text, partial, hits = text, self._held + text, 0, []
        if self._strings is not None:
            self._state, match = self._strings.feed(self._state, new, may_stop)
            partial = self._strings.partial_length(self._state)
            if match is not None:
                hits.append((len(self._held) + match[0], len(self._held) + match[0] - match[1]))
        if self._expressions is not None:
            found = self._expressions.feed(new)
            if found is not None and may_stop:
                hits.append((found[1] - self._given, found[0] - self._given))
            if (start := self._expressions.partial_start) is not None:
                partial = max(partial, self._given + len(text) - start)
        if hits:
            end, start = min(hits)
            self.found, self._held = text[start:end], ""
            return text[: end if self._include else start]
        self._held = text[len(text) - partial :]
        self._given += len(text) - len(self._held)
        return text[: len(text) - len(self._held)]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text
