"""Flags of ``unisono serve`` and what the commands print, from outside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.http.conftest import ROOT
from unisono.cli.main import app
from unisono.console import output as cli_output

SMALL = ["--max-num-seqs", "1", "--max-model-len", "128", "--device", "cpu", "--enforce-eager"]
UNISONO = [sys.executable, "-m", "unisono"]


# ---- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--port", "x"], ["--max-num-seqs", "many"], ["--drain-timeout", "soon"]])
def test_a_wrong_number_is_one_plain_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert arguments[0] in result.output
    assert result.output.startswith("Error: ")
    assert f"{arguments[1]}: give a" in result.output


def test_paths_are_looked_at_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, says in ((tmp_path / "nope", "does not exist"), (tmp_path / "empty", "has no config.json")):
        code = f"import sys, unisono.cli.main; sys.argv[1:] = ['serve', {str(path)!r}]\ntry: unisono.cli.main.app()\n"
        code += "finally: print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stdout.strip() == "[]"
    result = CliRunner().invoke(app, ["serve", "tiny", "--tokenizer", "/no"])
    assert "--tokenizer /no does not exist" in result.output


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused(served: Any, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    code, output, config, _ = served("tiny", "--api-key", key)
    assert (code, config) == (2, None)
    assert "--api-key is empty" in output
    monkeypatch.setenv("UNISONO_API_KEY", key)
    code, output, config, _ = served("tiny")
    assert (code, config) == (2, None)
    assert "UNISONO_API_KEY is empty" in output
    assert served("tiny", "--api-key", "k")[3].api_key == "k"
    monkeypatch.setenv("UNISONO_API_KEY", "secret")
    assert served("tiny")[3].api_key == "secret"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--trust-remote-code", "code of a checkpoint is never run"),
        ("--log-level loud", "choose one of debug, info"),
        ("--chat-template /no/such.jinja", "--chat-template /no/such.jinja: cannot be read"),
        ("--chat-template {%if%}", "--chat-template, line 1"),
        ("--allowed-origins [1", "is not valid JSON"),
        ("--allow-credentials", "name --allowed-origins"),
        ("--ssl-keyfile /no/key.pem", "--ssl-keyfile /no/key.pem: there is no such file"),
        ("--ssl-cert-reqs 2", "needs --ssl-ca-certs"),
        ("--timeout-keep-alive 0", "--timeout-keep-alive 0: give 1 second or more"),
        ("--tokenizer /no/such", "--tokenizer /no/such does not exist"),
        ("--generation-config /no/such", "it has no generation_config.json"),
        ("--kv-cache-dtype fp8_e5m2", "the model's dtype or in e4m3: give auto, fp8 or fp8_e4m3"),
        ("--lora-modules a=/b", "--lora-modules needs --enable-lora"),
        ("--lora-modules a", "give name=path"),
        ("--max-loras 0", "give a whole number from 1"),
        ("--max-lora-rank 513", "from 1 to 512"),
        ("--max-cpu-loras 0", "give a whole number from 1"),
        ("--lora-dtype float16", "adapters have the model's dtype"),
        ("--revision main", "tiny is a directory, which has no revisions"),
        ("--config /no/such.yaml", "--config /no/such.yaml: cannot be read"),
    ],
)
def test_invalid_serve_flags_raise(served: Any, arguments: str, says: str) -> None:
    code, output, config, _ = served("tiny", *arguments.split(" ", 1))
    assert code in (1, 2)
    assert says in " ".join(output.split())
    assert config is None
    assert "Traceback" not in output


def test_a_start_names_variables_that_it_does_not_read(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    code, output, _, settings = served("tiny")
    assert (code, settings.api_key) == (0, None)
    assert "VLLM_API_KEY is set and not read. Here: UNISONO_API_KEY, or --api-key." in output


# ---- names ----------------------------------------------------------------------------------------


def test_a_launch_line_of_vllm(served: Any) -> None:
    line = (
        "tiny -tp 1 --served-model-name a b --dtype half --enable-chunked-prefill --disable-log-requests "
        "--max-seq-len-to-capture 8192 --swap-space 4 --block-size 16 --uvicorn-log-level warning --no-enforce-eager "
        '-sc {"method":"ngram","num_speculative_tokens":2} --generation-config vllm --load-format safetensors'
    )
    code, output, config, settings = served(*line.split())
    assert code == 0, output
    assert settings.names == ("a", "b")
    assert (config.model, config.dtype, config.generation_config) == ("tiny", "float16", "vllm")
    assert config.speculative is not None
    assert (config.speculative.method, config.load_format, config.enforce_eager) == ("ngram", "auto", False)
    assert "--swap-space 4: no effect; nothing is swapped" in output
    assert "prompts are always computed in chunks" in output


def test_names_before_the_path(served: Any) -> None:
    assert served("--served-model-name", "me", "tiny")[3].names == ("me",)
    assert served("--served-model-name", "me", "you", "--max-num-seqs", "1", "tiny")[3].names == ("me", "you")
    assert served("--served-model-name", "me", "--served-model-name=you")[3].names == ("me", "you")


def test_a_file_of_flags(served: Any, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: tiny-hybrid\nserved-model-name: [x, y]\nmax_num_seqs: 3\nenforce-eager: true\nport: 1234\n"
        "enable-prefix-caching: false\ntensor-parallel-size: 1\nspeculative-config:\n  method: ngram\nquantization:\n"
        "context-length: 256\n"
    )
    code, output, config, settings = served("--config", str(file), "--port", "99", "--max-model-len", "512")
    assert code == 0, output
    assert (config.model, settings.names, settings.port) == ("tiny-hybrid", ("x", "y"), 99)
    assert (config.max_num_seqs, config.enforce_eager, config.enable_prefix_caching) == (3, True, False)
    assert config.max_model_len == 512
    assert config.speculative.method == "ngram"
    code, output, config, settings = served("tiny", f"--config={file}", "--served-model-name", "z")
    assert (code, config.model, settings.names) == (0, "tiny", ("z",))
    for text, says in (("- a", "give a mapping"), ("a: [", "is not valid YAML"), ("max-num-seq: 3", "nearest known")):
        file.write_text(text)
        code, output, config, _ = served("--config", str(file))
        assert (code, config) == (2, None)
        assert says in output


# ---- what is printed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explained() -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, ["explain", "tiny", "--json", *SMALL]).stdout)


def cells(info: dict[str, Any]) -> list[str]:
    """What ``explain`` says, cell by cell."""
    decisions = [str(cell) for decision in info["decisions"] for cell in decision.values()]
    passes = [str(row["features"]) for row in info["graphs"]]
    return [*map(str, info["settings"].values()), *decisions, *passes]


def test_explain_through_a_pipe_cuts_nothing(explained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pipe = io.StringIO()
    monkeypatch.setattr(cli_output, "stdout", Console(file=pipe))
    cli_output.print_tables(explained)
    missing = [cell for cell in cells(explained) if cell not in pipe.getvalue()]
    assert not missing
    assert "…" not in pipe.getvalue()


def test_explain_on_a_narrow_terminal_cuts_nothing(explained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux says so when the other side is closed
            while part := os.read(ours, 65536):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(cli_output, "stdout", Console(file=terminal, width=80))
        assert cli_output.stdout.is_terminal
        cli_output.print_tables(explained)
    reader.join(30)
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(shown).decode()).splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join("".join(lines).split())  # wrapped lines and all, without white space
    missing = [cell for cell in cells(explained) if "".join(cell.split()) not in text]
    assert not missing


def test_a_server_by_its_flags(tmp_path: Path) -> None:
    """TLS, CORS, names and a template, from a file and flags; each stage of the start is a line."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *make.split(), *files], check=True, capture_output=True)
    file, log = tmp_path / "flags.yaml", tmp_path / "log"
    file.write_text(f"ssl-keyfile: {key}\nssl-certfile: {certificate}\nport: 0\nserved-model-name: [a, b]\n")
    flags = ["--config", str(file), "--chat-template", "{{ messages[0].content }}", *SMALL]
    flags += ["--allowed-origins", '["https://here"]', "--allow-credentials", "--generation-config", "vllm"]
    process = subprocess.Popen([*UNISONO, "serve", *flags], cwd=ROOT, stderr=log.open("w"))
    try:
        end = time.monotonic() + 90
        while (found := re.search(r"Serving a, b on (https://\S+)/v1", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        lines = log.read_text().splitlines()
        assert lines[0].startswith("Starting the engine")
        assert any(line.startswith("Loading the model") for line in lines)
        with httpx.Client(base_url=found[1], verify=ssl.create_default_context(cafile=certificate), timeout=30) as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["a", "b"]
            asked = {"Origin": "https://here", "Access-Control-Request-Method": "POST"}
            allowed = http.options("/v1/chat/completions", headers=asked)
            assert allowed.headers["access-control-allow-origin"] == "https://here"
            assert http.options("/v1/models", headers={**asked, "Origin": "https://there"}).status_code == 400
            body = {"model": "b", "messages": [{"role": "user", "content": "def add"}], "max_tokens": 2}
            answer = http.post("/v1/chat/completions", json=body, headers={"Origin": "https://here"})
            assert answer.headers["access-control-allow-origin"] == "https://here"
            assert answer.json()["usage"]["prompt_tokens"] == 2  # no marks of the checkpoint's own template
            settings = http.get("/server_info").json()["engine"]["settings"]
            assert settings["generation_config"] == "vllm"
    finally:
        process.terminate()
        process.wait(60)
