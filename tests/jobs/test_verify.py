"""`--verify` finds answers that differ when run alone; `--dry-run` finds rows that would fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanoengine.cli.main import main
from tests.support.batch_jobs import Batch, completion
from tests.support.fake_llm import ANSWERS, MakeLLM
from tests.support.text_fixtures import byte_level

ROWS = [completion(f"{i}", prompt) for i, prompt in enumerate(["one", "dog", "€", "one", 3, "dog"])]


def test_verify_confirms_equal_answers(batch: Batch) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows, "--verify", 100) == 1, "a row has failed"
    assert "5 of 5 answers are identical when run alone" in batch.stderr
    assert batch.run(rows, "--verify", 2) == 1
    assert "of 2 answers" in batch.stderr


def test_verify_names_each_answer_that_differs(batch: Batch, make_llm: MakeLLM) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows, "--sort-output") == 1
    make_llm(ANSWERS | {"dog": " and a little bat!"}, tokenizer=byte_level()).close()
    assert batch.run(rows, "--sort-output", "--verify", 100) == 4
    assert re.findall(r"^row (\d+) \((\S+)\)", batch.stderr, re.MULTILINE) == [
        ("1", f"{rows}:2"), ("5", f"{rows}:6"),
    ]  # fmt: skip
    assert "little cat" in batch.stderr and "little bat" in batch.stderr
    assert "3 of 5 answers are identical" in batch.stderr


def test_verify_finds_changed_text_and_ignores_spacing(batch: Batch) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows) == 1
    lines = [json.dumps(row, indent=None, separators=(", ", ":  ")) for row in batch.records()]
    batch.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert batch.run(rows, "--verify", 100) == 1, batch.stderr
    batch.output.write_text("\n".join(lines).replace(" three", " thre3") + "\n", encoding="utf-8")
    assert batch.run(rows, "--verify", 100) == 4
    assert batch.stderr.count("thre3") == 2


def test_the_seed_selects_the_rows_to_verify(batch: Batch, make_llm: MakeLLM) -> None:
    rows = batch.write([completion(f"{i}", "one") for i in range(40)])
    samples = []
    for seed in (0, 0, 1):
        make_llm(ANSWERS, tokenizer=byte_level()).close()
        assert batch.run(rows, "--restart", "--seed", seed) == 0
        make_llm(ANSWERS | {"one": " two four."}, tokenizer=byte_level()).close()
        assert batch.run(rows, "--seed", seed, "--verify", 8) == 4
        samples.append(re.findall(r"^row (\d+)", batch.stderr, re.MULTILINE))
    assert len(samples[0]) == 8
    assert samples[0] == samples[1] != samples[2]


def test_the_demo_model_generates_the_same_text_alone(tmp_path: Path, capsys: Any) -> None:
    prompts = [f"Once upon a time {'there was ' * (i % 3)}" for i in range(12)]
    path = tmp_path / "in.txt"
    path.write_text("\n".join(prompts), encoding="utf-8")
    command = ["batch", "demo", str(path), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, "--max-tokens", "8", "--n", "2", "--verify", "6"]) == 0
    assert "6 of 6 answers are identical" in capsys.readouterr().err


# --- a dry run -----------------------------------------------------------------------------------

BAD = [
    {"prompt": 3},
    {"prompt": "x", "top_p": 7},
    {"prompt": "dog " * 5000},
    {"prompt_token_ids": [1, 10**6]},
    {"messages": []},
    {"prompt": "x", "chat_template": "{{ 1 }}"},
]
GOOD = [{"prompt": "Once upon a time", "max_tokens": 9, "n": 2}, {"prompt_token_ids": [1, 2, 3]}]


def test_a_dry_run_reports_the_errors_of_a_run_and_writes_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    rows = [GOOD[0], *BAD, GOOD[1]]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    command = ["batch", "demo", str(path), "--output", str(output)]
    assert main([*command, "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert [line.name for line in tmp_path.iterdir()] == ["in.jsonl"]
    assert main(command) == 1
    records = sorted(map(json.loads, output.read_text().splitlines()), key=lambda r: r["_row"])
    errors = [record["error"] for record in records if record["error"]]
    expected = [f"{e['file']}:{e['line']}: {e['code']}: {e['message']}" for e in errors]
    without_index = [line.replace("prompt 0: ", "") for line in expected]
    assert captured.out.splitlines() == without_index
    assert len(errors) == len(BAD) + 1
    num_tokens = sum(record["usage"]["prompt_tokens"] for record in records if record["usage"])
    assert f"9 rows, 7 would fail; {num_tokens} prompt tokens" in captured.err
    assert captured.err.count("prompts are sent as chat messages") == 1
    assert "at most 274 output tokens" in captured.err


def test_a_dry_run_without_errors_exits_with_0_and_keeps_an_earlier_output(
    tmp_path: Path, capsys: Any
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    output.write_text("mine\n")
    assert main(["batch", "demo", str(path), "--output", str(output), "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    assert output.read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_dry_run_reports_duplicate_ids(batch: Batch, capsys: Any) -> None:
    rows = batch.write([completion("a"), completion("a")])
    command = ["batch", "demo", str(rows), "--output", str(batch.output), "--dry-run"]
    assert main(command) == 0
    assert "equal random numbers" in capsys.readouterr().err
