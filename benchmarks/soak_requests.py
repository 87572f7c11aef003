"""The requests of ``python -m benchmarks.soak``: bodies, behaviour of clients, and the parts of answers that repeat.

A :class:`Case` is a seeded request, so its answer is the same bytes whenever it is asked. :func:`ask` sends one and
judges the answer against that of a quiet run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from benchmarks import soak_bodies
from benchmarks.soak_bodies import Abilities, words

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
VOLATILE = {"id", "call_id", "created", "created_at", "completed_at", "system_fingerprint", "usage", "object"}
"""Fields of answers that differ from one answer to the next, at any depth."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sell")]
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": "[a-c]{3,9}( [0-9]{1,4})?"}},
    {"structured_outputs": {"choice": ["yes", "no", "it is four"]}},
    {"structured_outputs": {"grammar": 'root ::= ("a" | "bc"){2,12}'}},
]
BAD: list[tuple[str, Any]] = [
    (TEXT, {"prompt": 7}),
    (TEXT, {"prompt": "a", "max_tokens": -1}),
    (TEXT, {"prompt": "a", "seed": 2**70}),
    (TEXT, {"prompt": [999999]}),
    (TEXT, {"prompt": "a", "unknown_field": 1}),
    (TEXT, {"prompt": "word " * 4000}),
    (TEXT, {"prompt": "a", "structured_outputs": {"regex": "(" * 40}}),
    (TEXT, {"model": "another", "prompt": "a"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}),
    (CHAT, b'{"messages": ['),
    (CHAT, b'{"messages": "\\ud800"}'),
    ("/v1/nothing", {}),
]
ENDED_EARLY = "The request ended early: "
"""Begins the error of a request that ran in an engine process that died."""
READS = ("/health", "/metrics", "/v1/models", "/server_info", "/version", "/load")


@dataclass(frozen=True)
class Case:
    """A request: its kind, route and body, and what its client does.

    client: ``stays``; ``leaves`` after ``patience`` events of a stream, or after ``patience`` hundredths of a second
    of an answer that is no stream; ``aborts`` through /abort; ``errs``: an error (4xx) is the right answer; ``reads``:
    a GET, of which the status counts.
    """

    kind: str
    path: str
    body: Any
    client: str = "stays"
    patience: int = 0

    @property
    def repeats(self) -> bool:
        """Whether the answer is the same whenever the case is asked."""
        return self.client not in ("errs", "reads")

    def patient(self) -> Case:
        """The case with a client that waits for the whole answer."""
        return replace(self, client="stays") if self.client in ("leaves", "aborts") else self

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


def cases(count: int, seed: int, longest: int, abilities: Abilities | None = None) -> list[Case]:
    """``count`` cases that take all kinds in turns. longest: tokens that a prompt and its answer have at most.

    abilities: of the server; kinds that it cannot serve are left out.
    """
    rng = random.Random(seed)
    makers = itertools.cycle(kinds(abilities or Abilities()).values())
    return [make(rng, number, longest) for number, make in zip(range(count), makers, strict=False)]


def kinds(abilities: Abilities) -> dict[str, _Maker]:
    """Every kind of request that a server with these abilities takes."""
    found = dict(_KINDS)
    if abilities.pictures:
        found |= _PICTURES
    if abilities.adapters:
        found |= _with_adapters(abilities.adapters)
    return found


