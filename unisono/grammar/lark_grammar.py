"""Grammars in Lark's notation, written as xgrammar's EBNF. Runs in the process that compiles.

Read: rules and terminals with priorities and ``?``/``!`` before their names, alternatives, aliases (``-> name``),
groups, ``[optional]``, ``? * +``, ``~ n`` and ``~ n..m``, strings (``"x"i`` in any case), ``"a".."z"``, regular
expressions, ``%import common.X``, ``%ignore``, comments. What is not read is named in the error. The whole text has to
match, from the rule ``start``. Reference: Lark's documentation, "Grammar reference".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"', "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+", "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*", "WS_INLINE": "[ \\t]+", "WS": "[ \\t\\f\\r\\n]+",
    "CR": "\\r", "LF": "\\n", "NEWLINE": "(\\r?\\n)+",
}  # fmt: skip
"""Terminals of Lark's library ``common``, as regular expressions."""

_TOKEN = re.compile(
    r"""(?P<comment>(//|\#)[^\n]*)|(?P<space>[ \t\r\f]+)|(?P<newline>\n)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<directive>%[a-z]+)|(?P<arrow>->)|(?P<range>\.\.)
    |(?P<name>[?!]{0,2}[A-Za-z_]\w*)|(?P<number>-?\d+)|(?P<sign>[:|()\[\]?*+~.,{}])""",
    re.VERBOSE,
)
_DEFINITION = re.compile(r"^[ \t]*[?!]{0,2}[A-Za-z_]\w*(\.-?\d+)?[ \t]*:(?!:)", re.MULTILINE)


