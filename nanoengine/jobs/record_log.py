"""The output file: records are appended while a job runs, and read back after a crash.

    append      one os.write per line with O_APPEND: written records survive SIGKILL
    sync        fdatasync at most every 5 s: a power failure loses at most the last 5 s
    records     parses each line and finds the rows that have a record
    rewrite     atomically replaces the log by some of its lines, in another order

A record is a JSON object on one line, with the fields of docs/batch.md and the number of a row.
Another program may have rewritten the file, with other spacing or order of fields.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from nanoengine.errors import ConfigError

SYNC_S = 5.0
"""Perf: a record costs 4 us, an fdatasync 4 ms (ext4 on an SSD)."""

BUFFER_BYTES = 1 << 20
SIMPLE_FIELDS = {"_row", "outputs", "usage", "error"}
OPENAI_FIELDS = {"id", "custom_id", "response", "error"}
OPENAI_ID = re.compile(r"batch_req_([0-9]{1,18})")
JSON_DECODER = json.JSONDecoder()
O_BINARY = getattr(os, "O_BINARY", 0)
"""A flag of `os.open`, with which Windows writes \\n unchanged."""


class OutputLostError(OSError):
    """A file of the job can't be written, or was changed by another program; the job can resume."""


@contextlib.contextmanager
def as_output_lost(path: Path) -> Iterator[None]:
    """Converts an OSError to an OutputLostError that names the file."""
    try:
        yield
    except OSError as error:
        raise OutputLostError(
            error.errno,
            f"{path} can't be written: {error.strerror or error}; all earlier records are kept, and"
            " the same command resumes the job",
        ) from error


class Record(NamedTuple):
    """A record in a log and the offset of its line [bytes]."""

    row: int
    failed: bool
    offset: int


def lock_path(path: Path) -> Path:
    """The lock file of `path`; the process that writes `path` holds the lock."""
    return path.with_name(f"{path.name}.lock")


def _parse_json(line: bytes) -> Any:
    """The parsed line; None if it is not JSON."""
    try:
        return JSON_DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None


def parse_record(line: bytes, offset: int, num_rows: int) -> Record | None:
    """The record in a line; None if the line is not a record, or its row is not below `num_rows`.

    Perf: 4 us, 3 of them for JSON. Why parse the whole line: its first and last bytes don't reveal
    a page of zeros inside, or half a record followed by another one.
    """
    record, row = _parse_json(line), None
    if isinstance(record, dict) and record.keys() >= SIMPLE_FIELDS:
        row = record["_row"]
    elif isinstance(record, dict) and record.keys() >= OPENAI_FIELDS:
        match = OPENAI_ID.fullmatch(str(record["id"]))
        row = int(match[1]) if match else None
    if type(row) is not int or not 0 <= row < num_rows:
        return None
    return Record(row, record["error"] is not None, offset)


def _is_torn(line: bytes) -> bool:
    """Whether the last line of a file is the beginning of a record that a crash interrupted.

    If it is complete JSON, or doesn't start like a record, another program has written it.
    """
    return not line.endswith(b"\n") and line[:1] in (b"{", b"\0") and _parse_json(line) is None


