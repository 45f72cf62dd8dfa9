"""Generate: an engine in a Ray Data actor, which streams rows across batches.

    dataset.map_batches(Generate, fn_constructor_kwargs={"model": ...},
                        compute=ray.data.ActorPoolStrategy(size=n))

    Ray Data ── batches, several at a time ──> __call__ ── rows ──> RowQueue ── Work ── LLM.stream
             <── a batch, its rows in order ──          <── outputs, as they finish ──────┘

Rows of the next batch start as soon as rows of this one finish, so the engine stays full at the end
of a batch. A batch is returned whole and in order, because Ray Data repeats the batches of a lost
actor, and expects equal results.

Ray repeats them without limit. So the running rows are recorded in a temporary file: after three
crashes of the actor, a row is poison and gets an error (`Attempts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import xxhash

from nanoengine.errors import RequestError
from nanoengine.jobs.datasets import ROWS, join_arrow
from nanoengine.jobs.prefetch import RowQueue
from nanoengine.jobs.rows import RowOptions, RowReader, Task
from nanoengine.jobs.source import Line, RowError
from nanoengine.jobs.work import Result, Work
from nanoengine.outputs import RequestOutput
from nanoengine.settings.checks import to_python
from nanoengine.settings.params import SamplingParams
from nanoengine.text.prompt_forms import PAUSE, Pause

ERROR_COLUMN = "__inference_error__"
"""The error of a row, or "". Source: the name of this column in Ray's own LLM module."""


class Generate:
    """Runs rows, whose columns are as in simple rows of docs/batch.md. All columns are kept.

    New columns: `outputs`, a list of {"text", "token_ids", "finish_reason"} per completion or turn;
    `usage`, {"prompt_tokens", "completion_tokens"}; and ERROR_COLUMN.

    Args:
        sampling_params: for rows that don't set their own.
        key_column: the column whose value seeds the random numbers of a row, like `custom_id` in a
            batch. None: all columns together.
        special_rows: options of `RowOptions`: prompt_column, template, chat, system.
        options: options of the LLM.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        *,
        key_column: str | None = None,
        special_rows: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from nanoengine.llm import LLM

        params = sampling_params
        given = {} if params is None else {f.name: getattr(params, f.name) for f in fields(params)}
        self._llm = LLM(model, **options)
        rows = RowOptions(sampling=given, **(special_rows or {}))
        reader = RowReader(rows, model, self._llm.info.generation_defaults)
        self._tasks = _Tasks(reader, Attempts(_attempts_path()))
        self._key_column = key_column
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._tasks.work.run(lambda rows: self._llm.stream(rows, on_error="record"))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # Ray then restarts the actor, and repeats its batches.

    async def __call__(self, batch: Any) -> Any:
        """Runs a batch: a dict of numpy arrays, or an Arrow table, which keeps types."""
        is_table = hasattr(batch, "to_pylist")
        if not is_table and not isinstance(batch, Mapping):
            raise RequestError(
                f"batch_format must be 'numpy' or 'pyarrow', got batches of {type(batch).__name__}"
            )
        rows = batch.to_pylist() if is_table else _rows(batch)
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        for row, future in zip(rows, futures, strict=True):
            self._tasks.put(row, self._key(row), future)
        results = [await future for future in futures]
        names = ("outputs", "usage", ERROR_COLUMN)
        columns = {name: [values[i] for values in results] for i, name in enumerate(names)}
        if not is_table:
            import numpy as np

            added = {name: np.empty(len(rows), object) for name in columns}
            for name, column in columns.items():
                added[name][:] = column
            return {**batch, **added}
        return join_arrow(batch, batch.column_names, columns, **_arrow_types())

    def _key(self, row: Mapping[str, Any]) -> str:
        if self._key_column is None:
            content = json.dumps(row, sort_keys=True, default=str)
            return xxhash.xxh3_128_hexdigest(content.encode(errors="surrogatepass"))
        if self._key_column not in row:
            raise RequestError(f"key_column={self._key_column!r}: the rows have no such column")
        return str(row[self._key_column])


class _Tasks(Iterator["Task | Pause"]):
    """The rows of all batches, as tasks of one `Work` that never ends."""

    def __init__(self, reader: RowReader, attempts: Attempts) -> None:
        self.work = Work(self, self._finish, on_start=lambda task: attempts.begin(task.key))
        self._reader, self._attempts = reader, attempts
        self._feed: RowQueue[Task] = RowQueue()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._num_rows = 0

    def put(self, row: dict[str, Any], key: str, future: asyncio.Future[Any]) -> None:
        """Queues a row; called from the event loop's thread."""
        number, self._num_rows = self._num_rows, self._num_rows + 1
        task = self._reader.task(Line(number, ROWS, number + 1, row))
        task.key = key
        if task.params.logprobs is not None or task.params.prompt_logprobs is not None:
            task.error = RowError("invalid_row", "logprobs have no column: use `nanoengine batch`")
        self._waiting[number] = future
        self._feed.put(task)

    def __next__(self) -> Task | Pause:
        """The next row. A row with crashes ends the stream, and runs separately from others."""
        task = next(self._feed)
        if task is not PAUSE and (crashes := self._attempts.crashes[task.key]):
            self.work.suspect(task, crashes, "the actor died")
            raise StopIteration
        return task

    def _finish(self, task: Task, result: Result) -> None:
        self._feed.row_finished()
        self._attempts.end(task.key)
        future = self._waiting.pop(task.row)
        failed = isinstance(result, RowError)
        error = f"{result.code}: {result}" if failed else ""
        values = _new_values([] if failed else [*task.outputs, result], error)
        future.get_loop().call_soon_threadsafe(lambda: future.done() or future.set_result(values))


