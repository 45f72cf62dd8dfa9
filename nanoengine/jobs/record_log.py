"""The output file: records are appended, never rewritten while a job runs, and read back after a
crash.

    append      one os.write per line with O_APPEND: written records survive SIGKILL
    sync        fdatasync at most every 5 s: a power cut loses at most that much
    records     finds the rows that have a record; parses each line
    rewrite     writes lines in another order, or fewer, to a temporary file that replaces the log

A record is a JSON object on one line, with the fields of docs/batch.md and the number of a row.
Other programs may have written it, with other spacing or another order of fields.
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
JSON = json.JSONDecoder()
O_BINARY = getattr(os, "O_BINARY", 0)
"""For `os.open`: with it Windows writes \\n unchanged."""


class OutputLostError(OSError):
    """A file of the job can't be written, or was changed by another program; the job can resume."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an OSError to an OutputLostError that names the file."""
    try:
        yield
    except OSError as error:
        raise OutputLostError(
            error.errno,
            f"{path} can't be written: {error.strerror or error}; every record before is kept, and"
            " the same command goes on from there",
        ) from error


class Record(NamedTuple):
    """A record in a log and the offset of its line [bytes]."""

    row: int
    failed: bool
    offset: int


def lock_path(path: Path) -> Path:
    """The lock file of `path`; the writer of `path` holds it."""
    return path.with_name(f"{path.name}.lock")


def _value(line: bytes) -> Any:
    """The parsed line; None if it is not JSON."""
    try:
        return JSON.decode(line.decode())
    except (ValueError, RecursionError):
        return None


def record_of(line: bytes, offset: int, num_rows: int) -> Record | None:
    """The record in a line; None if it has none, or its row is not below `num_rows`.

    Perf: 4 us, 3 of them for JSON. Why parse the whole line: a page of zeros, or half a record
    followed by another one, can't be seen at either end of a line.
    """
    found, row = _value(line), None
    if isinstance(found, dict) and found.keys() >= SIMPLE_FIELDS:
        row = found["_row"]
    elif isinstance(found, dict) and found.keys() >= OPENAI_FIELDS:
        named = OPENAI_ID.fullmatch(str(found["id"]))
        row = int(named[1]) if named else None
    if type(row) is not int or not 0 <= row < num_rows:
        return None
    return Record(row, found["error"] is not None, offset)


def _is_torn(line: bytes) -> bool:
    """Whether a last line is the rest of a record that a crashed process was writing.

    Complete JSON, or a line that starts differently, was written by another program.
    """
    return not line.endswith(b"\n") and line[:1] in (b"{", b"\0") and _value(line) is None


class RecordLog:
    """A file of records that belongs to one process at a time.

    The process that has locked the `.lock` file next to it owns it. Why not lock the file itself:
    Windows can't read a locked file or replace an open one. The lock ends with the process.

    Args:
        whose: describes the process that holds the lock, for the error message.

    Raises:
        ConfigError: it can't be written, or another process writes it.
    """

    def __init__(self, path: Path, whose: Callable[[], str] = lambda: "") -> None:
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
                f"output {str(path)!r} is being written by another process{whose()}"
            ) from error
        except OSError as error:
            self._unlock()
            raise ConfigError(f"output {str(path)!r} can't be written: {error.strerror}") from error

    def _open(self) -> None:
        self._is_new = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY, 0o666)
        self._end = self.num_bytes  # as long as no other program writes

    def _unlock(self) -> None:
        if self._lock.is_locked:
            try:
                with contextlib.suppress(OSError):  # Windows can't remove an open file.
                    lock_path(self.path).unlink()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def put_down(self) -> Iterator[None]:
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
        whole = self._end + len(line)
        self._is_dirty = True
        try:
            with writing(self.path):
                written = os.write(self._fd, line)
                if written < len(line):  # A full disk takes only a part; the second write fails.
                    written += os.write(self._fd, line[written:])
                if written < len(line):
                    raise OSError("it took a part of a record")
            self._end = whole
        except BaseException:  # Why all: a signal may raise after the write.
            if self._end < self.num_bytes < whole:
                os.ftruncate(self._fd, self._end)
            elif self.num_bytes >= whole:
                self._end = whole
            raise
        if time.monotonic() - self._synced > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Flushes the appended records to the disk.

        Raises:
            OutputLostError: it failed, or another program moved or changed the file, so records may
                be missing, or the file may have other content.
        """
        self._synced = time.monotonic()
        if self._is_dirty:
            self._is_dirty = False
            with writing(self.path):
                getattr(os, "fdatasync", os.fsync)(self._fd)
        how = None
        if not self._is_at_its_path():
            how = "was moved, removed or replaced by another program while the job ran: put it back"
        elif self.num_bytes != self._end:
            how = f"has {self.num_bytes:,} bytes, and the job wrote it to {self._end:,}: another"
            how += " program wrote it while the job ran; put back what is missing, if you can"
        if how is not None:
            told = f"{self.path} {how}; then the same command runs the rows that it lacks"
            raise OutputLostError(errno.ESTALE, told)

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def num_bytes(self) -> int:
        """Size of the file [bytes]."""
        return os.fstat(self._fd).st_size

    def mend_end(self) -> None:
        """Removes a torn last line that `records` found; adds a missing final line break."""
        os.ftruncate(self._fd, self._end)
        with open(self.path, "rb") as file:
            file.seek(max(self._end - 1, 0))
            if file.read() not in (b"", b"\n"):
                self._end += os.write(self._fd, b"\n")

    def records(self, num_rows: int | None = None) -> Iterator[Record | None]:
        """All records in the order of the file; None for a line that is not a record. A torn last
        line is left out; `mend_end` removes it.

        Args:
            num_rows: rows of the job; None: any number.
        """
        offset, most = 0, sys.maxsize if num_rows is None else num_rows
        with open(self.path, "rb", buffering=BUFFER_BYTES) as file:
            for line in file:
                record = record_of(line, offset, most)
                if record is None and _is_torn(line):
                    self._end = offset
                    return
                yield record
                offset += len(line)

    def rewrite(self, offsets: Iterable[int]) -> None:
        """Replaces the file by its lines at these offsets."""
        with self.put_down(), replacing(self.path) as file:
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
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` once it is complete and synced; removed on an error.

    Raises:
        OutputLostError: it can't be written.
    """
    beside = path.with_name(path.name + ".tmp")
    with writing(path):
        beside.unlink(missing_ok=True)
        try:
            # Why x: an existing link is not followed.
            with open(beside, "xb", BUFFER_BYTES) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        if os.name != "nt":  # Windows can't open a directory.
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # its directory entries
            finally:
                os.close(directory)
