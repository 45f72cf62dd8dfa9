"""Files to lines: what is read of a job's inputs, as a stream.

A line is not understood here, only found: that is cheap, so that a resumed job passes over a
million finished rows in a second. What can't be read is a `RowError` in its line's place.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import xxhash

from nanoengine.errors import ConfigError, MissingDependencyError, RequestError
from nanoengine.settings.checks import nearest

STDIN = "-"
Form = Literal["jsonl", "txt", "csv", "parquet"]
SUFFIXES: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "txt",
    ".csv": "csv",
    ".parquet": "parquet",
}
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
TABLE_ROWS = 64
"""Rows of a Parquet file that are Python objects at once."""

BUFFER_BYTES = 1 << 18
CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


class RowError(RequestError):
    """Why a row has no answer; `code` is one of docs/batch.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a job.

    Attributes:
        num_bytes: of the file as the job begins: what is written behind them meanwhile is for the
            next run, which finds it to have grown. None: stdin.
    """

    name: str
    form: Form
    packing: str | None = None
    num_bytes: int | None = None

    @property
    def may_grow(self) -> bool:
        """Whether rows that are appended leave the earlier ones as they are."""
        return self.packing is None and self.form != "parquet"


class Line(NamedTuple):
    """A row before it is understood.

    Attributes:
        row: its number in the job, from 0: over all inputs, blank lines left out.
        number: its line in the input, from 1; the row of a Parquet file.
        content: bytes of JSON or text, or a dict of columns.
    """

    row: int
    input: Input
    number: int
    content: bytes | dict[str, Any] | RowError


def find_inputs(
    names: Sequence[str],
    form: Form | None = None,
    is_own: Callable[[str], bool] = lambda name: False,
) -> list[Input]:
    """The inputs that `names` mean: files, globs, and - for stdin.

    Args:
        is_own: which files a glob passes over.

    Raises:
        ConfigError: no name is given, nothing is there, a suffix is unknown, stdin twice.
        MissingDependencyError: a form needs pyarrow.
    """
    found: list[Input] = []
    if not names:
        raise ConfigError("no input: name files, globs, or - for stdin")
    for name in names:
        is_glob = name != STDIN and not os.path.exists(name) and glob.has_magic(name)
        matches = [name]
        if is_glob:
            matches = sorted(one for one in glob.glob(name, recursive=True) if not is_own(one))
        if not matches:
            raise ConfigError(f"input {name!r} matches no file")
        found += [_input(match, form) for match in matches]
    twice = {one.name for one in found if sum(one.name == other.name for other in found) > 1}
    if twice:
        raise ConfigError(f"input {min(twice)!r} is given twice")
    if any(one.form == "parquet" or one.packing == "zstd" for one in found):
        require_pyarrow("Parquet and zstd")
    return found


def _input(name: str, form: Form | None) -> Input:
    if name == STDIN:
        return Input(name=name, form=form or "jsonl")
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"input {name!r} does not exist")
    if path.is_dir():
        raise ConfigError(f"input {name!r} is a directory: give its files, or a glob")
    if not path.is_file():
        raise ConfigError(
            f"input {name!r} is no file, and inputs are read more than once: pipe it in, as -"
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"input {name!r} can't be read: {error.strerror}") from error
    packing = PACKINGS.get(path.suffix)
    suffix = path.with_suffix("").suffix if packing else path.suffix
    if form is None and suffix not in SUFFIXES:
        raise ConfigError(
            f"input {name!r} ends in no known suffix; {nearest(suffix, SUFFIXES)}, and .gz or .zst"
            f" behind it; or say --input-format {' | '.join(get_args(Form))}"
        )
    size = os.path.getsize(name)
    return Input(name=name, form=form or SUFFIXES[suffix], packing=packing, num_bytes=size)


def require_pyarrow(what: str) -> Any:
    """The package pyarrow.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} need pyarrow: pip install 'nanoengine[batch]'"
        ) from error
    return pyarrow


def read_lines(inputs: Iterable[Input], max_row_bytes: int) -> Iterator[Line]:
    """All rows of the inputs, numbered through."""
    row = 0
    for one in inputs:
        for number, content in _read(one, max_row_bytes):
            yield Line(row, one, number, content)
            row += 1


