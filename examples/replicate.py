"""Replicates four reports against any OpenAI server, and prints a verdict for each.

    python examples/replicate.py --base-url http://localhost:8000/v1 --check json --check prefix

Without ``--base-url`` it starts ``unisono serve tiny-hybrid``, which drafts with its MTP module.

* json: structured outputs under speculation (vLLM #46118). Every answer must follow the schema.
* prefix: prefix hits of hybrids under MTP (vLLM #54360). The second chat with a system prompt must hit it.
* tools: tool arguments under n-gram drafts (vLLM #40875). They must have the types of the schema, whatever the prompt
  repeats.
* parsers: streamed tool calls (SGLang #37634). The pieces of a stream must add up to the call of a whole answer.

Start the server with the drafter of the report, and vLLM with --enable-prompt-tokens-details.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import openai

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "pens": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sure", "pens"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "count_pens", "description": "Note a number of pens.", "parameters": SCHEMA},
}
QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"
REPEATED = 'count_pens({"sure": "maybe", "pens": "many"}) ' * 6


def follows(text: str) -> bool:
    """Return True if a text is JSON that follows SCHEMA."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != {"sure", "pens"}:
        return False
    return isinstance(value["sure"], bool) and type(value["pens"]) is int and 0 <= value["pens"] <= 999


def check_json(client: openai.OpenAI, model: str, count: int) -> tuple[bool, str]:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pens", "schema": SCHEMA, "strict": True}}
    valid = 0
    for seed in range(count):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], response_format=form, max_tokens=512,
            temperature=1.0, seed=seed,
        )  # fmt: skip
        valid += follows(answer.choices[0].message.content or "")
    return valid == count, f"{valid} of {count} answers follow the schema"


def check_prefix(client: openai.OpenAI, model: str, count: int) -> tuple[bool, str]:
    name = uuid.uuid4().hex  # a system prompt that no earlier run has cached
    system = f"You are assistant {name}. " + "Count the pens, and give the number alone. " * 12
    cached, lengths = [], []
    for number in range(3):
        answer = client.chat.completions.create(
            model=model, max_tokens=4, temperature=0,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": f"{number}. {QUESTION}"}],
        )  # fmt: skip
        usage = answer.usage
        assert usage is not None
        details = usage.prompt_tokens_details
        cached.append((details.cached_tokens if details is not None else None) or 0)
        lengths.append(usage.prompt_tokens)
    said = ", ".join(f"{one} of {length}" for one, length in zip(cached, lengths, strict=True))
    return cached[1] >= 0.5 * lengths[1], f"cached prompt tokens: {said}"


def call(client: openai.OpenAI, model: str, content: str, seed: int, stream: bool) -> str:
    """The arguments of the call that the model has to make."""
    options: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": content}], "tools": [TOOL], "max_tokens": 96,
        "tool_choice": {"type": "function", "function": {"name": "count_pens"}}, "temperature": 0.7, "seed": seed,
    }  # fmt: skip
    if not stream:
        calls = client.chat.completions.create(**options).choices[0].message.tool_calls
        return calls[0].function.arguments if calls else ""
    pieces = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                pieces.append((delta.function and delta.function.arguments) or "")
    return "".join(pieces)


def check_tools(client: openai.OpenAI, model: str, count: int) -> tuple[bool, str]:
    valid = sum(follows(call(client, model, f"{REPEATED}\n{QUESTION}", seed, stream=False)) for seed in range(count))
    return valid == count, f"{valid} of {count} calls have valid arguments"


def check_parsers(client: openai.OpenAI, model: str, count: int) -> tuple[bool, str]:
    same = sum(
        call(client, model, QUESTION, seed, stream=True) == call(client, model, QUESTION, seed, stream=False) != ""
        for seed in range(count)
    )
    return same == count, f"{same} of {count} streams add up to the whole answer's call"


CHECKS: dict[str, Callable[[openai.OpenAI, str, int], tuple[bool, str]]] = {
    "json": check_json, "prefix": check_prefix, "tools": check_tools, "parsers": check_parsers,
}  # fmt: skip


def serve() -> tuple[subprocess.Popen[str], str]:
    """Start a server on a free port; returns the process and its URL once it takes requests."""
    command = [sys.executable, "-m", "unisono", "serve", "tiny-hybrid", "--port", "0", "--max-num-seqs", "2"]
    server = subprocess.Popen([*command, "--max-model-len", "1024"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next((found[0] for line in server.stderr if (found := re.search(r"http://[\w.]+:\d+", line))), None)
    while url is not None and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
            return server, f"{url}/v1"
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", help="URL of a server, with /v1; default: a server of its own")
    parser.add_argument("--model", help="name of the model; default: the first that is served")
    parser.add_argument("--check", action="append", choices=CHECKS, help="check to run; default: all")
    parser.add_argument("--count", type=int, default=4, help="requests of a check")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    server, url = (None, args.base_url) if args.base_url else serve()
    try:
        client = openai.OpenAI(base_url=url, api_key=args.api_key)
        model = args.model or client.models.list().data[0].id
        good = True
        for name in args.check or CHECKS:
            passed, said = CHECKS[name](client, model, args.count)
            good &= passed
            print(f"{name}: {'passed' if passed else 'FAILED'}: {said}", flush=True)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    return not good


if __name__ == "__main__":
    sys.exit(main())
