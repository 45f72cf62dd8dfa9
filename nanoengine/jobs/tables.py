"""A log of JSON lines as a Parquet file.

Passes over the log, so that one batch of rows is in memory: which types a column has, then the
rows. A column that no type of Parquet holds, a number here and a text there, `{}`, an integer of 65
bits, is written as JSON; where only a value tells that, the pass begins again.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanoengine.jobs.log import Log, replacing
from nanoengine.jobs.source import require_pyarrow

BATCH_ROWS = 1024
MISFITS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""What Arrow raises for values that a type can't hold; its own errors are among these."""


def write_parquet(log: Log, offsets: Iterable[int], path: Path) -> None:
    """Writes the records at these offsets of a log, in their order, as a table.

    Raises:
        OutputLostError: there is no room.
    """
    arrow = require_pyarrow("Parquet files")
    import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401  # `_write` takes it

    kept = array("q", offsets)
    types: dict[str, Any] = {}  # None: no common type
    for rows in _batches(log, kept):
        for name in dict.fromkeys(name for row in rows for name in row):
            known = types.setdefault(name, arrow.null())
            types[name] = _common(arrow, known, [row.get(name) for row in rows])
    with replacing(path) as file:
        while (misfit := _write(arrow, file, types, _batches(log, kept))) is not None:
            types[misfit] = None
            file.seek(0)
            file.truncate()


def _write(
    arrow: Any, file: BinaryIO, types: dict[str, Any], batches: Iterator[list[dict[str, Any]]]
) -> str | None:
    """Writes the table; stops at a value that its column can't hold, and gives the column."""
    schema = arrow.schema(
        [(_name(name), arrow.string() if kind is None else kind) for name, kind in types.items()]
    )
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        for rows in batches:
            columns = []
            for name, kind in types.items():
                try:
                    columns.append(_column(arrow, [row.get(name) for row in rows], kind))
                except MISFITS:
                    return name
            writer.write_batch(arrow.record_batch(columns, schema=schema))
    return None


def _name(name: str) -> str:
    """A column's name without lone surrogates, which Parquet can't hold."""
    return name.encode(errors="backslashreplace").decode()


def _batches(log: Log, offsets: array[int]) -> Iterator[list[dict[str, Any]]]:
    lines = map(json.loads, log.lines(offsets))
    while rows := list(itertools.islice(lines, BATCH_ROWS)):
        yield rows


def _common(arrow: Any, known: Any, values: list[Any]) -> Any:
    """The type that holds what a column had before and these values."""
    if known is None:
        return None
    try:
        found = arrow.infer_type(values)
        both = [arrow.schema([("it", kind)]) for kind in (known, found)]
        common = arrow.unify_schemas(both, promote_options="permissive").field("it").type
    except MISFITS:
        return None
    return None if _has_empty_struct(arrow, common) else common


def _has_empty_struct(arrow: Any, kind: Any) -> bool:
    """Whether Parquet has no place for it."""
    if arrow.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(arrow, kind.field(i).type) for i in range(kind.num_fields))


def _column(arrow: Any, values: list[Any], kind: Any) -> Any:
    if kind is None:
        return arrow.array([None if v is None else json.dumps(v) for v in values], arrow.string())
    return arrow.array(values, kind)
