"""Imports of the processes of a start, in the order of the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.conftest import ROOT, Server, Start


def has_torch(server: Server) -> bool:
    return "libtorch" in Path(f"/proc/{server.process.pid}/maps").read_text()


SLOW = ("torch", "transformers", "triton", "numpy", "fastapi", "starlette", "uvicorn", "click", "prometheus_client",
        "opentelemetry", "jinja2", "PIL", "httpx")  # fmt: skip
"""Packages that no command line needs before its engine process has started. New versions of typer import pydantic."""


def output(code: str, *arguments: str) -> str:
    """Standard output of a new interpreter."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.stdout.strip()


def test_the_engine_starts_before_a_server_imports_slow_packages() -> None:
    """From the program's entry on."""
    code = "import sys; from unisono.cluster.client import EngineClient"
    code += f"\ndef start(self): print([m for m in {SLOW} if m in sys.modules], flush=True); raise SystemExit"
    code += "\nEngineClient.start = start; from unisono.__main__ import main; main()"
    assert output(code, "serve", "tiny", "--port", "0", "--device", "cpu") == "[]"


def test_a_service_imports_no_torch() -> None:
    code = "import sys, unisono.cli.main, unisono.http.build\n"
    code += "print([m for m in ('torch', 'transformers', 'triton', 'jinja2', 'PIL', 'httpx') if m in sys.modules])"
    assert output(code) == "[]"


def test_an_engine_process_imports_no_command_line() -> None:
    """multiprocessing imports the installed program again, which is ``unisono.__main__`` and calls nothing."""
    code = "import sys, unisono.__main__, unisono.cluster.engine_process\n"
    code += "print([m for m in ('typer', 'rich', 'unisono.cli') if m in sys.modules])"
    assert output(code) == "[]"


def test_an_engine_starts_without_templates_and_http() -> None:
    """All that an engine process imports until it can take requests, which are rendered and tokenized elsewhere."""
    absent = ("transformers", "tokenizers", "jinja2", "typer", "rich", "fastapi", "pydantic", "uvicorn", "PIL",
              "prometheus_client", "opentelemetry", "httpx", "sympy", "torch._dynamo", "numpy.testing")  # fmt: skip
    code = "import sys; from unisono.cluster.engine_process import load_factory"
    code += "\nfrom unisono.config import EngineConfig; make = load_factory('unisono.engine.engine:Engine')"
    code += "\nmake(EngineConfig('tiny', device='cpu', graph_capture='lazy'), lambda stage, share: None)"
    code += f"\nprint([name for name in {absent} if name in sys.modules])"
    assert output(code) == "[]"


def test_engines_import_no_http_client() -> None:
    """It brings a command line of its own, 0.3 s; engines that fetch pictures import it then."""
    code = "import sys; from unisono import LLM; LLM"
    code += "\nprint([m for m in ('httpx', 'click', 'rich', 'fastapi', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_start_on_a_cpu_imports_no_sympy() -> None:
    """torch imports it, in 0.8 s, for shapes of meta tensors; captures made it do so."""
    code = "import sys; from unisono import LLM, SamplingParams; llm = LLM('tiny', device='cpu', graph_capture='lazy')"
    code += "\nllm.generate('a', SamplingParams(max_tokens=3, ignore_eos=True))"
    code += "\nassert len(list(llm.engine.runner.planner.graphs())) == 2"
    code += "\nprint([m for m in ('sympy', 'torch._dynamo', 'torch._inductor') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads which libraries a process has")
def test_server_imports_torch_only_for_embeddings(model_dir: Path, start: Start) -> None:
    """transformers imports torch with its tokenizers, unless it is told that there is none."""
    server = start(model_dir, fresh=True, enable_return_hidden_states=True)
    assert "PyTorch" not in server.log.read_text()
    body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    answer = server.http.post("/v1/embeddings", json={"model": "fake", "input": [5, 6, 7]})
    assert len(answer.json()["data"][0]["embedding"]) == 6
    answer = server.http.post("/generate", json={"input_ids": [5, 6], "return_hidden_states": True})
    assert answer.json()["meta_info"]["hidden_states"]
    assert not has_torch(server)
    assert has_torch(start(fresh=True, enable_prompt_embeds=True))
