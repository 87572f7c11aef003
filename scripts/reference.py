"""Writes the parts of docs/ that come from code: ``make reference``, or ``python scripts/reference.py [PART …]``.

A part stands in its page between ``<!-- NAME -->`` and ``<!-- end -->``:

* flags: the flags of every command, by group. aliases: names of vLLM and SGLang.
* fields: the request body fields that are honoured and refused. limits, parameters: the limits of fields and of paths.
* environment: the environment variables. others: those of vLLM and SGLang.
* formats: the weight formats.
* structured: what structured outputs enforce.
* families: the families of the table of decoders.
* matrix: feature × speculation × graphs, from the cells of the test matrix.
* pairs: feature × feature, from tests/feature_pairs.toml.
* metrics: the series of ``/metrics``. This part starts three servers and takes half a minute; name it to write it.

``tests/test_docs.py`` compares the pages with the code. ``--check`` exits 1 if a page differs, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"

# ---- flags ------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command by its name after ``unisono``, subcommands of ``bench`` included."""
    from unisono.cli.main import LAZY, app

    found: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name, load in LAZY.items():
        command = typer.main.get_command(load())
        del found[name]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {sub}": each for sub, each in inner.items()}
    return found


def options(command: Any) -> list[Any]:
    """The flags of a command that its help shows."""
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]


def flags() -> str:
    """Tables of the flags of ``serve`` by group, then of what other commands have beside these."""
    from unisono.console.help import GROUPS, group_of

    every = commands()
    serve = {option.name: option for option in options(every["serve"])}
    lines = []
    for name, (text, _) in GROUPS.items():
        group = [o for o in serve.values() if (o.rich_help_panel or group_of(o.name, "server")) == name]
        if group:
            lines += [f"### {name.capitalize()}", "", f"{text}.", "", *flag_table(group), ""]
    for name, command in every.items():
        own = [o for o in options(command) if o.name not in serve]
        if name != "serve" and own:
            summary = " ".join((command.help or "").split("\n\n")[0].split())
            lines += [f"### unisono {name}", "", summary, ""]
            if len(own) + 20 < len(options(command)):
                lines += ["The command also takes the flags of an engine that `serve` has.", ""]
            lines += [*flag_table(own), ""]
    return "\n".join(lines)


def flag_table(group: list[Any]) -> list[str]:
    rows = ["| Flag | Default | Meaning |", "|---|---|---|"]
    for option in sorted(group, key=lambda each: each.opts[0].lstrip("-")):
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        text = (option.help or "").replace("|", "\\|")
        environment = f" Environment: `{option.envvar}`." if option.envvar else ""
        rows.append(f"| {names} | {default_of(option)} | {text}{environment} |")
    return rows


def default_of(option: Any) -> str:
    """The default as the table shows it; a dash for none."""
    default = option.default
    if getattr(option, "is_flag", False):
        return "on" if default else "off"
    if default in (None, (), [], "") or callable(default):
        return "–"
    if isinstance(default, list | tuple):
        default = " ".join(map(str, default))
    return f"`{default}`"


def aliases() -> str:
    from unisono.config.flag_aliases import markdown

    return markdown() + "\n"


def families() -> str:
    """Table of the rows of the table of decoders."""
    from unisono.config.decoder_table import ROWS

    rows = ["| Architecture | Models | Beside Llama's layers |", "|---|---|---|"]
    rows += [f"| `{name}` | {row.models} | {row.layers} |" for name, row in ROWS.items()]
    return "\n".join(rows) + "\n"


# ---- fields of requests -----------------------------------------------------------------------------


def limits() -> str:
    from unisono.http.limits.fields import table

    return table()


def parameters() -> str:
    from unisono.http.limits.fields import parameter_table

    return parameter_table()


def other_variables() -> str:
    from unisono.config.env import markdown_of_others

    return markdown_of_others()


def environment() -> str:
    from unisono.config.env import markdown

    return markdown()


def structured() -> str:
    from unisono.structured_output.json_schema.formats import FORMATS, REFUSED
    from unisono.structured_output.json_schema.keywords import markdown
    from unisono.structured_output.syntax.structural_tag import KINDS
    from unisono.structured_output.syntax.xml_parameters import STYLES

    rows = [
        ("Formats that are enforced", _names(FORMATS)),
        ("Formats that are refused; other names of `format` are annotations", _names(REFUSED)),
        ("Parts of structural tags", _names(sorted(KINDS))),
        ("Styles of `json_schema` in structural tags", f"`json`, `python`, `gemma`, {_names(STYLES)}"),
    ]
    lists = "\n".join(["| List | Names |", "| --- | --- |", *(f"| {name} | {names} |" for name, names in rows)])
    return f"{markdown()}\n\n{lists}\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def fields() -> str:
    from unisono.http.openai.compatibility import page
    from unisono.http.openai.protocol import ChatRequest, CompletionRequest

    return page(ChatRequest.model_fields, CompletionRequest.model_fields)


