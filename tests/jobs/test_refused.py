"""Jobs that are refused before a model loads, without changing any file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.batch_jobs import Batch, completion

IDS = b"".join(json.dumps(completion(name)).encode() + b"\n" for name in ("a", "@", "b"))
FILES = {
    "in.jsonl": b'"one"\n',
    "in.xml": b"",
    "in.txt": b"one\ndog\n",
    "a.jsonl": b'{"a": "one"}\n' * 9,
    "question.csv": b"question,n\none,1\n",
    "latin.csv": b"na\xefme,prompt\nx,one\ny,one\n",
    "twice.csv": b"prompt,prompt\nx,one\ny,one\n",
    "ids.jsonl": IDS.replace(b'"@"', b'"a"'),
    "escaped.jsonl": IDS.replace(b'"@"', rb'"\u0061"'),
    **dict.fromkeys(("kept.jsonl", "kept.csv", "kept.parquet", "x.jsonl.job.json"), b"precious\n"),
}
UNWRITABLE = "can't be written"
IS_INPUT = "is an input: give another file"
IS_JOB_FILE = "is a file of the job: give another"
WRONG_SUFFIX = "can't be written as {}: name it .jsonl, .csv, .tsv or .parquet"
COLUMNS = " its columns are {}; select one with --prompt-column, or several with --template"

REFUSED = {
    # inputs
    "": "no input: give files, globs, or - for stdin",
    "none.jsonl": "input 'none.jsonl' does not exist",
    "*.nothing": "input '*.nothing' matches no file",
    "in.xml": "has an unknown suffix",
    "in.jsonl in.jsonl": "input 'in.jsonl' is given twice",
    "in.jsonl ./in.jsonl": "input './in.jsonl' is given twice",
    "pipe.jsonl": "is not a regular file, to be read twice",
    "x.jsonl.job.json --output x.jsonl --input-format txt": "is a file of the job",
    "latin.csv": "latin.csv': the header can't be read: the row is not UTF-8",
    "twice.csv": "twice.csv': the header can't be read: column 'prompt' occurs twice",
    "question.csv": "'prompt':" + COLUMNS.format("['question', 'n']"),
    "question.csv --dry-run": "'prompt':" + COLUMNS.format("['question', 'n']"),
    "question.csv --prompt-column q": "'q':" + COLUMNS.format("['question', 'n']"),
    "question.csv --template {{q}}": "'{{q}}':" + COLUMNS.format("['question', 'n']"),
    "a.jsonl --prompt-column b": "'b':" + COLUMNS.format("['a']"),
    "in.txt --prompt-column a": "'a':" + COLUMNS.format("[]"),
    "ids.jsonl --require-unique-ids": "custom_id 'a' occurs at ids.jsonl:1 and ids.jsonl:2",
    "escaped.jsonl --require-unique-ids": "occurs at escaped.jsonl:1 and escaped.jsonl:2",
    "ids.jsonl --require-unique-ids --dry-run": "custom_id 'a' occurs at",
    "- --require-unique-ids": "--require-unique-ids reads all rows before any runs",
    # outputs
    "in.jsonl --output nodir/out.jsonl": "output 'nodir/out.jsonl' can't be written",
    "in.jsonl --output .": UNWRITABLE,
    "in.jsonl --output in.jsonl/out.jsonl": UNWRITABLE,
    "in.jsonl --output in.jsonl": "--output 'in.jsonl' " + IS_INPUT,
    "in.jsonl --output link.jsonl": IS_INPUT,
    "in.jsonl --output hard.jsonl": IS_INPUT,
    "in.jsonl --output model/../in.jsonl": IS_INPUT,
    "in.jsonl --errors in.jsonl": "--errors 'in.jsonl' " + IS_INPUT,
    "in.jsonl --summary-json in.jsonl": IS_INPUT,
    "in.jsonl --summary-json out.jsonl": "--summary-json 'out.jsonl' " + IS_JOB_FILE,
    "in.jsonl --summary-json out.jsonl.job.json": IS_JOB_FILE,
    "in.jsonl --summary-json out.jsonl.job.runs": IS_JOB_FILE,
    "in.jsonl --summary-json to-out.jsonl": IS_JOB_FILE,
    "in.jsonl --summary-json no/x.json": "--summary-json 'no/x.json' can't be written",
    "in.jsonl --errors out.jsonl.job.json": "--errors 'out.jsonl.job.json' " + IS_JOB_FILE,
    "in.jsonl --errors out.jsonl.job.runs": IS_JOB_FILE,
    "in.jsonl --errors to-out.jsonl": IS_JOB_FILE,
    "in.jsonl --errors e.parquet": "--errors 'e.parquet' must end in .jsonl",
    "in.jsonl --errors kept.jsonl --output /dev/null": "a job whose --output is a pipe",
    "in.jsonl --output x.txt": WRONG_SUFFIX.format(".txt"),
    "in.jsonl --output x.txt --dry-run": WRONG_SUFFIX.format(".txt"),
    "in.jsonl --output x.json": WRONG_SUFFIX.format(".json"),
    "in.jsonl --output x.jsonl.gz": WRONG_SUFFIX.format(".gz"),
    "in.jsonl --output kept.jsonl": "without kept.jsonl.job.json",
    "in.jsonl --output kept.csv": "without kept.csv.job.json",
    "in.jsonl --output kept.parquet": "without kept.parquet.job.json",
    "in.jsonl --output - --sort-output": "need an --output that can be read again",
    "in.jsonl --output - --verify 1": "--verify needs an INPUT and an --output that",
    # options
    "in.jsonl --temperature -1": "temperature must be at least 0, got -1",
    "in.jsonl --template {{": "--template is not valid Jinja",
    "in.jsonl --template a --prompt-column b": "both make the prompt",
    "in.jsonl --system b": "--system needs a chat template",
    "in.jsonl --max-errors -1": "--max-errors must be at least 0, got -1",
    "in.jsonl --max-row-mib 0": "greater than 0 and at most 1,024, got 0.0",
    "in.jsonl --max-row-mib nan": "greater than 0 and at most 1,024, got nan",
    "in.jsonl --max-row-mib 1e30": "greater than 0 and at most 1,024, got 1e+30",
    "in.jsonl --shutdown-timeout inf": "at least 0 and at most 86,400, got inf",
    "in.jsonl --shutdown-timeout nan": "at least 0 and at most 86,400, got nan",
    "in.jsonl --verify 0": "verify must be at least 1, got 0",
    "in.jsonl --verify 1 --dry-run": "--dry-run runs no rows",
    "in.jsonl --reasoning-parser qwen": "'qwen'",
    "in.jsonl --tool-call-parser qwen": "'qwen'",
}


def contents(directory: Path) -> dict[Path, bytes | None]:
    """Returns all paths, with the content of each file."""
    return {p: p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


@pytest.mark.parametrize("args", REFUSED)
def test_an_invalid_job_is_refused_before_a_model_loads(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    if ".parquet" in args:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(batch.directory)
    monkeypatch.setattr("nanoengine.llm.LLM", None)
    for name, content in FILES.items():
        batch.write(content, name)
    os.mkfifo("pipe.jsonl")
    os.link("in.jsonl", "hard.jsonl")
    Path("link.jsonl").symlink_to("in.jsonl")
    Path("to-out.jsonl").symlink_to("out.jsonl")
    before = contents(batch.directory)
    first, _, output = args.partition(" --output ")
    name, *more = output.split() or ["out.jsonl"]
    assert batch.run(*first.split(), *more, output=name) == 2
    assert REFUSED[args] in batch.stderr
    assert contents(batch.directory) == before
