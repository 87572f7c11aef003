"""Splits a chat answer into the model's thinking and what it says: ``--reasoning-parser``.

Thinking stands between two marks at the beginning of an answer. Chat templates often write the opening mark into the
prompt, or an empty thought where thinking is turned off; so the prompt's end says how an answer begins. ``chat`` gives
every sequence of a chat answer a :class:`Splitter`. Names are those of vLLM and SGLang, the marks those of the models'
chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.text.harmony import ANALYSIS, CALL, END, FINAL, MESSAGE, Header, Messages, Part
from unisono.types import ConfigError


@dataclass(frozen=True)
class Parser:
    """The marks around a thought. opens: whether an answer begins inside one where the prompt shows neither mark."""

    start: str = "<think>"
    end: str = "</think>"
    opens: bool = False

    def begins(self, prompt: str, prefix: str | None = None) -> str:
        """Where an answer begins: ``begin`` (it may open a thought), ``thinking`` or ``content``.

        prefix: the beginning of the answer, where the request gave one to be continued.
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
        """For one answer; see :meth:`begins`. interrupts: marks of calls, with which a thought ends too.

        calls: whether calls are looked for in what is no thinking.
        """
        state = self.begins(prompt, prefix)
        return Splitter(self, "begin" if self.opens and state == "thinking" else state, interrupts)


@dataclass(frozen=True)
class HarmonyParser(Parser):
    """Thinking is the messages of a channel (``text/harmony.py``), wherever in the answer they are."""

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
"""By the names that vLLM and SGLang give them."""
OFF = "none"
"""``--reasoning-parser none``: no answer is split, whatever the template says."""


def parser_named(name: str | None) -> Parser | None:
    """The parser of a name; None for None and ``none``. Raises ConfigError that lists the names."""
    if name is None or name == OFF:
        return None
    if (parser := PARSERS.get(name.replace("-", "_"))) is None:
        raise ConfigError(f"--reasoning-parser {name!r} is unknown; choose one of {', '.join((*PARSERS, OFF))}.")
    return parser


def parser_of(template: str) -> Parser | None:
    """The parser for a chat template with this text; None where it has no thinking."""
    if PARSERS["openai_gptoss"].start in template:
        return PARSERS["openai_gptoss"]
    for parser in (PARSERS["seed_oss"], PARSERS["mistral"], PARSERS["kimi"], PARSERS["gemma4"], THINK):
        if parser.end in template:
            return parser if parser.start in template else replace(parser, opens=True)
    return None


@dataclass
class Splitter:
    """Reads one answer piece by piece; the pieces may cut a mark anywhere.

    state: ``begin`` (an opening mark may come first), ``thinking`` or ``content``. White space around marks belongs to
    neither part. Text that may yet turn out to be a mark, or white space before one, is held back.
    """

    parser: Parser
    state: str
    interrupts: Sequence[str] = ()
    _held: str = ""
    _started: bool = False

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """(new thinking, new content). last: no more text comes; what is held back is given out."""
        self._held += text
        if self.state == "begin" and not self._begin(last):
            return "", ""
        thinking = self._think(last) if self.state == "thinking" else ""
        return thinking, self._content() if self.state == "content" else ""

    def _begin(self, last: bool) -> bool:
        """Look for the opening mark. Returns whether it is known how the answer begins."""
        mark, text = self.parser.start, self._held.lstrip()
        if text.startswith(mark):
            self.state, self._held = "thinking", text[len(mark) :]
        elif mark.startswith(text) and not last:
            return False
        else:
            self.state, self._started = ("thinking", False) if self.parser.opens else ("content", True)
        return True

    def _think(self, last: bool) -> str:
        """New thinking up to the closing mark, without the white space at both ends."""
        if not self._started:
            self._held = self._held.lstrip()
        thought, marks = self._held, (self.parser.end, *self.interrupts)
        place, mark = min(((thought.find(mark), mark) for mark in marks if mark in thought), default=(-1, ""))
        if mark:
            rest = place + len(mark) if mark == self.parser.end else place
            self.state, self._held, self._started = "content", thought[rest:], False
            return thought[:place].rstrip()
        kept = thought if last else thought[: len(thought) - max(_overlap(thought, mark) for mark in marks)]
        new = kept if last else kept.rstrip()
        self._held = thought[len(new) :]
        self._started |= bool(new)
        return new

    def _content(self) -> str:
        text = self._held if self._started else self._held.lstrip("\r\n")
        self._held, self._started = "", self._started or bool(text)
        return text


@dataclass
class HarmonySplitter(Splitter):
    """The analysis channel is thinking, all else content. Messages of a kind are parted by line ends.

    calls: messages to functions keep their marks, for a reader of calls; without one they count as thinking.
    """

    calls: bool = False

    def __post_init__(self) -> None:
        opened = {"thinking": Header(ANALYSIS), "content": Header(FINAL)}.get(self.state)
        self._messages = Messages(opened)
        self._spoke = {"thinking": False, "content": False}
        self._parted = {"thinking": False, "content": False}

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        new = {"thinking": "", "content": ""}
        for part in self._messages.feed(text, last):
            header = part.header
            if header.recipient and self.calls:
                new["content"] += (header.text if part.begins else "") + part.text + (CALL if part.ends else "")
                self._parted["content"] = self._spoke["content"] = False  # the reader parts what calls part
            else:
                thinks = header.channel == ANALYSIS or bool(header.recipient)
                self._add(new, "thinking" if thinks else "content", part)
        return new["thinking"], new["content"]

    def _add(self, new: dict[str, str], kind: str, part: Part) -> None:
        """More thinking or content."""
        self._parted[kind] |= part.begins and self._spoke[kind]
        if part.text:
            new[kind] += ("\n" if self._parted[kind] else "") + part.text
            self._spoke[kind], self._parted[kind] = True, False


def _overlap(text: str, mark: str) -> int:
    """The number of characters at the end of ``text`` with which ``mark`` may begin."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
