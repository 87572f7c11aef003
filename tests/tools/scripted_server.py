"""An HTTP server that answers as a test says, in a thread: what a benchmark must measure is known exactly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]
"""(request body) -> pieces of the answer, headers included; the connection is closed after the last one."""


def sse(*events: Any) -> bytes:
    """A chunk of the body: these events, "[DONE]" as it is."""
    lines = "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events).encode()
    return b"%x\r\n%s\r\n" % (len(lines), lines)


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


END = sse("[DONE]") + b"0\r\n\r\n"


def plain(status: str, body: str) -> bytes:
    """A whole response that is not streamed."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@dataclass
class Scripted:
    """A running server. bodies: of every request, in order. most: requests at once."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0


@contextlib.contextmanager
def scripted(answer: Answer, models: str = '{"data": [{"id": "m"}]}') -> Iterator[Scripted]:
    """Serve ``answer`` on a free port."""
    server, ready, loop = Scripted(), threading.Event(), asyncio.new_event_loop()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    writer.write(plain("200 OK", models))
                    continue
                size = int(head.lower().split("content-length:")[1].split()[0])
                body = json.loads(await reader.readexactly(size))
                server.bodies.append(body)
                server.headers.append(head)
                server.running += 1
                server.most = max(server.most, server.running)
                whole = b""
                try:
                    async for piece in answer(body):
                        whole += piece
                        writer.write(piece)
                        await writer.drain()
                finally:
                    server.running -= 1
                if not whole.endswith((b"0\r\n\r\n", b"}")):
                    break
        writer.close()

    async def main() -> None:
        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await listening.serve_forever()

    task: list[asyncio.Task[None]] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        task.append(loop.create_task(main()))
        loop.run_until_complete(task[0])
        for one in asyncio.all_tasks(loop):
            one.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task[0].cancel)
        thread.join(10)