NewValues = tuple[list[dict[str, Any]], dict[str, int], str]
"""The values of the new columns for one row."""


def _new_values(outputs: list[RequestOutput], error: str = "") -> NewValues:
    texts = [
        {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
        for output in outputs
        for c in output.outputs
    ]
    usage = {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "completion_tokens": sum(len(c.token_ids) for o in outputs for c in o.outputs),
    }
    return texts, usage, error


def _arrow_types() -> dict[str, Any]:
    import pyarrow as pa

    usage = pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])
    output = [("text", pa.string()), ("token_ids", pa.list_(pa.int64()))]
    outputs = pa.list_(pa.struct([*output, ("finish_reason", pa.string())]))
    return {"outputs": outputs, "usage": usage, ERROR_COLUMN: pa.string()}


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts columns to rows; missing numbers are NaN in the columns."""
    columns = [[_plain(value) for value in column] for column in batch.values()]
    return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    value = to_python(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


# --- crashes --------------------------------------------------------------------------------------


def _attempts_path() -> Path:
    """The path of this actor's file; the same after a restart on the same machine."""
    try:
        import ray  # type: ignore[import-not-found]

        context = ray.get_runtime_context()
        name = f"{context.get_job_id()}-{context.get_actor_id()}"
    except ImportError:
        name = str(os.getpid())
    return Path(tempfile.gettempdir()) / f"nanoengine-{name}.runs"


class Attempts:
    """The running rows, recorded in a file, and the number of crashes of the actor per row.

        ["run", PID]      an actor started
        ["begin", KEY]    a row with this key runs
        ["end", KEY]      it has ended

    Attributes:
        crashes: key -> number of crashes, for rows that have not ended since.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: Counter[str] = Counter()
        self.crashes: Counter[str] = Counter()
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # incomplete, because the disk was full
                self._count(*json.loads(line))
        self._write("run", os.getpid())

    def begin(self, key: str) -> None:
        """Records that a row is about to run."""
        self._write("begin", key)

    def end(self, key: str) -> None:
        """Records that a row has ended, or never ran. Removes a file without rows or crashes."""
        self._write("end", key)
        if not self._running and not self.crashes:
            self._path.unlink(missing_ok=True)

    def _write(self, what: str, value: Any) -> None:
        self._count(what, value)
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps([what, value]).encode() + b"\n")

    def _count(self, what: str, value: Any) -> None:
        if what == "begin":
            self._running[value] += 1
        elif what == "end":
            self._running -= Counter([value])
            self.crashes.pop(value, None)
        else:  # the previous process crashed while these rows ran
            self.crashes.update(self._running.keys())
            self._running.clear()
