"""Reads the inputs of a job as a stream of lines.

A line is found here, not parsed. This is cheap: a resumed job skips a million finished rows in a
second. A line that can't be read becomes a `RowError`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import xxhash

from nanoengine.errors import ConfigError, MissingDependencyError, RequestError
from nanoengine.settings.checks import nearest, to_python

STDIN = "-"
Form = Literal["jsonl", "json", "txt", "csv", "parquet"]
SUFFIXES: dict[str, Form] = {f".{form}": form for form in get_args(Form)}
SUFFIXES |= {".ndjson": "jsonl", ".json": "jsonl", ".tsv": "csv"}
PACKINGS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstd"}
"""Suffix -> the standard library module that decompresses it; zstd is done by pyarrow."""

TABLE_ROWS = 64
"""Rows of a Parquet file that are converted to Python objects at a time."""

BUFFER_BYTES = 1 << 18
MOST_WHOLE_BYTES = 1 << 28
"""Maximum size of a file that is read as a whole: JSON over several lines, and UTF-16."""

UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
BETWEEN_ROWS = re.compile(r"[\s,\ufeff]*")
AS_UTF8 = "save the file as UTF-8, or convert it: iconv -f WINDOWS-1252 -t UTF-8"
ID_SIGNS = (b'"custom_id"', b'"id"', b"\\u00")
"""A line without any of these has no id. Any letter of a name may be written as an escape."""

PLAIN_ID = re.compile(rb'\s*\{\s*"((?:custom_)?id)"\s*:\s*"([^"\\]+)"\s*[,}]')


class RowError(RequestError):
    """Why a row has no answer; the values of `code` are listed in docs/batch.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a job.

    Attributes:
        num_bytes: size of the file when the job starts; None: stdin. Bytes that are appended later
            are left to the next run, which sees that the file has grown.
    """

    name: str
    form: Form
    packing: str | None = None
    num_bytes: int | None = None


class Line(NamedTuple):
    """A row before it is parsed.

    Attributes:
        row: its number in the job, from 0, over all inputs; blank lines don't count.
        number: its line in the input, from 1; for Parquet, the number of the row in the file.
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
    """Finds the inputs that `names` mean: files, globs, and - for stdin.

    Args:
        is_own: whether a glob skips a file, because the job writes it.

    Raises:
        ConfigError: no name is given, a file is missing, a suffix is unknown, stdin is given twice.
        MissingDependencyError: a format needs pyarrow.
    """
    found: list[Input] = []
    if not names:
        raise ConfigError("no input: name files, globs, or - for stdin")
    for name in names:
        matches = [name]
        if name != STDIN and not os.path.exists(name) and glob.has_magic(name):
            matches = sorted(one for one in glob.glob(name, recursive=True) if not is_own(one))
        if not matches:
            raise ConfigError(f"input {name!r} matches no file")
        found += [_input(match, form) for match in matches]
    counts = Counter(os.path.realpath(one.name) for one in found)
    if twice := sorted(one.name for one in found if counts[os.path.realpath(one.name)] > 1):
        raise ConfigError(f"input {twice[0]!r} is given twice")
    if any(one.form == "parquet" or one.packing == "zstd" for one in found):
        require_pyarrow("Parquet and zstd")
    return found


