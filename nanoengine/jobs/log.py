"""The output file: appended record by record, never rewritten while a job runs, read back after a
death.

    append      one os.write of a whole line, O_APPEND: what is finished survives SIGKILL
    sync        fdatasync at most every 5 s: a power cut costs at most that
    records     which rows are there: each line is parsed
    rewrite     the lines in another order or without some, beside the file, then in its place

A record is a JSON object on a line of its own, with the fields of docs/batch.md and the number of a
row of the job. How it is spaced, and in which order its fields stand, is left to who wrote it.
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
"""For `os.open`: Windows writes \\n as it is."""


class OutputLostError(OSError):
    """A file of the job can't be written, or another program has; the job can be resumed."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises OutputLostError, which names the file, where it can't be written."""
    try:
        yield
    except OSError as error:
        raise OutputLostError(
            error.errno,
            f"{path} can't be written: {error.strerror or error}; every record before is kept, and"
            " the same command goes on from there",
        ) from error


class Record(NamedTuple):
    """Where a record begins in a log [bytes]."""

    row: int
    failed: bool
    offset: int


def lock_path(path: Path) -> Path:
    """The file that is locked by who writes `path`."""
    return path.with_name(f"{path.name}.lock")


def _value(line: bytes) -> Any:
    """What a line of JSON holds; None if it is none."""
    try:
        return JSON.decode(line.decode())
    except (ValueError, RecursionError):
        return None


def record_of(line: bytes, offset: int, num_rows: int) -> Record | None:
    """The record that a line is, if its row is one of so many; else None.

    Perf: 4 us, of which JSON takes 3. Why all of it: a page of zeros, or half of a record that
    another one follows, shows at neither end of a line.
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
    """Whether a last line is what a process that died has left of a record.

    Why JSON that is no record is not, nor what begins otherwise: other programs wrote it.
    """
    return not line.endswith(b"\n") and line[:1] in (b"{", b"\0") and _value(line) is None


class Log:
    """A file of records that belongs to one process at a time.

    Who has locked the file beside it, `.lock`, has it. Why not the file itself: Windows reads no
    locked one, and replaces no open one. The lock ends with the process.

    Args:
        whose: says which process that is, if it is not this one.

    Raises:
        ConfigError: it can't be written, or another process writes it.
    """

    def __init__(self, path: Path, whose: Callable[[], str] = lambda: "") -> None:
        self.path = path
        self._synced = time.monotonic()
        self._is_dirty = False
        # Why not by thread: who closes the log may be another one.
        self._lock = FileLock(lock_path(path), thread_local=False)
        self._fd = -1
        try:
            path.parent.stat()  # Why: some versions of filelock make a directory that is missing.
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
                with contextlib.suppress(OSError):  # Windows removes no open file.
                    lock_path(self.path).unlink()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def put_down(self) -> Iterator[None]:
        """Meanwhile the file may be moved or replaced; no other process writes the next one."""
        self._close_file()
        try:
            yield
        finally:
            self._open()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def append(self, line: bytes) -> None:
        """Adds a record.

        Raises:
            OutputLostError: no room; the log ends with the record before. Or see `sync`.
        """
        whole = self._end + len(line)
        self._is_dirty = True
        try:
            with writing(self.path):
                written = os.write(self._fd, line)
                if written < len(line):  # A disk that is almost full takes a part; this says why.
                    written += os.write(self._fd, line[written:])
                if written < len(line):
                    raise OSError("it took a part of a record")
            self._end = whole
        except BaseException:  # Why all: what a signal raises may come after the write.
            if self._end < self.num_bytes < whole:
                os.ftruncate(self._fd, self._end)
            elif self.num_bytes >= whole:
                self._end = whole
            raise
        if time.monotonic() - self._synced > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Has the disk hold what was appended.

        Raises:
            OutputLostError: it can't; or the file has another name or size by now, so that what
                was appended may be in no file, or not be all that is in it.
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
        """Length of the file."""
        return os.fstat(self._fd).st_size

    def mend_end(self) -> None:
        """Cuts a torn last line, which `records` has found, and ends a whole one."""
        os.ftruncate(self._fd, self._end)
        with open(self.path, "rb") as file:
            file.seek(max(self._end - 1, 0))
            if file.read() not in (b"", b"\n"):
                self._end += os.write(self._fd, b"\n")

    def records(self, num_rows: int | None = None) -> Iterator[Record | None]:
        """All records in the order of the file; None for a line that is none. A torn end is left
        out, and `mend_end` cuts it.

        Args:
            num_rows: of the job; None: any number.
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
        """Puts the lines at these offsets in the place of all."""
        with self.put_down(), replacing(self.path) as file:
            file.writelines(self.lines(offsets))

    def lines(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """The lines that begin there."""
        with open(self.path, "rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield file.readline()

    def close(self, *, drop_empty: bool = False) -> None:
        """Syncs, and gives the file free for others; one that was made for nothing is removed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unlock)
            if self._fd < 0:
                return
            if drop_empty and self._is_new and not self.num_bytes:
                stack.callback(self.path.unlink, missing_ok=True)
            stack.callback(self._close_file)
            if self._is_dirty:
                self.sync()


class PipeLog:
    """Records for who reads them at once: standard output, a pipe; none is ever read back."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def append(self, line: bytes) -> None:
        """Writes a record whole."""
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # a pipe that another program has made so
                select.select([], [self._fd], [])

    def sync(self) -> None:
        """A pipe holds nothing back."""

    def close(self, *, drop_empty: bool = False) -> None:
        """Tells who reads that this was all; standard output stays the process's."""
        if self._fd > 2:
            fd, self._fd = self._fd, -1
            os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when it is whole and on the disk, else is removed.

    Raises:
        OutputLostError: it can't be written.
    """
    beside = path.with_name(path.name + ".tmp")
    with writing(path):
        beside.unlink(missing_ok=True)
        try:
            # Why x: a link that lies there is not followed.
            with open(beside, "xb", BUFFER_BYTES) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        if os.name != "nt":  # Windows opens no directory.
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the names in it
            finally:
                os.close(directory)
