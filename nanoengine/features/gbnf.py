"""GBNF, which is xgrammar's EBNF too, in Lark's notation: called for grammars that are written so.

    root ::= "x" tail        ->      start: "x" TAIL
    tail ::= [a-z]+                  TAIL: /[a-z]/+

llguidance has a converter, which wants a rule on one line and knows few escapes.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
"""The beginning of a rule; Lark has none like it."""

ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
WHOLE = "the-whole-text"


def to_lark(text: str) -> str:
    """A grammar in Lark's notation, in which it may be already.

    Rules of letters alone become what Lark calls terminals. Lark cuts a text into the longest of
    them, so that of `word "s"`, with `word ::= [a-z]+`, the word would take the "s" as well. Why
    the rule WHOLE: where no rule needs itself it is a terminal, and nothing is cut.

    Raises:
        ValueError: it is no GBNF.
    """
    head, *parts = RULE.split(text)
    if not parts:
        return text
    rules = list(zip(parts[::2], parts[1::2], strict=True))
    if not any(re.search(r"\broot\b", body) for _, body in rules):
        rules = [(WHOLE if name == "root" else name, body) for name, body in rules]
        rules.append(("root", WHOLE))
    # Why in parentheses: there it may have many lines.
    lines = "".join(f"{name} ::= ({body}\n)\n" for name, body in rules)
    try:
        return str(gbnf_to_lark(ESCAPE.sub(_known, head + lines)))
    except Exception as error:  # Why: the converter raises nothing more exact.
        raise ValueError(f"it is no GBNF: {error}") from error


def _known(escape: re.Match[str]) -> str:
    of_four, of_eight, one = escape.groups()
    if one and (one in '"\\[]' or one.isalpha()):
        return escape[0]  # The converter knows it, or says that there is none.
    found = "\0" if one == "0" else one or chr(int(of_four or of_eight, 16))
    return f"\\x{ord(found):02x}" if found.isascii() else found
