"""Values checked by their annotations, so that a field's type is written once.

    @checked(ConfigError)
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        overlap: bool | None = None      Settings(overlap="no")  ConfigError: overlap must be True,
                                                                 False or None, got 'no'

`check_value` checks one value; `checked` makes a dataclass check its arguments. Ranges and
contradictions are checked by the class itself. Any file may import this one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
import types
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_CHARS = 200
"""Maximum number of characters of a wrong value in a message."""

MAX_NAMES = 10
"""Maximum number of names in a message."""

MAX_ERROR_CHARS = 1000
"""Maximum number of characters of another library's exception in a message."""

TYPE_NAMES: dict[Any, tuple[str, ...]] = {
    bool: ("True", "False"),
    int: ("an integer",),
    float: ("a finite number",),
    str: ("a string",),
    types.NoneType: ("None",),
    tuple: ("a list",),
    list: ("a list",),
    dict: ("a dict",),
    Mapping: ("a dict",),
    PathLike: ("a path",),
    Callable: ("a function",),
}


def check_value(value: Any, annotation: Any, name: str, error: type[Exception]) -> Any:
    """Converts `value` to `annotation`: NumPy values become Python's, collections are copied.

    Args:
        annotation: bool, int, float, str, None, Any, a class, Literal, tuple[X, ...], list[X],
            dict[K, V], Mapping[K, V], or a union of these. A bool is not an int; an int is a float;
            a float is finite. A list, tuple or set becomes a tuple[X, ...] or list[X], whichever
            comes first in a union.
        name: starts the message, which continues with what is allowed and the value.
        error: the exception type to raise.

    >>> check_value({3, 3}, tuple[int, ...] | None, "ids", ValueError)
    (3,)
    >>> check_value([3, "4"], tuple[int, ...], "ids", ValueError)
    Traceback (most recent call last):
    ValueError: ids[1] must be an integer, got '4'
    """
    value = to_python(value)
    for kind in _members(annotation):
        if _is_kind(value, kind):
            break
    else:
        raise error(f"{name} must be {describe_allowed(annotation)}, got {quoted(value)}")
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        if set(map(type, value)) <= _exact_types(inner[0]):  # Perf: 100 times as fast.
            return origin(value)
        entries = enumerate(value)
        return origin([check_value(e, inner[0], f"{name}[{i}]", error) for i, e in entries])
    if origin in (dict, Mapping):
        return {
            check_value(key, inner[0], f"a key of {name}", error): check_value(
                entry, inner[1], f"{name}[{quoted(key)}]", error
            )
            for key, entry in value.items()
        }
    return value


def to_python(value: Any) -> Any:
    """Converts NumPy's scalars and arrays to Python's numbers and lists; returns others as is."""
    numpy = sys.modules.get("numpy")  # Why: without numpy imported, no value is numpy's.
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    return value


def describe_allowed(annotation: Any) -> str:
    """Describes the values that an annotation allows.

    >>> describe_allowed(Literal["auto", "fp8"]), describe_allowed(int | None)
    ('one of auto, fp8', 'an integer or None')
    """
    kinds = _members(annotation)
    if all(get_origin(kind) is Literal or kind is types.NoneType for kind in kinds):
        constants = [value for kind in kinds for value in get_args(kind) or (None,)]
        return f"one of {', '.join(map(str, constants))}"
    names: list[str] = []
    for kind in kinds:
        base = get_origin(kind) or kind
        if base is Literal:
            names += map(repr, get_args(kind))
        else:
            names += TYPE_NAMES.get(base) or (base.__name__,)
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} or {last}" if others else last


