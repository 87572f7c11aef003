"""The page's Markdown tree (``markdown.js``), in Node.js: tags, links, places in the source, and growing texts."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import ROOT

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js")
PAGE = ROOT / "unisono" / "http" / "page"
SCRIPT = """
import { readFileSync } from "node:fs";
import { growing, parse, safeLink } from "./page/markdown.js";
const { sources, links, pieces } = JSON.parse(readFileSync(0));
const grown = pieces.map((parts) => {
  let [source, stable, kept, shown] = ["", 0, 0, []];
  for (const part of parts) {
    source += part;
    const blocks = parse(source, stable);
    shown.length = kept;
    const open = growing(source, blocks);
    blocks.forEach((block, at) => {
      if (at === open) [stable, kept] = [block.start, shown.length];
      shown.push(...block.nodes);
    });
  }
  return { shown, whole: parse(source).flatMap((block) => block.nodes) };
});
console.log(JSON.stringify({ trees: sources.map((one) => parse(one)), links: links.map(safeLink), grown }));
"""
SOURCES = {
    "html": "<script>x()</script>\n\na <img src=x onerror=y> <b>b</b>",
    "block": "# T\n\n- a\n- b `c`\n\n1. x\n\n> q *e*\n\n| h |\n|:-:|\n| **v** |\n\n---\n",
    "code": "```js\nlet a;\n\n  b\n```\n\n    indented\n",
    "open": "```js\nlet a",
    "entities": "1 &lt; 2 &#x41;&#66; &nope; &amp;lt; &#0; \\* \\(x\\)",
    "links": "[a](https://x.y/p) [b](javascript:1) ![c](https://x.y/c.png) https://x.y/d <https://x.y/e> <br>",
    "place": "[a](http://b/c)c",
}
LINKS = {
    "https://a.b": "https://a.b", "HTTP://a.b": "HTTP://a.b", "mailto:a@b.c": "mailto:a@b.c", "http://a\tb": "http://ab",
    "javascript:1": None, " javascript:1": None, "java\nscript:1": None, "\x00javascript:1": None, "JAVASCRIPT:1": None,
    "data:text/html,x": None, "vbscript:x": None, "blob:x": None, "file:///etc": None, "//a.b": None,
    "a/b": None, "": None, "\u200bhttps://a.b": "https://a.b",
}  # fmt: skip
TEXT = """# A *title*

Words, **bold** and `code`
over two lines.

1. one
2. two
   - inner
   - [x] done

| a | b |
|---|---|
| 1 | 2 |

```python
def f():
    return "**no**"

```
> quoted
> text

Last ~~line~~ &amp; [link](https://x.y)
"""


TURNING = [["1. a", "\n", "*", "**b** c\n"], ["a\n", "*", "**", "b"], ["- a\n", "```", "`b`\n"]]
"""A block begins, and with the next piece its line belongs to the block before."""


def pieces() -> list[list[str]]:
    """The text in pieces of several lengths, as tokens cut it."""
    cut = [[TEXT[at : at + size] for at in range(0, len(TEXT), size)] for size in (1, 2, 3, 5, 7, 31)]
    return [*cut, *TURNING]


@cache
def answer(directory: Path) -> dict[str, Any]:
    shutil.copytree(PAGE, directory / "page")
    (directory / "package.json").write_text('{"type": "module"}')
    (directory / "script.js").write_text(SCRIPT)
    given = json.dumps({"sources": list(SOURCES.values()), "links": list(LINKS), "pieces": pieces()})
    assert NODE is not None
    done = subprocess.run([NODE, "script.js"], cwd=directory, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answer(tmp_path_factory.mktemp("node"))


def written(nodes: list[dict[str, Any]]) -> str:
    """Nodes in short: ``tag[…]``."""
    parts = []
    for node in nodes:
        if "text" in node:
            parts.append(node["text"])
        elif "code" in node:
            parts.append(f"CODE:{node['language']}[{written(node['children'])}]")
        else:
            props = "".join(f" {name}={value}" for name, value in node["props"].items())
            parts.append(f"{node['tag']}{props}[{written(node['children'])}]")
    return "".join(parts)


EXPECTED = {
    "html": "p[<script>x()</script>]p[a <img src=x onerror=y> <b>b</b>]",
    "block": (
        "h3[T]ul[li[a]li[b code[c]]]ol[li[x]]blockquote[p[q em[e]]]"
        "table[thead[tr[th className=to-center[h]]]tbody[tr[td className=to-center[strong[v]]]]]hr[]"
    ),
    "code": "CODE:js[let a;\n\n  b]CODE:[indented]",
    "open": "CODE:js[let a]",
    "entities": "p[1 < 2 AB &nope; &lt; &#0; * \\(x\\)]",
    "links": (
        "p[a href=https://x.y/p[a] b a href=https://x.y/c.png[🖼 c] a href=https://x.y/d[https://x.y/d] "
        "a href=https://x.y/e[https://x.y/e] br[]]"
    ),
    "place": "p[a href=http://b/c[a]c]",
}


@pytest.mark.parametrize("name", SOURCES)
def test_trees(told: dict[str, Any], name: str) -> None:
    blocks = told["trees"][list(SOURCES).index(name)]
    assert written([node for block in blocks for node in block["nodes"]]) == EXPECTED[name]


def leaves(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [leaf for node in nodes for leaf in ([node] if "text" in node else leaves(node["children"]))]


@pytest.mark.parametrize("name", SOURCES)
def test_places_in_the_source(told: dict[str, Any], name: str) -> None:
    """Blocks take the whole source in order; a text is where it says, and texts are in order."""
    source, blocks = SOURCES[name], told["trees"][list(SOURCES).index(name)]
    assert [block["start"] for block in blocks] == [0, *(block["end"] for block in blocks[:-1])]
    assert blocks[-1]["end"] == len(source)
    found = leaves([node for block in blocks for node in block["nodes"]])
    assert [leaf["at"] for leaf in found] == sorted(leaf["at"] for leaf in found)
    for leaf in found:
        if not leaf["span"]:
            assert source[leaf["at"] :].startswith(leaf["text"])


def test_a_links_address_is_no_place_of_text(told: dict[str, Any]) -> None:
    (block,) = told["trees"][list(SOURCES).index("place")]
    assert [leaf["at"] for leaf in leaves(block["nodes"])] == [1, 15]


def test_links_lead_to_the_web_only(told: dict[str, Any]) -> None:
    assert dict(zip(LINKS, told["links"], strict=True)) == LINKS


def test_a_growing_text_ends_as_the_whole_one(told: dict[str, Any]) -> None:
    for one in told["grown"]:
        assert one["shown"] == one["whole"]
    assert "strong[bold]" in written(told["grown"][0]["whole"])