def _read(one: Input, max_row_bytes: int) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        if one.form == "parquet":
            yield from _table_rows(one.name, max_row_bytes)
            return
        with open_input(one) as file:
            lines = BoundedLines(file, max_row_bytes)
            rows = _csv_rows(lines, max_row_bytes) if one.form == "csv" else _text_rows(lines)
            for number, content in rows:
                yield number, content
    except (OSError, EOFError, ValueError) as error:  # zlib.error is none of these: see gzip
        message = f"{one.name} can't be read behind row {number}: {error}"
        yield number + 1, RowError("unreadable_input", message)


@contextlib.contextmanager
def open_input(one: Input) -> Iterator[BinaryIO]:
    """The bytes of an input, unpacked."""
    if one.name == STDIN:
        with _own_stdin() as file:
            yield file
        return
    with open(one.name, "rb", buffering=0) as whole:
        head = io.BufferedReader(_Head(whole, one.num_bytes), BUFFER_BYTES)
        if one.packing == "gzip":
            with gzip.open(head, "rb") as file:
                yield io.BufferedReader(_Unpacked(file), BUFFER_BYTES)
        elif one.packing == "zstd":
            arrow = require_pyarrow("zstd files")
            with arrow.input_stream(head, compression="zstd") as file:
                yield io.BufferedReader(file, BUFFER_BYTES)
        else:
            yield head


@contextlib.contextmanager
def _own_stdin() -> Iterator[BinaryIO]:
    """Standard input by another descriptor.

    Why: at its end Python would wait for the lock of `sys.stdin`, which a thread that reads it has.
    """
    try:
        fd = os.dup(sys.stdin.fileno())
    except (AttributeError, io.UnsupportedOperation):  # a stream of the caller's, without one
        yield sys.stdin.buffer
        return
    with open(fd, "rb", buffering=BUFFER_BYTES) as file:
        yield file


class _Head(io.RawIOBase):
    """The first bytes of a file; all of them by default."""

    def __init__(self, file: io.FileIO, num_bytes: int | None) -> None:
        self._file = file
        self._left = sys.maxsize if num_bytes is None else num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count


class _Unpacked(io.RawIOBase):
    """A gzip file whose damage is an OSError, as zstd's is."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zlib

        try:
            return int(self._file.readinto(buffer))
        except (zlib.error, EOFError) as error:
            raise OSError(str(error)) from error


class BoundedLines:
    """The lines of a file with their numbers; one that is too long raises RowError in its place,
    was never whole in memory, and is followed by the next."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self.number = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(self._max_bytes + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > self._max_bytes and not line.endswith(b"\n"):
            while (rest := self._file.readline(BUFFER_BYTES)) and not rest.endswith(b"\n"):
                pass
            raise too_large(self._max_bytes)
        return line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line


def too_large(max_bytes: int) -> RowError:
    """The error of a row that is longer than what may be in memory."""
    limit = f"{max_bytes / 2**20:g}"
    return RowError("row_too_large", f"the row has more than --max-row-mib {limit} MiB")


def _text_rows(lines: BoundedLines) -> Iterator[tuple[int, bytes | RowError]]:
    while True:
        try:
            for line in lines:
                if line.strip():
                    yield lines.number, line
            return
        except RowError as error:
            yield lines.number, error


class _Texts:
    """Lines for `csv.reader`; bytes that are no UTF-8 pass as surrogates, to be found by cell."""

    def __init__(self, lines: BoundedLines) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines).decode(errors="surrogateescape")


def _csv_rows(
    lines: BoundedLines, max_row_bytes: int
) -> Iterator[tuple[int, dict[str, str] | RowError]]:
    """Each row by the names of the first one; all values are strings."""
    csv.field_size_limit(max_row_bytes)  # Why: a quote that is not closed would take all.
    reader = csv.reader(_Texts(lines))
    names: list[str] = []
    while True:
        first = lines.number + 1
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if not cells:
                continue
            "".join(cells).encode()
            if not names:
                twice = [name for name in cells if cells.count(name) > 1]
                if twice:
                    raise RowError("unreadable_row", f"column {twice[0]!r} stands twice")
                names = cells
                continue
            if len(cells) != len(names):
                raise RowError(
                    "unreadable_row", f"the row has {len(cells)} cells, the first has {len(names)}"
                )
            yield first, dict(zip(names, cells, strict=True))
            continue
        except RowError as error:
            failure = error
        except UnicodeEncodeError:
            failure = RowError("unreadable_row", "the row is not UTF-8")
        except csv.Error as error:
            failure = RowError("unreadable_row", f"the row is no CSV: {error}")
        if not names:  # Why the end: another row would be taken for the names.
            yield first, RowError("unreadable_input", f"the names of the columns: {failure}")
            return
        yield first, failure


