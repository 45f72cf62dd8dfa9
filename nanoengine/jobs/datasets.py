"""`LLM.generate_dataset`: returns a table of the same type as its source, with answer columns.

    a path            runs like `nanoengine batch`; returns the path of the output
    an iterable       of dicts or prompts; returns a list for a sequence, else an iterator
    a datasets.Dataset or IterableDataset, a pandas or polars data frame, an Arrow table

The library of a source is recognized by the module of its class, so that only libraries that the
caller uses are imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.jobs.job import Job, JobOptions
from nanoengine.jobs.manifest import describe_engine
from nanoengine.jobs.paths import JobPaths
from nanoengine.jobs.record_log import RecordLog, atomic_write
from nanoengine.jobs.records import Recorder, json_line
from nanoengine.jobs.reorder import reordered
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import Input, Line
from nanoengine.jobs.work import Result, Stream, Work
from nanoengine.settings.checks import quoted, to_python
from nanoengine.settings.params import SamplingParams

ROWS = Input(name="dataset", form="jsonl")
NEW_COLUMNS = ("outputs", "usage", "error")


def generate_dataset(
    llm: Any,
    source: Any,
    output: str | os.PathLike[str] | None,
    params: SamplingParams | None,
    **row_options: Any,
) -> Any:
    """Answers each row of a source; see `LLM.generate_dataset`.

    Args:
        row_options: fields of `RowOptions`.
    """
    config, defaults = llm.config, llm.info.generation_defaults
    stream: Stream = functools.partial(llm.stream, on_error="record")
    if params is not None and not isinstance(params, SamplingParams):
        got = quoted(params)
        raise RequestError(f"sampling_params must be SamplingParams or None, got {got}")
    sampling = {} if params is None else {f.name: getattr(params, f.name) for f in fields(params)}
    options = RowOptions(sampling=sampling, **row_options)
    reader = RowReader(options, config.model, defaults)

    def run_job(path: str, output: str) -> None:
        """Runs a job from file to file, or resumes it."""
        job = Job(
            JobOptions(inputs=(path,), output=output, **vars(options)),
            lambda: describe_engine(config, config.model),
        )
        with contextlib.closing(job):
            job.work(config.model, defaults).run(stream)
            job.complete()

    if isinstance(source, str | os.PathLike):
        if output is None:
            raise RequestError("a source that is a path needs a path for the records: give output=")
        run_job(os.fspath(source), os.fspath(output))
        return Path(output)
    rows, rebuild = _rows_and_rebuild(source)

    def answered_rows() -> Iterator[dict[str, Any]]:
        if output is not None:
            return _answer_by_job(rows, Path(output), run_job)
        return _in_source_order(answer_rows(rows, stream, reader, Recorder(config.model)))

    return rebuild(answered_rows)


def answer_rows(
    rows: Iterable[Any], stream: Stream, reader: RowReader, recorder: Recorder
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers, and rows with their new columns, in the order in which they finish."""
    finished: list[tuple[int, dict[str, Any]]] = []

    def finish(task: Task, result: Result) -> None:
        columns, task.columns = task.columns, {}  # Why: the values may not be serializable.
        record = json.loads(recorder.record(task, result))
        new = {name: record.get(name) for name in NEW_COLUMNS}
        finished.append((task.row, {**columns, **new}))

    lines = (Line(i, ROWS, i + 1, _as_dict(row)) for i, row in enumerate(rows))
    work = Work(reordered(map(reader.task, lines)), finish)
    for _ in work.steps(stream):
        yield from finished
        finished.clear()
    yield from finished


def _as_dict(row: Any) -> Any:
    if isinstance(row, Mapping):
        return dict(row)
    row = to_python(row)
    is_ids = isinstance(row, Sequence) and not isinstance(row, str | bytes)
    return {"prompt_token_ids": list(row)} if is_ids else {"prompt": row}