class LarkError(ValueError):
    """A grammar in Lark's notation that cannot be read; says where."""


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation; otherwise it is EBNF."""
    return "::=" not in text and _DEFINITION.search(text) is not None


def lark_to_ebnf(text: str, regex_rules: Callable[[str], str]) -> str:
    """The EBNF of a grammar in Lark's notation, with the rule ``root``. Raises LarkError.

    regex_rules: a regular expression -> its EBNF, with the rule ``root``.
    """
    return _Writer(list(_tokens(text)), regex_rules).ebnf()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise LarkError(f"line {line}: {text[at : at + 20]!r} is not Lark's notation")
        kind = match.lastgroup or ""
        if kind not in ("comment", "space"):
            yield _Token(kind, match[0], line)
        line, at = line + match[0].count("\n"), match.end()
    yield _Token("newline", "\n", line)
    yield _Token("end", "", line)


class _Writer:
    """Reads tokens and writes rules. Names in EBNF: ``rule_x`` for what the grammar calls x, so that none clashes."""

    def __init__(self, tokens: list[_Token], regex_rules: Callable[[str], str]) -> None:
        self._tokens, self._at, self._regex_rules = tokens, 0, regex_rules
        self._rules: dict[str, str] = {}
        self._used: dict[str, int] = {}  # name -> line
        self._ignored: list[str] = []
        self._patterns: dict[str, tuple[str, str]] = {}  # regular expression -> (rule, its EBNF)
        self._in_terminal = False

    def ebnf(self) -> str:
        while self._peek().kind != "end":
            if self._peek().kind == "newline":
                self._at += 1
            elif self._peek().kind == "directive":
                self._directive()
            else:
                self._definition()
        if "start" not in self._rules:
            raise LarkError("it has no rule 'start'")
        for name, line in self._used.items():
            if name not in self._rules:
                raise LarkError(f"line {line}: {name!r} is not defined")
        ignored = f"({' | '.join(self._ignored)})*" if self._ignored else '""'
        rules = ["root ::= ignored_text rule_start", f"ignored_text ::= {ignored}"]
        rules += [f"rule_{name} ::= {body}" for name, body in self._rules.items()]
        return "\n".join([*rules, *(rules for _, rules in self._patterns.values())])

    # ---- lines ----------------------------------------------------------------------------------

    def _directive(self) -> None:
        token = self._next()
        if token.text == "%ignore":
            self._in_terminal = True
            self._ignored.append(self._alternatives())
        elif token.text == "%import":
            self._import(token)
        else:
            raise LarkError(f"line {token.line}: {token.text} is not supported; %import common.X and %ignore are")
        self._end_line()

    def _import(self, token: _Token) -> None:
        path = [self._expect("name").text]
        while self._take("."):
            path.append(self._expect("name").text)
        names = path[1:]
        if self._take("("):
            names = [self._expect("name").text]
            while self._take(","):
                names.append(self._expect("name").text)
            self._expect(")")
        if path[0] != "common" or not names or (unknown := [name for name in names if name not in COMMON]):
            what = ".".join(path) if path[0] != "common" or not names else f"common.{unknown[0]}"
            raise LarkError(f"line {token.line}: %import {what} is not known; terminals of 'common' are")
        alias = self._expect("name").text if self._take("->") else names[0]
        for name in names:
            self._rules[alias if name == names[0] else name] = self._pattern(COMMON[name])

    def _definition(self) -> None:
        token = self._expect("name")
        name = token.text.lstrip("?!")
        if self._peek().text == "{":
            raise LarkError(f"line {token.line}: templates ({name}{{…}}) are not supported")
        if self._take("."):
            self._expect("number")
        self._expect(":")
        if name in self._rules:
            raise LarkError(f"line {token.line}: {name!r} is defined twice")
        self._in_terminal = name.lstrip("_").isupper()
        self._rules[name] = self._alternatives()
        self._end_line()

    def _end_line(self) -> None:
        token = self._next()
        if token.kind != "newline":
            raise LarkError(f"line {token.line}: {token.text!r} is not expected here")

    # ---- what rules say -------------------------------------------------------------------------

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._continues():
            found.append(self._sequence())
        return " | ".join(found)

    def _continues(self) -> bool:
        """Take a ``|``, which may stand on a later line."""
        at = self._at
        while self._tokens[at].kind == "newline":
            at += 1
        if self._tokens[at].text != "|" or self._tokens[at].kind == "string":
            return False
        self._at = at + 1
        return True

    def _sequence(self) -> str:
        parts = []
        while (item := self._item()) is not None:
            parts.append(item)
        if self._take("->"):
            self._expect("name")
        return " ".join(parts) if parts else '""'

    def _item(self) -> str | None:
        token = self._peek()
        if token.kind in ("string", "regex", "name"):
            self._at += 1
            atom = self._atom(token)
        elif token.text in ("(", "["):
            self._at += 1
            self._skip_lines()
            atom = f"({self._alternatives()})"
            self._skip_lines()
            self._expect(")" if token.text == "(" else "]")
            atom += "?" if token.text == "[" else ""
        else:
            return None
        return self._repeated(atom)

    def _repeated(self, atom: str) -> str:
        token = self._peek()
        if token.kind == "sign" and token.text in ("?", "*", "+"):
            self._at += 1
            return f"({atom}){token.text}"
        if self._take("~"):
            low = high = self._expect("number").text
            if self._take(".."):
                high = self._expect("number").text
            return f"({atom}){{{low},{high}}}"
        return atom

    def _atom(self, token: _Token) -> str:
        if token.kind == "name":
            if token.text.startswith(("?", "!")):
                raise LarkError(f"line {token.line}: {token.text!r} is not expected here")
            self._used.setdefault(token.text, token.line)
            written = f"rule_{token.text}"
            return self._then_ignored(written) if token.text.lstrip("_").isupper() else written
        if token.kind == "regex":
            return self._then_ignored(self._pattern(_regex_of(token)))
        text = _string_of(token)
        if self._take(".."):
            last = _string_of(self._expect("string"))
            if len(text) != 1 or len(last) != 1:
                raise LarkError(f"line {token.line}: a range is between two single characters")
            return self._then_ignored(f"[{_in_class(text)}-{_in_class(last)}]")
        return self._then_ignored(_any_case(text) if token.text.endswith("i") else f'"{_escaped(text)}"')

    def _then_ignored(self, terminal: str) -> str:
        """A terminal of a rule, and what is ignored after it. Within terminals nothing is."""
        return terminal if self._in_terminal else f"{terminal} ignored_text"

    def _pattern(self, regex: str) -> str:
        """The rule of a regular expression."""
        if regex not in self._patterns:
            name = f"pattern_{len(self._patterns)}"
            rules = self._regex_rules(regex)
            names = "|".join(map(re.escape, re.findall(r"^(\w+) ::=", rules, re.MULTILINE)))
            parts = re.compile(rf'("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|\b({names})\b')  # no names in strings
            rules = parts.sub(lambda m: m[1] or (name if m[2] == "root" else f"{name}_{m[2]}"), rules)
            self._patterns[regex] = name, rules
        return self._patterns[regex][0]

    # ---- tokens ---------------------------------------------------------------------------------

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._peek().text == text and self._peek().kind != "string"
        self._at += found
        return found

    def _skip_lines(self) -> None:
        while self._peek().kind == "newline":
            self._at += 1

    def _expect(self, what: str) -> _Token:
        token = self._next()
        if what not in (token.kind, token.text):
            raise LarkError(f"line {token.line}: {token.text!r} where {what!r} is expected")
        return token


def _string_of(token: _Token) -> str:
    try:
        return str(ast.literal_eval(token.text.removesuffix("i")))
    except (SyntaxError, ValueError) as error:
        raise LarkError(f"line {token.line}: the string {token.text} is not valid: {error}") from None


def _regex_of(token: _Token) -> str:
    body, _, flags = token.text[1:].rpartition("/")
    if flags:
        raise LarkError(f"line {token.line}: the flags {flags!r} of a regular expression are not supported")
    return body.replace(r"\/", "/")


def _escaped(text: str) -> str:
    return "".join(c if (c.isalnum() and c.isascii()) or c in " _-" else f"\\U{ord(c):08x}" for c in text)


def _in_class(char: str) -> str:
    return char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}"


def _any_case(text: str) -> str:
    """``text`` in any case."""
    both = (f"[{c.lower()}{c.upper()}]" if c.lower() != c.upper() and c.isascii() else f'"{_escaped(c)}"' for c in text)
    return " ".join(both) or '""'
