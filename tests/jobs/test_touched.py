"""Files of a job that another program writes, moves or damages between or during runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoengine.jobs import job as jobs
from nanoengine.jobs import record_log as logs
from nanoengine.jobs.job import Job
from nanoengine.jobs.record_log import RecordLog
from tests.support.batch_jobs import Batch, batch_fixture, completion
from tests.support.fake_llm import make_llm_fixture

__all__ = ["batch_fixture", "make_llm_fixture"]

GREEDY = ("--temperature", "0")
NUM_ROWS = 6


def rows() -> list[Any]:
    """Returns rows; one of them fails."""
    return [completion(str(i), **({"x": 1} if i == 2 else {})) for i in range(NUM_ROWS)]


def simple_rows() -> list[Any]:
    return [{"prompt": "one", "z": [], "a": "€"} if i != 2 else {"no": 1} for i in range(NUM_ROWS)]


# --- the model ------------------------------------------------------------------------------------


def write_weights(path: Path, content: bytes) -> None:
    """Writes a file with a fixed header and timestamp; other weights differ only in their data."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((2).to_bytes(8, "little") + b"{}" + content)
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("name", ["model.safetensors", "parts/one.safetensors"])
def test_a_job_is_not_resumed_with_other_weights(batch: Batch, name: str) -> None:
    """Regression: only headers were compared, and weights in subfolders were ignored."""
    model = batch.directory / "model"
    if name != "model.safetensors":
        index = {"weight_map": {"a": name}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(model / name, b"a" * 100)
    source = batch.write(rows())
    assert batch.run(source) == 1, batch.stderr
    kept = batch.output.read_bytes()
    write_weights(model / name, b"a" * 99 + b"b")
    assert batch.run(source) == 2
    assert f"model.files.{name}: it was" in batch.stderr
    assert batch.output.read_bytes() == kept
    write_weights(model / name, b"a" * 100)
    assert batch.run(source) == 1, "a copy of the same bytes is the same model"


def test_a_job_is_not_resumed_with_another_tokenizer(batch: Batch) -> None:
    tokenizer = batch.directory / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    source = batch.write(rows())
    args = (source, "--tokenizer", tokenizer)
    assert batch.run(*args) == 1, batch.stderr
    (tokenizer / "tokenizer.json").write_text("{ }")
    assert batch.run(*args) == 2
    assert "tokenizer.tokenizer.json: it was" in batch.stderr


def test_a_refused_job_does_not_read_the_model(batch: Batch, monkeypatch: Any) -> None:
    """Reading weights of 100 GB takes a while."""

    def never(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr("nanoengine.cli.batch.describe_engine", never)
    assert batch.run("none.jsonl") == 2
    assert "does not exist" in batch.stderr


# --- an output that another program has written ---------------------------------------------------

Rewrite = Callable[[list[Any]], bytes]


def lines(records: list[Any], end: str = "\n", **options: Any) -> bytes:
    return "".join(json.dumps(record, **options) + end for record in records).encode()


REWRITTEN: dict[str, Rewrite] = {
    "jq -c": lambda found: lines(found, separators=(",", ":"), ensure_ascii=False),
    "keys sorted": lambda found: lines(found, sort_keys=True),
    "unix2dos": lambda found: lines(found, end="\r\n"),
    "wide": lambda found: lines(found, separators=(" , ", " : ")),
    "no end of the last line": lambda found: lines(found, separators=(",", ":"))[:-1],
    "other fields": lambda found: lines([{"note": 1, **record} for record in found]),
}


@pytest.mark.parametrize("make_rows", [rows, simple_rows])
@pytest.mark.parametrize("how", REWRITTEN)
def test_records_are_recognized_after_a_rewrite_by_another_program(
    batch: Batch, how: str, make_rows: Callable[[], list[Any]]
) -> None:
    """Regression: they were dropped as invalid records, or counted as failures."""
    source = batch.write(make_rows())
    assert batch.run(source, *GREEDY) == 1, batch.stderr
    written = REWRITTEN[how](batch.records())
    batch.output.write_bytes(written)
    assert batch.run(source, *GREEDY) == 1, batch.stderr
    assert batch.num_resumed == NUM_ROWS
    assert f"all {NUM_ROWS} rows, 1 failed; see {batch.output}\n--retry-errors" in batch.stderr
    assert "warning" not in batch.stderr
    assert batch.output.read_bytes() == written.rstrip(b"\n") + b"\n"
    batch.output.write_bytes(written)
    assert batch.run(source, "--retry-errors", *GREEDY) == 1
    assert batch.num_resumed == NUM_ROWS - 1
    assert len(batch.by_row()) == NUM_ROWS


@pytest.mark.parametrize(
    "written",
    [
        lambda found: json.dumps(found).encode(),
        lambda found: json.dumps(found, indent=1).encode() + b"\n",
        lambda found: json.dumps(found[0]).encode()[1:-1],
        lambda found: lines([{**record, "error": None} for record in found[:2]]) + b"notes\n" * 3,
        lambda found: lines([{"answer": 5} for _ in found])[:-1],
        lambda found: lines(found).decode().encode("utf-16"),
    ],
    ids=["jq -s", "jq", "half a record", "notes", "other objects", "utf-16"],
)
def test_a_file_with_mostly_invalid_lines_is_not_changed(batch: Batch, written: Rewrite) -> None:
    """Regression: it was replaced by the lines that looked like records."""
    source = batch.write(rows())
    assert batch.run(source) == 1
    content = written(batch.records())
    batch.output.write_bytes(content)
    assert batch.run(source) == 2, batch.stderr
    assert "not records of this job" in batch.stderr
    assert batch.output.read_bytes() == content
    assert batch.run(source, "--restart") == 1
    assert (batch.directory / "out.1.jsonl").read_bytes() == content


# --- a record that is damaged ---------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[bytes, int, int], bytes], int]] = {
    # new bytes, given the start of the second and the third record; number of records lost
    "hole": (lambda raw, a, b: raw[: a + 20] + bytes(30) + raw[a + 50 :], 1),
    "hole over an end": (lambda raw, a, b: raw[: b - 20] + bytes(40) + raw[b + 20 :], 2),
    "glued": (lambda raw, a, b: raw[: a + 40] + raw[b:], 2),
    "one line": (lambda raw, a, b: raw[: b - 1] + raw[b:], 2),
    "twice": (lambda raw, a, b: raw[:b] + raw[a:], 0),
    "no number": (lambda raw, a, b: raw[:a] + raw[a:b].replace(b"req_1", b"req_x") + raw[b:], 1),
    "large": (lambda raw, a, b: raw[:a] + raw[a:b].replace(b"req_1", b"req_60000000000"), 5),
    "digits": (lambda raw, a, b: raw[:a] + b'{"_row": %s}\n' % (b"9" * 5000) + raw[b:], 1),
    "other": (lambda raw, a, b: raw[:a] + b'{"_row": %d, "error": null}\n' % 10**15 + raw[b:], 1),
    "bool": (
        lambda raw, a, b: (
            raw[:a] + b'{"_row": true, "outputs": [], "usage": null, "error": null}\n' + raw[b:]
        ),
        1,
    ),
    "deep": (lambda raw, a, b: raw[:a] + b'{"_row":' + b"[" * 9999 + b"\n" + raw[b:], 1),
    "above": (lambda raw, a, b: raw.replace(b"batch_req_5", b"batch_req_6"), 1),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_record_is_reported_and_its_row_is_answered_again(batch: Batch, how: str) -> None:
    """Regression: only both ends of a line were checked: a row was lost, or memory ran out."""
    source = batch.write(rows())
    assert batch.run(source, "--sort-output") == 1
    whole = batch.output.read_bytes()
    begins = list(itertools.accumulate(map(len, whole.splitlines(keepends=True))))
    damage, num_lost = DAMAGES[how]
    batch.output.write_bytes(damage(whole, *begins[:2]))
    for code in (1, 1):
        assert batch.run(source, "--sort-output") == code, batch.stderr
    assert batch.output.read_bytes() == whole
    batch.output.write_bytes(damage(whole, *begins[:2]))
    assert batch.run(source, "--sort-output") == 1
    assert ": not records, or repeated ones" in batch.stderr
    assert batch.num_resumed == NUM_ROWS - num_lost


# --- an output that is touched while the job runs -------------------------------------------------


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


TOUCHES: dict[str, Callable[[Path], Any]] = {
    "removed": lambda path: path.unlink(),
    "moved": lambda path: path.rename(path.with_name("moved")),
    "replaced": replace,
    "cut": lambda path: os.truncate(path, 10),
    "appended": lambda path: path.open("a").write("x"),
}


@pytest.mark.parametrize("how", TOUCHES)
@pytest.mark.parametrize("option", ["", "--sort-output", "--errors", "soon"])
def test_a_change_of_the_output_during_the_job_is_reported(
    batch: Batch, monkeypatch: Any, how: str, option: str
) -> None:
    """Regression: the job reported that all rows are answered, and there was no file."""
    append, count = RecordLog.append, 0
    errors = batch.directory / "e.jsonl"

    def touched(self: RecordLog, line: bytes) -> None:
        nonlocal count
        append(self, line)
        count += self.path == batch.output
        if count == 2:
            TOUCHES[how](batch.output)

    monkeypatch.setattr(RecordLog, "append", touched)
    if option == "soon":
        monkeypatch.setattr(logs, "SYNC_S", 0.0)
    source = batch.write([completion(str(i)) for i in range(150)])
    options = {"--sort-output": ["--sort-output"], "--errors": ["--errors", errors]}.get(option, [])
    assert batch.run(source, *options) == 1
    assert batch.stderr.count(f"error: {batch.output} ") == 1
    assert "during the job" in batch.stderr
    assert "complete" not in batch.stderr
    assert (count < 150) == (option == "soon"), "a change is detected at the next sync"


# --- an input that changes while the job runs -----------------------------------------------------


def shorter(raw: bytes) -> bytes:
    return b"".join(raw.splitlines(keepends=True)[:-2])


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "shorter": shorter,
    "cut in a line": lambda raw: raw[:-20],
    "edited": lambda raw: raw.replace(b"dog", b"one"),
    "empty": lambda raw: b"",
}


@pytest.mark.parametrize("how", [*CHANGES, "removed"])
@pytest.mark.parametrize("option", ["", "--sort-output", "to a pipe"])
def test_a_change_of_an_input_during_the_job_is_reported(
    batch: Batch, monkeypatch: Any, how: str, option: str
) -> None:
    """Regression: the job was complete without its last rows, or with answers to other rows."""
    source = batch.write([completion(str(i), "dog") for i in range(9)])
    work, times = Job.work, os.stat(source)

    def later(self: Job, *args: Any) -> Any:
        if how == "removed":
            source.unlink()
        else:
            source.write_bytes(CHANGES[how](source.read_bytes()))
            os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        return work(self, *args)

    monkeypatch.setattr(Job, "work", later)
    options = [option] if option.startswith("--") else []
    output = "/dev/null" if option == "to a pipe" else None
    assert batch.run(source, *options, output=output) == 1
    assert f"{source}: its content has changed" in batch.stderr
    assert "while the job ran" in batch.stderr
    assert "complete" not in batch.stderr


@pytest.mark.extra
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_no_table_is_written_for_changed_inputs(batch: Batch, monkeypatch: Any, form: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    source = batch.directory / f"in.{form}"

    def write(count: int) -> None:
        prompts = ["one"] * count
        if form == "parquet":
            parquet.write_table(pyarrow.table({"prompt": prompts}), source)
        else:
            batch.write(prompts)

    work = Job.work

    def later(self: Job, *args: Any) -> Any:
        write(3)
        return work(self, *args)

    write(5)
    monkeypatch.setattr(Job, "work", later)
    output = batch.directory / "out.parquet"
    assert batch.run(source, *GREEDY, output=output) == 1
    assert "its content has changed" in batch.stderr
    assert not output.exists()


def test_a_job_with_missing_rows_is_not_complete(batch: Batch, monkeypatch: Any) -> None:
    """An input may be shorter while it is read and unchanged at the end."""
    read_lines = jobs.read_lines
    source = batch.write(rows())
    monkeypatch.setattr(jobs, "read_lines", lambda *args: itertools.islice(read_lines(*args), 4))
    assert batch.run(source) == 1
    assert "2 of 6 rows have no record" in batch.stderr
    assert "complete" not in batch.stderr
    monkeypatch.undo()


# --- the small files of a job ---------------------------------------------------------------------

JOURNALS = [
    b"run 1 " + bytes(20),
    b"run 1 " + b"9" * 5000,
    b"run 1 x\n2\n",
    b"run \n",
    b"9" * 5000 + b"\n",
]
JOURNALS += ["run 1 ٣\n٢\n".encode(), b"\xff" * 50, b"run 1 0\n99999999999999999999\n"]


@pytest.mark.parametrize("content", JOURNALS)
def test_a_damaged_journal_does_not_stop_the_job(batch: Batch, content: bytes) -> None:
    """Regression: each start ended with a traceback."""
    source = batch.write(rows())
    assert batch.run(source) == 1
    whole = batch.by_row()
    batch.output.write_bytes(b"".join(batch.output.read_bytes().splitlines(keepends=True)[:3]))
    batch.write(content, "out.jsonl.job.runs")
    with contextlib.closing(RecordLog(batch.output)):
        assert batch.run(source) == 2
        assert "is being written by another process" in batch.stderr
    assert batch.run(source) == 1, batch.stderr
    assert batch.by_row() == whole


MANIFESTS: list[dict[str, Any]] = [
    {"inputs": 5}, {"inputs": None}, {"inputs": [5]}, {"inputs": [{}]},
    {"inputs": [{"name": 5, "bytes": 1}]}, {"inputs": [{"name": "x", "bytes": "1"}]},
    {"inputs": [{"name": "x", "bytes": [1]}]}, {"created": "now"}, {"created": None},
]  # fmt: skip


@pytest.mark.parametrize("changed", MANIFESTS)
def test_a_manifest_with_wrong_types_is_refused(batch: Batch, changed: dict[str, Any]) -> None:
    source = batch.write(rows())
    assert batch.run(source) == 1
    path, kept = batch.directory / "out.jsonl.job.json", batch.output.read_bytes()
    manifest = json.loads(path.read_bytes())
    for found in ({**manifest, **changed}, {n: v for n, v in manifest.items() if n not in changed}):
        path.write_text(json.dumps(found))
        assert batch.run(source) == 2
        assert f"{path} is not a manifest" in batch.stderr
    assert batch.output.read_bytes() == kept
    assert batch.run(source, "--restart") == 1, batch.stderr


@pytest.mark.parametrize("name", ["out.jsonl.job.json.tmp", "out.jsonl.tmp", "out.jsonl.job.runs"])
def test_a_link_at_the_path_of_a_job_file_is_not_followed(batch: Batch, name: str) -> None:
    """Regression: its target was overwritten."""
    precious, source = batch.write(b"precious\n", "precious"), batch.write(rows())
    assert batch.run(source, "--no-reorder", "--max-errors", "0") == 3
    (batch.directory / name).unlink(missing_ok=True)
    (batch.directory / name).symlink_to(precious)
    code = batch.run(source, "--sort-output")
    assert precious.read_bytes() == b"precious\n"
    assert code == (2 if name.endswith("runs") else 1), batch.stderr


# --- names and streams ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--output", "--errors", "--summary-json"])
def test_a_name_with_a_nul_is_refused(batch: Batch, option: str) -> None:
    source, name = batch.write(rows()), str(batch.directory / "a\0b.jsonl")
    before = sorted(os.listdir(batch.directory))
    options = () if option == "--output" else (option, name)
    assert batch.run(source, *options, output=name if option == "--output" else None) == 2
    assert "its name contains a NUL" in batch.stderr
    assert sorted(os.listdir(batch.directory)) == before


@pytest.mark.parametrize("stream", [">&-", "1</dev/null"])
def test_a_closed_stdout_is_refused(batch: Batch, stream: str) -> None:
    """Regression: all answers were lost, and the exit code was 0."""
    source = batch.write([{"prompt": "one", "max_tokens": 1}])
    command = f"{sys.executable} -m nanoengine.cli.main batch demo {source} --output - {stream}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "--output - writes to stdout, which is closed" in done.stderr
    assert "Traceback" not in done.stderr
