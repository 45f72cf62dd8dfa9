"""A job before and after the model runs: its inputs, its output files, and which rows are done.

Job(options, facts)       finds inputs, locks the output, compares manifests, before a model loads
job.work(model, *facts)   the rows that have no record yet
job.complete()            --in-order, Parquet and CSV
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.jobs import manifest as manifests
from nanoengine.jobs.journal import Journal, last_process
from nanoengine.jobs.paths import STDOUT, Paths, real_path
from nanoengine.jobs.prefetch import Ahead
from nanoengine.jobs.record_log import PipeRecordLog, RecordLog
from nanoengine.jobs.records import Recorder
from nanoengine.jobs.reorder import ordered
from nanoengine.jobs.rows import Kind, RowOptions, RowReader, Task, kind_of, require_columns
from nanoengine.jobs.source import (
    STDIN,
    Form,
    Input,
    Line,
    RowError,
    csv_dialect,
    find_inputs,
    read_lines,
    require_pyarrow,
    survey,
)
from nanoengine.jobs.work import Result, Work
from nanoengine.text.prompt_forms import PAUSE, Pause
from nanoengine.version import __version__

MIB = 1 << 20
MOST_ROW_MIB = 1024
ROW_OPTIONS = {one.name for one in fields(RowOptions)} - {"any_model", "trust_row_templates"}
"""Options of rows that answers depend on."""


@dataclass(frozen=True, kw_only=True)
class JobOptions(RowOptions):
    """Options of a job; docs/batch.md is the manual.

    Attributes:
        inputs: Files, globs, or - for stdin: .jsonl, .json, .txt, .csv, .tsv, compressed or not,
            .parquet.
        output: Where records go: .jsonl, .csv, .tsv, .parquet, or - for stdout.
        input_format: Format of the inputs, whatever their suffixes.
        errors: Write error records to this file, apart from answers.
        in_order: Sort the finished file into the order of the inputs.
        strict: Refuse to start if a custom_id, or an id, occurs twice.
        restart: Start over; an earlier output is moved aside, as OUTPUT.1.
        retry_errors: In a resumed job, run failed rows again.
        keep_input_order: Run rows in the order of the inputs; it changes no result, only the speed.
        max_errors: Stop, with exit code 3, if more rows than this fail.
        max_row_mib: A larger row becomes an error record [MiB].
        summary_json: Also write the summary to this file.
    """

    inputs: tuple[str, ...]
    output: str
    input_format: Form | None = None
    errors: str | None = None
    in_order: bool = False
    strict: bool = False
    restart: bool = False
    retry_errors: bool = False
    keep_input_order: bool = False
    max_errors: int | None = None
    max_row_mib: float = 16.0
    summary_json: Path | None = None

    @property
    def max_row_bytes(self) -> int:
        """`max_row_mib` in bytes."""
        return int(self.max_row_mib * MIB)


class InputChangedError(NanoEngineError):
    """The inputs changed while the job ran."""


class Job:
    """A job whose output this process owns.

    Args:
        options: the options of the job.
        facts: returns what results depend on in model and engine, for the manifest. Why a function:
            a job that is refused must not read weights.

    Attributes:
        num_rows: rows of all inputs, as far as they can be counted; None with stdin.
        num_done, num_failed: rows that had a record at the start, and the failed ones among them.
        done: one byte per row of the files, 1 if it has a record. Rows of stdin have none.
        log: the records.
        is_complete: no row is left.

    Raises:
        ConfigError: an input, an output or an earlier job doesn't allow it; no file was changed.
    """

    def __init__(self, options: JobOptions, facts: Callable[[], Mapping[str, Any]]) -> None:
        self.options = options
        self._paths = Paths(options.output, options.errors, options.summary_json)
        self.inputs = find_inputs(options.inputs, options.input_format, self._paths.is_own)
        self._has_stdin = any(one.name == STDIN for one in self.inputs)
        self._check()
        self._paths.check(self.inputs)
        self.num_failed = 0
        self.created = int(time.time())
        self.journal: Journal | None = None
        self.is_complete = False
        with contextlib.ExitStack() as stack:
            self._open_logs(stack)
            self._inputs_at_start = manifests.describe_inputs(self.inputs)
            self.num_rows = count_rows(self.inputs, options)
            self.done = bytearray(self.num_rows or 0)
            if isinstance(self.log, RecordLog):
                self.journal = self._resume(facts)
                close = self.journal.close
                stack.callback(lambda: close(is_complete=self.is_complete))
            elif any(log.num_bytes for log in self._files()):
                raise ConfigError(
                    f"--errors {options.errors!r} exists, and beside an output that can't be read"
                    " again nobody can tell what job it is of: name another file"
                )
            self._closing = stack.pop_all()
        self.num_done = self.done.count(1)

    def _check(self) -> None:
        options = self.options
        has_size = 0 < options.max_row_mib <= MOST_ROW_MIB
        is_stdout = options.output == STDOUT
        refused = {
            f"--max-row-mib must be greater than 0 and at most {MOST_ROW_MIB:,}, got"
            f" {options.max_row_mib}": not has_size,
            f"--max-errors must be at least 0, got {options.max_errors}": (
                (options.max_errors or 0) < 0
            ),
            "--strict reads all rows before any runs, and stdin comes once: give a file": (
                options.strict and self._has_stdin
            ),
            "--in-order and --retry-errors need an --output that can be read again, not -": (
                is_stdout and (options.in_order or options.retry_errors)
            ),
            "--output - writes to stdout, which is closed": is_stdout and not _is_writable(1),
        }
        for message, is_so in refused.items():
            if is_so:
                raise ConfigError(message)
        if self._paths.table == ".parquet":
            require_pyarrow("Parquet files")

    # --- the output -----------------------------------------------------------------------------

    def _open_logs(self, stack: contextlib.ExitStack) -> None:
        """Opens the output, and the file of errors if there is one; the stack closes them."""
        self.log = self._error_log = self._open_log(self.options.output, stack)
        name, path = self.options.errors, self._paths.errors_manifest
        if name is None or path is None:
            return
        self._error_log = self._open_log(name, stack)
        owner = (
            manifests.load(path, errors_of=str) if isinstance(self._error_log, RecordLog) else None
        )
        # Why: two jobs with one file would each count the other's rows as its own.
        if owner is not None and owner["errors_of"] != self._paths.errors_of:
            raise ConfigError(f"--errors {name!r} is of another job, see {path}: name another file")

    def _open_log(self, name: str, stack: contextlib.ExitStack) -> RecordLog | PipeRecordLog:
        log: RecordLog | PipeRecordLog
        path = Path(name)
        if name == STDOUT:
            log = PipeRecordLog(1)
        elif path.exists() and not path.is_dir() and not path.is_file():
            try:
                log = PipeRecordLog(os.open(path, os.O_WRONLY))
            except OSError as error:
                raise ConfigError(f"output {name!r} can't be written: {error.strerror}") from error
        else:
            is_table = self._paths.table and name == self.options.output
            path = self._paths.table_log if is_table else real_path(name)
            log = RecordLog(path, lambda: last_process(self._paths.runs))
        stack.push(lambda error, *_: log.close(drop_empty=error is not None))
        return log

    def _files(self) -> list[RecordLog]:
        """The logs that can be read back."""
        both = dict.fromkeys((self.log, self._error_log))
        return [log for log in both if isinstance(log, RecordLog)]

    def _resume(self, facts: Callable[[], Mapping[str, Any]]) -> Journal:
        """Compares with the earlier job, if there is one, and reads back which rows it has done."""
        paths, options = self._paths, self.options
        now = {
            "format": manifests.FORMAT,
            "nanoengine": __version__,
            **facts(),
            "rows": {k: v for k, v in asdict(options).items() if k in ROW_OPTIONS},
            "max_row_mib": options.max_row_mib,
            "errors": options.errors,
            "stdin": self._has_stdin,
            "created": self.created,
            "inputs": self._inputs_at_start,
        }
        now = json.loads(json.dumps(now))  # as it will be read back
        if options.restart:
            with contextlib.ExitStack() as stack:
                for log in self._files():
                    stack.enter_context(log.put_down())
                paths.move_aside()
        before = manifests.load(paths.manifest, created=int, inputs=list)
        has_records = any(log.num_bytes for log in self._files())
        # Why the table too: it would be replaced at the end.
        if has_records or (paths.table and paths.output.exists() and paths.output.stat().st_size):
            if before is None:
                raise ConfigError(
                    f"output {options.output!r} exists, and no {paths.manifest.name} beside it says"
                    f" what job it is of: {manifests.ASIDE}"
                )
            if now["stdin"]:
                raise ConfigError(
                    "a job that reads stdin can't be resumed, as nobody knows what came then: give"
                    f" a file; or {manifests.ASIDE}"
                )
            manifests.require_same(before, now, self.inputs)
            self._read_back()
        elif before is not None and {**before, "created": 0} != {**now, "created": 0}:
            before = None  # another job, without any answer
        if before is None or options.retry_errors:
            paths.runs.unlink(missing_ok=True)
        if before is not None:
            now["created"] = self.created = before["created"]
        if len(self._files()) > 1 and not paths.errors_manifest.exists():
            owner = {"format": manifests.FORMAT, "errors_of": paths.errors_of}
            manifests.save(paths.errors_manifest, owner)
        if before != now:
            manifests.save(paths.manifest, now)
        return Journal(paths.runs, self.done.count(1), self.is_done)

    def _read_back(self) -> None:
        """Marks rows with a record as done; with `retry_errors`, only rows that did not fail."""
        for log in self._files():
            kept, num_bad, num_dropped = array("q"), 0, 0
            for record in log.records(self.num_rows):
                if record is None or self.done[record.row]:
                    num_bad += 1
                elif record.failed and self.options.retry_errors:
                    num_dropped += 1
                else:
                    kept.append(record.offset)
                    self.done[record.row] = 1
                    self.num_failed += record.failed
            if num_bad > len(kept) + num_dropped:
                raise ConfigError(
                    f"{log.path}: most lines are no records of this job, {num_bad:,} beside"
                    f" {len(kept) + num_dropped:,} that are: bring back what it was; or"
                    f" {manifests.ASIDE}"
                )
            log.mend_end()
            if num_bad:
                told = f"{num_bad:,} lines are no records, or of rows that have one: they are"
                told += " dropped, and rows without any run again"
                warnings.warn(f"{log.path}: {told}", stacklevel=1)
            if num_bad or num_dropped:
                log.rewrite(kept)

    # --- the rows -------------------------------------------------------------------------------

    def work(self, model: str, *facts: Any) -> Work:
        """The remaining work, for a model; `facts` are the further arguments of `RowReader`."""
        options, journal = self.options, self.journal
        reader, recorder = self.reader(model, *facts)
        counts = {} if journal is None else journal.counts

        def finish(task: Task, result: Result) -> None:
            if task.row < len(self.done):
                self.done[task.row] = 1
            log = self._error_log if isinstance(result, RowError) else self.log
            log.append(recorder.record(task, result))

        tasks = self.tasks(reader, lambda row: not self.is_done(row) and row not in counts)
        suspects = self.tasks(reader, counts.__contains__) if counts else ()
        return Work(
            tasks if options.keep_input_order else ordered(tasks),
            finish,
            suspects=[(task, counts[task.row]) for task in suspects],
            note=lambda task: None if journal is None else journal.note(task.row),
            max_errors=options.max_errors,
        )

    def is_done(self, row: int) -> bool:
        """Whether a row has a record."""
        return row < len(self.done) and self.done[row] == 1

    def reader(self, model: str, *facts: Any) -> tuple[RowReader, Recorder]:
        """Makes the reader of tasks and the writer of records; the arguments are as for `work`."""
        return RowReader(self.options, model, *facts), Recorder(model, self.created)

    def tasks(self, reader: RowReader, wanted: Callable[[int], bool]) -> Iterator[Task | Pause]:
        """The tasks of the wanted rows."""
        return tasks_of(self.inputs, self.options, reader, wanted)

    # --- the end --------------------------------------------------------------------------------

    def complete(self) -> None:
        """Finishes the output once all rows have a record: sorts it, or writes the table.

        Raises:
            OutputLostError: the file has lost records that were written.
            InputChangedError: rows have no record, or the inputs have changed.
        """
        self.log.sync()
        self._error_log.sync()
        self._require_all()
        if self._paths.table and isinstance(self.log, RecordLog):
            from nanoengine.jobs import tables

            to = self.log, _in_order(self.log), self._paths.output
            if self._paths.table == ".parquet":
                tables.write_parquet(*to)
            else:
                tables.write_csv(*to, *csv_dialect(self.inputs))
        elif self.options.in_order:
            for log in self._files():
                log.rewrite(_in_order(log))
        self.is_complete = True

    def _require_all(self) -> None:
        for told in manifests.changed_inputs(self._inputs_at_start):
            raise InputChangedError(
                f"{told} while the job ran, so some answers may be to other rows: --restart begins"
                " anew"
            )
        # Why not Parquet: a damaged file yields fewer rows than it declares, and an error record.
        is_counted = self.num_rows is not None and all(one.form != "parquet" for one in self.inputs)
        num_done = self.done.count(1)
        if is_counted and num_done < self.num_rows:
            raise InputChangedError(
                f"{self.num_rows - num_done:,} of {self.num_rows:,} rows have no record: an"
                " input was not whole while it was read; the same command runs them"
            )

    def close(self) -> None:
        """Releases the output for other processes."""
        self._closing.close()


def count_rows(inputs: list[Input], options: JobOptions) -> int | None:
    """Counts the rows of the inputs, as far as possible; None with stdin.

    Raises:
        ConfigError: --strict, and an id occurs twice; or see `require_columns`.
    """
    require_columns(inputs, options, options.max_row_bytes)
    if any(one.name == STDIN for one in inputs):
        return None
    num_rows, duplicates = survey(inputs, options.max_row_bytes)
    if not num_rows:
        warnings.warn("the inputs have no rows", stacklevel=1)
    if duplicates and options.strict:
        raise ConfigError("--strict: " + "; ".join(duplicates))
    for told in duplicates:
        warnings.warn(f"{told}: both are answered, by equal random numbers", stacklevel=1)
    return num_rows


def tasks_of(
    inputs: list[Input],
    options: JobOptions,
    reader: RowReader,
    wanted: Callable[[int], bool] = lambda row: True,
) -> Iterator[Task | Pause]:
    """The tasks of the wanted rows of the inputs."""
    kinds: dict[Input, Kind] = {}
    lines: Iterable[Line | Pause] = read_lines(inputs, options.max_row_bytes)
    for line in Ahead(lines) if any(one.name == STDIN for one in inputs) else lines:
        if line is PAUSE:
            yield PAUSE
        elif wanted(line.row):
            if line.input not in kinds:
                kinds[line.input] = _kind_of(line, options)
            yield reader.task(line, kinds[line.input])


def _kind_of(first: Line, options: JobOptions) -> Kind:
    """The form of an input, from its first row that can be parsed."""
    one = first.input
    if one.form not in ("jsonl", "json") or options.columns_alone:
        return "simple"
    lines = [first] if one.name == STDIN else read_lines([one], options.max_row_bytes)
    return kind_of(lines)


def _is_writable(fd: int) -> bool:
    try:
        os.write(fd, b"")  # Windows reports only a closed one.
    except OSError:
        return False
    return True


def _in_order(log: RecordLog) -> array[int]:
    """The offsets of a log's records, in the order of their rows; needs 8 bytes per row."""
    offsets = array("q")
    for record in log.records():
        if record is not None:
            missing = record.row + 1 - len(offsets)
            offsets.extend([-1] * missing)
            offsets[record.row] = record.offset
    return array("q", (offset for offset in offsets if offset >= 0))
