"""A job that is killed, stopped or hits a full disk ends with the records of a complete run."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_jobs import row_of
from tests.support.batch_server import BatchServer, wait_for_lines
from tests.support.checkpoints import make_checkpoint
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

NUM_ROWS = 260
WORDS = ("the", "little", "girl", "and", "her", "dog", "went", "to", "a", "big", "house", "park")


@pytest.fixture(scope="module")
def server() -> Iterator[BatchServer]:
    server = BatchServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama", vocab_size=len(byte_level().backend))
    byte_level().backend.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory


def rows(count: int = NUM_ROWS) -> list[str]:
    """Returns greedy and sampled rows, rows with n=2, and rows that are invalid in several ways."""
    draw = random.Random(0)
    lines = []
    for i in range(count):
        body: dict[str, Any] = {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
            "max_tokens": draw.randint(1, 24),
            "temperature": 0,
        }
        if i % 3 == 1:
            body |= {"temperature": 0.9, "n": 2}
        elif i % 7 == 2:
            body |= {"temperature": 1.1, "seed": i}
        row = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        bad = {5: b"{torn", 17: b"\xff", 40: b'"a string"', 41: b"[]"}.get(i)
        if i % 50 == 30:
            body["temprature"] = 1
        if i % 50 == 31:
            body["prompt"] = "the " * 400
        lines.append(json.dumps(row).encode() if bad is None else bad)
    return [line.decode("latin-1") for line in lines]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    path.write_bytes("\n".join(rows()).encode("latin-1"))
    return path


def command(model: Path, source: Path | str, output: Path, *more: str) -> list[str]:
    engine = ["--device", "cpu", "--attention-backend", "naive", "--num-kv-blocks", "200"]
    engine += ["--max-num-seqs", "24", "--max-model-len", "128"]
    return ["batch", str(model), str(source), "--output", str(output), *engine, *more]


@pytest.fixture(scope="module")
def uninterrupted(
    server: BatchServer, model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    assert server.run(command(model, source, output)) == 1
    return records(output)


def records(output: Path) -> dict[str, Any]:
    """Returns records by id, without the time of the job; exactly one per row."""
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    by_id = {record.get("id", f"simple {record.get('_row')}"): record for record in found}
    assert len(by_id) == len(found) == NUM_ROWS
    for record in found:
        if record.get("response"):
            del record["response"]["body"]["created"]
    return by_id


def failed(found: dict[str, Any]) -> int:
    return sum(record["error"] is not None for record in found.values())


def test_an_uninterrupted_run_answers_every_row(uninterrupted: dict[str, Any]) -> None:
    assert failed(uninterrupted) == 14
    texts = [
        [choice["text"] for choice in record["response"]["body"]["choices"]]
        for record in uninterrupted.values()
        if record.get("response")
    ]
    assert sum(len(pair) == 2 and pair[0] != pair[1] for pair in texts) > 60


def test_a_job_survives_sigkill_at_twenty_random_moments(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    uninterrupted: dict[str, Any],
) -> None:
    draw, output = random.Random(1), tmp_path / "out.jsonl"
    num_done, num_kills, sizes = 0, 0, set()
    while num_kills < 20:
        pid = server.start(command(model, source, output))
        num_done = wait_for_lines(output, num_done + draw.randint(0, 14), pid)
        time.sleep(draw.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL, "the job ended before it was killed often enough"
        num_kills += 1
        sizes.add(output.stat().st_size)
    assert len(sizes) > 10, "most of the processes did something"
    assert server.run(command(model, source, output)) == 1
    assert records(output) == uninterrupted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]


@pytest.mark.parametrize(
    ("number", "code", "timeout"), [(signal.SIGTERM, 143, "0"), (signal.SIGINT, 130, "10")]
)
def test_a_signal_ends_the_run_and_the_next_run_resumes(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    uninterrupted: dict[str, Any],
    number: int,
    code: int,
    timeout: str,
) -> None:
    output = tmp_path / "out.jsonl"
    for count in (1, 150):
        pid = server.start(command(model, source, output, "--shutdown-timeout", timeout))
        assert wait_for_lines(output, count, pid) < NUM_ROWS
        os.kill(pid, number)
        assert server.wait() == code
        assert output.read_bytes().endswith(b"\n")
    assert server.run(command(model, source, output)) == 1
    assert records(output) == uninterrupted


def test_a_second_signal_stops_at_once(
    server: BatchServer, model: Path, source: Path, tmp_path: Path
) -> None:
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job.runs"
    pid = server.start(command(model, source, output, "--shutdown-timeout", "600"), step_s=0.5)
    wait_for_lines(journal, 26, pid)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    num_started = sum(line.strip().isdecimal() for line in journal.open())
    os.kill(pid, signal.SIGTERM)
    assert server.wait() == 143
    num_answered = sum(json.loads(line)["error"] is None for line in output.open())
    assert num_started >= 24 > num_answered, "all would have finished within the shutdown timeout"


def test_a_full_disk_leaves_an_output_that_the_next_run_completes(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    uninterrupted: dict[str, Any],
) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "stderr.txt"
    for max_bytes in (20_000, 50_001):
        args = command(model, source, output)
        assert server.run(args, max_bytes=max_bytes, stderr=str(log)) == 1
        assert str(output) in log.read_text()
        assert "can't be written: File too large" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert max_bytes - 2000 < output.stat().st_size <= max_bytes
        assert output.read_bytes().endswith(b"}\n")
    assert server.run(command(model, source, output)) == 1
    assert records(output) == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_row_that_crashes_the_process_three_times_is_poison(
    server: BatchServer, model: Path, tmp_path: Path, number: int
) -> None:
    """Only that row is poison, though others ran at the same time. A kill from outside counts only
    if its process had finished no record, so uncounted kills may precede the three."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "the dog " * (i % 5 + 1), "max_tokens": 4} for i in range(60)]
    lines[7] = {"prompt_token_ids": [7] * 37, "max_tokens": 4}
    source.write_text("\n".join(map(json.dumps, lines)))
    args = command(model, source, output)
    crashes = 0
    while (status := server.run(args, crash_on=37, signal=number)) == -number:
        crashes += 1
        assert crashes < 20
    assert status == 1
    found = {record["_row"]: record for record in map(json.loads, output.open())}
    assert len(found) == 60
    assert [row for row, record in found.items() if record["error"]] == [7]
    assert found[7]["error"]["code"] == "poison"
    assert crashes == 3 or (number == signal.SIGKILL and crashes <= 5)


