"""Grammars in Lark's notation and in EBNF: which texts match, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.text_check import TextCheck
from unisono.structured_output.syntax.parse import is_lark
from unisono.types import BadRequest

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


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        (SUMS, ["1+2", "1 + 2*(3 - -4.5)", "2e3"], ["1+", "()", "1 2", ""]),
        (GREETING, ["Hello Bob/12!ab", "hELLO X/00abc"], ["hi bob/12ab", "hi Bob/12!a", "hi Bob/12abca"]),
        (LISTS, ["[]", '[a=1, b="x\\"y", c=[d=-7]]'], ["[a]", "[a=1,]", "[a=1"]),
        ('start: "root" | "start_" | "\\n" | "::"', ["root", "\n", "::"], ["rot", "\\n"]),
        ('start: a b\na:\nb: "x"', ["x"], ["", "xx"]),
        ('start: "{" %json {"type": "integer"} "}"', ["{7}"], ["{x}", "7"]),
        # EBNF: character by character, whatever begins what
        ('root ::= "x" y\ny ::= "z" | "" # a comment', ["x", "xz"], ["z", "xzz"]),
        ('root ::= x y\nx ::= "a" | "ab"\ny ::= "bd" | "c"', ["abd", "abc", "ac", "abbd"], ["ab", "abcd"]),
        ("root ::= [a-z]+ [^\"\\\\]\n  [-\\]]", ["ab!-", "aa]"], ["a-", 'a"-', "ab!"]),
        ('root ::= ("a"?){0,3} [b]{2,} "c"{,2}', ["bb", "aaabbbcc"], ["b", "aaaabb", "bbccc"]),
        ('root ::= "\\u00e9" | "\\x41" | "\\U0001F600" | [\\u4e00-\\u4e10]', ["é", "A", "😀", "一"], ["e", "\u4e11"]),
        ('root ::= "(" root ")" | ""\nunused ::= unused', ["", "(())"], ["(", ")("]),
        ('root ::= "a" | "b" x\nx ::= x "c"', ["a"], ["b"]),
        ('root ::= start\nstart ::= "q"', ["q"], [""]),
    ],
)  # fmt: skip
def test_lark_grammars_accept_and_reject_texts(text: str, matching: list[str], other: list[str]) -> None:
    form = TextCheck("grammar", text)
    assert [form.accepts(one) for one in matching] == [True] * len(matching)
    assert [form.accepts(one) for one in other] == [False] * len(other)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start: x", "x"),
        ('a: "x"', "start"),
        ('start: "a', "1("),
        ('start: "a"\nstart: "b"', "start"),
        ('start: "a"\n%import common.NOPE', "NOPE"),
        ("start: start", "no text matches it"),
        ('start: "a" b\nb: b "c" | start', "no text matches it"),
        ("root ::= root", "no text matches it"),
        ('root ::= "a" root', "no text matches it"),
        (r"root ::= [^\u0000-\U0010ffff]", "no text matches it"),
        ("root ::= foo", '"foo", which is not defined'),
        ('foo ::= "a"', 'no rule "root"'),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= "a" (="b") "b"', "lookahead"),
        ('root ::= TagDispatch(("a", b))\nb ::= "c"', "structural tag"),
        ('root ::= "\\q"', "escape"),
        ("root ::= [z-a]", "wrong way round"),
    ],
)
def test_invalid_lark_grammars_raise(text: str, says: str) -> None:
    with pytest.raises(BadRequest, match="cannot be compiled") as caught:
        TextCheck("grammar", text)
    assert says in str(caught.value)


def test_lark_is_distinguished_from_gbnf() -> None:
    assert is_lark('?start: "a" | "b"')
    assert is_lark("// sums\nstart.3 : A")
    assert not is_lark('root ::= "a: b"')