def quoted(value: Any) -> str:
    """`repr` of any value for a message, with limited length."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or an integer of too many digits
        return f"a value of type {type(value).__name__}"
    return truncate(text)


def truncate(text: object, max_chars: int = MAX_CHARS) -> str:
    """Cuts a text from a file, a user or another library after `max_chars` characters."""
    text = str(text)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def describe_error(error: BaseException) -> str:
    """The type and text of an exception for a message, with limited length."""
    return truncate(f"{type(error).__name__}: {error}", MAX_ERROR_CHARS)


def join_names(names: Collection[str], like: str | None = None, limit: int = MAX_NAMES) -> str:
    """The first names, each with limited length, and the number of further ones.

    Args:
        like: an unknown name. The known names most similar to it come first.
    """
    if like is not None:
        names = difflib.get_close_matches(like[:MAX_CHARS], names, n=len(names) or 1, cutoff=0)
    num_more = len(names) - limit
    listed = ", ".join(map(truncate, list(names)[:limit]))
    return listed + (f" and {num_more} more" if num_more > 0 else "")


def nearest(name: object, known: Collection[str]) -> str:
    """A hint for an unknown name: the most similar known name, else all of them."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {join_names(known, limit=50)}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def require_positive(options: object, error: type[Exception], *names: str) -> None:
    """Raises `error` if one of these options is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise error(f"{name} must be at least 1, got {quoted(value)}")


def checked(
    error: type[Exception], translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Callable[[type[T]], type[T]]:
    """A class decorator: the frozen dataclass checks and normalises its arguments.

    An unknown name raises `error`, with the most similar field; a value of a wrong type also raises
    it, with what is allowed. An assignment raises and mentions `dataclasses.replace`. Defaults are
    not checked. A subclass that is a dataclass itself only checks if it is decorated, too.

    Args:
        translate: converts a caller's options to fields. Only called if one of them is not a
            field or has a value of a wrong type, so that valid options load no tables.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        names = [field.name for field in fields]
        positional = [field.name for field in fields if not field.kw_only]

        @functools.cache  # Why lazy: annotations may use names that are defined later.
        def hints() -> dict[str, tuple[Any, frozenset[type]]]:
            return {name: (kind, _exact_types(kind)) for name, kind in get_type_hints(cls).items()}

        def check(options: dict[str, Any]) -> None:
            kinds = hints()
            for name, value in options.items():
                if name not in kinds:
                    hint = nearest(name, names)
                    raise error(f"unknown option {name!r} of {cls.__name__}; {hint}")
                kind, accepted = kinds[name]
                if type(value) not in accepted:  # Perf: a Row takes 1.7 us, not 4.5.
                    options[name] = check_value(value, kind, name, error)

        @functools.wraps(init)
        def __init__(self: T, *args: Any, **options: Any) -> None:
            by_position = dict(zip(positional, args, strict=False))
            if len(by_position) < len(args) or not by_position.keys().isdisjoint(options):
                init(self, *args, **options)  # raises Python's own TypeError
            options |= by_position
            try:
                check(options)
            except error:
                if translate is None:
                    raise
            else:
                init(self, **options)
                return
            options = translate(options)  # Why here: its errors get no context.
            check(options)
            init(self, **options)

        def __setattr__(self: T, name: str, value: Any) -> None:
            hint = f"create a changed copy with dataclasses.replace(..., {name}=...)"
            raise dataclasses.FrozenInstanceError(f"{cls.__name__} is frozen: {hint}")

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        cls.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
        return cls

    return decorate


@functools.cache
def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; otherwise the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (types.NoneType if annotation is None else annotation,)


@functools.cache
def _exact_types(annotation: Any) -> frozenset[type]:
    """Types whose values need no further check or conversion."""
    kinds = _members(annotation)
    if Any in kinds:
        return frozenset((str, dict, list, types.NoneType))
    return frozenset(kind for kind in kinds if isinstance(kind, type) and kind is not float)


def _is_kind(value: Any, kind: Any) -> bool:
    """Whether a plain value has this type, without checking its entries."""
    base = get_origin(kind) or kind
    if base in (Any, object):
        return True
    if base is Literal:
        return any(type(value) is type(v) and value == v for v in get_args(kind))
    if base in (tuple, list):
        return isinstance(value, list | tuple | set | frozenset)
    if base in (dict, Mapping):
        return isinstance(value, Mapping)
    if base in (int, float) and isinstance(value, bool):
        return False
    if base is float:  # Why a comparison: it also handles integers above the range of floats.
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, base)
