"""A log of JSON lines as a Parquet file.

Two passes, so that one batch of rows is in memory: which types a column has, then the rows. A
column whose values have no common type, a number here and a text there, is written as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanoengine.jobs.log import Log
from nanoengine.jobs.source import require_pyarrow

BATCH_ROWS = 1024


def write_parquet(log: Log, offsets: Iterable[int], path: Path) -> None:
    """Writes the records at these offsets of a log, in their order, as a table.

    Raises:
        OSError: there is no room.
    """
    arrow = require_pyarrow("Parquet files")
    import pyarrow.parquet  # type: ignore[import-untyped]

    kept = array("q", offsets)
    types: dict[str, Any] = {}  # None: no common type
    for rows in _batches(log, kept):
        for name in dict.fromkeys(name for row in rows for name in row):
            known = types.setdefault(name, arrow.null())
            types[name] = _common(arrow, known, [row.get(name) for row in rows])
    schema = arrow.schema(
        [(name, arrow.string() if kind is None else kind) for name, kind in types.items()]
    )
    beside = path.with_name(path.name + ".tmp")
    try:
        with pyarrow.parquet.ParquetWriter(beside, schema) as writer:
            for rows in _batches(log, kept):
                writer.write_batch(_batch(arrow, rows, schema, types))
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, f"{path} can't be written: {error}") from error


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
        return arrow.unify_schemas(both, promote_options="permissive").field("it").type
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        return None


def _batch(arrow: Any, rows: list[dict[str, Any]], schema: Any, types: dict[str, Any]) -> Any:
    columns = []
    for name, kind in types.items():
        values = [row.get(name) for row in rows]
        if kind is None:
            texts = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
            columns.append(arrow.array(texts, arrow.string()))
        else:
            columns.append(arrow.array(values, kind))
    return arrow.record_batch(columns, schema=schema)
