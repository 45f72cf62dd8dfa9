"""Writes a log of JSON lines as a Parquet file or a CSV.

It reads the log twice, with one batch of rows in memory: first for the types of the columns, then
for the rows. A column without a Parquet type is written as JSON, for example one with numbers and
strings, `{}`, or integers of 65 bits. If a value shows this only in the second pass, that pass
starts again.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanoengine.jobs.record_log import SIMPLE_FIELDS, RecordLog, replacing
from nanoengine.jobs.source import require_pyarrow

ANSWER = ("text", "finish_reason", "reasoning_content", "tool_calls", "parse_error")
"""Columns of a CSV per answer; a column that no record has is left out."""

BATCH_ROWS = 1024
MISFITS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""What Arrow raises for values that a type can't hold; its own errors are subclasses of these."""


def write_parquet(log: RecordLog, offsets: array[int], path: Path) -> None:
    """Writes the records at these offsets of a log, in this order, as a Parquet file.

    Raises:
        OutputLostError: the disk is full.
    """
    arrow = require_pyarrow("Parquet files")
    import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401  # used by `_write`

    types: dict[str, Any] = {}  # None: no common type
    for rows in _batches(log, offsets):
        for name in dict.fromkeys(name for row in rows for name in row):
            known = types.setdefault(name, arrow.null())
            types[name] = _common(arrow, known, [row.get(name) for row in rows])
    with replacing(path) as file:
        while (misfit := _write(arrow, file, types, _batches(log, offsets))) is not None:
            types[misfit] = None
            file.seek(0)
            file.truncate()


def _write(
    arrow: Any, file: BinaryIO, types: dict[str, Any], batches: Iterator[list[dict[str, Any]]]
) -> str | None:
    """Writes the table. Returns the first column that can't hold one of its values, else None."""
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
    """The name of a column without lone surrogates, which Parquet can't hold."""
    return name.encode(errors="backslashreplace").decode()


def _batches(log: RecordLog, offsets: array[int]) -> Iterator[list[dict[str, Any]]]:
    lines = map(json.loads, log.lines(offsets))
    while rows := list(itertools.islice(lines, BATCH_ROWS)):
        yield rows


def _common(arrow: Any, known: Any, values: list[Any]) -> Any:
    """A type for these values and the ones known before; None if there is none."""
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
    """Whether a type contains a struct without fields, which Parquet can't store."""
    if arrow.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(arrow, kind.field(i).type) for i in range(kind.num_fields))


def _column(arrow: Any, values: list[Any], kind: Any) -> Any:
    if kind is None:
        return arrow.array([None if v is None else json.dumps(v) for v in values], arrow.string())
    return arrow.array(values, kind)


def write_csv(
    log: RecordLog, offsets: array[int], path: Path, delimiter: str, encoding: str
) -> None:
    """Writes the records at these offsets of a log, in this order, as a CSV with a header.

    The columns of the rows come first. If a row has a column NAME, a new one is output_NAME.

    Raises:
        OutputLostError: the disk is full.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else delimiter
    columns: dict[str, None] = {}
    new: dict[str, None] = {}
    most = 1
    for rows in _batches(log, offsets):
        for own, answers, _ in map(_cells, rows):
            columns |= dict.fromkeys(own)
            new |= dict.fromkeys(name for one in answers for name in one)
            most = max(most, len(answers))
    names = [name if most == 1 else f"{name}_{i + 1}" for i in range(most) for name in new]
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding, "backslashreplace", newline="")
        writer = csv.writer(text, delimiter=delimiter)  # \r\n: a lone \r is quoted
        writer.writerow([*columns, *(_free(name, columns) for name in (*names, "error"))])
        for rows in _batches(log, offsets):
            for own, answers, error in map(_cells, rows):
                answers += [{}] * (most - len(answers))
                cells = [own.get(name) for name in columns]
                cells += [one.get(name) for one in answers for name in new]
                writer.writerow(map(_text, [*cells, error]))
        text.flush()
        text.detach()


def _cells(record: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """Splits a record into the columns of its row, the columns of each answer, and its error."""
    error = record["error"] and "{code} in line {line}: {message}".format_map(record["error"])
    if "_row" in record:
        answers = record["outputs"]
        own = {name: one for name, one in record.items() if name not in SIMPLE_FIELDS}
    else:
        body = (record["response"] or {}).get("body") or {}
        answers, own = body.get("choices"), {"custom_id": record["custom_id"]}
        own |= {"response": body} if body and answers is None else {}
    answers = [one | one.pop("message", {}) for one in answers or ()]
    for one in answers:
        one["text"] = one.get("text", one.get("content"))
    return own, [{name: one[name] for name in ANSWER if name in one} for one in answers], error


def _free(name: str, taken: dict[str, None]) -> str:
    return name if name not in taken else _free(f"output_{name}", taken)


def _text(cell: Any) -> Any:
    """A cell: strings and numbers are unchanged, null is empty, all else is JSON."""
    return json.dumps(cell, ensure_ascii=False) if isinstance(cell, bool | list | dict) else cell
