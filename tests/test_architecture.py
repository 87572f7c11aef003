"""The rules of the code base, enforced on syntax trees: import directions, sizes, no algorithm names in the engine."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.tiers import in_unit_tier

PACKAGE = Path(__file__).parent.parent / "unisono"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parent
TRAINING = sorted((ROOT / "training").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Packages that each package may import, lazy imports included. A package may always import itself.
ALLOWED = {
    "types": set(),
    "graphs": set(),
    "sandbox": set(),
    "config": {"types"},
    "kernels": {"types", "config"},
    "transport": {"types"},
    "kv": {"types", "graphs", "kernels"},
    "distributed": {"types", "config", "sandbox", "kernels"},
    "layers": {"types", "config", "kernels", "distributed"},
    "attention": {"types", "graphs", "kv", "kernels", "layers"},
    "models": {"types", "config", "graphs", "kv", "kernels", "distributed", "layers", "attention"},
    "drafters": {"types", "config", "graphs", "kv", "kernels", "distributed", "layers", "attention", "models"},
    "sampling": {"types", "kernels", "distributed"},
    "text": {"types", "config", "sandbox"},
    "media": {"types", "sandbox"},
    "structured_output": {"types", "sandbox", "text"},
    "frontend": {"types", "config", "text", "media"},
    "passes": {
        "types", "graphs", "kv", "kernels", "distributed", "attention", "models", "drafters", "sampling",
        "structured_output",
    },
    "engine": {
        "types", "config", "graphs", "sandbox", "kv", "kernels", "distributed", "layers", "attention", "models",
        "drafters", "sampling", "passes", "transport",
    },
    "cluster": {"types", "engine"},
    "http": {"types", "config", "text", "media", "frontend", "cluster"},
    "entrypoints": {"types", "config", "text", "media", "frontend", "engine", "cluster", "http"},
    "console": {"types", "config", "entrypoints"},
    "tools": {
        "types", "config", "text", "kv", "attention", "models", "drafters", "cluster", "entrypoints", "console",
    },
    "cli": {"types", "config", "text", "media", "engine", "cluster", "http", "entrypoints", "console", "tools"},
}  # fmt: skip


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The packages and top-level modules of ``unisono`` that a file imports, lazy imports included."""
    return {name.split(".")[1] for name in modules(path) if name.startswith("unisono.")}


def modules(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, lazy imports included. ``from a import b`` gives a and a.b."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_import_directions() -> None:
    for path in FILES:
        if (name := room(path)) not in ("__init__", "__main__"):
            wrong = imports(path) - ALLOWED[name] - {name, "__version__"}
            assert not wrong, f"{path}: {name} may not import {sorted(wrong)}"


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


def test_sizes() -> None:
    for path in (*FILES, *TRAINING):
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path} has {lines} lines; a file has at most 500"
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                assert size <= 60, f"{path}: {node.name} has {size} lines; a function has at most 60"


def test_modules_have_docstrings() -> None:
    for path in (*FILES, *TRAINING):
        if tree(path).body:
            assert ast.get_docstring(tree(path)), f"{path} has no module docstring"


def test_llguidance_is_imported_lazily() -> None:
    """Not before: servers without structured outputs do not need it."""
    for path in FILES:
        everywhere = [node for node in nodes(path) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for node in everywhere:
            names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            if any("llguidance" in name for name in names):
                assert room(path) == "structured_output", path
                assert node not in tree(path).body, path


def test_engine_names_no_drafter() -> None:
    """The engine, graphs, sampling and state know the Drafter protocol, never a drafter by name."""
    algorithm = re.compile(r"\b(dflash2?|dspark|eagle3?|mtp|nextn|ngram|suffix_decoding|standalone)\b", re.IGNORECASE)
    for path in FILES:
        if room(path) in ("engine", "passes", "graphs", "sampling", "kv", "kernels"):
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
    for node in nodes(path):
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


def test_engine_names_no_feature() -> None:
    """What makes, runs and reads passes knows the Feature protocol, never a feature by name."""
    named = re.compile(
        r"grammar|matcher|\bmasked\b|logprob|log-prob|embedd|overrid|return_hidden|structured"
        r"|picture|\bmedia\b|vision|encoder",
        re.IGNORECASE,
    )
    engine = ("scheduling/scheduler", "sequence", "engine", "worker/batch", "scheduling/draft_controller")
    passes = ("context", "extend", "round", "verify", "tree", "acceptance")
    for path in [PACKAGE / "engine" / f"{name}.py" for name in engine] + [
        PACKAGE / "passes" / f"{name}.py" for name in passes
    ]:
        text = path.read_text()
        for protocol in (
            "override_embeddings",
            "Overriding",
            "unisono.models.blocks.embedding_overrides",
            "hf_overrides",
        ):
            text = text.replace(protocol, "")
        hit = named.search(text)
        assert hit is None, f"{path} names {hit.group(0)!r}"


def test_tiers() -> None:
    """The unit tier has tests of bookkeeping and models, and no test of an engine, a server or a kernel."""
    unit = {str(path.relative_to(ROOT / "tests")) for path in TESTS if path.name[:5] == "test_" and in_unit_tier(path)}
    assert {"kv/test_pages.py", "graphs/test_planner.py", "models/test_parity.py", "text/test_stop_regex.py"} <= unit
    started = {
        "engine/test_engine.py",
        "http/test_api.py",
        "graphs/test_matrix.py",
        "test_docs.py",
        "tools/test_soak.py",
    }
    assert not started & unit
