"""What the API process loads: torch, as long to import as all else together, only where a server takes embeddings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.conftest import ROOT, Server, Start


def has_torch(server: Server) -> bool:
    return "libtorch" in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_serve_imports_no_torch() -> None:
    code = "import sys, unisono.cli.main, unisono.http.server\n"
    code += "from unisono.config import EngineConfig; EngineConfig('tiny')\n"
    code += "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


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
