"""No command resolves a name or opens a connection when its model and files are local."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from nanoengine.assets import demo_model_path
from nanoengine.cli.main import COMMANDS
from nanoengine.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import make_gguf
from tests.support.text_fixtures import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 100_300
"""Above 100,000 tokens, transformers asks the hub which model a tokenizer belongs to."""

BLOCKED = """
import os, socket
def refused(*args, **kwargs):
    with open(os.environ["ATTEMPTS"], "a") as file:
        print(*args, file=file)
    raise OSError("no network here")
def connect(self, address, *, method):
    return refused(address) if self.family != socket.AF_UNIX else method(self, address)
socket.getaddrinfo = socket.gethostbyname = refused
for name in ("connect", "connect_ex"):
    method = getattr(socket.socket, name)
    setattr(socket.socket, name, lambda self, to, method=method: connect(self, to, method=method))
"""
"""A sitecustomize.py: each Python process started here writes its connection attempts to a file."""

RUN = """
import contextlib, io, json, sys
from nanoengine.cli.main import main
for command, stdin in json.load(open(sys.argv[1])):
    sys.stdin = io.StringIO(stdin)
    status = main(command)
    assert status == 0, (command, status)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a GGUF file and a checkpoint whose tokenizer has `VOCAB_SIZE` tokens."""
    folder = tmp_path_factory.mktemp("large")
    tokens = ["</s>", "<|user|>", "<|assistant|>", *sorted(ByteLevel.alphabet()), "th"]
    tokens += [f"token {n}" for n in range(VOCAB_SIZE - len(tokens))]
    ggml = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["t h"], "eos_token_id": 0,
        "token_type": [3 if n < 3 else 1 for n in range(VOCAB_SIZE)],
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    keys["tokenizer.chat_template"] = CHAT_TEMPLATE
    small = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "hidden_size": 64}
    make_gguf(folder / "m.gguf", "qwen2", keys=keys, **small)
    make_checkpoint(folder / "m", "qwen2", **small)
    Tokenizer.load(str(folder / "m.gguf")).backend.save_pretrained(folder / "m")
    return folder / "m.gguf", folder / "m"


def attempts(folder: Path, commands: list[tuple[list[str], str]]) -> list[str]:
    """Runs the commands in one process and returns the addresses that it tried to reach."""
    (folder / "sitecustomize.py").write_text(BLOCKED)
    (folder / "commands.json").write_text(json.dumps(commands))
    log = folder / "attempts"
    log.touch()
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "ATTEMPTS": str(log)}
    env |= {"HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "commands.json")],
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return log.read_text().splitlines()


def commands_on(model: Path, folder: Path) -> list[tuple[list[str], str]]:
    """Returns each command that takes a model, with its own files."""
    folder.mkdir()
    rows, texts, trace = folder / "rows.jsonl", folder / "texts.txt", str(folder / "trace.jsonl")
    messages = [{"role": "user", "content": "the house"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    texts.write_text("the dog\nthe house\n")
    name, limits = str(model), ["--max-tokens", "2", "--kv-cache-gib", "0.02"]
    return [
        (["generate", name, "--raw", "--prompt", "the", *limits, "--trace", trace], ""),
        (["generate", name, "--prompt", "the", *limits], ""),
        (["chat", name, *limits], "the house\n/quit\n"),
        (["batch", name, str(rows), "--output", str(folder / "a.jsonl"), *limits], ""),
        (["batch", name, str(rows), "--output", str(folder / "b.jsonl"), "--dry-run"], ""),
        (["embed", name, str(texts), "--output", str(folder / "a.npy"), *limits[2:]], ""),
        (["info", name], ""),
        (["explain", trace], ""),
        (["viz", trace, "--output", str(folder / "page.html")], ""),
    ]


def test_no_command_opens_a_socket_for_local_files(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    file, directory = models
    commands = commands_on(file, tmp_path / "file")
    needs_tokenizer = {"generate", "--dry-run", "embed"}
    more = commands_on(directory, tmp_path / "directory")
    commands += [command for command in more if needs_tokenizer & {*command[0]}]
    commands += [
        (["bench", "--smoke"], ""),
        (["learn", str(tmp_path / "course")], ""),
        (["simulate", "--num-blocks", "500", "--num-requests", "8"], ""),
        (["compare", "demo", "demo", "--max-length", "8", "--answer-tokens", "0"], ""),
    ]
    assert {command[0] for command, _ in commands} == COMMANDS.keys() - {"eval"}
    assert attempts(tmp_path, commands) == []
    assert np.isfinite(np.load(tmp_path / "directory" / "a.npy")).all()


def test_a_connection_attempt_is_recorded(tmp_path: Path) -> None:
    """Looking up a hub id is counted as an attempt."""
    (tmp_path / "sitecustomize.py").touch()
    with pytest.raises(AssertionError, match="not a local directory or file"):
        attempts(tmp_path, [(["info", "someone/something"], "")])
    assert "huggingface" in (tmp_path / "attempts").read_text()


@pytest.mark.eval
@pytest.mark.timeout(300)
def test_an_evaluation_opens_no_socket_for_local_files(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs pip install 'nanoengine[eval]'")
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "The little dog ran."}) + "\n")
    task = {
        "task": "few", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    (tmp_path / "few.yaml").write_text(json.dumps(task))  # JSON is YAML.
    options = ["--tasks", str(tmp_path / "few.yaml")]
    command = ["eval", str(demo_model_path()), *options]
    assert attempts(tmp_path, [(command, "")]) == []
