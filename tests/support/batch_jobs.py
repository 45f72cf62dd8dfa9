"""`nanoengine batch` in this process, with an LLM that recites a script: milliseconds per run."""

from __future__ import annotations

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.cli import main as cli
from tests.support.fake_llm import ANSWERS, MakeLLM
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 400, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 100, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


class Batch:
    """Runs jobs in its own directory.

    Attributes:
        output: default path of the output records.
    """

    def __init__(self, directory: Path, make_llm: MakeLLM, capsys: Any) -> None:
        self.directory = directory
        self.output = directory / "out.jsonl"
        self.stderr = ""
        self._capsys = capsys
        self._model = directory / "model"
        self._model.mkdir()
        (self._model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        (self._model / "model.safetensors").write_bytes(bytes(8))
        make_llm(ANSWERS, tokenizer=byte_level()).close()

    def write(self, rows: Any, name: str = "in.jsonl") -> Path:
        """Writes an input file: bytes unchanged, otherwise one JSON line per row."""
        path = self.directory / name
        if not isinstance(rows, bytes):
            rows = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(rows)
        return path

    def run(self, *args: Any, output: Any = None) -> int:
        """Runs the command with these inputs and options and stores its stderr in `stderr`."""
        where = self.output if output is None else output
        command = ["batch", str(self._model), *map(str, args), "--output", str(where)]
        try:
            code = cli.main(command)
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = self._capsys.readouterr()
        self.stderr = captured.err
        assert "Traceback" not in self.stderr
        return code

    @property
    def num_resumed(self) -> int:
        """The number of rows that the last run found finished, according to its summary."""
        summary = r"earlier runs finished (?:all )?(\d+) rows?"
        found = re.search(summary, self.stderr, re.MULTILINE)
        return int(found[1]) if found else 0

    def answers(
        self, rows: Any, *args: Any, code: int = 0, name: str = "in.jsonl"
    ) -> dict[int, dict[str, Any]]:
        """Runs a job on rows or a file, checks its exit code, and returns `by_row`."""
        source = rows if isinstance(rows, Path) else self.write(rows, name)
        assert self.run(source, *args) == code, self.stderr
        return self.by_row()

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """All records, in file order."""
        lines = (path or self.output).read_bytes().split(b"\n")
        assert lines.pop() == b""
        return [json.loads(line) for line in lines]

    def by_row(self) -> dict[int, dict[str, Any]]:
        """Records by row; each row has one."""
        records = self.records()
        found = {row_of(record): record for record in records}
        assert len(found) == len(records)
        return found


def row_of(record: dict[str, Any]) -> int:
    """The input row of a record."""
    if "_row" in record:
        return int(record["_row"])
    return int(record["id"].removeprefix("batch_req_"))


def chat(custom_id: Any, content: str = "one", **body: Any) -> dict[str, Any]:
    """A row in OpenAI's chat format."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **body},
    }


def completion(custom_id: Any, prompt: Any = "one", **body: Any) -> dict[str, Any]:
    """A row in OpenAI's older completion format: greedy, long enough for the scripted answers."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "temperature": 0, "max_tokens": 64, **body},
    }


@pytest.fixture(name="batch")
def batch_fixture(
    tmp_path: Path,
    make_llm: MakeLLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Batch:
    """Jobs on the scripted LLM, whose tokenizer has a chat template.

    Parsing is cached per command, since it takes 60 ms and some commands run hundreds of times. A
    third of that time is spent on locating the source of classes.
    """
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))
    parse = functools.cache(cli.parse)
    monkeypatch.setattr(cli, "parse", lambda options, prog, args: parse(options, prog, tuple(args)))
    monkeypatch.setattr(byte_level().backend, "chat_template", CHAT_TEMPLATE)
    return Batch(tmp_path, make_llm, capsys)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that `LLM.stream` has pulled."""
    rows: list[Any] = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM,
        "stream",
        lambda self, given, **options: stream(
            self, (rows.append(row) or row for row in given), **options
        ),
    )
    return rows
