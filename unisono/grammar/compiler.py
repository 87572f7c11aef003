"""Compiling what requests ask of their outputs, in threads, once for all that ask the same.

Reading a schema and compiling it take milliseconds to seconds: xgrammar does both outside the interpreter's lock, so
the engine goes on with its passes meanwhile.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.tokenizer import Tokenizer
from unisono.types import BadRequest, StructuredOutputs

KEPT = 256
"""Compiled grammars that are kept, the latest used ones."""

THREADS = 2
"""Compilations at once: a slow one leaves way for others."""


BLANKS = 20
"""Blanks in a row between the parts of a JSON text: a small model may write nothing else till its tokens are spent."""


@dataclass(frozen=True)
class Compiled:
    """A grammar for this vocabulary. grammar: xgrammar's CompiledGrammar. eos: the ids that may end a text."""

    grammar: Any
    eos: tuple[int, ...]


class Grammars:
    """The grammars of one model: ``directory`` has its tokenizer, ``eos`` are its end-of-sequence ids."""

    def __init__(self, directory: str | Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._directory, self._vocab_size, self._eos = Path(directory), vocab_size, tuple(eos)
        self._kept: OrderedDict[StructuredOutputs, Future[Compiled]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._lock = threading.Lock()
        self._tools: tuple[Any, Any, tuple[int, ...]] | None = None

    def prepare(self, asked: StructuredOutputs) -> Future[Compiled]:
        """Begin to compile, unless that was done. The future's exception is a BadRequest that says what is wrong."""
        found = self._kept.pop(asked, None)
        if found is None or found.cancelled():
            found = self._threads.submit(self._compile, asked)
        self._kept[asked] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def get(self, asked: StructuredOutputs) -> Compiled:
        """The compiled grammar; waits for it. Raises BadRequest."""
        return self.prepare(asked).result()

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, asked: StructuredOutputs) -> Compiled:
        kind, given = asked.kind, getattr(asked, asked.kind)
        try:
            xgrammar, compiler, eos = self._set_up()
            return Compiled(compiler.compile_grammar(_parse(xgrammar, asked)), eos)
        except BadRequest:
            raise
        except Exception as error:  # xgrammar raises RuntimeError, ValueError and classes of its own
            shown = repr(given) if len(repr(given)) <= 80 else repr(given)[:79] + "…"
            raise BadRequest(
                f"structured_outputs.{kind}={shown} cannot be compiled: {_reason(error)}", "structured_outputs"
            ) from None

    def _set_up(self) -> tuple[Any, Any, tuple[int, ...]]:
        """xgrammar, its compiler for this vocabulary, and the ids that end a text; made at the first use."""
        with self._lock:
            if self._tools is None:
                tokenizer = Tokenizer.load(self._directory)
                if tokenizer is None:
                    raise BadRequest(
                        "structured_outputs needs to know what tokens spell, and this checkpoint has no tokenizer: "
                        "serve one with tokenizer files, or leave structured_outputs out.",
                        "structured_outputs",
                    )
                eos = tuple(i for i in dict.fromkeys((*self._eos, *tokenizer.eos_token_ids)) if i < self._vocab_size)
                if not eos:
                    raise BadRequest(
                        "structured_outputs ends a text with the model's end-of-sequence token, and this checkpoint "
                        "names none: set eos_token_id in its config.json, or leave structured_outputs out.",
                        "structured_outputs",
                    )
                import xgrammar  # a second, with torch; only servers of structured outputs pay for it

                info = _vocabulary(xgrammar.TokenizerInfo, tokenizer, self._vocab_size, eos)
                compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
                self._tools = xgrammar, compiler, eos
            return self._tools


def _vocabulary(kind: Any, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> Any:
    """xgrammar's TokenizerInfo, ``kind``, without the spelling of special tokens: they are no part of an answer's text.

    With it a mask would take ``<|pad|>`` for seven characters, which the reader of the answer never sees.
    """
    backend = tokenizer.backend
    told = kind.from_huggingface(backend, vocab_size=vocab_size, stop_token_ids=list(eos)).dump_metadata()
    spelt = [""] * vocab_size  # which xgrammar never allows
    for text, i in backend.get_vocab().items():
        if i < vocab_size and i not in tokenizer.special_ids:
            spelt[i] = text
    return kind.from_vocab_and_metadata(spelt, told)


def _parse(xgrammar: Any, asked: StructuredOutputs) -> Any:
    """What is asked for as xgrammar's Grammar. Raises what xgrammar raises."""
    grammar = xgrammar.Grammar
    blanks: dict[str, Any] = {"any_whitespace": not asked.disable_any_whitespace}
    if not asked.disable_any_whitespace:
        blanks["max_whitespace_cnt"] = BLANKS
    if asked.json is not None:
        return grammar.from_json_schema(asked.json, **blanks)
    if asked.json_object:
        return grammar.from_json_schema('{"type": "object"}', strict_mode=False, **blanks)
    if asked.regex is not None:
        return grammar.from_regex(asked.regex)
    if asked.choice is not None:
        return grammar.from_ebnf("root ::= " + " | ".join(_literal(text) for text in asked.choice))
    if asked.structural_tag is not None:
        return grammar.from_structural_tag(asked.structural_tag)
    return grammar.from_ebnf(asked.grammar)


def _literal(text: str) -> str:
    """``text`` as a string of EBNF."""
    return '"' + "".join(c if c.isalnum() or c in " _-" else f"\\U{ord(c):08x}" for c in text) + '"'


def _reason(error: Exception) -> str:
    """xgrammar's message without the time and the line of its source that it begins with."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is \w+: ", "", text).split("The JSON string is:")[0]
    return " ".join(text.split())[:300].rstrip(".") + "."
