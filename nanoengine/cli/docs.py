"""What a class of options says of each, under `Attributes:` of its docstring."""

from __future__ import annotations

import inspect
import re


def field_docs(options_class: type) -> dict[str, str]:
    """What is said of each field, by the class and those that it extends."""
    told: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        told |= re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", inspect.getdoc(cls) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in told.items()}
