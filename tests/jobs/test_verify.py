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


def test_the_same_answers_are_verified(batch: Batch) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows, "--verify", 100) == 1, "a row has failed"
    assert "of 5 answers, run again alone in a fresh engine, 5 are the same" in batch.told
    assert batch.run(rows, "--verify", 2) == 1
    assert "of 2 answers" in batch.told


def test_each_answer_that_differs_is_named(batch: Batch, make_llm: MakeLLM) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows, "--in-order") == 1
    make_llm(ANSWERS | {"dog": " and a little bat!"}, tokenizer=byte_level()).close()
    assert batch.run(rows, "--in-order", "--verify", 100) == 4
    assert re.findall(r"^row (\d+) \((\S+)\)", batch.told, re.MULTILINE) == [
        ("1", f"{rows}:2"), ("5", f"{rows}:6"),
    ]  # fmt: skip
    assert "little cat" in batch.told and "little bat" in batch.told
    assert "3 are the same" in batch.told


def test_a_changed_file_is_found_and_other_blanks_are_no_change(batch: Batch) -> None:
    rows = batch.write(ROWS)
    assert batch.run(rows) == 1
    kept = [json.dumps(one, indent=None, separators=(", ", ":  ")) for one in batch.records()]
    batch.output.write_text("\n".join(kept) + "\n", encoding="utf-8")
    assert batch.run(rows, "--verify", 100) == 1, batch.told
    batch.output.write_text("\n".join(kept).replace(" three", " thre3") + "\n", encoding="utf-8")
    assert batch.run(rows, "--verify", 100) == 4
    assert batch.told.count("thre3") == 2


def test_the_seed_draws_the_rows(batch: Batch, make_llm: MakeLLM) -> None:
    rows = batch.write([completion(f"{i}", "one") for i in range(40)])
    drawn = []
    for seed in (0, 0, 1):
        make_llm(ANSWERS, tokenizer=byte_level()).close()
        assert batch.run(rows, "--restart", "--seed", seed) == 0
        make_llm(ANSWERS | {"one": " two four."}, tokenizer=byte_level()).close()
        assert batch.run(rows, "--seed", seed, "--verify", 8) == 4
        drawn.append(re.findall(r"^row (\d+)", batch.told, re.MULTILINE))
    assert len(drawn[0]) == 8
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_demo_model_says_the_same_alone(tmp_path: Path, capsys: Any) -> None:
    prompts = [f"Once upon a time {'there was ' * (i % 3)}" for i in range(12)]
    path = tmp_path / "in.txt"
    path.write_text("\n".join(prompts), encoding="utf-8")
    command = ["batch", "demo", str(path), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, "--max-tokens", "8", "--n", "2", "--verify", "6"]) == 0
    assert "of 6 answers, run again alone in a fresh engine, 6 are the same" in (
        capsys.readouterr().err
    )


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


def test_a_dry_run_says_what_a_run_would_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    rows = [GOOD[0], *BAD, GOOD[1]]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    command = ["batch", "demo", str(path), "--output", str(output)]
    assert main([*command, "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]
    assert main(command) == 1
    records = sorted(map(json.loads, output.read_text().splitlines()), key=lambda r: r["_row"])
    errors = [record["error"] for record in records if record["error"]]
    told = [f"{e['file']}:{e['line']}: {e['code']}: {e['message']}" for e in errors]
    without_index = [one.replace("prompt 0: ", "") for one in told]
    assert shown.out.splitlines() == without_index
    assert len(errors) == len(BAD) + 1
    used = sum(record["usage"]["prompt_tokens"] for record in records if record["usage"])
    assert f"9 rows, of which 7 would fail; {used} prompt tokens" in shown.err
    assert "at most 274 tokens to generate" in shown.err


def test_a_dry_run_without_a_fault_exits_with_0_and_leaves_an_earlier_output_alone(
    tmp_path: Path, capsys: Any
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    output.write_text("mine\n")
    assert main(["batch", "demo", str(path), "--output", str(output), "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    assert output.read_text() == "mine\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_dry_run_looks_for_equal_ids(batch: Batch, capsys: Any) -> None:
    rows = batch.write([completion("a"), completion("a")])
    command = ["batch", "demo", str(rows), "--output", str(batch.output), "--dry-run"]
    assert main(command) == 0
    assert "equal random numbers" in capsys.readouterr().err
