"""Grammars in Lark's notation: which texts match, and what is refused."""

from __future__ import annotations

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from unisono.grammar.lark_grammar import COMMON, LarkError, is_lark
from unisono.grammar.parse import parse

SUMS = """
?start: sum
?sum: product
    | sum "+" product   -> add
    | sum "-" product   -> sub
?product: atom
    | product "*" atom
    | product "/" atom
?atom: NUMBER -> number
     | "-" atom
     | "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
GREETING = r"""
start: greeting " " NAME ["!"] ("a".."c") ~ 2..3 // comment
greeting: "Hello"i | "hi"  # another
NAME.2: /[A-Z][a-z]*\/\d{2}/
"""
LISTS = """
start: "[" (pair ("," pair)*)? "]"
pair: WORD "=" _value
_value: SIGNED_INT | ESCAPED_STRING | start
%import common (WORD, SIGNED_INT)
%import common.ESCAPED_STRING
%ignore /[ \\n]/
"""


def grammar(text: str) -> xgrammar.Grammar:
    return parse(xgrammar, "grammar", text, False)


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        (SUMS, ["1+2", " 1 + 2*(3 - -4.5) ", "2e3"], ["1+", "()", "1 2", ""]),
        (GREETING, ["Hello Bob/12!ab", "hELLO X/00abc"], ["hi bob/12ab", "hi Bob/12!a", "hi Bob/12abca"]),
        (LISTS, ["[]", '[a=1, b="x\\"y", c=[d=-7]]'], ["[a]", "[a=1,]", "[a=1"]),
        ('start: "root" | "start_" | "\\n" | "::"', ["root", "\n", "::"], ["rot", "\\n"]),
        ('start: a b\na:\nb: "x"', ["x"], ["", "xx"]),
    ],
)  # fmt: skip
def test_what_matches(text: str, matching: list[str], other: list[str]) -> None:
    compiled = grammar(text)
    assert [accepts(compiled, one) for one in matching] == [True] * len(matching)
    assert [accepts(compiled, one) for one in other] == [False] * len(other)


def test_terminals_of_common() -> None:
    """Each is what its regular expression says, by Python's ``re``."""
    import re

    for name, pattern in COMMON.items():
        compiled = grammar(f"start: {name}\n%import common.{name}")
        for text in ("7", "-7", ".5", "1.", "1.5e-3", "e+4", "abc", "a_1", "Z", '"a\\"b"', " ", "\n", "\r\n", "\r"):
            assert accepts(compiled, text) == (re.fullmatch(pattern, text) is not None), (name, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start: x", "'x' is not defined"),
        ('a: "x"', "no rule 'start'"),
        ('start: "a', "line 1"),
        ('start: "a"\nstart: "b"', "line 2: 'start' is defined twice"),
        ('f{x}: x\nstart: f{"a"}', "templates"),
        ('%declare X\nstart: "a"', "%declare"),
        ('%import python.X\nstart: "a"', "python.X"),
        ('%import common.NOPE\nstart: "a"', "common.NOPE"),
        ("start: /a/i", "flags"),
        ('start: "ab".."c"', "single characters"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(LarkError, match=says):
        grammar(text)


def test_which_notation() -> None:
    assert is_lark('?start: "a" | "b"')
    assert is_lark("// sums\nstart.3 : A")
    assert not is_lark('root ::= "a: b"')
