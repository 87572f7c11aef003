"""Splits a chat answer into reasoning and content: ``--reasoning-parser``.

Reasoning is enclosed in two marks at the beginning of an answer. Chat templates often write the opening mark into the
prompt, or an empty reasoning section if reasoning is turned off; so the prompt's end determines the state of the
answer's beginning. Every sequence of a chat answer has a :class:`Splitter`. Names are those of vLLM and SGLang, the
marks those of the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.text.harmony import ANALYSIS, CALL, END, FINAL, MESSAGE, HarmonyMessages, Header, MessagePart
from unisono.types import ConfigError


@dataclass(frozen=True)
class Parser:
    """The marks around reasoning. opens: an answer begins with reasoning if the prompt has neither mark."""

    start: str = "<think>"
    end: str = "</think>"
    opens: bool = False

    def begins(self, prompt: str, prefix: str | None = None) -> str:
        """The state of an answer's beginning: ``begin`` (it may open reasoning), ``thinking`` or ``content``.

        prefix: the beginning of the answer, if the request continues one.
        """
        before = prompt.rstrip() if prefix is None else prefix
        opened = before.endswith(self.start) if prefix is None else prefix.rfind(self.start) > prefix.rfind(self.end)
        if opened:
            return "thinking"
        closed = before.endswith(self.end) if prefix is None else bool(prefix)
        return "content" if closed else "thinking" if self.opens and prefix is None else "begin"

    def splitter(
        self, prompt: str, prefix: str | None = None, interrupts: Sequence[str] = (), calls: bool = False
    ) -> Splitter:
        """A splitter for one answer; see :meth:`begins`.

        interrupts: marks of calls, which end reasoning too.

        calls: a tool parser reads the content.
        """
        state = self.begins(prompt, prefix)  # the model may repeat an opening mark that the prompt has
        return Splitter(self, "begin" if self.opens and state == "thinking" else state, interrupts)


@dataclass(frozen=True)
class HarmonyParser(Parser):
    """Reasoning is the messages of the analysis channel (``text/harmony.py``), anywhere in the answer."""

    start: str = Header(ANALYSIS).text
    end: str = END

    def begins(self, prompt: str, prefix: str | None = None) -> str:
        if prefix is None and prompt.rstrip().endswith(self.start):
            return "thinking"
        return "content" if prefix is not None or prompt.endswith(MESSAGE) else "begin"

    def splitter(
        self, prompt: str, prefix: str | None = None, interrupts: Sequence[str] = (), calls: bool = False
    ) -> Splitter:
        return HarmonySplitter(self, self.begins(prompt, prefix), calls=calls)


THINK, OPENED = Parser(), Parser(opens=True)
PARSERS: Mapping[str, Parser] = {
    "qwen3": THINK,
    "deepseek_r1": OPENED,
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "glm45", "glm47", "holo2", "interns1", "kimi_k2", "mimo"), THINK),
    **dict.fromkeys(("nemotron_v3", "olmo3"), THINK),
    **dict.fromkeys(("minimax_m2", "qwen3_thinking", "step3", "step3p5"), OPENED),
    "gemma4": Parser("<|channel>thought", "<channel|>"),
    "kimi": Parser("◁think▷", "◁/think▷"),
    "mistral": Parser("[THINK]", "[/THINK]"),
    "seed_oss": Parser("<seed:think>", "</seed:think>", opens=True),
    **dict.fromkeys(("openai_gptoss", "gpt_oss"), HarmonyParser()),
}
"""Parsers by the names of vLLM and SGLang."""
OFF = "none"
"""``--reasoning-parser none``: answers are not split, whatever the template."""


def parser_named(name: str | None) -> Parser | None:
    """The parser ``name``; None for None and ``none``. Raises ConfigError with the list of names."""
    if name is None or name == OFF:
        return None
    if (parser := PARSERS.get(name.replace("-", "_"))) is None:
        raise ConfigError(f"--reasoning-parser {name!r} is unknown; choose one of {', '.join((*PARSERS, OFF))}.")
    return parser


def parser_of(template: str) -> Parser | None:
    """The parser for a chat template with this text; None if it has no reasoning."""
    if PARSERS["openai_gptoss"].start in template:
        return PARSERS["openai_gptoss"]
    for parser in (PARSERS["seed_oss"], PARSERS["mistral"], PARSERS["kimi"], PARSERS["gemma4"], THINK):
        if parser.end in template:
            return parser if parser.start in template else replace(parser, opens=True)
    return None


@dataclass
class Splitter:
    """Splitter of one answer in pieces, which may split a mark anywhere.

    state: ``begin`` (an opening mark may come first), ``thinking`` or ``content``. White space around marks belongs to
    neither part. Text that may become a mark, and white space before one, is held back.
    """

    parser: Parser
    state: str
    interrupts: Sequence[str] = ()
    _held: str = ""
    _started: bool = False

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """(new reasoning, new content). last: no more text follows; held-back text is released."""
        self._held += text
        if self.state == "begin" and not self._begin(last):
            return "", ""
        thinking = self._think(last) if self.state == "thinking" else ""
        return thinking, self._content() if self.state == "content" else ""

    def _begin(self, last: bool) -> bool:
        """Look for the opening mark. Returns True once the state of the beginning is known."""
        mark, text = self.parser.start, self._held.lstrip()
        if text.startswith(mark):
            self.state, self._held = "thinking", text[len(mark) :]
        elif mark.startswith(text) and not last:
            return False
        else:
            self.state, self._started = ("thinking", False) if self.parser.opens else ("content", True)
        return True

    def _think(self, last: bool) -> str:
        """New reasoning up to the closing mark, without white space at both ends."""
        if not self._started:
            self._held = self._held.lstrip()
        held, marks = self._held, (self.parser.end, *self.interrupts)
        place, mark = min(((held.find(mark), mark) for mark in marks if mark in held), default=(-1, ""))
        if mark:
            rest = place + len(mark) if mark == self.parser.end else place
            self.state, self._held, self._started = "content", held[rest:], False
            return held[:place].rstrip()
        kept = held if last else held[: len(held) - max(_overlap(held, mark) for mark in marks)]
        new = kept if last else kept.rstrip()
        self._held = held[len(new) :]
        self._started |= bool(new)
        return new

    def _content(self) -> str:
        text = self._held if self._started else self._held.lstrip("\r\n")
        self._held, self._started = "", self._started or bool(text)
        return text


@dataclass
class HarmonySplitter(Splitter):
    """The analysis channel is reasoning, everything else content.

    Messages of one kind are separated by newlines.

    calls: messages to functions keep their marks, for a tool parser; otherwise they count as reasoning.
    """

    calls: bool = False

    def __post_init__(self) -> None:
        opened = {"thinking": Header(ANALYSIS), "content": Header(FINAL)}.get(self.state)
        self._messages = HarmonyMessages(opened)
        self._spoke = {"thinking": False, "content": False}
        self._parted = {"thinking": False, "content": False}

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        new = {"thinking": "", "content": ""}
        for part in self._messages.feed(text, last):
            header = part.header
            if header.recipient and self.calls:
                new["content"] += (header.text if part.begins else "") + part.text + (CALL if part.ends else "")
                self._parted["content"] = self._spoke["content"] = False  # the tool parser separates text around calls
            else:
                thinks = header.channel == ANALYSIS or bool(header.recipient)
                self._add(new, "thinking" if thinks else "content", part)
        return new["thinking"], new["content"]

    def _add(self, new: dict[str, str], kind: str, part: MessagePart) -> None:
        """Append reasoning or content."""
        self._parted[kind] |= part.begins and self._spoke[kind]
        if part.text:
            new[kind] += ("\n" if self._parted[kind] else "") + part.text
            self._spoke[kind], self._parted[kind] = True, False


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
