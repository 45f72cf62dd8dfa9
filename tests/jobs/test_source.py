"""Files to lines: compressed files, damaged files, and rows with equal ids."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.jobs import source
from nanoengine.jobs.source import RowError, find_inputs, read_lines, survey
from tests.support.batch_jobs import Batch

MAX_ROW_BYTES = 1 << 20
ROWS = [json.dumps({"prompt": f"row {i}", "x": i * i % 9973}).encode() + b"\n" for i in range(3000)]
PLAIN = b"".join(ROWS)


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return bytes(sink.getvalue())


COMPRESSORS: list[Any] = [
    pytest.param(".gz", gzip.compress, id="gz"),
    pytest.param(".bz2", bz2.compress, id="bz2"),
    pytest.param(".xz", lzma.compress, id="xz"),
    pytest.param(".zst", zstd, id="zst", marks=pytest.mark.extra),
]


def read(path: Path, content: bytes) -> tuple[list[bytes], RowError | None]:
    """Returns the rows of a file, and the error that follows them."""
    path.write_bytes(content)
    found = [line.content for line in read_lines(find_inputs([str(path)]), MAX_ROW_BYTES)]
    error = found.pop() if isinstance(found[-1], RowError) else None
    assert error is None or error.code == "unreadable_input"
    return found, error


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSORS)
def test_rows_before_the_damage_of_a_compressed_file_are_read(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """Regression: the last 256 KiB before the damage were lost, all rows of a small file."""
    path = tmp_path / f"in.jsonl{suffix}"
    # Why two members: bz2 and zstd compress this much as one block, which is damaged as a whole.
    first, second = compress(PLAIN[: len(PLAIN) // 2]), compress(PLAIN[len(PLAIN) // 2 :])
    assert read(path, first + second) == (ROWS, None)
    middle = len(second) // 2
    broken = second[:middle] + bytes(64) + second[middle + 64 :]
    for damaged in (b"xyz", second[:middle], broken):
        rows, error = read(path, first + damaged)
        assert error is not None
        assert rows[: len(ROWS) // 2] == ROWS[: len(ROWS) // 2]


def test_gzip_is_read_up_to_the_damaged_bit(tmp_path: Path) -> None:
    """As zcat does: with bytes after a complete member, and with a flipped bit."""
    path, whole = tmp_path / "in.jsonl.gz", gzip.compress(PLAIN)
    rows, error = read(path, whole + b"xyz")
    assert rows == ROWS
    assert "Not a gzipped file" in str(error)
    num_early = 0
    for at in range(1000, len(whole), len(whole) // 12):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        unpacker, unpacked = zlib.decompressobj(31), []
        try:
            for i in range(len(flipped)):
                unpacked.append(unpacker.decompress(flipped[i : i + 1]))
        except zlib.error:
            num_early += b"".join(unpacked).count(b"\n") < len(ROWS)
        lines = b"".join(unpacked).splitlines(keepends=True)
        rows, error = read(path, bytes(flipped))
        assert error is not None
        assert rows == [line for line in lines if line.endswith(b"\n") and line.strip()]
    assert num_early, "no flip was met before the end of the file"


def test_a_job_answers_the_readable_rows_of_a_damaged_file(batch: Batch) -> None:
    packed = bytearray(gzip.compress(b'"one"\n' * 300 + bytes(range(256)) * 8))
    packed[-1] ^= 1
    path = batch.write(bytes(packed), "in.txt.gz")
    found = batch.answers(path, "--max-tokens", "4", code=1)
    assert all(found[row]["error"] is None for row in range(300))
    assert found[max(found)]["error"]["code"] == "unreadable_input"
    assert "after row" in found[max(found)]["error"]["message"]


# --- rows with equal ids --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (rb'{"custom_id": "a"}', ("custom_id", "a")),
        (rb'{"custom_id": "\u0061"}', ("custom_id", "a")),
        (rb'{"custom\u005fid": "a"}', ("custom_id", "a")),
        (rb'{"custom_id": "a\/b"}', ("custom_id", "a/b")),
        (rb'{"body": {"custom_id": "b"}, "custom_id": "a"}', ("custom_id", "a")),
        (rb'{"custom_id": "b", "custom_id": "a"}', ("custom_id", "a")),
        (rb'{"meta": {"id": "b"}}', None),
        (rb'{"id": 5}', ("id", "5")),
        (rb'{"id": "b", "custom_id": "a"}', ("custom_id", "a")),
        (rb'{"id": true}', None),
        (rb'{"id": ""}', None),
        (rb'{"id": [1]}', None),
        (rb'{"id": 1.5}', None),
        (rb'{"prompt": "id"}', None),
        (rb'["id"]', None),
        (rb'{"id', None),
    ],
)
def test_the_id_of_a_line_is_found(line: bytes, expected: tuple[str, str] | None) -> None:
    assert source.line_id(line) == expected


NAMES = st.sampled_from(["custom_id", "id", "prompt", "é"])
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.booleans() | st.text("ai\"\\é/_", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(row=st.dictionaries(NAMES, VALUES, max_size=4), is_ascii=st.booleans())
def test_the_id_of_a_line_equals_the_id_of_the_parsed_row(row: Any, is_ascii: bool) -> None:
    line = json.dumps(row, ensure_ascii=is_ascii).encode()
    assert source.line_id(line) == source.row_id(row)


def test_duplicate_ids_are_found_in_every_format_except_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 7, "prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.csv").write_bytes(b"id,prompt\n7,x\n8,y\n")
    (tmp_path / "c.txt").write_bytes(b'{"id": 7}\n')
    inputs = find_inputs([str(path) for path in sorted(tmp_path.iterdir())])
    num_rows, (duplicate,) = survey(inputs, MAX_ROW_BYTES)
    assert num_rows == 5
    assert duplicate.startswith("id '7' occurs at ")
    assert "a.jsonl:1 and " in duplicate
    assert duplicate.endswith("b.csv:2")


# --- files of other programs ----------------------------------------------------------------------

CELLS = [["question", "note"], ["one", "1;2"], ['say "dog"\nor not', "é, €"]]


def as_csv(delimiter: str, encoding: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(CELLS)
    return text.getvalue().encode(encoding)


@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_csv_with_any_delimiter_and_encoding_is_read(
    tmp_path: Path, name: str, delimiter: str, encoding: str
) -> None:
    """Regression: the header was read as one column, so every row lacked the prompt column."""
    content = as_csv(delimiter, encoding)
    rows, error = read(tmp_path / name, gzip.compress(content) if "gz" in name else content)
    assert error is None
    assert rows == [dict(zip(CELLS[0], row, strict=True)) for row in CELLS[1:]]


def test_a_tsv_is_split_at_tabs_only(tmp_path: Path) -> None:
    rows, _ = read(tmp_path / "in.tsv", b"a, b, c\td\n1, 2\t3\n")
    assert rows == [{"a, b, c": "1, 2", "d": "3"}]


ENTRIES = [{"prompt": "one", "x": [1, {"y": "é"}]}, "dog", [5, 6], {"prompt": "]\n, ["}]


@pytest.mark.parametrize("name", ["in.json", "in.jsonl", "in.json.gz"])
@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
        lambda rows: "\ufeff \n" + json.dumps(rows).replace("}, ", "}\n,\n"),
        lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
    ],
    ids=["one line", "indented", "one row per line", "rows one after another"],
)
def test_json_over_several_lines_is_read(
    tmp_path: Path, name: str, write: Callable[[Any], str]
) -> None:
    """Regression: each of its lines was a failed row."""
    content = write(ENTRIES).encode()
    rows, error = read(tmp_path / name, gzip.compress(content) if "gz" in name else content)
    assert error is None
    assert [json.loads(row) for row in rows] == ENTRIES


def test_json_lines_are_recognized_despite_a_json_suffix(tmp_path: Path) -> None:
    content = b'[5, 6]\n{"torn": \n{"prompt": "one"}\n'
    for first in (b"", b"[[5\n", b"{\n"):
        rows, error = read(tmp_path / "in.json", first + content)
        assert (rows, error) == ((first + content).splitlines(keepends=True), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n{"a": 2},\n{"a" 3}]', "the row in line 3 is not JSON"),
        (b'[{"a": 1},\n{"a": 2}\n', "the row in line 3 is not JSON"),
        (b'[{"a": 1},\n{"a": 2}]\n[{"a": 3}]', "the array ends in line 2, but text follows it"),
    ],
)
def test_rows_before_the_damage_of_an_array_are_read(
    tmp_path: Path, content: bytes, message: str
) -> None:
    rows, error = read(tmp_path / "in.json", content)
    assert rows == [b'{"a": 1}', b'{"a": 2}']
    assert message in str(error)


def test_files_that_are_read_as_a_whole_have_a_maximum_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_WHOLE_FILE_BYTES", 100)
    for name, content in (
        ("in.json", json.dumps(ENTRIES * 9).encode()),
        ("in.csv", as_csv(";", "utf-16") + bytes(99)),
    ):
        rows, error = read(tmp_path / name, content)
        assert rows == []
        assert "JSON arrays and UTF-16 may have 0 MiB" in str(error)


def test_a_job_whose_json_array_has_grown_is_refused(batch: Batch) -> None:
    array = batch.write(json.dumps(["one", "dog"], indent=1).encode(), "in.json")
    assert batch.run(array) == 0, batch.stderr
    array.write_bytes(json.dumps(["one", "dog", "hi"], indent=1).encode())
    assert batch.run(array) == 2
    assert "its content has changed" in batch.stderr


def test_a_template_may_use_an_optional_column(batch: Batch) -> None:
    path = batch.write(b"word\none\n", "in.csv")
    template = "{% if other is defined %}{{ other }}{% endif %}{{ word }}"
    assert batch.run(path, "--template", template) == 0, batch.stderr


def test_a_row_in_another_encoding_is_reported_with_the_byte(batch: Batch) -> None:
    path = batch.write("prompt\none\ncaf\xe9\n".encode("cp1252"), "in.csv")
    assert batch.run(path) == 1
    assert "in.csv:3: the row is not UTF-8: byte 0xe9 after 'caf'; save the file as" in batch.stderr
