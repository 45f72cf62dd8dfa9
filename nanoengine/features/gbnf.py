"""Converts GBNF, which includes xgrammar's EBNF, to Lark's notation.

    root ::= "x" tail        ->      start: "x" TAIL
    tail ::= [a-z]+                  TAIL: /[a-z]/+

llguidance's converter needs each rule on one line and supports few escapes.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
"""The beginning of a rule; Lark has no similar syntax."""

ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
WHOLE = "the-whole-text"


def to_lark(text: str) -> str:
    """Converts a grammar to Lark's notation; a grammar in that notation is returned as is.

    Rules that contain only characters become terminals in Lark. Its lexer splits a text into the
    longest terminals: for `word "s"`, with `word ::= [a-z]+`, the word would include the "s". The
    rule WHOLE avoids this: a grammar without recursion becomes one terminal, and is not split.

    Raises:
        ValueError: the text is not valid GBNF.
    """
    head, *parts = RULE.split(text)
    if not parts:
        return text
    rules = list(zip(parts[::2], parts[1::2], strict=True))
    if not any(re.search(r"\broot\b", body) for _, body in rules):
        rules = [(WHOLE if name == "root" else name, body) for name, body in rules]
        rules.append(("root", WHOLE))
    # Why in parentheses: inside them, newlines are allowed.
    lines = "".join(f"{name} ::= ({body}\n)\n" for name, body in rules)
    try:
        return str(gbnf_to_lark(ESCAPE.sub(_convert_escape, head + lines)))
    except Exception as error:  # Why: the converter raises no specific type.
        raise ValueError(f"it is not valid GBNF: {error}") from error


def _convert_escape(escape: re.Match[str]) -> str:
    hex4, hex8, char = escape.groups()
    if char and (char in '"\\[]' or char.isalpha()):
        return escape[0]  # The converter handles it, or reports it as unknown.
    char = "\0" if char == "0" else char or chr(int(hex4 or hex8, 16))
    return f"\\x{ord(char):02x}" if char.isascii() else char
