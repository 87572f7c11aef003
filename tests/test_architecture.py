"""The rules of the code base, enforced on syntax trees: import directions, sizes, no algorithm names in the engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "unisono"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parent
TRAINING = sorted((ROOT / "training").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What each package may import from the project, lazy imports included. A package may always import itself.
ALLOWED = {
    "token_tree": set(),
    "structured_outputs": set(),
    "results": set(),
    "errors": set(),
    "media": {"results"},
    "types": {"errors", "media", "token_tree", "structured_outputs", "results"},
    "program": set(),
    "heap": set(),
    "bars": set(),
    "prompts": set(),
    "checkpoint_files": {"types"},
    "hub": {"types", "checkpoint_files"},
    "lora": {"types"},
    "catalog": {"types", "hub", "checkpoint_files"},
    "vectors": {"types"},
    "config": {"types", "vectors", "preflight"},
    "channel": set(),
    "forks": {"channel"},
    "templates": {"channel", "forks"},
    "untrusted": {"types"},
    "preflight": {"types", "catalog", "checkpoint_files", "hub", "untrusted"},
    "tokenizer": {"types", "templates", "untrusted", "checkpoint_files"},
    "request_checks": {"types"},
    "frontend": {"types", "media", "vectors", "tokenizer", "request_checks", "channel", "forks"},
    "kernels": {"types"},
    "distributed": {"types", "kernels", "channel"},
    "graphs": {"program"},
    "layers": {"types", "kernels", "distributed", "preflight"},
    "attention": {"types", "program", "state", "kernels", "layers"},
    "models": {
        "types", "program", "state", "catalog", "kernels", "layers", "attention", "distributed", "untrusted",
        "checkpoint_files", "preflight",
    },
    "drafters": {"types", "program", "state", "kernels", "distributed", "layers", "attention", "models"},
    "sampling": {"types", "kernels", "distributed"},
    "transport": {"types"},
    "state": {"types", "program", "kernels"},
    "grammar": {"types", "tokenizer", "channel", "forks"},
    "passes": {
        "types", "program", "vectors", "state", "kernels", "distributed", "models", "drafters", "sampling",
        "attention", "grammar",
    },
    "engine": {
        "types", "program", "catalog", "config", "kernels", "layers", "attention", "models", "drafters", "passes",
        "sampling", "graphs", "state", "distributed", "request_checks", "transport", "channel", "forks",
    },
    "flag_table": {"types"},
    "llm_arguments": {"types", "config", "flag_table", "lora", "preflight"},
    "llm_calls": {"types"},
    "llm": {
        "types", "bars", "config", "engine", "tokenizer", "frontend", "llm_arguments", "llm_calls", "lora",
        "preflight", "results",
    },
    "async_llm": {"types", "engine", "frontend", "llm", "llm_calls", "lora"},
    "server": {"types", "heap", "vectors", "tokenizer", "frontend"},
    "tools": {
        "types", "heap", "catalog", "config", "llm", "tokenizer", "state", "models", "attention", "cli_help",
        "cli_output", "cli_values", "frontend", "preflight",
    },
    "ray_serve": {"types", "catalog", "config", "server"},
    "cli_aliases": {"types", "flag_table"},
    "cli_config": {"types", "flag_table"},
    "cli_help": {"types", "flag_table"},
    "cli_output": {"types", "bars", "cli_help"},
    "cli_values": {"types", "catalog"},
    "cli_engine_flags": {"catalog"},
    "cli_commands": {"types", "heap", "cli_output", "config", "engine", "frontend", "llm", "preflight", "tools"},
    "cli": {
        "types", "catalog", "config", "cli_aliases", "cli_commands", "cli_config", "cli_engine_flags", "cli_help",
        "cli_output", "cli_values", "lora",
        "hub", "frontend", "preflight", "server", "tools",
    },
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The packages and top-level modules of ``unisono`` that a file imports, lazy imports included."""
    return {name.split(".")[1] for name in modules(path) if name.startswith("unisono.")}


def modules(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, lazy imports included. ``from a import b`` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_directions(path: Path) -> None:
    name = room(path)
    if name in ("__init__", "__main__"):
        return
    wrong = imports(path) - ALLOWED[name] - {name, "__version__"}
    assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_the_package_needs_no_checkout() -> None:
    """``training`` and ``tests`` are not installed."""
    for path in FILES:
        outside = {name for name in modules(path) if name.split(".")[0] in ("training", "tests", "benchmarks")}
        assert not outside, f"{path} imports {sorted(outside)}"


def test_test_modules_import_no_test_module() -> None:
    """What several test modules share belongs into a helper module, whose name does not begin with ``test_``."""
    names = {str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path for path in TESTS}
    tests = {name for name, path in names.items() if path.name.startswith("test_")}
    for name, path in names.items():
        wrong = modules(path) & tests
        assert not wrong, f"{name} imports {sorted(wrong)}"


@pytest.mark.parametrize("path", [*FILES, *TRAINING], ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "a file has at most 500 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            size = node.end_lineno - node.lineno + 1
            assert size <= 60, f"{node.name} has {size} lines"


@pytest.mark.parametrize("path", [*FILES, *TRAINING], ids=lambda p: str(p.relative_to(ROOT)))
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
    """The engine, graphs, sampling and state know the Drafter protocol, never a drafter by name."""
    algorithm = re.compile(r"\b(eagle3?|mtp|nextn|ngram|suffix_decoding|standalone)\b", re.IGNORECASE)
    for path in FILES:
        if room(path) in ("engine", "passes", "graphs", "sampling", "state", "program", "kernels"):
            hit = algorithm.search(path.read_text())
            assert hit is None, f"{path} names {hit.group(0)!r}"


def circle_in(edges: Mapping[str, Collection[str]]) -> str | None:
    """A circle among these edges, as a chain of names; None where there is none."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> str | None:
        if name in above:
            return " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for below in sorted(edges.get(name, ())):
                if found := visit(below, (*above, name)):
                    return found
            done.add(name)
        return None

    return next(filter(None, (visit(name, ()) for name in edges)), None)


def modules_imported(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of the project that a file imports, lazily and under TYPE_CHECKING included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
    return found & set(modules)


def test_rooms_import_one_way() -> None:
    circle = circle_in({name: allowed - {name} for name, allowed in ALLOWED.items()})
    assert circle is None, circle


def test_modules_import_one_way() -> None:
    names = {
        ".".join(("unisono", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in FILES
    }
    circle = circle_in({name: modules_imported(path, names) - {name} for name, path in names.items()})
    assert circle is None, circle


def test_nothing_names_a_feature() -> None:
    """What makes, runs and reads passes knows the Feature protocol, never a feature by name."""
    named = re.compile(
        r"grammar|matcher|\bmasked\b|logprob|log-prob|embedd|overrid|return_hidden|structured"
        r"|picture|\bmedia\b|vision|encoder",
        re.IGNORECASE,
    )
    engine = ("scheduler", "sequence", "engine", "batch", "draft_controller")
    passes = ("modules", "extend", "round", "verify", "tree", "acceptance")
    for path in [PACKAGE / "engine" / f"{name}.py" for name in engine] + [
        PACKAGE / "passes" / f"{name}.py" for name in passes
    ]:
        text = path.read_text()
        for protocol in ("override_embeddings", "Overriding", "unisono.models.overriding", "hf_overrides"):
            text = text.replace(protocol, "")
        hit = named.search(text)
        assert hit is None, f"{path} names {hit.group(0)!r}"
