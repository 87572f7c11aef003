"""The chat session: reads lines, runs slash commands, requests answers and keeps the conversation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.console.output import complain
from unisono.tools.chat.answers import AnswerFigures, AnswerSource, Message
from unisono.tools.chat.screen import Screen
from unisono.types import BadRequest, UnisonoError

PARAMETERS: Mapping[str, str] = {
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens up to this probability",
    "top_k": "keep the k likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "max_tokens": "tokens of an answer, at most",
    "seed": "repeats an answer",
    "stop": "a string that ends an answer, or a list of strings",
    "presence_penalty": "subtracted once from the logits of tokens of the answer",
    "frequency_penalty": "subtracted once per occurrence",
    "repetition_penalty": "divides the logits of tokens of prompt and answer",
    "ignore_eos": "true: go on after the answer's end, to measure",
    "max_drafts": "drafts a round at most; 0 turns speculation off",
    "enable_thinking": "true or false, for the chat template",
    "reasoning_effort": "low, medium or high, for the chat template",
}
"""Parameters of ``/params``."""
HISTORY_LINES = 1000
PROMPT, MORE = "› ", "… "


class Session:
    """A conversation with a source of answers. :meth:`run` returns at the input's end or after ``/quit``."""

    def __init__(
        self, source: AnswerSource, screen: Screen, system: str | None = None, params: Mapping[str, Any] | None = None
    ) -> None:
        self._source, self._screen = source, screen
        self._params = dict(params or {})
        self._system = system
        self._messages: list[Message] = []
        self._open = True

    def run(self) -> None:
        """Chat until the end of the input."""
        lines = self._source.banner()
        self._screen.banner(lines, any("speculates" in line for line in lines))
        with _history(self._screen.terminal):
            while self._open and (line := self._line()) is not None:
                if line.startswith("/"):
                    self._command(line.strip())
                elif line.strip():
                    self._ask(line)

    # ---- input ----------------------------------------------------------------------------------

    def _line(self) -> str | None:
        """The user's next message: a backslash at the end of a line continues it. None at the end of the input."""
        terminal = self._screen.terminal
        parts: list[str] = []
        while True:
            try:
                parts.append(input((MORE if parts else PROMPT) if terminal else ""))
            except EOFError:
                if terminal:
                    print()
                return "\n".join(parts) if parts else None
            except KeyboardInterrupt:
                if not terminal:
                    return None
                print()
                self._screen.tell("Ctrl-D or /quit ends.")
                parts.clear()
                continue
            if not terminal or not parts[-1].endswith("\\"):
                return "\n".join(parts)
            parts[-1] = parts[-1][:-1]

    # ---- answers --------------------------------------------------------------------------------

    def _conversation(self) -> list[Message]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._messages

    def _ask(self, text: str) -> None:
        """Request an answer and add it to the conversation; without an answer, the question is removed."""
        self._messages.append({"role": "user", "content": text})
        reasoning, answer, figures = "", "", AnswerFigures()
        self._screen.begin()
        try:
            with _stoppable(self._source.prompt_interrupts) as stopped:
                for piece in self._source.answer(self._conversation(), self._params, figures, stopped):
                    reasoning, answer = reasoning + piece.reasoning, answer + piece.content
                    self._screen.write(piece)
        except KeyboardInterrupt:
            figures.finish = "abort"
        except UnisonoError as error:
            self._screen.end()
            complain(error)
            self._messages.pop()
            if not isinstance(error, BadRequest) and not (self._screen.terminal and self._source.prompt_interrupts):
                raise
            return
        self._screen.end()
        if figures.finish == "abort" and not (answer or reasoning):
            self._messages.pop()
        else:
            kept = {"reasoning_content": reasoning} if reasoning else {}
            self._messages.append({"role": "assistant", "content": answer, **kept})
        if self._screen.terminal:
            self._screen.tell(figures.line())

    # ---- commands -------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        if (found := COMMANDS.get({"exit": "quit", "q": "quit", "?": "help"}.get(name, name))) is None:
            complain(f"/{name} is unknown; /help lists the commands. A line that begins with a blank is sent as it is.")
            return
        try:
            found[0](self, rest.strip())
        except (BadRequest, OSError) as error:
            complain(str(error))

    def _help(self, rest: str) -> None:
        """List the commands."""
        self._screen.table({f"/{name}{usage}": text for name, (_, usage, text) in COMMANDS.items()})

    def _quit(self, rest: str) -> None:
        self._open = False

    def _clear(self, rest: str) -> None:
        self._messages.clear()
        self._screen.tell("The conversation is empty; the system message and the parameters stay.")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = None if rest in ("none", '""') else rest
        self._screen.tell(f"system message: {self._system}" if self._system else "no system message")

    def _drafts(self, rest: str) -> None:
        if rest not in ("on", "off", ""):
            raise BadRequest(f"/drafts {rest}: give on or off.")
        self._screen.drafts = rest == "on" if rest else not self._screen.drafts
        self._screen.tell(f"colours of drafts are {'on' if self._screen.drafts else 'off'}")

    def _set_params(self, rest: str) -> None:
        """Show all parameters, or set some: ``name=value``, ``name=default`` to unset one, ``reset`` to unset all."""
        params = {} if rest == "reset" else dict(self._params)
        for word in [] if rest in ("", "reset") else rest.split():
            name, equals, text = word.partition("=")
            if name not in PARAMETERS or not equals:
                names = ", ".join(PARAMETERS)
                raise BadRequest(f"/params {word}: give name=value, and one of {names}; =default forgets it.")
            params.pop(name, None)
            if text not in ("default", "none", "null", ""):
                params[name] = _value(text)
        self._source.check(params)
        self._params = params
        defaults = self._source.defaults()
        self._screen.table(
            {name: f"{self._shown(name, defaults).ljust(12)} {text}" for name, text in PARAMETERS.items()}
        )

    def _shown(self, name: str, defaults: Mapping[str, Any]) -> str:
        if name in self._params:
            return json.dumps(self._params[name], ensure_ascii=False)
        return f"({json.dumps(defaults[name])})" if defaults.get(name) is not None else "(default)"

    def _save(self, rest: str) -> None:
        if not rest:
            raise BadRequest("/save needs a file: /save chat.json.")
        file = Path(rest).expanduser()
        saved = {"model": self._source.name, "parameters": self._params, "messages": self._conversation()}
        file.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n")
        self._screen.tell(f"{len(saved['messages'])} messages are in {file}")


