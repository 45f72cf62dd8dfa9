"""The process dies, or the disk is full, at any of the calls that change a job's files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoengine.jobs.record_log import OutputLostError, RecordLog
from tests.support.batch_jobs import Batch, completion

CHANGES = ("write", "fdatasync", "fsync", "replace", "ftruncate", "unlink")
WRITES = ("write", "fdatasync", "fsync")


class SimulatedCrash(BaseException):
    """Simulates the end of the process: nothing after it happens."""


class Disk:
    """Counts the calls that change a job's files; from a given call on, all fail.

    Args:
        fails: makes the exception that this call and all later ones raise.
        names: calls that are counted and fail.

    Attributes:
        count: calls since `arm`.
        calls: call number -> name, from the first run.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], fails: Callable[[], Any]
    ) -> None:
        self.count, self.last, self.part = 0, -1, 0.0
        self.calls: dict[int, str] = {}
        self._fails = fails
        for name in names:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if args[0] in (1, 2):  # stdout and stderr don't count
                return call(*args, **options)
            number, self.count = self.count, self.count + 1
            self.calls.setdefault(number, call.__name__)
            if 0 <= self.last <= number:
                if number == self.last and call.__name__ == "write":
                    call(args[0], args[1][: int(self.part * len(args[1]))])
                elif number == self.last and self.part:
                    call(*args, **options)
                raise self._fails()
            return call(*args, **options)

        counted.__name__ = call.__name__
        return counted

    def arm(self, last: int, part: float) -> None:
        """Lets the call with this number fail after the fraction `part` of it; -1: none fails."""
        self.count, self.last, self.part = 0, last, part


def disk_full_error() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def rows() -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "n": 2, "max_tokens": 3},
        {"unknown": 1},
    ]
    return [completion(f"r{i}", "one", **body) for i, body in enumerate(bodies)]


def output_and_options(kind: str, batch: Batch) -> tuple[Path, list[str]]:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        return batch.directory / "out.parquet", []
    errors = ["--errors", str(batch.directory / "errors.jsonl"), "--sort-output"]
    return batch.output, errors


def contents(batch: Batch, output: Path) -> Any:
    """Returns all results of a job without its time."""
    names = sorted(path.name for path in batch.directory.iterdir() if path.name != "in.jsonl")
    if output.suffix == ".parquet":
        import pyarrow.parquet

        records = pyarrow.parquet.read_table(output).to_pylist()
    else:
        records = [
            sorted(batch.records(path), key=lambda record: record["id"]) for path in logs(batch)
        ]
    return names, json.loads(json.dumps(records), object_hook=without_time)


def without_time(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != "created"}


def remove_outputs(batch: Batch) -> None:
    for path in batch.directory.iterdir():
        if path.name not in ("in.jsonl", "model"):
            path.unlink()


KINDS = ["apart, in order", pytest.param("parquet", marks=pytest.mark.extra)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_at_any_call_loses_no_finished_record(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    output, options = output_and_options(kind, batch)
    source = batch.write(rows())
    disk = Disk(monkeypatch, CHANGES, SimulatedCrash)
    assert batch.run(source, *options, output=output) == 1
    uninterrupted, num_calls = contents(batch, output), disk.count
    assert num_calls > 12
    for last in range(num_calls):
        # Why 1.0 only for the last one: for others it equals 0.0 of the next call.
        parts = (0.0, 0.5 * (disk.calls[last] == "write"), float(last == num_calls - 1))
        for part in sorted(set(parts)):
            remove_outputs(batch)
            disk.arm(last, part)
            with pytest.raises(SimulatedCrash):
                batch.run(source, *options, output=output)
            before = finished(batch)
            disk.arm(-1, 0)
            assert batch.run(source, *options, output=output) == 1, batch.stderr
            assert contents(batch, output) == uninterrupted, (last, part)
            assert batch.num_resumed == before


def logs(batch: Batch) -> list[Path]:
    return sorted(set(batch.directory.glob("*.jsonl")) - {batch.directory / "in.jsonl"})


def finished(batch: Batch) -> int:
    """Returns the number of complete records in all files of a job that has died."""
    return sum(path.read_bytes().count(b"}\n") for path in logs(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_at_any_call_is_reported_with_the_file_and_the_next_run_completes(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    output, options = output_and_options(kind, batch)
    source = batch.write(rows())
    disk = Disk(monkeypatch, WRITES, disk_full_error)
    assert batch.run(source, *options, output=output) == 1
    uninterrupted, num_calls = contents(batch, output), disk.count
    for last in range(num_calls):
        remove_outputs(batch)
        for part in (0.5, 0.0, 0.0, 0.0):  # Why so often: three crashes would make a row poison.
            disk.arm(last, part)
            code = batch.run(source, *options, output=output)
            if disk.count <= last:  # Records of earlier runs leave fewer calls.
                break
            assert code == (1 if "output tokens" in batch.stderr else 2), "2: no row has run"
            error, reason = batch.stderr.partition("error: ")[2], " can't be written: No space left"
            assert str(batch.directory) in error.partition(reason)[0], (last, part, batch.stderr)
        disk.arm(-1, 0)
        assert batch.run(source, *options, output=output) == 1, batch.stderr
        assert contents(batch, output) == uninterrupted, last


def test_a_failed_rewrite_leaves_the_log_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RecordLog(tmp_path / "out.jsonl")
    log.append(b'{"_row": 0}\n')

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(OutputLostError, match="No space left"):
            log.rewrite([0])
    log.append(b'{"_row": 1}\n')
    log.close()
    assert log.path.read_bytes() == b'{"_row": 0}\n{"_row": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("num_written", [0, 5, 12])
def test_a_signal_during_a_write_leaves_only_complete_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    log, line, write = RecordLog(tmp_path / "out.jsonl"), b'{"_row": 1}\n', os.write
    log.append(b'{"_row": 0}\n')

    def interrupted(fd: int, data: bytes) -> int:
        write(fd, data[:num_written])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(line)
    log.close()
    assert log.path.read_bytes() == b'{"_row": 0}\n' + (line if num_written == len(line) else b"")