# ---- the test matrix --------------------------------------------------------------------------------


def matrix() -> str:
    """Tables of the cells of test_matrix.py, test_columns.py and test_trees.py."""
    from tests.engine.matrix import TREE_DRAFTERS, TREES
    from tests.graphs import test_columns, test_matrix
    from tests.graphs.kinds import KINDS

    methods, quick = test_matrix.METHODS, test_matrix.FAST
    head = ["| | " + " | ".join(f"`{method}`" for method in methods) + " |", "|---|" + "---|" * len(methods)]
    lines = ["| Kind of graph | Flags | Prompt passes | Rounds |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        given = ", ".join(f"`{flag}={value}`" for flag, value in kind.flags.items())
        given += f", `attention_backend={kind.backend}`" * (kind.backend != "auto")
        lines.append(f"| {name} | {given} | {kind_of(kind.extend)} | {kind_of(kind.round)} |")
    lines += ["", "Table: kinds of graphs of the matrix.", "", *head]
    for feature in test_matrix.FEATURES:
        daily = [sum(m == method and feature in names for m, _, names in quick) for method in methods]
        lines.append(f"| {feature} | " + " | ".join(f"✓ {len(KINDS)} / {n}" for n in daily) + " |")
    for name, cells in (("trees: " + ", ".join(TREES), TREE_DRAFTERS),):
        lines.append(f"| {name} | " + " | ".join("✓ full / eager" if m in cells else "–" for m in methods) + " |")
    lines += ["", "Table: features of requests. `✓ 7 / 1`: seven kinds of graphs give the bytes of eager passes in", ""]
    lines[-2] += " `make test-all`, one of them in `make test`. –: the drafter has no trees."
    lines += head
    for name, column in test_columns.COLUMNS.items():
        daily = [sum(n == name and m == method for n, m, _ in test_columns.FAST) for method in methods]
        run = [not column.methods or method in column.methods for method in methods]
        cells = [f"✓ {len(KINDS)} / {n}" if ran else "–" for ran, n in zip(run, daily, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Table: ways to run an engine, with the same meaning of the numbers. –: not part of the matrix."]
    return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    """The kind on a GPU, for the name on a CPU, where a tape stands for a graph."""
    return {"tape": "full", "tape-segmented": "segmented", "tape-compiled": "compiled"}.get(name, name)


# ---- metrics ----------------------------------------------------------------------------------------


def metrics() -> str:
    """Series of three servers: replicas with an adapter and offload, a prefill engine, a decode engine."""
    from tests.models.make_adapters import make_adapter
    from unisono.config import catalog

    with tempfile.TemporaryDirectory() as folder:
        where = f"unix://{folder}/transfer"
        adapter = f"sql={make_adapter(Path(folder) / 'sql', catalog.bundled_path('tiny'), 1)}"
        replicas = ["--data-parallel-size", "2", "--cpu-offload-ratio", "1"]
        flags = [
            ["tiny", *replicas, "--enable-lora", "--lora-modules", adapter, "--served-model-name", "tiny"],
            ["tiny-vl", "--role", "prefill", "--transfer-listen", where],
            ["tiny", "--role", "decode", "--prefill-url", where],
        ]
        series: dict[str, tuple[str, str, set[str]]] = {}
        for each in flags:
            for name, kind, text, labels in scraped(each):
                series.setdefault(name, (kind, text, set()))[2].update(labels)
    rows = ["| Name | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for name, (kind, text, labels) in sorted(series.items()):
        shown = ", ".join(f"`{label}`" for label in sorted(labels - {"model_name", "engine", "le"})) or "–"
        rows.append(f"| `{name}` | {kind} | {shown} | {text} |")
    return "\n".join(rows) + "\n"


def scraped(flags: list[str]) -> Iterator[tuple[str, str, str, set[str]]]:
    """Name without prefix, kind, help and labels of each series of a server that answered one request."""
    small = ["--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "256", "--port", "0"]
    command = [sys.executable, "-m", "unisono", "serve", *flags, *small]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "UNISONO_TRANSFER_KEY": "reference"}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True)
        try:
            url = address(server, log)
            for model in (flags[0], "sql"):
                ask(f"{url}/v1/completions", {"model": model, "prompt": "def add(a, b):", "max_tokens": 8})
            time.sleep(1)  # the engine's next report
            page = ask(url + "/metrics")
        finally:
            server.terminate()
            server.wait(60)
    texts = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        if name.startswith(("process_", "python_")) or name.endswith("_created"):
            continue
        lines = re.findall(rf"^{re.escape(name)}(?:_total|_bucket|_count|_sum)?\{{(.*?)\}} ", page, re.MULTILINE)
        labels = {label for line in lines for label in re.findall(r'(\w+)="', line)}
        yield name.removeprefix("unisono:"), kind, texts.get(name, ""), labels


def address(server: subprocess.Popen[str], log: Any) -> str:
    """URL of a server from its log, once it is ready. Raises SystemExit if it ends."""
    for _ in range(1200):
        time.sleep(0.1)
        log.seek(0)
        text = log.read()
        found = re.search(r"https?://[\w.]+:(\d+)", text)
        if found and "tiny" in ask(f"http://127.0.0.1:{found[1]}/v1/models"):
            return f"http://127.0.0.1:{found[1]}"
        if server.poll() is not None:
            raise SystemExit(f"the server ended:\n{text}")
    raise SystemExit(f"the server did not start:\n{text}")


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """The answer's text, errors included; an empty text if there is no connection."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60).read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


# ---- weight formats -----------------------------------------------------------------------------


def formats() -> str:
    from unisono.layers.formats.documented import markdown

    return markdown()


# ---- pages ------------------------------------------------------------------------------------------


def pairs() -> str:
    """Tables of pairs of features. Raises PairError for an entry whose test does not exist."""
    from scripts.feature_pairs import Pairs

    return Pairs.read().tables()


PARTS: dict[str, tuple[Path, Callable[[], str]]] = {
    "flags": (REFERENCE / "flags.md", flags),
    "aliases": (REFERENCE / "flags.md", aliases),
    "fields": (REFERENCE / "request-fields.md", fields),
    "limits": (REFERENCE / "limits.md", limits),
    "parameters": (REFERENCE / "limits.md", parameters),
    "environment": (REFERENCE / "environment.md", environment),
    "others": (REFERENCE / "environment.md", other_variables),
    "formats": (ROOT / "docs/guide/quantise.md", formats),
    "structured": (ROOT / "docs/guide/structure.md", structured),
    "families": (REFERENCE / "models.md", families),
    "matrix": (REFERENCE / "same-bytes.md", matrix),
    "pairs": (REFERENCE / "feature-pairs.md", pairs),
    "metrics": (REFERENCE / "metrics.md", metrics),
}
SLOW = ("metrics",)
WHOLE = ("fields",)
"""Parts that are a page of their own."""


def current(part: str) -> str:
    """The part as its page has it. Raises SystemExit if the page lacks the markers."""
    return match(part)[1]


def match(part: str) -> re.Match[str]:
    page = PARTS[part][0]
    if part in WHOLE:
        return re.fullmatch("(.*)", page.read_text(), re.DOTALL)  # type: ignore[return-value]
    found = re.search(rf"<!-- {part} -->\n(.*?)<!-- end -->", page.read_text(), re.DOTALL)
    if found is None:
        raise SystemExit(f"{page.relative_to(ROOT)} has no part between <!-- {part} --> and <!-- end -->.")
    return found


def write(part: str) -> bool:
    """Write a part into its page. Returns True if it changed."""
    page, make = PARTS[part]
    text, found, made = page.read_text(), match(part), make()
    page.write_text(text[: found.start(1)] + made + text[found.end(1) :])
    return made != found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all but metrics")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a page differs")
    args = parser.parse_args()
    stale = []
    for part in args.parts or [name for name in PARTS if name not in SLOW]:
        if part not in PARTS:
            parser.error(f"{part} is unknown; the parts are {', '.join(PARTS)}.")
        changed = PARTS[part][1]() != current(part) if args.check else write(part)
        if changed:
            stale.append(part)
    if stale:
        print(f"reference: {'differs' if args.check else 'written'}: {', '.join(stale)}")
    sys.exit(bool(stale) and args.check)


if __name__ == "__main__":
    main()