def _input(name: str, form: Form | None) -> Input:
    if name == STDIN:
        return Input(name=name, form=form or "jsonl")
    path = Path(name)
    for is_so, told in (
        (not path.exists(), "does not exist"),
        (path.is_dir(), "is a directory: give its files, or a glob"),
        (not path.is_file(), "is no file, and inputs are read more than once: pipe it in, as -"),
    ):
        if is_so:
            raise ConfigError(f"input {name!r} {told}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"input {name!r} can't be read: {error.strerror}") from error
    packing = PACKINGS.get(path.suffix)
    suffix = path.with_suffix("").suffix if packing else path.suffix
    if form is None and suffix not in SUFFIXES:
        raise ConfigError(
            f"input {name!r} ends in no known suffix; {nearest(suffix, SUFFIXES)}, and one of"
            f" {', '.join(PACKINGS)} behind it; or say --input-format {' | '.join(get_args(Form))}"
        )
    size = os.path.getsize(name)
    found = Input(name=name, form=form or SUFFIXES[suffix], packing=packing, num_bytes=size)
    return replace(found, form="json") if found.form == "jsonl" and _spans_lines(found) else found


def head(one: Input) -> bytes:
    """The first bytes of a file, decompressed, as UTF-8; empty if they can't be read."""
    with contextlib.suppress(OSError, ValueError), open_input(one) as file:
        return file.read(BUFFER_BYTES)
    return b""


def _spans_lines(one: Input) -> bool:
    """Whether a file begins with an array of rows, or with JSON that contains line breaks."""
    found = head(one).removeprefix(codecs.BOM_UTF8).strip()
    start = re.match(rb'(\{)|\[\s*[\[{"]', found)  # a row, or an array that starts with one
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(found.partition(b"\n")[0])
        return start is not None and start[1] is None
    with contextlib.suppress(ValueError, RecursionError):
        rows = [row for _, row in itertools.islice(_json_rows(found, BUFFER_BYTES), 2)]
        return start is not None and (start[1] is None or b"\n" in rows[0])
    return False


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
    """All rows of the inputs, numbered consecutively."""
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
            rows: Any = _bounded_lines(file, max_row_bytes)
            if one.form == "csv":
                rows = _csv_rows(rows, max_row_bytes, _delimiters(one))
            elif one.form == "json":
                rows = _json_rows(_whole(file), max_row_bytes)
            for number, content in rows:
                if not isinstance(content, bytes) or content.strip():
                    yield number, content
    except (OSError, ValueError) as error:
        message = f"{one.name} can't be read behind row {number}: {error}"
        yield number + 1, RowError("unreadable_input", message)


@contextlib.contextmanager
def open_input(one: Input) -> Iterator[BinaryIO]:
    """Opens an input for reading its decompressed bytes."""
    if one.name == STDIN:
        # Why another descriptor: at exit, Python would wait for the lock of `sys.stdin`, which the
        # reading thread holds.
        try:
            raw: Any = io.FileIO(os.dup(sys.stdin.fileno()))
        except (AttributeError, io.UnsupportedOperation):  # a caller's stream without a descriptor
            yield sys.stdin.buffer
            return
    else:
        raw = _Unpacked(one) if one.packing else _Head(one.name, one.num_bytes)
    with io.BufferedReader(raw, BUFFER_BYTES) as file:
        start = file.peek(2)[:2]
        encoding = UTF_16.get(start)
        if 0 in start and one.form == "csv":  # without a byte order mark
            encoding = "utf-16-le" if start[0] else "utf-16-be"
        if encoding is None:
            yield file
        else:
            yield io.BytesIO(_whole(file).decode(encoding).encode(errors="surrogatepass"))


def _whole(file: BinaryIO) -> bytes:
    """Reads the whole file.

    Raises:
        ValueError: it is larger than `MOST_WHOLE_BYTES`.
    """
    found = file.read(MOST_WHOLE_BYTES + 1)
    if len(found) > MOST_WHOLE_BYTES:
        most = MOST_WHOLE_BYTES >> 20
        raise ValueError(f"JSON arrays and UTF-16 may have {most} MiB: make UTF-8 lines of it")
    return found


class _Head(io.FileIO):
    """The first bytes of a file; from `slow_from` on, one byte per read."""

    def __init__(self, path: str, num_bytes: int | None, slow_from: int = sys.maxsize) -> None:
        super().__init__(path)
        self._size = sys.maxsize if num_bytes is None else num_bytes
        self.slow_from = slow_from
        self.latest = 0  # where the latest read began

    read = io.RawIOBase.read  # implemented by `readinto`

    def readinto(self, buffer: Any) -> int:
        at = self.latest = self.tell()
        most = 1 if at >= self.slow_from else len(buffer)
        return super().readinto(memoryview(buffer)[: min(most, self._size - at)])


class _Unpacked(io.RawIOBase):
    """A compressed file: yields every byte before a damaged part, then raises OSError.

    Why it reads a second time, in the end byte by byte: a call that reaches the damage loses the
    bytes that it has already decompressed.
    """

    def __init__(self, one: Input) -> None:
        self._one, self._count = one, 0
        self._begin()

    def _begin(self, slow_from: int = sys.maxsize) -> None:
        self._head = _Head(self._one.name, self._one.num_bytes, slow_from)
        if self._one.packing == "zstd":
            arrow = require_pyarrow("zstd files")
            self._file = arrow.input_stream(self._head, compression="zstd")
        else:
            self._file = importlib.import_module(self._one.packing or "").open(self._head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        is_slow = self._head.slow_from < sys.maxsize
        try:
            found = self._file.read1(1 if is_slow else len(buffer))
            if not found and self._head.latest < self._head.tell():  # bz2 and lzma skip it
                raise OSError("what stands behind its last member is no member")
        except Exception as error:  # Why all: each library raises its own.
            if is_slow:
                raise OSError(str(error)) from error
            self._head.close()
            self._begin(self._head.latest)
            left = self._count
            while left and (found := self._file.read1(min(left, BUFFER_BYTES))):
                left -= len(found)
            return self.readinto(buffer)
        self._count += len(found)
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._head.close()
        super().close()


def _bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | RowError]]:
    """The lines with their numbers. A line that is too long becomes an error, and is never
    entirely in memory."""
    for number in itertools.count(1):
        line = file.readline(max_bytes + 1)
        if not line:
            return
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(BUFFER_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, too_large(max_bytes)
        else:
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _json_rows(content: bytes, max_bytes: int) -> Iterator[tuple[int, bytes | RowError]]:
    """The entries of an array, or of consecutive values, each with the number of its first line.

    Raises:
        ValueError: the rest is not JSON.
    """
    text, raw_decode = content.decode(errors="surrogateescape"), json.JSONDecoder().raw_decode
    end, line, closing = 0, 1, None
    while True:
        begin = BETWEEN_ROWS.match(text, end).end()  # type: ignore[union-attr]  # it is optional
        line += text.count("\n", end, begin)
        if closing is None:
            closing, end = ("]", begin + 1) if text[begin : begin + 1] == "[" else ("", begin)
            continue
        if text[begin : begin + 1] == closing:
            if text[begin + 1 :].strip():
                raise ValueError(f"in line {line} the array ends, and more stands behind it")
            return
        try:
            _, end = raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row of line {line} is no JSON: {error}") from error
        row = text[begin:end].encode(errors="surrogateescape")
        yield line, row if len(row) <= max_bytes else too_large(max_bytes)
        line += text.count("\n", begin, end)


def too_large(max_bytes: int) -> RowError:
    """The error of a row that is larger than the limit."""
    return RowError("row_too_large", f"more than --max-row-mib {max_bytes / 2**20:g} MiB")


def _delimiters(one: Input) -> str:
    """The possible delimiters of a CSV."""
    return "\t" if ".tsv" in Path(one.name).suffixes[-2:] else ",;\t|"


def _delimiter(first: str, delimiters: str) -> str:
    """The delimiter that splits the first row into the most cells; on a tie, the first one."""
    return max(delimiters, key=lambda one: len(next(csv.reader([first], delimiter=one), ())))


def csv_dialect(inputs: Iterable[Input]) -> tuple[str, str]:
    """Delimiter and encoding of the first CSV input, so that its program can read the output."""
    for one in inputs:
        if one.form == "csv" and one.name != STDIN:
            first, _, _ = head(one).partition(b"\n")
            encoding = "utf-8-sig" if first.startswith(codecs.BOM_UTF8) else "utf-8"
            with contextlib.suppress(csv.Error):
                return _delimiter(first.decode(errors="replace"), _delimiters(one)), encoding
    return ",", "utf-8"


def _csv_rows(
    lines: Iterable[tuple[int, bytes | RowError]], max_row_bytes: int, delimiters: str
) -> Iterator[tuple[int, dict[str, str] | RowError]]:
    """The rows as dicts, with names from the first row; all values are strings."""
    number = 0

    def text(found: tuple[int, bytes | RowError]) -> str:
        nonlocal number
        number, line = found
        if isinstance(line, RowError):
            raise line
        return line.decode(errors="surrogateescape")  # Why: a later check names the invalid cell.

    csv.field_size_limit(max_row_bytes)  # Why: an unclosed quote would read the whole file.
    texts = map(text, lines)
    reader: Iterator[list[str]] = iter(())
    names: list[str] = []
    while True:
        first = number + 1
        try:
            if not names:
                head_line = next(texts)
                delimiter = _delimiter(head_line, delimiters)
                reader = csv.reader(itertools.chain([head_line], texts), delimiter=delimiter)
            cells = next(reader)
            "".join(cells).encode()
            if twice := [name for name in cells if not names and cells.count(name) > 1]:
                raise RowError("unreadable_row", f"column {twice[0]!r} stands twice")
            if names and cells and len(cells) != len(names):
                told = f"the row has {len(cells)} cells, the first has {len(names)}"
                raise RowError("unreadable_row", told)
        except StopIteration:
            return
        except RowError as error:
            failure = error
        except UnicodeEncodeError as error:
            byte, before = ord(error.object[error.start]) - 0xDC00, error.object[: error.start]
            told = f"the row is not UTF-8: byte 0x{byte:x} behind {before[-20:]!r}; {AS_UTF8}"
            failure = RowError("unreadable_row", told)
        except csv.Error as error:
            failure = RowError("unreadable_row", f"the row is no CSV: {error}")
        else:
            if names and cells:
                yield first, dict(zip(names, cells, strict=True))
            names = names or cells
            continue
        if not names:  # Why stop: the next row would become the header.
            yield first, RowError("unreadable_input", f"the names of the columns: {failure}")
            return
        yield first, failure


def _table_rows(path: str, max_row_bytes: int) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """The rows of a Parquet file; a row whose JSON is too long becomes an error."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise OSError(f"column {twice[0]!r} stands twice")
        try:
            for batch in file.iter_batches(batch_size=TABLE_ROWS):
                may_be_large = batch.nbytes > max_row_bytes
                for row in batch.to_pylist():
                    number += 1
                    line = json.dumps(row, ensure_ascii=False, default=str) if may_be_large else ""
                    is_large = len(_bytes(line)) > max_row_bytes
                    yield number, too_large(max_row_bytes) if is_large else row
        except Exception as error:  # Why all: values without a Python type raise various errors.
            raise OSError(str(error)) from error


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


# --- what is known about the inputs before rows run -----------------------------------------------


def digest(path: str, num_bytes: int | None = None) -> str:
    """xxh3 of a file's first `num_bytes`, by default of all; 10 GiB/s from the page cache."""
    with _Head(path, num_bytes) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def own_id(row: Any) -> tuple[str, str] | None:
    """The column and the value of a row's id: a string or an integer."""
    for name in ("custom_id", "id"):
        value = to_python(row.get(name)) if isinstance(row, dict) else None
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return name, str(value)
    return None


def _line_id(content: Any) -> tuple[str, str] | None:
    """The id of a line, which is parsed only if a regular expression can't find the id.

    Perf: 1.7 instead of 6 us per row, if the id comes first and the line has no other candidate.
    """
    if isinstance(content, bytes):
        signs = sum(map(content.count, ID_SIGNS))
        if signs == 1 and (first := PLAIN_ID.match(content)):
            return first[1].decode(), first[2].decode(errors="replace")
        try:
            content = json.loads(content) if signs else None
        except (ValueError, RecursionError):
            return None
    return own_id(content)


MOST_DUPLICATES = 20


def survey(inputs: Iterable[Input], max_row_bytes: int) -> tuple[int, list[str]]:
    """The number of rows of all inputs except stdin, and descriptions of pairs with the same id.
    It needs 8 bytes of memory per row."""
    import numpy as np

    hashes = bytearray()
    files = [one for one in inputs if one.name != STDIN]
    for one in files:
        if one.form == "parquet":
            hashes += bytes(8 * _num_table_rows(one.name))
            continue
        for _, content in _read(one, max_row_bytes):
            found = _line_id(content) if one.form != "txt" else None
            hashes += xxhash.xxh3_64_digest(_bytes(" ".join(found))) if found else bytes(8)
    ids = np.frombuffer(hashes, "<u8")
    order = np.argsort(ids, kind="stable")
    later = np.flatnonzero((ids[order[1:]] == ids[order[:-1]]) & (ids[order[1:]] != 0))
    pairs = [(int(order[i]), int(order[i + 1])) for i in later[:MOST_DUPLICATES]]
    return len(ids), _described(files, pairs, len(later), max_row_bytes)


def _num_table_rows(path: str) -> int:
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    except (OSError, pyarrow.ArrowException):
        return 1  # the error record


def _described(
    files: list[Input], pairs: list[tuple[int, int]], count: int, max_row_bytes: int
) -> list[str]:
    """Descriptions of the pairs; pairs whose hashes collide, with different ids, are left out."""
    wanted = {row for pair in pairs for row in pair}
    lines = read_lines(files, max_row_bytes) if wanted else ()
    ids = {it.row: (_line_id(it.content), it) for it in lines if it.row in wanted}
    told = []
    for one, other in ((ids.get(first), ids.get(second)) for first, second in pairs):
        if one and other and one[0] and one[0] == other[0]:
            at, again = (f"{it.input.name}:{it.number}" for _, it in (one, other))
            told.append("{} {!r} stands at {} and at {}".format(*one[0], at, again))
    if told and count > len(pairs):
        told.append(f"and {count - len(pairs)} more")
    return told
