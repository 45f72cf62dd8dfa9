"""Checks of values by annotation: accepted values, conversions, and messages for the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from nanoengine.settings.checks import MAX_CHARS, check_value, checked


def nested(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (bool, True, True),
        (bool, np.bool_(False), False),
        (int, 5, 5),
        (int, np.int64(5), 5),
        (int, np.uint8(5), 5),
        (int, np.array(5), 5),
        (float, 5, 5),
        (float, 0.5, 0.5),
        (float, np.float32(0.5), 0.5),
        (float, np.float16(0.5), 0.5),
        (float, np.int32(2), 2),
        (str, "x", "x"),
        (str, np.str_("x"), "x"),
        (None, None, None),
        (int | None, None, None),
        (Any, [object], [object]),
        (Literal["auto", 2], "auto", "auto"),
        (Literal["auto", 2], np.int64(2), 2),
        (bool | Literal["never"], "never", "never"),
        (str | PathLike[str], Path("x"), Path("x")),
        (tuple[int, ...], [1, np.int64(2)], (1, 2)),
        (tuple[int, ...], np.array([1, 2]), (1, 2)),
        (tuple[int, ...], (), ()),
        (tuple[float, ...] | list[float], {0.5}, (0.5,)),
        (list[str] | None, ("a", "b"), ["a", "b"]),
        (str | tuple[str, ...], "ab", "ab"),
        (tuple[tuple[int, ...], ...], [[1], [2, 3]], ((1,), (2, 3))),
        (dict[int, float], {np.int64(3): np.float32(0.5)}, {3: 0.5}),
        (Mapping[str, Any], {"a": None}, {"a": None}),
    ],
)
def test_valid_values_become_python_types(annotation: Any, value: Any, expected: Any) -> None:
    found = check_value(value, annotation, "x", ValueError)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(found, list | tuple):
        assert [type(one) for one in found] == [type(one) for one in expected]
    if isinstance(found, dict):
        assert [type(one) for one in found.values()] == [type(one) for one in expected.values()]


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (bool, "false", "x must be True or False, got 'false'"),
        (bool, 1, "x must be True or False, got 1"),
        (bool | None, "no", "x must be True, False or None, got 'no'"),
        (int, True, "x must be an integer, got True"),
        (int, np.bool_(True), "x must be an integer, got True"),
        (int, 5.0, "x must be an integer, got 5.0"),
        (int | None, "5", "x must be an integer or None, got '5'"),
        (float, math.nan, "x must be a finite number, got nan"),
        (float, -math.inf, "x must be a finite number, got -inf"),
        (float, np.float32("inf"), "x must be a finite number, got inf"),
        (float, True, "x must be a finite number, got True"),
        (float, 1j, "x must be a finite number, got 1j"),
        (str | None, 5, "x must be a string or None, got 5"),
        (Literal["auto", "fp8"], "int8", "x must be one of auto, fp8, got 'int8'"),
        (Literal["int8", "int4"] | None, 4, "x must be one of int8, int4, None, got 4"),
        (Literal[1], True, "x must be one of 1, got True"),
        (bool | Literal["never"], "no", "x must be True, False or 'never', got 'no'"),
        (str | PathLike[str], 5, "x must be a string or a path, got 5"),
        (tuple[int, ...], 5, "x must be a list, got 5"),
        (tuple[str, ...] | list[str] | None, "ab", "x must be a list or None, got 'ab'"),
        (tuple[int, ...], [1, 1.5], "x[1] must be an integer, got 1.5"),
        (tuple[tuple[int, ...], ...], [[1], [None]], "x[1][0] must be an integer, got None"),
        (dict[int, float], [1], "x must be a dict, got [1]"),
        (dict[int, float], {"3": 1}, "a key of x must be an integer, got '3'"),
        (dict[int, float], {3: "1"}, "x[3] must be a finite number, got '1'"),
        (Path | None, "x", "x must be Path or None, got 'x'"),
    ],
)
def test_invalid_values_raise_with_the_allowed_ones(
    annotation: Any, value: Any, message: str
) -> None:
    with pytest.raises(KeyError) as caught:
        check_value(value, annotation, "x", KeyError)
    assert caught.value.args == (message,)


def test_any_wrong_value_fits_a_message() -> None:
    for value in (10**5000, nested(100_000), "y" * 10**6):
        with pytest.raises(ValueError, match="x must be True or False, got") as caught:
            check_value(value, bool, "x", ValueError)
        assert len(str(caught.value)) < MAX_CHARS + 50


@checked(ValueError)
@dataclass(frozen=True, slots=True)
class Settings:
    size: int
    name: str = "x"
    later: Later | None = None


class Later:
    pass


def test_a_dataclass_checks_its_arguments() -> None:
    later = Later()
    settings = Settings(np.int64(3), later=later)  # type: ignore[arg-type]
    assert settings == Settings(size=3, name="x", later=later)
    assert type(settings.size) is int
    with pytest.raises(ValueError, match="size must be an integer, got 'a'"):
        Settings("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown option 'sise' of Settings; did you mean 'size'"):
        Settings(sise=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="unknown option 'q' of Settings; known: size, name"):
        Settings(3, q=3)  # type: ignore[call-arg]
    for wrong in ((), (1, "x", None, 4)):
        with pytest.raises(TypeError, match="__init__"):
            Settings(*wrong)
