"""The house's rules, enforced on the AST: import directions, sizes, no algorithm names where none belong."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "unisono"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the project. Lazy imports count. A room may always import itself.
ALLOWED = {
    "token_tree": set(),
    "structured_outputs": set(),
    "results": set(),
    "types": {"token_tree", "structured_outputs", "results"},
    "program": set(),
    "heap": set(),
    "catalog": {"types"},
    "vectors": {"types"},
    "config": {"types"},
    "tokenizer": {"types"},
    "kernels": {"types"},
    "distributed": {"types"},
    "graphs": {"program"},
    "layers": {"types", "kernels", "distributed"},
    "attention": {"types", "program", "kernels", "layers"},
    "models": {"types", "program", "state", "catalog", "kernels", "layers", "attention", "distributed"},
    "drafters": {"types", "program", "state", "kernels", "layers", "attention", "models"},
    "sampling": {"types", "kernels"},
    "cache": {"types"},
    "state": {"types", "program", "kernels"},
    "grammar": {"types", "tokenizer"},
    "passes": {
        "types", "program", "vectors", "cache", "state", "kernels", "models", "drafters", "sampling", "attention",
        "grammar",
    },
    "engine": {
        "types", "program", "catalog", "config", "kernels", "layers", "attention", "models", "drafters", "passes",
        "sampling", "graphs", "cache", "state", "distributed",
    },
    "llm": {"types", "vectors", "config", "engine", "tokenizer"},
    "server": {"types", "heap", "vectors", "catalog", "config", "engine", "tokenizer"},
    "tools": {"types", "heap", "catalog", "config", "llm", "tokenizer", "cache", "models", "attention"},
    "cli": {"types", "catalog", "config", "tokenizer", "llm", "server", "tools"},
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms that a file imports, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "unisono" else [f"unisono.{a.name}" for a in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("unisono.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_directions(path: Path) -> None:
    name = room(path)
    if name in ("__init__", "__main__"):
        return
    wrong = imports(path) - ALLOWED[name] - {name, "__version__"}
    assert not wrong, f"{name} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "a file past 500 lines: the design is telling you something"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            size = node.end_lineno - node.lineno + 1
            assert size <= 60, f"{node.name} has {size} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_xgrammar_is_imported_where_a_grammar_is_used() -> None:
    """Not before: it takes a second, and brings torch into processes that have none."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        everywhere = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for node in everywhere:
            if any("xgrammar" in name for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]):
                assert room(path) == "grammar", path
                assert node not in tree.body, path


def test_nothing_names_an_algorithm() -> None:
    """The engine, graphs, sampling and cache know the Drafter protocol, never a drafter by name."""
    algorithm = re.compile(r"\b(eagle3?|mtp|nextn|ngram|suffix_decoding|standalone)\b", re.IGNORECASE)
    for path in FILES:
        if room(path) in ("engine", "passes", "graphs", "sampling", "cache", "program", "kernels"):
            hit = algorithm.search(path.read_text())
            assert hit is None, f"{path} names {hit.group(0)!r}"


def test_no_package_cycles() -> None:
    edges = {name: allowed - {name} for name, allowed in ALLOWED.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"cycle: {' -> '.join((*above, name))}"
        if name not in done:
            for below in edges.get(name, ()):
                visit(below, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_nothing_names_a_feature() -> None:
    """What makes, runs and reads passes knows the Feature protocol, never a feature by name."""
    named = re.compile(
        r"grammar|matcher|\bmasked\b|logprob|log-prob|embedd|overrid|return_hidden|structured", re.IGNORECASE
    )
    engine = ("scheduler", "sequence", "engine", "batch", "draft_controller")
    passes = ("modules", "extend", "round", "verify", "tree", "acceptance")
    for path in [PACKAGE / "engine" / f"{name}.py" for name in engine] + [
        PACKAGE / "passes" / f"{name}.py" for name in passes
    ]:
        text = path.read_text().replace("override_embeddings", "").replace("Overriding", "")
        hit = named.search(text)
        assert hit is None, f"{path} names {hit.group(0)!r}"