def _sampling(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_k": 40, "logit_bias": {"5": 2.0}},
    ]
    return {**rng.choice(ways), "seed": number, "max_tokens": rng.randrange(4, longest // 16)}


def _text(rng: random.Random, number: int, longest: int, **more: Any) -> dict[str, Any]:
    return {"prompt": words(rng, rng.randrange(2, 30)), **_sampling(rng, number, longest), **more}


def _chat(rng: random.Random, number: int, longest: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words(rng, rng.randrange(2, 30))}]
    return {"messages": messages, **_sampling(rng, number, longest), **more}


def _long(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    """Half the context of prompt, a quarter of answer: a few of them fill the pages."""
    prompt = [rng.randrange(3, 500) for _ in range(longest // 2)]
    more = {"max_tokens": longest // 4, "ignore_eos": True, "stream": number % 2 == 0}
    return {"prompt": prompt, **_sampling(rng, number, longest), **more}


def _repetitive(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    """What drafters predict well."""
    text = f"{words(rng, 4)} " * 6
    return {"prompt": text, "temperature": 0, "seed": number, "max_tokens": 24, "ignore_eos": True}


def _form(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    return _chat(rng, number, longest, stream=number % 2 == 0, **FORMS[rng.randrange(len(FORMS))])


def _tools(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    choice: Any = ["auto", "required", {"type": "function", "function": {"name": "sell"}}][rng.randrange(3)]
    return _chat(
        rng, number, longest, tools=TOOLS, tool_choice=choice, stream=number % 2 == 0, max_tokens=longest // 12
    )


def _schema(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": soak_bodies.schema(rng), "strict": True}}
    body = _chat(rng, number, longest, response_format=form, stream=number % 2 == 0)
    return {**body, "max_tokens": longest // 8}


def _schema_tools(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    """Functions with schemas of their own, asked for in a new conversation or after a result."""
    given = soak_bodies.tools(rng)
    body = _tools(rng, number, longest) | {"tools": given, "tool_choice": soak_bodies.choice(rng, given)}
    if rng.random() < 0.5:
        body |= {"messages": soak_bodies.called(rng, given), "tool_choice": "auto"}
    return body | {"parallel_tool_calls": rng.random() < 0.5}


def _tools_elsewhere(rng: random.Random, number: int, longest: int) -> Case:
    return Case("tools elsewhere", *soak_bodies.tools_elsewhere(rng, longest // 12))


def _picture(rng: random.Random, number: int, longest: int) -> dict[str, Any]:
    return {**_chat(rng, number, longest), "messages": soak_bodies.seen(rng), "max_tokens": longest // 16}


def _pictures_elsewhere(rng: random.Random, number: int, longest: int) -> Case:
    return Case("pictures elsewhere", *soak_bodies.seen_elsewhere(rng, longest // 32))


def _other(rng: random.Random, number: int, longest: int) -> Case:
    content = words(rng, 6)
    message = [{"role": "user", "content": content}]
    path, body = rng.choice(
        [
            ("/v1/responses", {"input": content, "max_output_tokens": 12, "temperature": 0, "store": False}),
            ("/v1/messages", {"messages": message, "max_tokens": 12, "temperature": 0}),
            ("/tokenize", {"prompt": content}),
            ("/v1/messages/count_tokens", {"messages": message}),
        ]
    )
    return Case("other routes", path, body)


_Maker = Callable[[random.Random, int, int], Case]


def _maker(kind: str, path: str, body: Callable[..., dict[str, Any]], client: str = "stays", **more: Any) -> _Maker:
    def make(rng: random.Random, number: int, longest: int) -> Case:
        return Case(kind, path, {**body(rng, number, longest), **more}, client, rng.randrange(1, 12))

    return make


def _bad(rng: random.Random, number: int, longest: int) -> Case:
    path, body = BAD[rng.randrange(len(BAD))]
    return Case("bad bodies", path, body, "errs")


def _read(rng: random.Random, number: int, longest: int) -> Case:
    return Case("reads", rng.choice(READS), None, "reads")


_KINDS: dict[str, _Maker] = {
    "completions": _maker("completions", TEXT, _text, logprobs=2),
    "completion streams": _maker("completion streams", TEXT, _text, stream=True),
    "long": _maker("long", TEXT, _long),
    "chats": _maker("chats", CHAT, _chat),
    "chat streams": _maker("chat streams", CHAT, _chat, stream=True, stop=["a", "!"]),
    "repetitive": _maker("repetitive", TEXT, _repetitive),
    "n > 1": _maker("n > 1", TEXT, _text, n=3, stream=True),
    "best of": _maker("best of", TEXT, _text, n=2, best_of=3),
    "grammars": _maker("grammars", CHAT, _form),
    "tools": _maker("tools", CHAT, _tools),
    "schemas": _maker("schemas", CHAT, _schema),
    "schema tools": _maker("schema tools", CHAT, _schema_tools),
    "tools elsewhere": _tools_elsewhere,
    "left streams": _maker("left streams", CHAT, _chat, "leaves", stream=True, n=2, max_tokens=60, ignore_eos=True),
    "left answers": _maker("left answers", TEXT, _text, "leaves", max_tokens=90, ignore_eos=True),
    "left grammars": _maker("left grammars", CHAT, _form, "leaves"),
    "left tools": _maker("left tools", CHAT, _schema_tools, "leaves"),
    "aborts": _maker("aborts", TEXT, _text, "aborts", stream=True, max_tokens=120, ignore_eos=True),
    "bad bodies": _bad,
    "other routes": _other,
    "reads": _read,
}


_PICTURES: dict[str, _Maker] = {
    "pictures": _maker("pictures", CHAT, _picture),
    "picture streams": _maker("picture streams", CHAT, _picture, stream=True),
    "pictures elsewhere": _pictures_elsewhere,
    "left pictures": _maker("left pictures", CHAT, _picture, "leaves", stream=True, max_tokens=60, ignore_eos=True),
}


def _with_adapters(names: Sequence[str]) -> dict[str, _Maker]:
    """Requests of the adapters in turns: text, a chat, a schema, and clients that leave."""

    def maker(kind: str, path: str, body: Callable[..., dict[str, Any]], client: str = "stays", **more: Any) -> _Maker:
        plain = _maker(kind, path, body, client, **more)

        def make(rng: random.Random, number: int, longest: int) -> Case:
            case = plain(rng, number, longest)
            return replace(case, body={**case.body, "model": rng.choice(names)})

        return make

    return {
        "adapters": maker("adapters", TEXT, _text, logprobs=1),
        "adapter streams": maker("adapter streams", CHAT, _chat, stream=True),
        "adapter schemas": maker("adapter schemas", CHAT, _schema),
        "left adapters": maker("left adapters", TEXT, _text, "leaves", stream=True, max_tokens=60, ignore_eos=True),
    }


@dataclass
class Outcome:
    """How a request went. verdict: ``ok``, ``refused`` (overload), ``killed``, ``wrong``, ``failed`` or ``hung``.

    ``killed``: the request ran in an engine process that died.
    """

    kind: str
    verdict: str
    seconds: float
    why: str = ""


@dataclass
class Answer:
    """What a client got. said: of each choice what the answer says, joined over the stream's events; text first."""

    status: int
    said: Any = None
    error: str = ""
    retry_after: bool = False
    events: int = 0
    ends: list[str] = field(default_factory=list)


def _stable(value: Any) -> Any:
    """A JSON value without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {key: _stable(one) for key, one in value.items() if key not in VOLATILE}
    return [_stable(one) for one in value] if isinstance(value, list) else value


def joined(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What a stream of chunks says: of each choice the text, the calls and the end."""
    said: dict[str, str] = {}

    def add(index: int, name: str, text: str | None) -> None:
        if text:
            said[f"{index} {name}"] = said.get(f"{index} {name}", "") + text

    for chunk in events:
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            add(choice["index"], "text", choice.get("text") or delta.get("content"))
            add(choice["index"], "thinking", delta.get("reasoning_content"))
            for call in delta.get("tool_calls") or ():
                for name, text in call["function"].items():
                    add(choice["index"], f"call {call['index']} {name}", text)
            add(choice["index"], "finish", choice.get("finish_reason"))
    return said


class Client:
    """Sends cases to a server at ``url``. limit: seconds after which a request that has not ended hangs."""

    def __init__(self, url: str, limit: float) -> None:
        self._url, self._limit = url, limit
        self._numbers = itertools.count()
        self.reopen()

    def reopen(self) -> None:
        """Have no connection yet, after ``http.aclose``."""
        sockets = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self.http = httpx.AsyncClient(base_url=self._url, timeout=self._limit, limits=sockets)

    async def abilities(self) -> Abilities:
        """Ask the server which adapters it has and whether its model sees."""
        models, state = await self.http.get("/v1/models"), await self.http.get("/page/state")
        return Abilities.read(models.json(), state.json())

    async def answer(self, case: Case) -> Answer:
        """The whole answer. Raises TimeoutError."""
        async with asyncio.timeout(self._limit):
            return await self._answer(case, None)

    async def ask(self, case: Case, expected: Answer | None) -> Outcome:
        """Send a case as its client would, and judge the answer."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._limit):
                verdict, why = await self._asked(case, expected)
        except TimeoutError:
            verdict, why = "hung", f"no end after {self._limit:g} s"
        except (httpx.HTTPError, ValueError) as error:
            verdict, why = "failed", f"{type(error).__name__}: {error}"
        return Outcome(case.kind, verdict, time.monotonic() - begun, why)

    async def _asked(self, case: Case, expected: Answer | None) -> tuple[str, str]:
        if case.client == "leaves" and not case.streams:
            try:
                await asyncio.wait_for(self._answer(case, None), case.patience / 100)
            except TimeoutError:
                return "ok", ""
        answer = await self._answer(case, case.patience if case.client in ("leaves", "aborts") else None)
        return judge(case, answer, expected)

    async def _answer(self, case: Case, patience: int | None) -> Answer:
        """patience: events of a stream after which the client leaves, or aborts."""
        method = "GET" if case.client == "reads" else "POST"
        content = case.body if isinstance(case.body, bytes) else None if case.body is None else json.dumps(case.body)
        headers = {} if method == "GET" else {"content-type": "application/json"}
        name = f"soak-{next(self._numbers)}"
        async with self.http.stream(
            method, case.path, content=content, headers={**headers, "x-request-id": name}
        ) as response:
            answer = Answer(response.status_code, retry_after="retry-after" in response.headers)
            if response.status_code != 200 or not case.streams:
                text = (await response.aread()).decode()
                if response.status_code != 200:
                    answer.error = json.loads(text)["error"]["message"]
                elif method == "POST":
                    answer.said = _stable(json.loads(text))
                return answer
            chunks: list[dict[str, Any]] = []
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    answer.ends.append("done")
                    break
                chunks.append(json.loads(line[6:]))
                if "error" in chunks[-1]:
                    answer.error = str(chunks[-1]["error"].get("message"))
                    continue  # [DONE] follows; there is nothing to abort
                if patience is not None and len(chunks) == patience:
                    answer.ends.append("left")
                    if case.client == "leaves":
                        break
                    await self.http.post("/abort", json={"request_ids": [chunks[-1]["id"]]})
            answer.events, answer.said = len(chunks), joined(chunks)
            return answer


def judge(case: Case, answer: Answer, expected: Answer | None) -> tuple[str, str]:
    """Verdict and reason. expected: the answer of the quiet run, where the case has one."""
    shown = f"{answer.status} {answer.error}"
    if answer.status in (429, 503):
        told = answer.retry_after or "The server sleeps" in answer.error
        return ("refused", "") if told else ("failed", f"{shown} without Retry-After")
    if answer.error.startswith(ENDED_EARLY):
        return "killed", ""
    if case.client == "errs":
        good = 400 <= answer.status < 500 and answer.error
        return ("ok", "") if good else ("failed", f"{shown} for a bad body")
    if answer.status != 200 or answer.error:
        return "failed", shown
    if case.streams and not answer.ends:
        return "failed", "the stream ended without [DONE]"
    if case.client == "reads" or expected is None:
        return "ok", ""
    if case.client in ("leaves", "aborts") and case.streams:
        return ("ok", "") if _begins(answer.said, expected.said) else ("wrong", _difference(answer.said, expected.said))
    return ("ok", "") if answer.said == expected.said else ("wrong", _difference(answer.said, expected.said))


def _begins(part: dict[str, str], whole: dict[str, str]) -> bool:
    """Whether a stream that was cut short says the beginning of the whole one."""
    return all(whole.get(name, "").startswith(text) for name, text in part.items() if not name.endswith(" finish"))


def _difference(got: Any, expected: Any) -> str:
    return f"got {json.dumps(got)[:300]}, the quiet run {json.dumps(expected)[:300]}"
