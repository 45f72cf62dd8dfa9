"""A job that is killed, stopped or out of room ends with the records of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_server import BatchServer, wait_for_lines
from tests.support.checkpoints import make_checkpoint
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

NUM_ROWS = 500
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


def rows() -> list[str]:
    """Greedy and sampled rows, pairs of completions, and rows that are bad in several ways."""
    draw = random.Random(0)
    lines = []
    for i in range(NUM_ROWS):
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


def command(model: Path, source: Path, output: Path, *more: str) -> list[str]:
    engine = ["--device", "cpu", "--attention-backend", "naive", "--num-kv-blocks", "200"]
    engine += ["--max-num-seqs", "24", "--max-model-len", "128"]
    return ["batch", str(model), str(source), "--output", str(output), *engine, *more]


@pytest.fixture(scope="module")
def undisturbed(
    server: BatchServer, model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    assert server.run(command(model, source, output)) == 1
    return records(output)


def records(output: Path) -> dict[str, Any]:
    """Records by id, without the time of the job; each row has one."""
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    by_id = {record.get("id", f"simple {record.get('_row')}"): record for record in found}
    assert len(by_id) == len(found) == NUM_ROWS
    for record in found:
        if record.get("response"):
            del record["response"]["body"]["created"]
    return by_id


def failed(found: dict[str, Any]) -> int:
    return sum(record["error"] is not None for record in found.values())


def test_an_undisturbed_run_answers_every_row(undisturbed: dict[str, Any]) -> None:
    assert failed(undisturbed) == 24
    texts = [
        [choice["text"] for choice in record["response"]["body"]["choices"]]
        for record in undisturbed.values()
        if record.get("response")
    ]
    assert sum(len(pair) == 2 and pair[0] != pair[1] for pair in texts) > 100


def test_sigkill_at_twenty_random_moments(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    undisturbed: dict[str, Any],
) -> None:
    draw, output = random.Random(1), tmp_path / "out.jsonl"
    num_done, num_kills, sizes = 0, 0, set()
    while num_kills < 20:
        pid = server.start(command(model, source, output))
        num_done = wait_for_lines(output, num_done + draw.randint(0, 24), pid)
        time.sleep(draw.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL, "the job ended before it was killed often enough"
        num_kills += 1
        sizes.add(output.stat().st_size)
    assert len(sizes) > 10, "most of the processes did something"
    assert server.run(command(model, source, output)) == 1
    assert records(output) == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]


@pytest.mark.parametrize(
    ("number", "code", "grace"), [(signal.SIGTERM, 143, "0"), (signal.SIGINT, 130, "10")]
)
def test_a_signal_ends_the_run_and_the_next_one_goes_on(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    undisturbed: dict[str, Any],
    number: int,
    code: int,
    grace: str,
) -> None:
    output = tmp_path / "out.jsonl"
    for count in (1, 150):
        pid = server.start(command(model, source, output, "--grace", grace))
        assert wait_for_lines(output, count, pid) < NUM_ROWS
        os.kill(pid, number)
        assert server.wait() == code
        assert output.read_bytes().endswith(b"\n")
    assert server.run(command(model, source, output)) == 1
    assert records(output) == undisturbed


def test_a_second_signal_stops_at_once(
    server: BatchServer, model: Path, source: Path, tmp_path: Path
) -> None:
    output, runs = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job.runs"
    pid = server.start(command(model, source, output, "--grace", "600"), step_s=0.5)
    wait_for_lines(runs, 26, pid)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    given_out = sum(line.strip().isdecimal() for line in runs.open())
    os.kill(pid, signal.SIGTERM)
    assert server.wait() == 143
    answered = sum(json.loads(line)["error"] is None for line in output.open())
    assert given_out >= 24 > answered, "the grace would have let all of them end"


def test_a_full_disk_leaves_an_output_that_the_next_run_completes(
    server: BatchServer,
    model: Path,
    source: Path,
    tmp_path: Path,
    undisturbed: dict[str, Any],
) -> None:
    output, told = tmp_path / "out.jsonl", tmp_path / "told.txt"
    for max_bytes in (30_000, 80_001):
        args = command(model, source, output)
        assert server.run(args, max_bytes=max_bytes, stderr=str(told)) == 1
        assert str(output) in told.read_text()
        assert "can't be written: File too large" in told.read_text()
        assert "Traceback" not in told.read_text()
        assert max_bytes - 2000 < output.stat().st_size <= max_bytes
        assert output.read_bytes().endswith(b"}\n")
    assert server.run(command(model, source, output)) == 1
    assert records(output) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_row_under_which_the_process_dies_three_times_is_poison(
    server: BatchServer, model: Path, tmp_path: Path, number: int
) -> None:
    """It names that row alone, though others ran beside it each time. A kill from outside counts if
    nothing was finished before it, so one that finished something goes before the three."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "the dog " * (i % 5 + 1), "max_tokens": 4} for i in range(60)]
    lines[7] = {"prompt_token_ids": [7] * 37, "max_tokens": 4}
    source.write_text("\n".join(map(json.dumps, lines)))
    args = command(model, source, output)
    deaths = 0
    while (status := server.run(args, die_on=37, signal=number)) == -number:
        deaths += 1
        assert deaths < 20
    assert status == 1
    found = {record["_row"]: record for record in map(json.loads, output.open())}
    assert len(found) == 60
    assert [row for row, record in found.items() if record["error"]] == [7]
    assert found[7]["error"]["code"] == "poison"
    assert deaths == 3 or (number == signal.SIGKILL and deaths <= 5)
