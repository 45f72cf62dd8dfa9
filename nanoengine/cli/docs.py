"""What a class of options says of each: the string below the field."""

from __future__ import annotations

import ast
import inspect
import textwrap


def field_docs(options_class: type) -> dict[str, str]:
    """The string below each field, of the class and those that it extends."""
    told: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for before, node in zip(definition.body, definition.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    told[name] = " ".join(text.split())
    return told
