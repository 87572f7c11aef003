"""Starts a server, lets the model call a function, and sends the result back.

``tool_choice="required"`` writes the call under a grammar, so that even a tiny model calls with valid arguments.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def serve() -> tuple[subprocess.Popen[str], str]:
    """Start a server on a free port; returns the process and its URL."""
    command = [sys.executable, "-m", "unisono", "serve", "tiny", "--port", "0", "--max-num-seqs", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://[\w.]+:\d+", line):
            return server, found[0]
    raise SystemExit("the server did not start")


def wait(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server is not ready")


def main() -> None:
    server, url = serve()
    try:
        wait(url)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        messages: list = [{"role": "user", "content": "What is 12 plus 30?"}]
        ask = {"model": "tiny", "temperature": 0, "max_tokens": 80, "tools": [TOOL]}
        chat = client.chat.completions.create(messages=messages, tool_choice="required", **ask)
        for call in chat.choices[0].message.tool_calls:
            arguments = json.loads(call.function.arguments)
            print(f"{call.function.name}({arguments}) = {sum(arguments.values())}")
            messages += [chat.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        chat = client.chat.completions.create(messages=messages, **ask)
        print(chat.choices[0].message.content or chat.choices[0].message.tool_calls)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
