"""Writes a log of JSON records as a Parquet file or a CSV.

Both have the same columns: the input's columns, then text, finish_reason, ... and error. If the
input has a NAME, the new column is output_NAME.

The log is read several times, with one batch of rows in memory: for the names of the columns, for
their Parquet types, and for the rows. A column whose values have no common Parquet type is written
as JSON, for example numbers mixed with strings, `{}`, or integers of 65 bits. If only the last pass
finds such a value, it starts again.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nanoengine.jobs.record_log import SIMPLE_FIELDS, RecordLog, atomic_write
from nanoengine.jobs.source import require_pyarrow

ANSWER_COLUMNS = (
    "text", "token_ids", "finish_reason", "reasoning_content", "tool_calls", "parse_error",
    "logprobs", "prompt_logprobs",
)  # fmt: skip
"""Columns per answer. All except text are omitted if no record has a value, and token_ids if any
record has text."""

BATCH_ROWS = 1024
CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Errors of Arrow for values that a type can't hold; Arrow's own errors are subclasses."""


def write_parquet(log: RecordLog, offsets: array[int], path: Path) -> None:
    """Writes the records at these offsets of a log, in this order, as a Parquet file.

    Raises:
        OutputLostError: the disk is full.
    """
    arrow = require_pyarrow("Parquet files")
    import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401  # used by `_write`

    names, table = _table(log, offsets)
    types = dict.fromkeys(names, arrow.null())  # None: no common type, so JSON
    types[names[-1]] = arrow.string()  # Why: most jobs have no error, and files may be merged.
    for rows in table():
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            types[name] = _common_type(arrow, types[name], values)
    with atomic_write(path) as file:
        while (failed := _write(arrow, file, types, table())) is not None:
            types[failed] = None
            file.seek(0)
            file.truncate()


def _write(arrow: Any, file: BinaryIO, types: dict[str, Any], batches: Any) -> str | None:
    """Writes the table. Returns the first column whose type can't hold a value; None if all can."""
    # Why: Parquet can't hold lone surrogates.
    names = [name.encode(errors="backslashreplace").decode() for name in types]
    kinds = [arrow.string() if kind is None else kind for kind in types.values()]
    schema = arrow.schema(list(zip(names, kinds, strict=True)))
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        for rows in batches:
            columns = []
            for name, field, values in zip(types, schema, zip(*rows, strict=True), strict=True):
                if types[name] is None:
                    values = [None if v is None else json.dumps(v) for v in values]
                try:
                    columns.append(arrow.array(values, field.type))
                except CONVERSION_ERRORS:
                    return name
            writer.write_batch(arrow.record_batch(columns, schema=schema))
    return None


def _batches(log: RecordLog, offsets: array[int]) -> Iterator[list[dict[str, Any]]]:
    lines = map(json.loads, log.lines(offsets))
    while rows := list(itertools.islice(lines, BATCH_ROWS)):
        yield rows


def _common_type(arrow: Any, known: Any, values: Sequence[Any]) -> Any:
    """A type for these values and for values of type `known`; None if there is none."""
    if known is None:
        return None
    try:
        kinds = known, arrow.infer_type(values)
        schemas = [arrow.schema([("column", kind)]) for kind in kinds]
        common = arrow.unify_schemas(schemas, promote_options="permissive").field("column").type
    except CONVERSION_ERRORS:
        return None
    return None if _has_empty_struct(arrow, common) else common


def _has_empty_struct(arrow: Any, kind: Any) -> bool:
    """Whether a type contains a struct without fields, which Parquet can't store."""
    if arrow.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(arrow, kind.field(i).type) for i in range(kind.num_fields))


def write_csv(
    log: RecordLog, offsets: array[int], path: Path, delimiter: str, encoding: str
) -> None:
    """Writes the records at these offsets of a log, in this order, as a CSV with a header.

    Raises:
        OutputLostError: the disk is full.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else delimiter
    names, table = _table(log, offsets)
    with atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding, "backslashreplace", newline="")
        writer = csv.writer(text, delimiter=delimiter)  # Because lines end in \r\n, \r is quoted.
        writer.writerow(names)
        for rows in table():
            writer.writerows(map(_format_cell, row) for row in rows)
        text.flush()
        text.detach()


def _table(log: RecordLog, offsets: array[int]) -> tuple[list[str], Callable[[], Any]]:
    """The names of the columns of a table of records, and a function that reads its rows in
    batches."""
    columns: dict[str, None] = {}
    found: set[str] = set()
    count = 1
    for records in _batches(log, offsets):
        for row, answers, _ in map(_split, records):
            columns |= dict.fromkeys(row)
            found.update(name for answer in answers for name, value in answer.items() if value)
            count = max(count, len(answers))
    found = found - {"token_ids"} if "text" in found else found and found | {"text"}
    fields = [name for name in ANSWER_COLUMNS if name in found]

    def cells(record: dict[str, Any]) -> list[Any]:
        row, answers, error = _split(record)
        answers += [{}] * (count - len(answers))
        new = [answer.get(name) for answer in answers for name in fields]
        return [*map(row.get, columns), *new, error]

    new = [f"{name}_{i + 1}" if count > 1 else name for i in range(count) for name in fields]
    names = [*columns, *(_unused_name(name, columns) for name in (*new, "error"))]
    return names, lambda: (list(map(cells, records)) for records in _batches(log, offsets))


def _split(record: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """Splits a record into the columns of its row, the columns of each answer, and its error."""
    error = record["error"] and "{code} in line {line}: {message}".format_map(record["error"])
    if "_row" in record:
        answers = record["outputs"]
        row = {name: value for name, value in record.items() if name not in SIMPLE_FIELDS}
    else:
        body = (record["response"] or {}).get("body") or {}
        answers, row = body.get("choices"), {"custom_id": record["custom_id"]}
        row |= {"response": body} if body and answers is None else {}
    answers = [answer | answer.pop("message", {}) for answer in answers or ()]
    for answer in answers:
        answer["text"] = answer.get("text", answer.get("content"))
        # Why as JSON: tokens are keys, which would become fields of a Parquet struct.
        answer |= {n: json.dumps(x) for n, x in answer.items() if x and n.endswith("logprobs")}
    return row, [{n: a[n] for n in ANSWER_COLUMNS if n in a} for a in answers], error


def _unused_name(name: str, used: dict[str, None]) -> str:
    return name if name not in used else _unused_name(f"output_{name}", used)


def _format_cell(cell: Any) -> Any:
    """A cell: strings and numbers are unchanged, null is empty, all else is JSON."""
    return json.dumps(cell, ensure_ascii=False) if isinstance(cell, bool | list | dict) else cell
