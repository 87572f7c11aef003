"""Syntaxes of structured outputs: EBNF, Lark, regular expressions, structural tags."""
