"""Chat templates that take all time or memory: they end their own process, and the request that used them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Server, Start, servers
from unisono.text.templates import renderer as templates
from unisono.text.templates.renderer import Renderer, TemplateFailed, TemplateTooHard
from unisono.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hello"}]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOOPS = "{% for x in range(99999) %}" * 3 + "{% endfor %}" * 3
HARD = {
    "nested loops": LOOPS,
    "a string bomb": "{% set x = 'a' * 10**10 %}{{ x }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "endless text": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 500 + "{% endfor %}{% endfor %}",
    "a format": "{{ '%0999999999d' % 5 }}",
    "a macro": "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}",
}
REACHING = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/reached') }}",
    "{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ (messages|attr('__class__')) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    assert renderer.render(PLAIN, HI) == "<user>Hello"
    yield renderer
    renderer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "PATIENCE", 10.0)


@pytest.mark.parametrize("text", HARD.values(), ids=list(HARD))
def test_templates_beyond_time_or_memory_limits_are_killed(renderer: Renderer, text: str) -> None:
    template = renderer._forks._template
    assert template is not None
    with pytest.raises((TemplateTooHard, TemplateFailed)):
        renderer.render(text, HI)
    assert renderer.render(PLAIN, HI, add_generation_prompt=True) == "<user>Hello<assistant>"
    assert renderer._forks._template is template, "another process is forked, not started"
    assert template._process.poll() is None


@pytest.mark.parametrize("text", REACHING)
def test_templates_cannot_reach_python_internals(renderer: Renderer, text: str) -> None:
    try:
        found = renderer.render(text, HI)
    except TemplateFailed:
        return
    assert "<class" not in found
    assert "function" not in found


def test_as_transformers_renders(renderer: Renderer, model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer is not None
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief. ", "name": None},
        {"role": "user", "content": "é💥"},
        {"role": "assistant", "content": "So", "reasoning_content": "hm"},
    ]
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        wanted = tokenizer.backend.apply_chat_template(messages, tokenize=False, **options)
        assert tokenizer.apply_chat_template(messages, **options) == wanted


def test_a_process_that_was_killed_is_replaced(renderer: Renderer) -> None:
    template = renderer._forks._template
    assert renderer._own.channel is not None
    assert template is not None
    os.kill(template.fork()[1], signal.SIGKILL)
    template._process.kill()
    template._process.wait()
    renderer._leave()
    assert renderer.render(PLAIN, HI) == "<user>Hello"


def with_template(model_dir: Path, directory: Path, text: str) -> Path:
    shutil.copytree(model_dir, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(text)
    return directory


def test_a_template_that_takes_too_much_refuses_the_start(model_dir: Path, tmp_path: Path, start: Start) -> None:
    server = start(with_template(model_dir, tmp_path / "model", LOOPS), ready=False)
    assert server.wait(60) == 1
    assert "CheckpointError: The chat template cannot be used: it takes more than 2 s" in server.log.read_text()


@pytest.fixture(scope="module")
def trapped(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its template is harmless till somebody says so."""
    text = "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}" + PLAIN
    with servers(tmp_path_factory) as start:
        yield start(with_template(model_dir, tmp_path_factory.mktemp("model"), text))


def test_a_request_that_sets_a_template_off_fails_alone(trapped: Server) -> None:
    bomb = {"messages": [{"role": "user", "content": "bomb"}], "max_tokens": 2}
    answer = trapped.http.post("/v1/chat/completions", json=bomb)
    assert answer.status_code == 400
    assert "chat template cannot write these messages" in answer.json()["error"]["message"]
    answer = trapped.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2})
    assert answer.status_code == 200