def _table_rows(path: str, max_row_bytes: int) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Each row; one whose line of JSON would be too long is an error."""
    require_pyarrow("Parquet files")
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise OSError(f"column {twice[0]!r} stands twice")
        try:
            for batch in file.iter_batches(batch_size=TABLE_ROWS):
                may_be_large = batch.nbytes > max_row_bytes
                for row in batch.to_pylist():
                    number += 1
                    is_large = may_be_large and len(_as_line(row)) > max_row_bytes
                    yield number, too_large(max_row_bytes) if is_large else row
        except Exception as error:  # Why: a value that Python has not raises anything.
            raise OSError(str(error)) from error


def _as_line(row: dict[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text.encode(errors="surrogatepass")


# --- what is known of the inputs before anything runs ---------------------------------------------


def digest(path: str, num_bytes: int | None = None) -> str:
    """xxh3 of a file's first `num_bytes`, of all by default; 10 GiB/s from the page cache."""
    hasher = xxhash.xxh3_128()
    left = num_bytes if num_bytes is not None else sys.maxsize
    with open(path, "rb", buffering=0) as file:
        while left and (chunk := file.read(min(left, 1 << 22))):
            hasher.update(chunk)
            left -= len(chunk)
    return hasher.hexdigest()


class Survey(NamedTuple):
    """What one pass over the inputs tells.

    Attributes:
        num_rows: of all inputs but stdin.
        duplicates: pairs of rows with the same custom_id, the first of them with its place.
    """

    num_rows: int
    duplicates: list[str]


MOST_DUPLICATES = 20


def survey(inputs: Iterable[Input], max_row_bytes: int) -> Survey:
    """Counts rows, and finds equal `custom_id`s by 8 bytes a row."""
    import numpy as np

    num_rows, hashes = 0, bytearray()
    files = [one for one in inputs if one.name != STDIN]
    find = CUSTOM_ID.search
    for one in files:
        if one.form == "parquet":
            num_rows += _num_table_rows(one.name)
            hashes += bytes(8 * (num_rows - len(hashes) // 8))
            continue
        for _, content in _read(one, max_row_bytes):
            num_rows += 1
            found = find(content) if isinstance(content, bytes) else None
            hashes += xxhash.xxh3_64_digest(found[1]) if found else bytes(8)
    ids = np.frombuffer(hashes, "<u8")
    order = np.argsort(ids, kind="stable")
    later = np.flatnonzero((ids[order[1:]] == ids[order[:-1]]) & (ids[order[1:]] != 0))
    pairs = [(int(order[i]), int(order[i + 1])) for i in later[:MOST_DUPLICATES]]
    return Survey(num_rows, _described(files, pairs, len(later), max_row_bytes))


def _num_table_rows(path: str) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    except (OSError, pyarrow.ArrowException):
        return 1  # the error record


def _described(
    files: list[Input], pairs: list[tuple[int, int]], count: int, max_row_bytes: int
) -> list[str]:
    """The pairs in words; equal hashes of other ids are no duplicates."""
    wanted = {row for pair in pairs for row in pair}
    places: dict[int, tuple[str, str]] = {}
    for line in read_lines(files, max_row_bytes) if wanted else ():
        if line.row in wanted and isinstance(line.content, bytes):
            try:
                known = json.loads(line.content).get("custom_id")
            except (ValueError, AttributeError, RecursionError):
                continue
            places[line.row] = (str(known), f"{line.input.name}:{line.number}")
    told = []
    for first, second in pairs:
        one, other = places.get(first), places.get(second)
        if one and other and one[0] == other[0]:
            told.append(f"custom_id {one[0]!r} stands at {one[1]} and at {other[1]}")
    if told and count > len(pairs):
        told.append(f"and {count - len(pairs)} more")
    return told
