"""Reads the descriptions of options from the `Attributes:` of docstrings."""

from __future__ import annotations

import inspect
import re


def field_docs(options_class: type) -> dict[str, str]:
    """The description of each field of a class and its base classes."""
    docs: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        docs |= re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", inspect.getdoc(cls) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in docs.items()}
