"""A job before and after the model runs: its inputs, its output files, and which rows are done.

Job(options, describe)          finds inputs, locks the output, compares manifests; loads no model
job.work(model, *reader_args)   the rows that have no record yet
job.complete()                  sorts the output, or writes the Parquet or CSV file
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
from nanoengine.jobs.paths import STDOUT, JobPaths, resolved_path
from nanoengine.jobs.prefetch import Prefetcher
from nanoengine.jobs.record_log import PipeRecordLog, RecordLog
from nanoengine.jobs.records import Recorder
from nanoengine.jobs.reorder import reordered
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
from nanoengine.settings.checks import counted
from nanoengine.text.prompt_forms import PAUSE, Pause
from nanoengine.version import __version__

MIB = 1 << 20
ROW_MIB_LIMIT = 1024
ROW_OPTIONS = {field.name for field in fields(RowOptions)} - {"trust_row_templates"}
"""Options of rows that answers depend on."""


@dataclass(frozen=True, kw_only=True)
class JobOptions(RowOptions):
    """Options of a job; docs/batch.md is the manual.

    Attributes:
        inputs: Files, globs, or - for stdin: .jsonl, .json, .txt, .csv, .tsv, compressed or not,
            .parquet.
        output: File for the records: .jsonl, .csv, .tsv, .parquet, or - for stdout.
        input_format: Format of the inputs, regardless of their suffixes.
        errors: Write error records to this file instead of the output.
        sort_output: Sort the finished output into the order of the inputs.
        require_unique_ids: Refuse to start if a custom_id or an id occurs twice.
        restart: Start over; answers.csv is renamed to answers.1.csv.
        retry_errors: In a resumed job, run failed rows again.
        reorder: Run rows with a common prefix together, and the longest rows first at the end. Only
            the speed depends on it.
        max_errors: Stop, with exit code 3, if more rows than this fail.
        max_row_mib: Maximum size of a row; a larger one becomes an error record [MiB].
        summary_json: Also write the summary to this file.
    """

    inputs: tuple[str, ...]
    output: str
    input_format: Form | None = None
    errors: str | None = None
    sort_output: bool = False
    require_unique_ids: bool = False
    restart: bool = False
    retry_errors: bool = False
    reorder: bool = True
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
        describe: returns the manifest's description of model and engine. Why a function: it
            reads all weights, so other checks come first.

    Attributes:
        num_rows: rows of all inputs; None with stdin.
        num_done, num_failed: rows that had a record at the start, and the failed ones among them.
        done: one byte per row of the files, 1 if it has a record; empty with stdin.
        log: the records.
        is_complete: all rows have a record.
        make_recorder: the class of the maker of records.

    Raises:
        ConfigError: an input, the output or an option is invalid, or the output belongs to another
            job; no file was changed.
    """

    make_recorder = Recorder

    def __init__(self, options: JobOptions, describe: Callable[[], Mapping[str, Any]]) -> None:
        self.options = options
        self._paths = JobPaths(options.output, options.errors, options.summary_json)
        self.inputs = find_inputs(options.inputs, options.input_format, self._paths.is_job_file)
        self._has_stdin = any(source.name == STDIN for source in self.inputs)
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
                self.journal = self._resume(describe)
                close = self.journal.close
                stack.callback(lambda: close(is_complete=self.is_complete))
            elif any(log.num_bytes for log in self._record_logs()):
                reason = "a job whose --output is a pipe can't be resumed: give a new file"
                raise ConfigError(f"--errors {options.errors!r} exists, but {reason}")
            self._exit_stack = stack.pop_all()
        self.num_done = self.done.count(1)

    def _check(self) -> None:
        """Raises ConfigError if options are out of range or contradict each other."""
        options = self.options
        has_size, max_errors = 0 < options.max_row_mib <= ROW_MIB_LIMIT, options.max_errors or 0
        is_stdout = options.output == STDOUT
        errors = {
            f"--max-row-mib must be greater than 0 and at most {ROW_MIB_LIMIT:,}, got"
            f" {options.max_row_mib}": not has_size,
            f"--max-errors must be at least 0, got {max_errors}": max_errors < 0,
            "--require-unique-ids reads all rows before any runs, which stdin does not allow: give"
            " a file": options.require_unique_ids and self._has_stdin,
            "--sort-output and --retry-errors need an --output that can be read again, not -": (
                is_stdout and (options.sort_output or options.retry_errors)
            ),
            "--output - writes to stdout, which is closed": is_stdout and not _is_writable(1),
        }
        for message, is_wrong in errors.items():
            if is_wrong:
                raise ConfigError(message)
        if self._paths.table == ".parquet":
            require_pyarrow("Parquet files")

    # --- the output -----------------------------------------------------------------------------

    def _open_logs(self, stack: contextlib.ExitStack) -> None:
        """Opens the output, and the file for --errors if it is given; the stack closes them."""
        self.log = self._error_log = self._open_log(self.options.output, stack)
        name, path = self.options.errors, self._paths.errors_manifest
        if name is None or path is None:
            return
        self._error_log = self._open_log(name, stack)
        is_log = isinstance(self._error_log, RecordLog)
        owner = manifests.load(path, errors_of=str) if is_log else None
        # Why: jobs that share a file would count each other's records.
        if owner is not None and owner["errors_of"] != self._paths.errors_of:
            raise ConfigError(f"--errors {name!r} belongs to the job of {path}: give another file")

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
            path = self._paths.table_log if is_table else resolved_path(name)
            log = RecordLog(path, lambda: last_process(self._paths.journal))
        stack.push(lambda error, *_: log.close(drop_empty=error is not None))
        return log

    def _record_logs(self) -> list[RecordLog]:
        """The logs that can be read back: not pipes."""
        logs = dict.fromkeys((self.log, self._error_log))
        return [log for log in logs if isinstance(log, RecordLog)]

    def _resume(self, describe: Callable[[], Mapping[str, Any]]) -> Journal:
        """Checks that an earlier job on this output is the same one, and reads its records."""
        paths, options = self._paths, self.options
        manifest = {
            "format": manifests.FORMAT,
            "nanoengine": __version__,
            **describe(),
            "rows": {k: v for k, v in asdict(options).items() if k in ROW_OPTIONS},
            "max_row_mib": options.max_row_mib,
            "errors": options.errors,
            "stdin": self._has_stdin,
            "created": self.created,
            "inputs": self._inputs_at_start,
        }
        manifest = json.loads(json.dumps(manifest))  # as it will be read back
        if options.restart:
            with contextlib.ExitStack() as stack:
                for log in self._record_logs():
                    stack.enter_context(log.file_closed())
                paths.move_aside()
        earlier = manifests.load(paths.manifest, created=int, inputs=list)
        has_records = any(log.num_bytes for log in self._record_logs())
        # Why the table too: it would be replaced at the end.
        if has_records or (paths.table and paths.output.exists() and paths.output.stat().st_size):
            if earlier is None:
                manifest_name = f"{paths.manifest.name}, which describes its job"
                message = f"output {options.output!r} exists without {manifest_name}"
                raise ConfigError(f"{message}: {manifests.START_OVER_HINT}")
            if manifest["stdin"]:
                raise ConfigError(f"a job of stdin can't be resumed: {manifests.START_OVER_HINT}")
            manifests.require_same(earlier, manifest, self.inputs)
            self._read_back()
        elif earlier is not None and {**earlier, "created": 0} != {**manifest, "created": 0}:
            earlier = None  # another job that wrote no record
        if earlier is None or options.retry_errors:
            paths.journal.unlink(missing_ok=True)
        if earlier is not None:
            manifest["created"] = self.created = earlier["created"]
        if len(self._record_logs()) > 1 and not paths.errors_manifest.exists():
            owner = {"format": manifests.FORMAT, "errors_of": paths.errors_of}
            manifests.save(paths.errors_manifest, owner)
        if earlier != manifest:
            manifests.save(paths.manifest, manifest)
        return Journal(paths.journal, self.done.count(1), self.is_done)

    def _read_back(self) -> None:
        """Marks rows with a record as done; with `retry_errors`, only rows that did not fail."""
        for log in self._record_logs():
            kept, num_bad, num_to_retry = array("q"), 0, 0
            for record in log.records(self.num_rows):
                if record is None or self.done[record.row]:
                    num_bad += 1
                elif record.failed and self.options.retry_errors:
                    num_to_retry += 1
                else:
                    kept.append(record.offset)
                    self.done[record.row] = 1
                    self.num_failed += record.failed
            num_good = len(kept) + num_to_retry
            if num_bad > num_good:
                count = f"{num_bad:,} of {num_bad + num_good:,}"
                message = f"{log.path}: most lines are not records of this job ({count})"
                raise ConfigError(f"{message}: restore the file; or {manifests.START_OVER_HINT}")
            log.repair_end()
            if num_bad:
                message = f"dropped {counted(num_bad, 'line')}: not records, or repeated ones"
                warnings.warn(f"{log.path}: {message}", stacklevel=1)
            if num_bad or num_to_retry:
                log.rewrite(kept)

    # --- the rows -------------------------------------------------------------------------------

    def work(self, model: str, *reader_args: Any) -> Work:
        """The remaining work, for a model.

        Args:
            reader_args: the arguments of `RowReader` after `model`; see `rows.reader_args`.
        """
        options, journal = self.options, self.journal
        reader, recorder = self.reader(model, *reader_args)
        crashes = {} if journal is None else journal.crashes

        def finish(task: Task, result: Result) -> None:
            if task.row < len(self.done):
                self.done[task.row] = 1
            log = self._error_log if isinstance(result, RowError) else self.log
            log.append(recorder.record(task, result))

        tasks = self.tasks(reader, lambda row: not self.is_done(row) and row not in crashes)
        suspects = self.tasks(reader, crashes.__contains__) if crashes else ()
        return Work(
            reordered(tasks) if options.reorder else tasks,
            finish,
            suspects=[(task, crashes[task.row]) for task in suspects],
            on_start=lambda task: None if journal is None else journal.record_start(task.row),
            max_errors=options.max_errors,
        )

    def is_done(self, row: int) -> bool:
        """Whether a row has a record."""
        return row < len(self.done) and self.done[row] == 1

    def reader(self, model: str, *reader_args: Any) -> tuple[RowReader, Recorder]:
        """The reader of rows and the maker of records; the arguments are as for `work`."""
        return RowReader(self.options, model, *reader_args), self.make_recorder(model, self.created)

    def tasks(self, reader: RowReader, include: Callable[[int], bool]) -> Iterator[Task | Pause]:
        """The tasks of the rows for which `include` is true."""
        return tasks_of(self.inputs, self.options, reader, include)

    # --- the end --------------------------------------------------------------------------------

    def complete(self) -> None:
        """Finishes the output when all rows have a record: sorts it, or writes the table.

        Raises:
            OutputLostError: the file has lost records that were written.
            InputChangedError: rows have no record, or the inputs have changed.
        """
        self.log.sync()
        self._error_log.sync()
        self._require_all()
        if self._paths.table and isinstance(self.log, RecordLog):
            from nanoengine.jobs import tables

            args = self.log, _sorted_offsets(self.log), self._paths.output
            if self._paths.table == ".parquet":
                tables.write_parquet(*args)
            else:
                tables.write_csv(*args, *csv_dialect(self.inputs))
        elif self.options.sort_output:
            for log in self._record_logs():
                log.rewrite(_sorted_offsets(log))
        self.is_complete = True

    def _require_all(self) -> None:
        for message in manifests.changed_inputs(self._inputs_at_start):
            raise InputChangedError(f"{message} while the job ran: start over with --restart")
        # Why not Parquet: a damaged file yields fewer rows than it declares, and an error record.
        is_exact = all(source.form != "parquet" for source in self.inputs)
        num_done = self.done.count(1)
        if self.num_rows is not None and is_exact and num_done < self.num_rows:
            missing = f"{self.num_rows - num_done:,} of {self.num_rows:,} rows have no record"
            reason = "an input was truncated while it was read"
            raise InputChangedError(f"{missing}, because {reason}: run the same command again")

    @property
    def places(self) -> str:
        """The names of the files that have the records, for messages."""
        name = "stdout" if self.options.output == STDOUT else self.options.output
        if isinstance(self.log, RecordLog) and not self.is_complete:
            name = str(self.log.path)
        return name if self.options.errors is None else f"{name} and {self.options.errors}"

    def close(self) -> None:
        """Releases the output for other processes."""
        self._exit_stack.close()


