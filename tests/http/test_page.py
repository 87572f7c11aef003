"""The page at ``/``: its files, headers and state route. ``test_page_browser.py`` has the tests in a browser."""

from __future__ import annotations

import json
import re
import tomllib
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from tests.http import pictures_
from tests.http.conftest import Server, Start, until
from unisono.graphs import Reason
from unisono.http.answers.drafts import AcceptanceReport, by_token
from unisono.http.observability.history import percentile
from unisono.http.openai.responses import AnswerMetrics
from unisono.http.page_state import questions
from unisono.http.routes.page import POLICY, TYPES, page_files
from unisono.http.server import ServerSettings
from unisono.media.decoding.images import FORMATS
from unisono.types import ConfigError, FinishReason, TokenDelta
from unisono.types.acceptance import DraftCount

ROOT = Path(__file__).parents[2]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = sorted(page_files())


def chunks(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream."""
    answer = server.http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    return [choice for frame in frames for choice in json.loads(frame)["choices"]]


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in NAMES)])
def test_files(server: Server, path: str) -> None:
    get, head = server.http.get(path), server.http.head(path)
    assert get.status_code == head.status_code == 200
    assert head.content == b""
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    assert get.content == page_files()[name]
    for answer in (get, head):
        assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    again = server.http.get(path, headers={"if-none-match": get.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize("name", ["app.py", "..%2fapp.py", "%2e%2e/app.py", "__init__.py", "style.css/x"])
def test_unknown_page_files_return_404(server: Server, name: str) -> None:
    assert server.http.get(f"/page/{name}").status_code == 404


def test_the_policy_forbids_other_hosts_inline_scripts_and_markup_from_text() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' blob:"  # blob: previews of attached pictures
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")


OWN = [name for name in NAMES if not name.startswith("vendor/") and not name.endswith(".png")]


def test_page_files_reference_no_other_host() -> None:
    assert {"index.html", "style.css", "app.js", "chat.js", "numbers.js"} <= set(OWN)
    for name in OWN:
        text = page_files()[name].decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?:https?|wss?)://|[\"'(]//|@import", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
        assert not re.search(r"<style|\sstyle=|<script(?! type=\"module\" src=\"page/)|\son\w+=", text), name
        for target in re.findall(r'(?:from|src=|href=) ?"([^"#]+)"', text):
            assert target == "docs" or target.removeprefix("./").removeprefix("page/") in NAMES, f"{name}: {target}"


VENDORED = {
    "vendor/marked/marked.esm.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "vendor/marked/LICENSE.txt": "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
}
"""SHA-256 of the files of marked 18.2.1, as its package has them."""


def test_vendored_files_are_unchanged_and_documented() -> None:
    contents = page_files()
    found = {name: sha256(contents[name]).hexdigest() for name in NAMES if name.startswith("vendor/")}
    assert found == VENDORED
    assert b"marked v18.2.1" in contents["vendor/marked/marked.esm.js"]
    assert b"MIT license" in contents["vendor/marked/LICENSE.txt"]
    assert "marked 18.2.1" in (ROOT / "docs/guide/web-page.md").read_text()


def test_scripts_of_the_page_are_short() -> None:
    for name in OWN:
        assert len(page_files()[name].decode().splitlines()) <= 500, name


def test_browser_storage_of_the_page() -> None:
    """The key and the text that is typed last as long as the tab; the browser keeps two choices of the display."""
    texts = {name: page_files()[name].decode() for name in OWN}
    stored = {name for name, text in texts.items() if "sessionStorage." in text}
    assert stored == {"api.js", "chat.js"}
    assert "localStorage" not in texts["api.js"] + texts["chat.js"]
    assert set(re.findall(r'localStorage\.setItem\("([^"]+)"', "".join(texts.values()))) == {
        "unisono-theme",
        "unisono-panel",
    }


def test_every_reason_of_an_eager_pass_is_explained() -> None:
    told = page_files()["numbers.js"].decode().partition("const REASONS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+):", told, re.MULTILINE)) == {reason.name for reason in Reason}


def test_the_package_has_the_files() -> None:
    """pyproject.toml names them: a wheel has data files only where it does."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["unisono"]
    named = {found for pattern in data for found in (ROOT / "unisono").glob(pattern)}
    assert {ROOT / "unisono" / "http" / "page" / name for name in NAMES} <= named


# ---- which tokens were drafted ----


@pytest.fixture(scope="module")
def drafting(start_module: Start, model_dir: Path) -> Server:
    """Its rounds bring four tokens: three accepted drafts and one of the model's own."""
    return start_module(model_dir, tokens_per_step=4)


@pytest.fixture(scope="module")
def start_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.http.conftest import servers

    with servers(tmp_path_factory) as start:
        yield start


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_return_drafts_marks_each_token(drafting: Server, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": "abcdefgh"} if path == TEXT else {"messages": [{"role": "user", "content": "abcdefghijklmnop"}]}
    )
    asked |= {"max_tokens": 10, "seed": 1}
    plain = chunks(drafting, path, **asked)
    marked = chunks(drafting, path, **asked, return_drafts=True)

    def text(choices: list[dict[str, Any]]) -> str:
        return "".join(one["text"] if path == TEXT else one["delta"].get("content", "") for one in choices)

    assert text(marked) == text(plain) != ""
    assert not any("draft" in one for one in plain)
    drafts = [one["draft"] for one in marked if "draft" in one]
    positions = [0, 1, 2, None] * 2 + [0, None]
    assert [draft["position"] for draft in drafts] == positions
    assert [(draft["drafted"], draft["accepted"]) for draft in drafts] == [(3, 3)] * 8 + [(3, 1)] * 2
    assert marked[-1]["finish_reason"] == "length"


def test_usage_does_not_depend_on_return_drafts(drafting: Server) -> None:
    """A stop string ends the text within a round: the drafts after it do not count, however chunks are cut."""
    told = []
    for more in ({}, {"return_drafts": True}):
        body = {"prompt": "abcdefgh", "max_tokens": 20, "stop": "f", "stream": True, **more}
        answer = drafting.http.post(TEXT, json={**body, "stream_options": {"include_usage": True}})
        last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
        told.append(last["usage"])
    assert told[0] == told[1]
    assert told[0]["completion_tokens"] < 20


def test_drafts_come_with_ids_and_log_probabilities(drafting: Server) -> None:
    marked = chunks(drafting, TEXT, prompt="abcd", max_tokens=4, return_drafts=True, return_token_ids=True, logprobs=1)
    for one in marked[:-1]:
        assert len(one["token_ids"]) == len(one["logprobs"]["tokens"]) == 1
        assert "draft" in one


def test_return_drafts_needs_a_stream(server: Server) -> None:
    answer = server.http.post(TEXT, json={"prompt": "a", "return_drafts": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_drafts")
    assert server.http.post(TEXT, json={"prompt": "a", "return_drafts": False}).status_code == 200


def test_joined_deltas_keep_round_boundaries() -> None:
    delta = TokenDelta("r", [1], drafted_tokens=0)
    delta.absorb(TokenDelta("r", [2, 3], drafted_tokens=4, accepted_tokens=1))
    delta.absorb(TokenDelta("r", [4, 5, 6], FinishReason.STOP, drafted_tokens=2, accepted_tokens=2))
    delta.absorb(TokenDelta("r", [], FinishReason.STOP))
    parts = list(by_token(delta))
    assert [part.token_ids for part, _ in parts] == [[1], [2], [3], [4], [5], [6]]
    assert [draft and draft.position for _, draft in parts] == [None, 0, None, 0, 1, None]
    assert [part.finish for part, _ in parts] == [FinishReason.RUNNING] * 5 + [FinishReason.STOP]
    for name in ("drafted_tokens", "accepted_tokens"):
        assert sum(getattr(part, name) for part, _ in parts) == getattr(delta, name)


# ---- what the last requests waited for ----


def latest(server: Server, **headers: str) -> list[dict[str, Any]]:
    answer = server.http.get("/requests", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


def test_recent_requests_report_phase_times(start: Start) -> None:
    server = start(step_seconds=0.02, prefill_seconds=0.2, queue_seconds=0.05, tokens_per_step=2)
    assert latest(server) == []
    answer = server.http.post(TEXT, json={"prompt": [7, 8, 9, 10], "max_tokens": 8}).json()
    (one,) = latest(server)
    assert one["id"].startswith(answer["id"])
    assert one["queue"] == 0.05
    assert 0.1 < one["prefill"] < 2
    assert one["decode"] > 0.05
    parts = sum(one[name] for name in ("preparation", "queue", "prefill", "decode"))
    assert one["total"] == pytest.approx(parts, abs=0.05)
    assert one["first_token"] == pytest.approx(one["preparation"] + one["queue"] + one["prefill"], abs=1e-5)
    assert (one["prompt_tokens"], one["cached_tokens"], one["completion_tokens"]) == (4, 2, 8)
    assert (one["drafted_tokens"], one["accepted_tokens"], one["finish_reason"], one["key"]) == (4, 4, "length", "")
    assert not {"prompt", "text", "token_ids"} & one.keys()


def test_a_hundred_are_remembered_the_latest_first(start: Start) -> None:
    server = start()
    for size in (3, 90, 12):
        server.http.post(TEXT, json={"prompt": [5], "n": size, "max_tokens": size})
    until(lambda: len(latest(server)) == 100)
    assert state(server)["latency"]["total"]["count"] == 105  # percentiles are over the last 1000
    lengths = [one["completion_tokens"] for one in latest(server)]
    assert [(length, len(list(group))) for length, group in groupby(lengths)] == [(12, 12), (90, 88)]


def test_requests_are_for_operators(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(f"{name} sha256:{sha256(f'{name}-key'.encode()).hexdigest()}\n" for name in ("alice", "bob"))
    )
    keys.chmod(0o600)
    server = start(api_key_file=str(keys))
    assert server.http.get("/").status_code == server.http.get("/page/app.js").status_code == 200
    assert server.http.get("/requests").status_code == server.http.get("/page/state").status_code == 401
    key = {"authorization": "Bearer bob-key"}
    server.http.post(TEXT, json={"prompt": [5], "max_tokens": 2}, headers=key)
    assert [one["key"] for one in latest(server, **key)] == ["bob"]
    assert server.http.get("/page/state", headers=key).json()["requests"] == {"running": 0, "waiting": 0}


def test_web_pages_of_others_read_no_requests(server: Server) -> None:
    answer = server.http.get("/requests", headers={"origin": "https://example.org"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")


# ---- the page's numbers ----


def state(server: Server) -> dict[str, Any]:
    answer = server.http.get("/page/state")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_running_is_never_0_while_an_answer_streams(start: Start) -> None:
    """Even if the engine does not answer: its last numbers are from before the request."""
    server = start(step_seconds=0.7)  # longer than /page/state waits for the engine
    assert state(server)["requests"] == {"running": 0, "waiting": 0}
    body = {"prompt": [7, 8], "max_tokens": 400, "stream": True, "return_token_ids": True}
    seen = []
    with server.http.stream("POST", TEXT, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.append(state(server))
            if len(seen) == 3:
                break
    assert [one["requests"] for one in seen] == [{"running": 1, "waiting": 0}] * 3
    assert not all(one["fresh"] for one in seen)
    until(lambda: state(server)["requests"]["running"] == 0)


def test_requests_before_their_first_token_wait_or_run(start: Start) -> None:
    server = start(prefill_seconds=1.0, max_num_seqs=256)
    with server.http.stream("POST", TEXT, json={"prompt": [7, 8], "n": 3, "max_tokens": 2, "stream": True}):
        # Headers come with the first token; the sequences that have none yet are counted all the same.
        told = state(server)["requests"]
        assert told["running"] + told["waiting"] == 3


def test_percentiles_are_measured_values_and_need_enough_requests(start: Start) -> None:
    server = start(step_seconds=0.01, prefill_seconds=0.05, tokens_per_step=2)
    empty = state(server)["latency"]
    assert set(empty) == {"first_token", "between_tokens", "queue", "prefill", "decode", "total"}
    assert all(row == {"count": 0, "last": None, "p50": None, "p90": None, "p99": None} for row in empty.values())

    def ask(count: int, **body: Any) -> dict[str, Any]:
        for _ in range(count):
            server.http.post(TEXT, json={"prompt": [7, 8], "max_tokens": 9, **body}).raise_for_status()
        return state(server)["latency"]

    one = ask(1)
    for row in one.values():
        assert (row["count"], row["p50"], row["p90"], row["p99"]) == (1, None, None, None)
    (record,) = latest(server)
    assert one["first_token"]["last"] == record["first_token"]
    assert one["total"]["last"] == record["total"] >= record["first_token"]
    assert one["between_tokens"]["last"] == pytest.approx(record["decode"] / 8)
    two = ask(1)["total"]
    assert [two[name] is None for name in ("p50", "p90", "p99")] == [False, True, True]
    ten = ask(8)
    records = latest(server)
    for name in ("first_token", "queue", "prefill", "decode", "total"):
        values = sorted(record[name] for record in records)
        assert (ten[name]["count"], ten[name]["p50"], ten[name]["p90"], ten[name]["p99"]) == (
            10, values[4], values[8], None,
        )  # fmt: skip
        assert ten[name]["last"] == records[0][name]
    assert all(ten["first_token"][name] <= ten["total"][name] for name in ("last", "p50", "p90"))
    hundred = ask(9, n=10)["first_token"]
    assert (hundred["count"], hundred["p99"]) == (100, sorted(one["first_token"] for one in latest(server))[98])


def test_sequences_that_were_aborted_are_in_no_percentile(start: Start) -> None:
    server = start(step_seconds=0.05)
    with server.http.stream("POST", TEXT, json={"prompt": [7, 8], "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: len(latest(server)) == 1)
    assert latest(server)[0]["finish_reason"] == "abort"
    assert state(server)["latency"]["total"]["count"] == 0


def test_the_state_agrees_with_the_metrics(drafting: Server) -> None:
    drafting.http.post(TEXT, json={"prompt": "abcdefgh", "max_tokens": 7}).raise_for_status()
    told = state(drafting)
    metrics = drafting.http.get("/metrics").text
    assert (
        told["tokens"]["generated"]
        == float(re.findall(r"^unisono:generation_tokens_total\S* (\S+)", metrics, re.M)[0])
        >= 7
    )
    (passes,) = told["passes"]
    assert (passes["program"], passes["kind"], passes["reason"]) == ("round", "eager", "DISABLED")
    assert passes["count"] > 0


def test_page_state_reports_model_inputs(server: Server, start: Start, tmp_path: Path) -> None:
    blind = state(server)["model"]
    assert (blind["names"], blind["pictures"], blind["max_model_len"]) == (["fake"], None, 512)
    assert len(blind["questions"]) == 3
    pictures_.write_checkpoint(tmp_path)
    media = {"limit_mm_per_prompt": {"image": 3}, "media_max_mb": 2}
    seeing = state(start(tmp_path, vision=pictures_.vision(), media=media))["model"]
    assert len(seeing["questions"]) == 3
    assert not set(seeing["questions"]) & set(blind["questions"])
    assert seeing["pictures"]["max_count"] == 3
    assert seeing["pictures"]["max_bytes"] == 2 << 20
    assert {"image/png", "image/jpeg"} <= set(seeing["pictures"]["types"])
    assert set(seeing["pictures"]["types"]) <= {f"image/{name.lower()}" for name in FORMATS}


def test_questions_fit_the_model() -> None:
    assert any("Mia" in one for one in questions(str(ROOT / "unisono" / "bundled" / "tiny"), False))
    assert any("shapes" in one for one in questions(str(ROOT / "unisono" / "bundled" / "tiny-vl"), True))
    assert any("Python" in one for one in questions("/models/some-llm", False))
    assert any("picture" in one for one in questions("/models/some-vlm", True))


RANKS: list[tuple[int, list[int | None]]] = [
    (0, [None, None, None]), (1, [None, None, None]), (2, [1, None, None]), (9, [5, None, None]), (10, [5, 9, None]),
    (99, [50, 90, None]), (100, [50, 90, 99]), (1000, [500, 900, 990]),
]  # fmt: skip


@pytest.mark.parametrize(("count", "expected"), RANKS)
def test_nearest_rank_percentiles(count: int, expected: list[int | None]) -> None:
    values = [float(value) for value in range(1, count + 1)]
    assert [percentile(values, share) for share in (50, 90, 99)] == expected


def test_split_rounds_count_as_whole_ones() -> None:
    delta = TokenDelta("r", [1], drafted_tokens=0)
    delta.absorb(TokenDelta("r", [2, 3], drafted_tokens=4, accepted_tokens=1))
    delta.absorb(TokenDelta("r", [4, 5, 6], drafted_tokens=2, accepted_tokens=2))
    whole, split = DraftCount(), DraftCount()
    whole.add(delta.rounds, 6)
    for part, _ in by_token(delta):
        split.add(part.rounds, 1)
    told = whole.result("x", 4, detailed=True)
    assert split.result("x", 4, detailed=True) == told
    assert (told.per_step_accepted, told.per_step_drafted, told.num_steps_without_drafts) == ([1, 2], [4, 2], 0)
    assert told.acceptance_histogram == [0, 1, 1, 0, 0]
    assert told.drafts_histogram == [0, 0, 1, 0, 1]
    assert told.accepted_per_position == [2, 1, 0, 0]
    assert told.drafted_per_position == [2, 2, 1, 1]
    assert told.mean_draft_tokens == 3


def test_reports_of_acceptance_have_levels() -> None:
    count = DraftCount()
    count.add([(1, 0, 0), (1, 3, 0), (1, 0, 0)], 3)
    assert AcceptanceReport("none", "x", 3).metrics([count]) is UNSET
    assert AcceptanceReport("summary", "none", 0).metrics([count]) == AnswerMetrics(None)
    assert AcceptanceReport("summary", "x", 3).metrics([count, count]) == AnswerMetrics(None)
    summary = AcceptanceReport("summary", "x", 3).metrics([count])
    assert isinstance(summary, AnswerMetrics)
    assert summary.speculative_decoding is not None
    assert summary.speculative_decoding.per_step_drafted is UNSET
    assert summary.speculative_decoding.num_steps_without_drafts == 1
    assert summary.speculative_decoding.draft_acceptance_rate == 0
    with pytest.raises(ConfigError, match="--per-request-spec-decode-metrics all: give one of none, summary, detailed"):
        ServerSettings(Path("x"), ("x",), per_request_spec_decode_metrics="all")
