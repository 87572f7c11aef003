"""Prefill and decode apart, from outside: two servers, one of which clients talk to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, serving
from tests.transport.nixl_library import NEEDS_NIXL
from unisono.config.env import TRANSFER_KEY

PROMPT = " ".join(f"{n * 37 % 101} + {n * 53 % 97} =" for n in range(40))
FLAGS = ("tiny", "--max-num-seqs", "4", "--graphs", "off", "--speculative-method", "none")


def complete(server: Server) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 7}
    response = server.http.post("/v1/completions", json=body)
    response.raise_for_status()
    return response.json()["choices"]


@pytest.mark.full
@NEEDS_NIXL
@pytest.mark.parametrize("tls", ["", "tcp"])
def test_two_servers_with_nixl(tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, with the networks that UCX picks, and with TCP below it."""
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    flags = (*FLAGS, "--transfer-backend", "nixl", "--role")
    with serving(tmp_path / "one", *flags, "prefill", "--transfer-listen", "tcp://127.0.0.1:0") as prefill:
        where = prefill.info()["kv_transfer"]["service"]["address"]
        with serving(tmp_path / "other", *flags, "decode", "--prefill-url", where) as decode:
            first = complete(decode)
            told = decode.info()["kv_transfer"]["client"]
            assert told["results"] == {"done": 1}
            assert told["peers"] == {where: "nixl"}
            assert told["bytes_by_transport"] == {"nixl": told["bytes"]}
            line = r'(?m)^\S*kv_transfer_bytes_sent_total\S*transport="(\w+)"\S* ([\d.e+]+)$'
            sent = re.findall(line, prefill.http.get("/metrics").text)
            assert {name: float(count) for name, count in sent} == {"nixl": told["bytes"], "tcp": 0}
            assert complete(prefill) == first, "one engine says the same"
            prefill.kill()
            decode.http.post("/reset_prefix_cache").raise_for_status()
            assert complete(decode) == first, "computed here"


def test_two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")
    where = f"unix://{tmp_path}/prefill"
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "one", *FLAGS, "--role", "prefill", "--transfer-listen", where) as prefill,
        serving(tmp_path / "other", *FLAGS, "--role", "decode", "--prefill-url", where) as decode,
    ):
        first = complete(decode)
        told = decode.info()["kv_transfer"]["client"]
        assert told["results"] == {"done": 1}
        sent = re.search(r"(?m)^\S*kv_transfer_pages_sent_total\S* ([\d.e+]+)$", prefill.http.get("/metrics").text)
        assert sent is not None
        assert float(sent[1]) == told["pages"] > 4
        assert complete(prefill) == first, "one engine says the same"
        prefill.kill()
        decode.http.post("/reset_prefix_cache").raise_for_status()
        assert complete(decode) == first, "computed here"
        results = decode.info()["kv_transfer"]["client"]["results"]
        assert results["done"] == 1
        assert sum(results.values()) == 2