def count_rows(inputs: list[Input], options: JobOptions) -> int | None:
    """The number of rows of the inputs; None with stdin. Warns about duplicate ids.

    Raises:
        ConfigError: an id occurs twice, with `require_unique_ids`; or see `require_columns`.
    """
    require_columns(inputs, options, options.max_row_bytes)
    if any(source.name == STDIN for source in inputs):
        return None
    num_rows, duplicates = survey(inputs, options.max_row_bytes)
    if not num_rows:
        warnings.warn("the inputs have no rows", stacklevel=1)
    if duplicates and options.require_unique_ids:
        raise ConfigError("--require-unique-ids: " + "; ".join(duplicates))
    for duplicate in duplicates:
        warnings.warn(f"{duplicate}: both rows run, with equal random numbers", stacklevel=1)
    return num_rows


def tasks_of(
    inputs: list[Input],
    options: JobOptions,
    reader: RowReader,
    include: Callable[[int], bool] = lambda row: True,
) -> Iterator[Task | Pause]:
    """The tasks of the rows for which `include` is true; PAUSE while stdin has no row."""
    kinds: dict[Input, Kind] = {}
    lines: Iterable[Line | Pause] = read_lines(inputs, options.max_row_bytes)
    if any(source.name == STDIN for source in inputs):
        lines = Prefetcher(lines)
    for line in lines:
        if line is PAUSE:
            yield PAUSE
        elif include(line.row):
            if line.input not in kinds:
                kinds[line.input] = _kind_of(line, options)
            yield reader.task(line, kinds[line.input])


def _kind_of(first: Line, options: JobOptions) -> Kind:
    """The kind of an input's rows, from its first row that can be parsed."""
    source = first.input
    if source.form not in ("jsonl", "json") or options.columns_are_data:
        return "simple"
    lines = [first] if source.name == STDIN else read_lines([source], options.max_row_bytes)
    return kind_of(lines)


def _is_writable(fd: int) -> bool:
    try:
        os.write(fd, b"")  # Windows only reports a closed one.
    except OSError:
        return False
    return True


def _sorted_offsets(log: RecordLog) -> array[int]:
    """The offsets of a log's records, sorted by row; needs 8 bytes per row."""
    offsets = array("q")
    for record in log.records():
        if record is not None:
            missing = record.row + 1 - len(offsets)
            offsets.extend([-1] * missing)
            offsets[record.row] = record.offset
    return array("q", (offset for offset in offsets if offset >= 0))