COMMANDS: Mapping[str, tuple[Callable[[Session, str], None], str, str]] = {
    "help": (Session._help, "", "this list"),
    "params": (
        Session._set_params,
        " [name=value …|reset]",
        "show or set sampling parameters; name=default forgets one",
    ),
    "system": (Session._set_system, " [TEXT|none]", "show, set or remove the system message"),
    "clear": (Session._clear, "", "forget the conversation"),
    "drafts": (Session._drafts, " [on|off]", "colour accepted drafts, or not"),
    "save": (Session._save, " FILE", "write the conversation to a JSON file"),
    "quit": (Session._quit, "", "end; Ctrl-D does the same"),
}


def _value(text: str) -> Any:
    """A parameter's value: JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.contextmanager
def _stoppable(at_once: bool) -> Iterator[Callable[[], object]]:
    """A function that returns True after Ctrl-C.

    at_once: Ctrl-C raises KeyboardInterrupt, too.

    An engine in this process is interrupted between tokens, so that no step of it is cut off. An exception can be lost,
    for example while an object is freed; the flag cannot.
    """
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        if at_once:
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _history(terminal: bool) -> Iterator[None]:
    """On a terminal: line editing, and the lines of earlier chats, kept in the user's state directory."""
    if not terminal or sys.platform == "win32":
        yield
        return
    import readline

    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "unisono" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.set_history_length(HISTORY_LINES)
            readline.write_history_file(file)
            file.chmod(0o600)