# --- soak test ------------------------------------------------------------------------------------

NUM_KILLS = int(os.environ.get("BATCH_KILLS", "24"))
CODES = {signal.SIGKILL: (-9,), signal.SIGTERM: (143, -15), signal.SIGINT: (130, 99)}
"""Exit codes; the second of a pair is for a process that has not reached the command yet."""

MIN_NEW_RECORDS = 5
"""Records that a process must add before any are damaged: without one its rows are suspects."""


def write_inputs(directory: Path) -> dict[str, list[str]]:
    """Writes inputs of each format; returns the arguments that make a command read them."""
    lines = [line.encode("latin-1") + b"\n" for line in rows(500)]
    (directory / "a.jsonl").write_bytes(b"".join(lines[:300]))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[200:])))
    with (directory / "c.csv").open("w", newline="", encoding="utf-8") as file:
        texts = ["the " * 400 if i % 40 == 7 else " ".join(WORDS[: i % 12]) for i in range(300)]
        csv.writer(file).writerows([["prompt", "note"], *([t, 'two\nlines, "€"'] for t in texts)])
    for i in range(3):
        (directory / f"part-{i}.jsonl").write_bytes(b"".join(lines[i * 100 : i * 100 + 100]))
    (directory / "part-3.txt").write_text("\n\n".join(WORDS), encoding="utf-8")
    sampled = ["--max-tokens", "12", "--temperature", "0.8"]
    return {
        "jsonl": [str(directory / "a.jsonl")],
        "gz": [str(directory / "b.jsonl.gz")],
        "csv": [str(directory / "c.csv"), *sampled],
        "glob": [str(directory / "part-*"), *sampled],
    }


def kept(directory: Path) -> dict[int, Any]:
    """Returns the records of a job's outputs by row, without its time; at most one per row."""
    found: dict[int, Any] = {}
    for line in b"\n".join(path.read_bytes() for path in directory.glob("*.jsonl")).split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the next process must find it
        if record.get("response"):
            del record["response"]["body"]["created"]
        assert found.setdefault(row_of(record), record) is record, "a row was answered twice"
    return found


