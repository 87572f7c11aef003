"""A fuzz of a running server that looks for stalls of its event loop, growth and answers with 500.

``python -m tests.http.stall_fuzz URL PID --seconds 3600``; PID is the API process. Another process asks for /health
all the time. A stall is the time that such an answer takes, less the time that threads of the API process waited for a
processor meanwhile (schedstat), and this process did: on a busy machine that is not the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

import httpx

from tests.http import fuzz
from tests.http.openapi_fuzz import Maker

STALL_SECONDS, GROWTH = 0.25, 1.5
MIB = 1 << 20


def waited(pid: int) -> float:
    """Seconds that the process's threads have waited for a processor, all together."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


def own_wait() -> float:
    """Seconds that this thread has waited for a processor."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def resident(pid: int) -> int:
    """MiB of the process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def watch(url: str, pid: int, worst: multiprocessing.Array) -> None:  # type: ignore[valid-type]
    """Ask for /health for ever. worst: [stall, growth in MiB, answers]."""
    where, base = urlparse(url), resident(pid)
    while True:
        own = time.thread_time() + own_wait()
        begun, before = time.perf_counter(), waited(pid)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
        connection.connect()
        connected = time.perf_counter() - begun
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        whole, queued = time.perf_counter() - begun, waited(pid) - before
        taken = whole - queued - (time.thread_time() + own_wait() - own)
        if taken > max(STALL_SECONDS, worst[0]):
            print(f"{whole:.3f} s, {connected:.3f} to connect; the server's threads waited {queued:.3f} s", flush=True)
        worst[0], worst[1], worst[2] = max(worst[0], taken), max(worst[1], resident(pid) / base), worst[2] + 1
        time.sleep(0.02)


def large() -> Iterator[tuple[str, bytes]]:
    """Bodies near the limit of their size, each expensive to somebody."""
    text, chat, n = "/v1/completions", "/v1/chat/completions", 16 * MIB
    yield text, b'{"prompt":[1' + b',"a",1' * (n // 6) + b"]}"
    yield text, b'{"prompt":[[1]' + b",{}" * (n // 3) + b"]}"
    yield text, b'{"prompt":[1' + b",1" * (MIB - 2) + b"]}"
    yield text, b'{"prompt":"' + b"a" * n + b'"}'
    yield text, b'{"prompt":"' + rb"\u00e9" * (n // 6) + b'"}'
    yield text, b'{"prompt":"a","stop":[1' + b",1" * (n // 2) + b"]}"
    yield text, b'{"prompt":"a","stop":"' + b"a" * n + b'"}'
    yield text, b'{"prompt":"a","logit_bias":{"1":1' + b',"2":1' * (n // 6) + b"}}"
    yield text, b'{"prompt":"a","vllm_xargs":{"1":' + b"[" * n + b"}}"
    yield text, b'{"prompt":"a","' + b"a" * n + b'":1}'
    yield text, b'{"prompt":"a","seed":' + b"9" * n + b"}"
    yield text, b'{"prompt":"a","guided_choice":[""' + b',"a"' * 200_000 + b"]}"
    yield text, b'{"prompt":"a","guided_json":{"enum":[1' + b",1" * (MIB - 2) + b"]}}"
    yield text, b'{"prompt":"a","bad_words":["' + b"a " * (n // 2) + b'"]}'
    message = b'{"role":"user","content":"a"}'
    yield chat, b'{"messages":[' + (message + b",") * 30_000 + message + b"]}"
    yield chat, b'{"messages":[' + (message + b",") * 8_000 + b"1]}"
    part = b'{"type":"text","text":"a"}'
    yield chat, b'{"messages":[{"role":"user","content":[' + (part + b",") * 50_000 + part + b"]}]}"
    yield chat, b'{"messages":[' + message + b'],"tools":[' + b"{}," * 80_000 + b"{}]}"
    yield chat, b'{"messages":[' + message + b'],"chat_template_kwargs":{"a":"' + b"a" * n + b'"}}'
    yield "/v1/responses", b'{"input":[' + (message + b",") * 8_000 + b'{"role":"x"}],"truncation":"auto"}'
    yield "/v1/messages", b'{"max_tokens":1,"messages":[' + (message + b",") * 8_000 + b"{}]}"
    yield "/v1/messages", b'{"max_tokens":1,"messages":[' + message + b'],"system":[' + (part + b",") * 50_000 + b"1]}"
    yield "/tokenize", b'{"prompt":"' + b"a b " * MIB + b'"}'
    yield "/detokenize", b'{"tokens":[1' + b",1" * (MIB - 2) + b"]}"
    yield "/v1/embeddings", b'{"input":[' + b"[]," * 200_000 + b"[]]}"
    yield "/generate", b'{"text":"a","sampling_params":{"stop":["a"' + b',"b"' * 200_000 + b"]}}"
    yield "/abort", b'{"request_ids":["a"' + b',"b"' * 200_000 + b"]}"


def requests(url: str, seed: int) -> Iterator[tuple[str, str, bytes, str]]:
    """Method, path, body and content type: of all routes, of each API's body, and now and then a large one."""
    chance, number = random.Random(seed), seed
    document = httpx.get(f"{url}/openapi.json").json()
    while True:
        number += 1
        for sent in Maker(document, number).requests(200):
            yield sent.method, sent.path, sent.body or b"", sent.content_type
        for path, text in fuzz.bodies(200, number):
            yield "post", path, text.encode("utf-8", "replace"), "application/json"
        big = list(large())
        for path, body in chance.sample(big, 6):
            yield "post", path, body, "application/json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("pid", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    worst = multiprocessing.Array("d", 3)
    watcher = multiprocessing.Process(target=watch, args=(options.url, options.pid, worst), daemon=True)
    watcher.start()
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    end, stalled = time.monotonic() + options.seconds, STALL_SECONDS
    with httpx.Client(base_url=options.url, timeout=300) as client, ThreadPoolExecutor(options.at_once) as pool:

        def send(one: tuple[str, str, bytes, str]) -> None:
            nonlocal stalled
            method, path, body, kind = one
            answer = client.request(method.upper(), path, content=body, headers={"content-type": kind})
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 and b"service_unavailable" not in answer.content:
                wrong.append(f"{answer.status_code} {method} {path} {body[:1500]!r}\n  {answer.text[:300]}")
                print(wrong[-1], flush=True)
            if worst[0] > stalled:
                stalled = worst[0]
                print(f"stall {worst[0]:.3f} s near {method} {path} {len(body)} {body[:150]!r}", flush=True)

        batch: list[tuple[str, str, bytes, str]] = []
        for one in requests(options.url, options.seed):
            batch.append(one)
            if len(batch) == options.at_once:
                list(pool.map(send, batch))
                batch = []
            if time.monotonic() > end:
                break
    watcher.terminate()
    told = {
        "seconds": options.seconds,
        "statuses": dict(statuses),
        "500": len(wrong),
        "worst stall": round(worst[0], 3),
    }
    print(json.dumps({**told, "growth": round(worst[1], 3), "health answers": int(worst[2])}))
    sys.exit(bool(wrong) or worst[0] > STALL_SECONDS or worst[1] > GROWTH)


if __name__ == "__main__":
    main()
