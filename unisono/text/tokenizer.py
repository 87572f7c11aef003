"""A checkpoint's tokenizer and chat template, loaded through transformers.

``frontend`` and the tools convert text to token ids and back with it; ``structured_output`` reads the bytes of each
token.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.config.checkpoint_files import TOKENIZER_FILES
from unisono.config.transformers_names import from_transformers
from unisono.config.untrusted_files import check_directory
from unisono.text.templates.renderer import RendererBusy, TemplateFailed, TemplateTooHard, renderer
from unisono.types import BadRequest, CheckpointError, TemporaryFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in tokenizers with byte fallback."""
SPACE = "▁"
"""A space in a vocabulary in sentencepiece's style."""
RESERVED_VARIABLES = frozenset({"self", "messages", "conversation", "conversations"})
"""Names that no template variable may have: the messages' names on their way to a template."""

HARMONY_ENDS = {"<|call|>", "<|return|>"}


def _byte_level() -> dict[str, int]:
    """The bytes of the characters in a byte-level vocabulary, as GPT-2 defined them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


def import_without_torch() -> None:
    """Import transformers' tokenizers in a process that computes nothing: without torch, 2 s and 200 MB less.

    Does nothing in a process that has torch. Otherwise transformers has tokenizers and configs there, and no model.
    """
    if "torch" in sys.modules:
        return
    logger = logging.getLogger("transformers")
    logger.disabled = True  # it warns that there are no models
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers looks for it once
    try:
        from transformers import AutoTokenizer  # noqa: F401
        from transformers.utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]
        logger.disabled = False


class Tokenizer:
    """A checkpoint's tokenizer. ``decode`` and ``encode`` may run in different threads."""

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self.backend = backend
        self.size = max(backend.get_vocab().values(), default=-1) + 1
        added = backend.added_tokens_decoder
        self.special_ids = {i for i, token in added.items() if token.special} | set(backend.all_special_ids)
        # True if more tokens only append to a text: cleaning up spaces changes earlier text.
        self.appends = backend.is_fast and not backend.clean_up_tokenization_spaces
        # The fast decoder without transformers' wrapper: it runs twice for every generated token.
        self._token_bytes: dict[int, bytes] = {}
        self._decode: Callable[..., Any] = backend._tokenizer.decode if self.appends else backend.decode

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer in checkpoint directory ``path``, never from a network; None if there is none.

        Raises CheckpointError for tokenizer files that cannot be read.
        """
        path = Path(path)
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            return None
        check_directory(path)
        try:
            return cls(from_transformers("AutoTokenizer").from_pretrained(str(path), local_files_only=True))
        except Exception as error:  # transformers raises anything from KeyError to a bare Exception here
            raise CheckpointError(f"The tokenizer in {path} cannot be loaded: {error}") from error

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence ids; a checkpoint's configs may name more.

        In the harmony format a call ends an answer, too; not all configs of such checkpoints have its id.
        """
        eos, specials = self.backend.eos_token_id, self.special_tokens
        harmony = [specials[end] for end in HARMONY_ENDS if specials.keys() >= HARMONY_ENDS]
        return (() if eos is None else (int(eos),)) + tuple(sorted({*harmony} - {eos}))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise CheckpointError if the tokenizer makes ids that a model of ``vocab_size`` tokens lacks.

        Added tokens may lie beyond it: some checkpoints carry unused ones, and a prompt with one is refused.
        """
        if self.backend.vocab_size > vocab_size:
            raise CheckpointError(
                f"The tokenizer has {self.backend.vocab_size} tokens, the model's vocabulary {vocab_size} "
                "(vocab_size in config.json): they do not belong together."
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with special tokens (such as a leading BOS) as the checkpoint adds them."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts as one, with the special tokens that the checkpoint adds to pairs."""
        return list(self.backend.encode(first, second, verbose=False))

    def token_id(self, token: str) -> int | None:
        """Id of a text that is one token; None if it is not."""
        ids = self.encode(token, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of ``words``, at the beginning of a text and, if different, after a space.

        As in vLLM, the same word in other tokens is not matched.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            alone = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            found |= {ids: None for ids in (alone,) if ids}
            if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
                found[spaced] = None
        return tuple(found)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        """Text of ``token_ids``; ids that only pad the model's vocabulary have none.

        spaces: keep a decoder's space between adjacent special tokens.
        """
        known = [i for i in token_ids if i < self.size]
        text = self._decode(known, skip_special_tokens=skip_special_tokens)
        if not spaces and not skip_special_tokens:
            pairs = {pair for pair in pairwise(known) if self.special_ids.issuperset(pair)}
            for first, second in pairs:
                a, b = (self.backend.convert_ids_to_tokens(i) for i in (first, second))
                text = text.replace(f"{a} {b}", f"{a}{b}")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text: part of a character if several tokens share it."""
        if (found := self._token_bytes.get(token_id)) is None:
            found = self._token_bytes[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        text = self.decode([token_id], skip_special_tokens=False)
        piece = self.backend.convert_ids_to_tokens(token_id) if token_id < self.size else None
        if not isinstance(piece, str) or token_id in self.special_ids:
            return text.encode()
        if "ByteLevel" in self._decoders and BYTE_LEVEL.keys() >= set(piece):
            return bytes(BYTE_LEVEL[char] for char in piece)
        if "ByteFallback" in self._decoders and (match := BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes.fromhex(match[1])
        return text.encode() if REPLACEMENT in text or SPACE not in piece else piece.replace(SPACE, " ").encode()

    @cached_property
    def _decoders(self) -> set[str]:
        """The types of the fast tokenizer's decoders; none for a slow one."""
        if not self.backend.is_fast or (decoder := self.backend.backend_tokenizer.decoder) is None:
            return set()
        state = json.loads(decoder.__getstate__())
        return {one["type"] for one in [state, *state.get("decoders", [])]}

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Characters of ``text`` before each of its tokens; None if the ids are not its tokens.

        Tokens that share a character begin where it does; special tokens that are not in the text begin where the next
        does.
        """
        if not self.backend.is_fast:
            return None
        for special in (True, False):
            encoded = self.backend(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
            if list(encoded["input_ids"]) == list(token_ids):
                spans = [len(text) if begin == end == 0 else begin for begin, end in encoded["offset_mapping"]]
                return list(accumulate(reversed(spans), min))[::-1]
        return None

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """True if the token never adds text: it pads the vocabulary, or is special and those are skipped."""
        return token_id >= self.size or (skip_special_tokens and token_id in self.special_ids)

    @cached_property
    def chat_template(self) -> str | None:
        """The text of the default chat template; None without one."""
        if self.backend.chat_template is None:
            return None
        try:
            return str(self.backend.get_chat_template())
        except ValueError:  # several templates, none of them the default
            return None

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by their text."""
        return {str(self.backend.convert_ids_to_tokens(i)): i for i in self.special_ids}

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: a text of n characters has at least n / this many tokens."""
        return max((len(token) for token in self.backend.get_vocab()), default=1)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt text of a conversation (``role``/``content`` mappings) by the checkpoint's template.

        tools: definitions in OpenAI's form, for a template that supports them (``text/templates/tools.py``).
        template_kwargs, documents: variables of the template. chat_template: used instead of the checkpoint's.

        Encode it with ``add_special_tokens=False``: the template writes them. It runs in transformers' sandbox. Raises
        BadRequest if there is no template, or if it refuses the messages.
        """
        if self.backend.chat_template is None and chat_template is None:
            raise BadRequest(
                "This model has no chat template, so it cannot take messages; use /v1/completions "
                "(LLM.generate) with a prompt, or add chat_template.jinja to the checkpoint.",
                param="messages",
            )
        variables = dict(template_kwargs or {})
        own = inspect.signature(self.backend.apply_chat_template).parameters.keys() | RESERVED_VARIABLES
        if (reserved := next((name for name in variables if name in own), None)) is not None:
            raise BadRequest(
                f"chat_template_kwargs sets {reserved!r}, which is not a variable of the template; remove it.",
                param="chat_template_kwargs",
            )
        try:
            text = self._rendered(
                [dict(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
                chat_template=chat_template,
                variables=variables,
            )
        except (TemplateTooHard, TemplateFailed, ValueError) as error:
            whose, param = ("model's", "messages") if chat_template is None else ("request's", "chat_template")
            what = "cannot write" if isinstance(error, TemplateTooHard) else "refuses"
            raise BadRequest(f"The {whose} chat template {what} these messages: {error}.", param=param) from None
        return text

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Call the backend's ``apply_chat_template`` without tokenizing, in the renderer's process.

        Raises TemplateFailed, ValueError if there is no such template, and TemporaryFailure without a process.
        """
        if not messages:
            raise ValueError("there are none: give at least one")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        functions = [dict(tool) for tool in tools] if tools else None
        try:
            return renderer().render(
                self.backend.get_chat_template(chat_template, functions),
                messages,
                tools=functions,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.backend.special_tokens_map, "documents": documents, **(variables or {})},
            )
        except RendererBusy as error:
            raise TemporaryFailure(str(error)) from None

    def check_template(self) -> None:
        """Raise CheckpointError for a chat template that takes too much time or memory for two short messages.

        A template that refuses them may accept others.
        """
        if self.backend.chat_template is None:
            return
        messages = [{"role": "user", "content": "Hello"}]
        try:
            self._rendered(messages, add_generation_prompt=True)
        except TemplateTooHard as error:
            raise CheckpointError(
                f"The chat template cannot be used: {error}. Give the checkpoint another one."
            ) from None
        except (TemplateFailed, ValueError):
            return