class RecordLog:
    """A file of records that belongs to one process at a time.

    That process holds the lock of the `.lock` file next to it, which the system releases when the
    process ends. Why not lock the file itself: Windows can't read a locked file or replace an open
    one.

    Args:
        describe_owner: describes the process that holds the lock, for the error message.

    Raises:
        ConfigError: it can't be written, or another process writes it.
    """

    def __init__(self, path: Path, describe_owner: Callable[[], str] = lambda: "") -> None:
        self.path = path
        self._synced = time.monotonic()
        self._is_dirty = False
        # Why not thread-local: another thread may close the log.
        self._lock = FileLock(lock_path(path), thread_local=False)
        self._fd = -1
        try:
            path.parent.stat()  # Why: some versions of filelock create a missing directory.
            self._lock.acquire(blocking=False)
            self._open()
        except Timeout as error:
            raise ConfigError(
                f"output {str(path)!r} is being written by another process{describe_owner()}"
            ) from error
        except OSError as error:
            self._unlock()
            raise ConfigError(f"output {str(path)!r} can't be written: {error.strerror}") from error

    def _open(self) -> None:
        self._is_new = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY, 0o666)
        self._end = self.num_bytes  # where the last record ends

    def _unlock(self) -> None:
        if self._lock.is_locked:
            try:
                with contextlib.suppress(OSError):  # Windows can't remove an open file.
                    lock_path(self.path).unlink()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def file_closed(self) -> Iterator[None]:
        """Closes the file during the context, so that it can be replaced; the lock stays held."""
        self._close_file()
        try:
            yield
        finally:
            self._open()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def append(self, line: bytes) -> None:
        """Appends a record.

        Raises:
            OutputLostError: the disk is full; the log ends with the previous record. Or see `sync`.
        """
        end = self._end + len(line)
        self._is_dirty = True
        try:
            with as_output_lost(self.path):
                written = os.write(self._fd, line)
                if written < len(line):  # The disk is full: the second write raises.
                    written += os.write(self._fd, line[written:])
                if written < len(line):
                    raise OSError("only a part of a record was written")
            self._end = end
        except BaseException:  # Why all: a signal handler may raise here.
            if self._end < self.num_bytes < end:
                os.ftruncate(self._fd, self._end)
            elif self.num_bytes >= end:
                self._end = end
            raise
        if time.monotonic() - self._synced > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Flushes the appended records to the disk.

        Raises:
            OutputLostError: it failed, or another program moved or changed the file, so records may
                be missing.
        """
        self._synced = time.monotonic()
        if self._is_dirty:
            self._is_dirty = False
            with as_output_lost(self.path):
                getattr(os, "fdatasync", os.fsync)(self._fd)
        change = None
        if not self._is_at_its_path():
            change = "was moved, removed or replaced by another program during the job: restore it"
        elif self.num_bytes != self._end:
            change = f"has {self.num_bytes:,} bytes instead of {self._end:,}: another program wrote"
            change += " to it during the job; restore missing records if you can"
        if change is not None:
            message = f"{self.path} {change}; then the same command runs the rows without a record"
            raise OutputLostError(errno.ESTALE, message)

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def num_bytes(self) -> int:
        """Size of the file [bytes]."""
        return os.fstat(self._fd).st_size

    def repair_end(self) -> None:
        """Removes a torn last line that `records` found; adds a missing line break at the end."""
        os.ftruncate(self._fd, self._end)
        with open(self.path, "rb") as file:
            file.seek(max(self._end - 1, 0))
            if file.read() not in (b"", b"\n"):
                self._end += os.write(self._fd, b"\n")

    def records(self, num_rows: int | None = None) -> Iterator[Record | None]:
        """All records in the order of the file; None for a line that is not a record. A torn last
        line is skipped; `repair_end` removes it.

        Args:
            num_rows: rows of the job; None: unknown.
        """
        offset, limit = 0, sys.maxsize if num_rows is None else num_rows
        with open(self.path, "rb", buffering=BUFFER_BYTES) as file:
            for line in file:
                record = parse_record(line, offset, limit)
                if record is None and _is_torn(line):
                    self._end = offset
                    return
                yield record
                offset += len(line)

    def rewrite(self, offsets: Iterable[int]) -> None:
        """Replaces the file by its lines at these offsets."""
        with self.file_closed(), atomic_write(self.path) as file:
            file.writelines(self.lines(offsets))

    def lines(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """The lines at these offsets."""
        with open(self.path, "rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield file.readline()

    def close(self, *, drop_empty: bool = False) -> None:
        """Syncs and releases the file; with `drop_empty`, removes it if it is new and empty."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unlock)
            if self._fd < 0:
                return
            if drop_empty and self._is_new and not self.num_bytes:
                stack.callback(self.path.unlink, missing_ok=True)
            stack.callback(self._close_file)
            if self._is_dirty:
                self.sync()


class PipeRecordLog:
    """Writes records to standard output or a pipe; they are never read back."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def append(self, line: bytes) -> None:
        """Writes a complete record."""
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # a pipe that another program made non-blocking
                select.select([], [self._fd], [])

    def sync(self) -> None:
        """Does nothing: writes to a pipe are not buffered."""

    def close(self, *, drop_empty: bool = False) -> None:
        """Closes the pipe, so that the reader sees its end; standard output stays open."""
        if self._fd > 2:
            fd, self._fd = self._fd, -1
            os.close(fd)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` at the end of the context, after a sync; an error
    removes it.

    Raises:
        OutputLostError: it can't be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    with as_output_lost(path):
        temporary.unlink(missing_ok=True)
        try:
            # Why x: it does not follow an existing link.
            with open(temporary, "xb", BUFFER_BYTES) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if os.name != "nt":  # Windows can't open a directory.
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # Syncs the rename.
            finally:
                os.close(directory)
