"""Chat templates: rendered in a process that can be killed, with limits of time, memory and output.

A template is a program of the checkpoint's, or of a client's where the server takes those, and jinja's sandbox limits
what it can reach, not what it takes. :class:`Renderer` is the caller's side; :func:`main` runs in the process, which
renders as transformers does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.sandbox.channel import Channel, Gone
from unisono.sandbox.forks import Template, limit_memory, limit_time, serve

SECONDS = 2.0
"""Processor time of one rendering. A conversation of 1 MB takes some 10 ms."""

PATIENCE = 20.0
"""Seconds that a rendering may take by the clock, whatever the machine is busy with."""

MEMORY = 512 << 20
"""Bytes that rendering may take."""

MAX_CHARS = 1 << 26
"""Characters of a rendered conversation: as many as a body has bytes."""


class TemplateFailed(Exception):
    """The template refuses the messages, or fails on them."""


class TemplateTooHard(TemplateFailed):
    """The template takes too much time or memory, or writes too much."""


class RendererBusy(Exception):
    """No process to render in comes up; a later try may have one."""


START_PATIENCE = 40.0
"""Seconds that a process may take to start, which takes one or two on a machine that is not busy."""


class _Forks:
    """Forks of one process that has imported what rendering needs. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: Template | None = None

    def start(self) -> None:
        with self._lock:
            self._begin()

    def _begin(self) -> Template:
        if self._template is None:
            self._template = Template("unisono.text.templates.renderer", [], START_PATIENCE)
        return self._template

    def fork(self) -> Channel:
        """Return a channel to a new process. Raises RendererBusy, and starts anew at the next call."""
        if not self._lock.acquire(timeout=START_PATIENCE):
            raise RendererBusy(f"no process to render in has started for {START_PATIENCE:g} s")
        try:
            for last in (False, True):
                try:
                    return self._begin().fork()[0]
                except (Gone, TimeoutError) as error:
                    self._end()
                    if last or isinstance(error, TimeoutError):
                        raise RendererBusy("the process that renders chat templates does not start") from None
            raise AssertionError
        finally:
            self._lock.release()

    def _end(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def close(self) -> None:
        with self._lock:
            self._end()


class Renderer:
    """Renders templates. Starts processes when it is first used, or at :meth:`start`.

    Threads may share it. Each has a process of its own, so a template that takes long holds up its own thread only.
    """

    def __init__(self) -> None:
        self._forks = _Forks()
        self._own = threading.local()

    def start(self) -> None:
        """Begin to start the process, which takes a second or two; the first rendering waits for it."""
        self._forks.start()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the template writes it. Raises TemplateFailed and RendererBusy.

        Keys of messages whose value is None are left out, as transformers does: many templates would write "None".
        """
        conversation = [{k: v for k, v in message.items() if v is not None} for message in messages]
        given = {
            **(variables or {}),
            "conversations": [conversation],
            "chat_template": template,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        kind, text = self._ask(given)
        if kind == "text":
            return text
        raise (TemplateTooHard if kind == "hard" else TemplateFailed)(text)

    def close(self) -> None:
        """End the processes; those of other threads end with theirs. A later rendering starts others."""
        self._leave()
        self._forks.close()

    def __del__(self) -> None:
        try:  # noqa: SIM105  at the interpreter's end this module's names are gone
            self.close()
        except Exception:
            pass

    def _ask(self, given: dict[str, Any]) -> tuple[str, str]:
        channel = self._connected()
        try:
            channel.send(given)
            return tuple(channel.receive()[0])
        except TimeoutError:
            self._leave()
            return "hard", f"it takes more than {PATIENCE:g} s"
        except Gone:
            self._leave()
            return "hard", f"it takes more than {SECONDS:g} s of processor time, or ends its process"
        except (TypeError, ValueError, OverflowError) as error:  # what msgpack does not know
            return "failed", f"a variable is no plain data: {error}"

    def _connected(self) -> Channel:
        """Return the channel to this thread's process."""
        found: Channel | None = getattr(self._own, "channel", None)
        if found is not None and found.ended():  # killed while it was idle
            self._leave()
            found = None
        if found is None:
            found = self._own.channel = self._forks.fork()
            found.socket.settimeout(PATIENCE)
        return found

    def _leave(self) -> None:
        found: Channel | None = getattr(self._own, "channel", None)
        if found is not None:
            found.close()
            self._own.channel = None


@functools.cache
def renderer() -> Renderer:
    """The renderer of this process: one serves every tokenizer."""
    return Renderer()


# ---- in the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork a process that renders for each message."""
    serve(descriptor, _begin)


def _begin(first: list[Any]) -> Any:
    import sys

    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without it: 4 s and 300 MB less
    from transformers.utils import chat_template_utils

    return lambda channel, message: _render_all(channel, chat_template_utils.render_jinja_template)


def _render_all(channel: Channel, render: Any) -> None:
    limit_memory(MEMORY)
    while True:
        given, _ = channel.receive()
        limit_time(SECONDS)
        try:
            (text,), _ = render(**given)
            answer = (
                ["text", text] if len(text) <= MAX_CHARS else ["hard", f"it writes more than {MAX_CHARS} characters"]
            )
        except (MemoryError, OverflowError):
            answer = ["hard", f"it takes more than {MEMORY >> 20} MiB"]
        except RecursionError:
            answer = ["hard", "it is nested too deeply"]
        except Exception as error:  # the template is the checkpoint's code, run on the caller's messages
            answer = ["failed", f"{error}"[:2000]]
        try:
            channel.send(answer)
        except (UnicodeEncodeError, MemoryError) as error:
            channel.send(["failed", f"its text cannot be sent: {type(error).__name__}"])
        limit_time(0)
