"""What a class of options says of each: in its docstring, or in the string below the field."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap


def field_docs(options_class: type) -> dict[str, str]:
    """What is said of each field, by the class and those that it extends."""
    told: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        told |= re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", inspect.getdoc(cls) or "", re.MULTILINE)
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for before, node in zip(definition.body, definition.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    told[name] = text
    return {name: " ".join(text.split()) for name, text in told.items()}
