"""Chat templates, rendered in a separate process with limits of time, memory and output.

A template is a program of the checkpoint, or of a client if the server accepts those. Jinja's sandbox limits what it
can reach, but not the time and memory it uses. :class:`Renderer` is the caller's side; :func:`main` runs in the
process, which renders like transformers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.sandbox.channel import ForkChannel, Gone
from unisono.sandbox.forks import Template, limit_memory, limit_time, serve

SECONDS = 2.0
"""Processor time of one rendering, seconds. A conversation of 1 MB takes about 10 ms."""

PATIENCE = 20.0
"""Wall-clock limit of one rendering, seconds."""

MEMORY = 512 << 20
"""Memory limit of rendering, bytes."""

MAX_CHARS = 1 << 26
"""Characters of a rendered conversation: as many as a request body has bytes."""


class TemplateFailed(Exception):
    """The template refuses the messages, or fails on them."""


class TemplateTooHard(TemplateFailed):
    """The template exceeds its time, memory or output limit."""


class RendererBusy(Exception):
    """No rendering process could be started; a later attempt may succeed."""


START_PATIENCE = 40.0
"""Timeout for the start of a process, seconds. It takes one or two on an idle machine."""


class _Forks:
    """Forks of one process that has imported Jinja. Threads share it."""

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

    def fork(self) -> ForkChannel:
        """A channel to a new process. Raises RendererBusy; the next call starts anew."""
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
    """Renderer of templates.

    Starts processes on first use, or at :meth:`start`.

    Threads may share it. Each has a process of its own, so a slow template delays only its own thread.
    """

    def __init__(self) -> None:
        self._forks = _Forks()
        self._own = threading.local()

    def start(self) -> None:
        """Start the process in the background; it takes a second or two, and the first rendering waits for it."""
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
        """Render a conversation.

        Raises TemplateFailed and RendererBusy.

        Keys of messages with the value None are left out, as in transformers: many templates would print "None".
        """
        conversation = [{k: v for k, v in message.items() if v is not None} for message in messages]
        value = {
            **(variables or {}),
            "conversations": [conversation],
            "chat_template": template,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        kind, text = self._ask(value)
        if kind == "text":
            return text
        raise (TemplateTooHard if kind == "hard" else TemplateFailed)(text)

    def close(self) -> None:
        """End the processes; those of other threads end with their threads. A later rendering starts new ones."""
        self._leave()
        self._forks.close()

    def __del__(self) -> None:
        try:  # noqa: SIM105  at the interpreter's end this module's names are gone
            self.close()
        except Exception:
            pass

    def _ask(self, message: dict[str, Any]) -> tuple[str, str]:
        channel = self._connected()
        try:
            channel.send(message)
            return tuple(channel.receive()[0])
        except TimeoutError:
            self._leave()
            return "hard", f"it takes more than {PATIENCE:g} s"
        except Gone:
            self._leave()
            return "hard", f"it takes more than {SECONDS:g} s of processor time, or ends its process"
        except (TypeError, ValueError, OverflowError) as error:  # types that msgpack does not know
            return "failed", f"a variable is no plain data: {error}"

    def _connected(self) -> ForkChannel:
        """The channel to this thread's process."""
        found: ForkChannel | None = getattr(self._own, "channel", None)
        if found is not None and found.ended():  # it was killed while idle
            self._leave()
            found = None
        if found is None:
            found = self._own.channel = self._forks.fork()
            found.socket.settimeout(PATIENCE)
        return found

    def _leave(self) -> None:
        found: ForkChannel | None = getattr(self._own, "channel", None)
        if found is not None:
            found.close()
            self._own.channel = None


@functools.cache
def renderer() -> Renderer:
    """The renderer of this process, shared by all tokenizers."""
    return Renderer()


# ---- in the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Serve one message per forked process, and render it there."""
    serve(descriptor, _begin)


def _begin(first: list[Any]) -> Any:
    import sys

    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without it: 4 s and 300 MB less
    from transformers.utils import chat_template_utils

    return lambda channel, message: _render_all(channel, chat_template_utils.render_jinja_template)


def _render_all(channel: ForkChannel, render: Any) -> None:
    limit_memory(MEMORY)
    while True:
        message, _ = channel.receive()
        limit_time(SECONDS)
        try:
            (text,), _ = render(**message)
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