def _in_source_order(rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Rows in the order of the source; a row waits until all earlier ones are finished."""
    waiting: dict[int, dict[str, Any]] = {}
    next_number = 0
    for number, row in rows:
        waiting[number] = row
        while next_number in waiting:
            yield waiting.pop(next_number)
            next_number += 1


def _answer_by_job(
    rows: Iterable[Any], output: Path, run_job: Callable[[str, str], None]
) -> Iterator[dict[str, Any]]:
    """Answers the rows as a job that can resume; its input is written next to the output."""
    source = output.with_name(output.name + ".rows.jsonl")
    columns = list(map(_as_dict, rows))  # Why first: if reading rows raises, no file exists yet.
    # Why a log: its lock keeps other processes from replacing the rows while a job reads them.
    with contextlib.closing(RecordLog(source)) as locked:
        with locked.file_closed(), atomic_write(source) as file:
            file.writelines(map(json_line, columns))
        run_job(str(source), str(output))
    new_columns: dict[int, dict[str, Any]] = {}
    paths = JobPaths(str(output), None, None)
    log = paths.table_log if paths.table else output
    with log.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            new_columns[record["_row"]] = {name: record[name] for name in NEW_COLUMNS}
    for i, row in enumerate(columns):
        yield {**row, **new_columns[i]}


# --- types of tables ------------------------------------------------------------------------------

AnsweredRows = Callable[[], Iterator[dict[str, Any]]]
"""Answers the rows; yields each with its new columns, in the original order."""

Rebuild = Callable[[AnsweredRows], Any]
"""Makes a table of the source's type from the answered rows."""


class _RowSource:
    """Generates answered rows for `datasets`, which pickles this object for a fingerprint; a
    closure can't be pickled. Each iteration answers the rows again, as for any lazy dataset."""

    def __init__(self, answered_rows: AnsweredRows) -> None:
        self._answered_rows = answered_rows

    def __call__(self) -> Iterator[dict[str, Any]]:
        yield from self._answered_rows()

    def __reduce__(self) -> tuple[Any, ...]:
        return uuid.uuid4, ()


def _rows_and_rebuild(source: Any) -> tuple[Iterable[Any], Rebuild]:
    """The rows of a source, and a function that makes a table of its type with the new columns.

    A table keeps its own columns and their types.
    """
    kinds = [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(source).__mro__]
    if "datasets.IterableDataset" in kinds:
        return source, lambda answered: type(source).from_generator(_RowSource(answered))
    kind = next((kind for kind in kinds if kind in _TABLES), None)
    if kind is not None:
        names, rows, join = _TABLES[kind]
        columns = names(source)
        if repeated := [name for name in columns if columns.count(name) > 1]:
            message = f"column {repeated[0]!r} occurs twice in the {type(source).__name__}"
            raise RequestError(message)
        return rows(source), lambda answered: join(source, columns, _columns(answered()))
    # Why check for columns: iterating over other tables yields column names or values.
    is_table = hasattr(source, "columns") or hasattr(source, "column_names")
    if is_table or isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        allowed = "a path, an iterable of rows, a Dataset, a data frame or an Arrow table"
        raise RequestError(f"source must be {allowed}, got {type(source).__name__}")
    rebuild = list if isinstance(source, Sequence) else iter
    return source, lambda answered: rebuild(answered())


def _columns(rows: Iterator[dict[str, Any]]) -> dict[str, list[Any]]:
    """The new columns of all rows."""
    values = [[row[name] for name in NEW_COLUMNS] for row in rows]
    return {name: [row[i] for row in values] for i, name in enumerate(NEW_COLUMNS)}


def _join_dataset(source: Any, columns: list[Any], new: dict[str, list[Any]]) -> Any:
    source = source.remove_columns([name for name in columns if name in new])
    for name, column in new.items():
        source = source.add_column(name, column)
    return source


def _join_polars(source: Any, columns: list[Any], new: dict[str, list[Any]]) -> Any:
    rows = list(zip(*new.values(), strict=True))
    added = type(source)(rows, schema=list(new), orient="row", infer_schema_length=None)
    return source.with_columns(added.get_columns())


def join_arrow(source: Any, columns: list[Any], new: Mapping[str, Any], **types: Any) -> Any:
    """An Arrow table with new columns, which replace existing ones with the same name.

    Args:
        types: types of new columns; by default inferred from their values.
    """
    import pyarrow  # type: ignore[import-untyped]

    source = source.drop_columns([name for name in columns if name in new])
    for name, column in new.items():
        source = source.append_column(name, pyarrow.array(column, types.get(name)))
    return source


_TABLES: dict[str, tuple[Callable[[Any], list[Any]], Callable[[Any], Iterable[Any]], Any]] = {
    "datasets.Dataset": (lambda table: table.column_names, lambda table: table, _join_dataset),
    "pandas.DataFrame": (
        lambda table: list(table.columns),
        # Why None: pandas stores missing values as NaN, and integers with NaN as floats.
        lambda table: table.astype(object).where(table.notna(), None).to_dict("records"),
        lambda table, columns, new: table.assign(**new),
    ),
    "polars.DataFrame": (
        lambda table: table.columns,
        lambda table: table.iter_rows(named=True),
        _join_polars,
    ),
    "pyarrow.Table": (
        lambda table: table.column_names,
        lambda table: (row for batch in table.to_batches() for row in batch.to_pylist()),
        join_arrow,
    ),
}
"""Class -> functions: names of the columns, rows, and the table with new columns."""