def rewritten(raw: bytes, draw: random.Random) -> bytes:
    """Returns the same records as another program writes them."""
    options: dict[str, Any] = {
        "sort_keys": draw.random() < 0.5,
        "ensure_ascii": draw.random() < 0.5,
        "separators": draw.choice([(",", ":"), (", ", ": "), (" ,\t", " : ")]),
    }
    end = draw.choice(["\n", "\r\n"])
    complete = raw[: raw.rindex(b"\n")].split(b"\n")
    lines = [json.dumps(json.loads(line), **options) + end for line in complete]
    return "".join(lines).encode()[: draw.choice([None, -len(end)])]


def damage(raw: bytes, draw: random.Random) -> bytes:
    """Returns the same with a truncated end, with zero bytes, or with two lines joined."""
    middle = raw.index(b"\n", draw.randrange(len(raw) * 3 // 4)) - draw.randrange(50)
    return draw.choice(
        [raw[: -draw.randint(1, 200)], raw[:middle] + bytes(50) + raw[middle + 50 :],
         raw[:middle] + raw[middle + 50 :]]
    )  # fmt: skip


@pytest.mark.soak
def test_jobs_survive_many_kills(
    server: BatchServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs BATCH_KILLS kills on jobs of every format. Other programs write to their outputs between
    two processes. No row is lost or answered twice, and no answer differs."""
    draw, counts = random.Random(NUM_KILLS), Counter[str]()
    inputs, uninterrupted, started = write_inputs(tmp_path), {}, time.monotonic()
    for form, (source, *sampled) in inputs.items():
        (tmp_path / form).mkdir()
        args = command(model, source, tmp_path / form / "out.jsonl", *sampled)
        assert server.run(args) == 1
        uninterrupted[form] = kept(tmp_path / form)
    while counts["kills"] < NUM_KILLS:
        form = list(inputs)[counts["jobs"] % len(inputs)]
        counts["jobs"] += 1
        directory = tmp_path / str(counts["jobs"])
        directory.mkdir()
        more = ["--sort-output"] * (draw.random() < 0.5)
        more += ["--errors", str(directory / "errors.jsonl")] * (draw.random() < 0.5)
        source, *sampled = inputs[form]
        args = command(model, source, directory / "out.jsonl", *sampled, *more)
        kill_until_complete(server, args, directory, uninterrupted[form], draw, counts)
    with capsys.disabled():
        print(f"\n{dict(counts)} in {time.monotonic() - started:.0f} s")


def kill_until_complete(
    server: BatchServer,
    args: list[str],
    directory: Path,
    uninterrupted: dict[int, Any],
    draw: random.Random,
    counts: Counter[str],
) -> None:
    """Runs a job to its end, with kills and edits by other programs in between."""
    output, log = directory / "out.jsonl", directory / "stderr"
    before: dict[int, Any] = {}
    may_be_early = True  # Why once: three kills before any record make a row poison.
    while True:
        log.touch()  # Why: a process may be killed before it has opened its stderr.
        pid = server.start(args, stderr=str(log))
        if counts["kills"] < NUM_KILLS:
            if may_be_early and draw.random() < 0.3:
                may_be_early = False
            else:
                num_lines = output.read_bytes().count(b"\n") if output.exists() else 0
                wait_for_lines(output, num_lines + draw.randint(1, 40), pid)
            time.sleep(draw.random() * 0.05)
            number = draw.choice(list(CODES))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        status = server.wait()
        assert "Traceback" not in log.read_text()
        found = kept(directory)
        assert before.keys() <= found.keys(), "a record was lost"
        assert found == {row: uninterrupted[row] for row in found}
        if status == 1:
            assert found == uninterrupted
            return
        assert status in CODES[number], log.read_text()
        counts["kills"] += 1
        counts[number.name] += 1
        touched = draw.choice(sorted(directory.glob("*.jsonl")) or [output])
        raw = touched.read_bytes() if touched.exists() else b""
        if raw.count(b"\n") >= 4 * MIN_NEW_RECORDS and len(found) >= len(before) + MIN_NEW_RECORDS:
            rewrite = draw.choice([rewritten, damage])
            touched.write_bytes(rewrite(raw, draw))
            counts[rewrite.__name__] += 1
        before = kept(directory)
