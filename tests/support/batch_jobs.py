"""`nanoengine batch` in this process, on an LLM whose model is a script: milliseconds a run."""

from __future__ import annotations

import functools
import inspect
import json
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
    """Runs jobs in a directory of its own.

    Attributes:
        output: where records go, unless a run says something else.
    """

    def __init__(self, directory: Path, make_llm: MakeLLM, capsys: Any) -> None:
        self.directory = directory
        self.output = directory / "out.jsonl"
        self.told = ""
        self._capsys = capsys
        self._model = directory / "model"
        self._model.mkdir()
        (self._model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        (self._model / "model.safetensors").write_bytes(bytes(8))
        make_llm(ANSWERS, tokenizer=byte_level()).close()

    def write(self, rows: Any, name: str = "in.jsonl") -> Path:
        """A file of rows: bytes as they are, else a JSON line each."""
        path = self.directory / name
        if not isinstance(rows, bytes):
            rows = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(rows)
        return path

    def run(self, *args: Any, output: Any = None) -> int:
        """Runs the command on these inputs and options; what it says on stderr is in `told`."""
        where = self.output if output is None else output
        command = ["batch", str(self._model), *map(str, args), "--output", str(where)]
        try:
            code = cli.main(command)
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = self._capsys.readouterr()
        self.told = captured.err
        assert "Traceback" not in self.told
        return code

    def answers(
        self, rows: Any, *args: Any, code: int = 0, name: str = "in.jsonl"
    ) -> dict[int, dict[str, Any]]:
        """Runs a job on rows, or on a file of them, which must end with `code`; `by_row` then."""
        source = rows if isinstance(rows, Path) else self.write(rows, name)
        assert self.run(source, *args) == code, self.told
        return self.by_row()

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """All records, in the order of the file."""
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
    """The row that a record is of."""
    if "_row" in record:
        return int(record["_row"])
    return int(record["id"].removeprefix("batch_req_"))


def chat(custom_id: Any, content: str = "one", **body: Any) -> dict[str, Any]:
    """A row of OpenAI's format."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **body},
    }


def completion(custom_id: Any, prompt: Any = "one", **body: Any) -> dict[str, Any]:
    """A row of OpenAI's older format; greedy, and long enough for the scripted answers."""
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

    A command that is given again is parsed once: that takes 60 ms, and some are given hundreds of
    times; a third of it finds where a class begins.
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
