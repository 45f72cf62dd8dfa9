"""The command line: help without torch, one-line errors, and each command on a tiny real model."""

from __future__ import annotations

import codecs
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoengine import LLM, DiskTier, HostTier, SamplingParams, __version__
from nanoengine.cli import main as cli
from nanoengine.cli.bench import BenchArgs
from nanoengine.cli.generate import GenerateArgs
from nanoengine.cli.info import InfoArgs
from nanoengine.cli.options import engine_options
from nanoengine.config import EngineConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.text_fixtures import CHAT_TEMPLATE, byte_level

SMALL = ["--device", "cpu", "--attention-backend", "naive", "--num-kv-blocks", "64"]
GREEDY = [*SMALL, "--max-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with the byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama", vocab_size=len(byte_level().backend))
    byte_level().backend.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory


def expected(model: Path, *prompts: object) -> list[str]:
    """What the library gives for greedy prompts of the tests."""
    with LLM(model, device="cpu", attention_backend="naive", num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        outputs = llm.generate(list(prompts), params, use_tqdm=False)  # type: ignore[arg-type]
        assert llm.info.num_kv_blocks == 64
        return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_help_and_options_need_no_torch() -> None:
    code = (
        "import sys; from nanoengine.cli.main import main, parse; main(['--help']);"
        "from nanoengine.cli.generate import GenerateArgs;"
        "parse(GenerateArgs, 'x', ['m', '--top-k', '5']);"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_module_is_an_entry_point() -> None:
    command = [sys.executable, "-m", "nanoengine.cli.main", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"nanoengine {__version__}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["generte"],
            "error: unknown command 'generte'; known: batch, generate, bench, gpu-report",
        ),
        (["generate", "m"], "error: no prompts: give --prompt TEXT or --file PATH"),
        (["generate", "m", "--prompt", "a", "--system", "b"], "error: --system needs --chat"),
        (["generate", "m", "--file", "x.csv"], "error: file must end in .txt or .jsonl"),
        (["generate", "m", "--file", "none.txt"], "error: file 'none.txt' does not exist"),
        (["info", "/no/such/dir"], "error: model directory '/no/such/dir' does not exist"),
        (
            ["info", "m", "--kv-disk", "d"],
            "error: --kv-disk PATH and --kv-disk-gib GIB go together",
        ),
        (
            ["info", "m", "--kv-disk", "d", "--kv-disk-gib", "1"],
            "error: blocks reach --kv-disk through host memory: give --kv-host-gib",
        ),
        (["info", "m", "--kv-host-gib", "0"], "error: HostTier gib must be greater than 0"),
        (["info", "m", "--max-num-seqs", "0"], "error: max_num_seqs must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["info", "m", "--max-num-seq", "3"])
    assert exit_info.value.code == 2
    assert "max-num-seq" in capsys.readouterr().err


@pytest.mark.parametrize("options_class", [GenerateArgs, InfoArgs])
def test_options_are_those_of_the_engine(options_class: type[EngineConfig]) -> None:
    args = cli.parse(options_class, "x", ["m", "--max-num-seqs", "3", "--dtype", "float32"])
    options = engine_options(args)
    assert EngineConfig(**options) == EngineConfig(model="m", max_num_seqs=3, dtype="float32")


@pytest.mark.parametrize("options_class", [GenerateArgs, InfoArgs, BenchArgs])
def test_tiers_are_made_of_options(options_class: type[EngineConfig]) -> None:
    model = ["--model", "m"] if options_class is BenchArgs else ["m"]
    host = [*model, "--kv-host-gib", "0.5"]
    disk = [*host, "--kv-disk", "kept", "--kv-disk-gib", "2"]
    for given, tiers in (
        (model, ()),
        (host, (HostTier(gib=0.5),)),
        (disk, (HostTier(gib=0.5), DiskTier(Path("kept"), gib=2.0))),
    ):
        assert engine_options(cli.parse(options_class, "x", given))["kv_tiers"] == tiers


def test_generate_finds_on_disk_what_an_earlier_run_has_kept(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the dog " * 32
    tiers = ["--kv-host-gib", "0.01", "--kv-disk", str(tmp_path), "--kv-disk-gib", "0.01"]
    command = ["generate", str(model), "--prompt", text, *GREEDY, "--block-size", "8", *tiers]
    assert cli.main(command) == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kv")}
    assert len(files) >= 4
    first = capsys.readouterr().out
    assert cli.main(command) == 0
    assert capsys.readouterr().out == first
    read = [path for path, time in files.items() if path.stat().st_mtime_ns > time]
    assert len(read) >= 4, "a file that is read is marked as used"


def test_ctrl_c_ends_with_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanoengine.cli.generate.main", interrupt)
    assert cli.main(["generate", "m"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_generate_streams_one_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(model), "--prompt", "the dog", *GREEDY]) == 0
    assert capsys.readouterr().out == expected(model, "the dog")[0] + "\n"


def test_generate_shows_several_prompts_in_order(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "the dog", "--prompt", "User:"]
    assert cli.main(["generate", str(model), *prompts, *GREEDY]) == 0
    texts = expected(model, "the dog", "User:")
    lines = [f"[0] 'the dog'\n    {texts[0]!r}", f"[1] 'User:'\n    {texts[1]!r}"]
    assert capsys.readouterr().out == "\n".join(lines) + "\n"


def test_generate_runs_a_file_into_records_and_keeps_bad_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = {"messages": [{"role": "user", "content": "go home"}]}
    rows = ["the dog", {"prompt": ""}, talk, {"prompt_token_ids": [5, 6]}]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = ["generate", str(model), "--file", str(source), "--output", str(sink), *GREEDY]
    assert cli.main(command) == 1
    assert "1 prompts failed" in capsys.readouterr().err
    records = [json.loads(line) for line in sink.read_text(encoding="utf-8").splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert records[1]["outputs"][0]["finish_reason"] == "error"
    assert "empty" in records[1]["outputs"][0]["error"]
    good = [records[i]["outputs"][0]["text"] for i in (0, 2, 3)]
    assert good == expected(model, "the dog", talk, [5, 6])
    assert records[2]["prompt"] == "<|user|>go home</s><|assistant|>"


def test_generate_chats_with_a_system_message(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("go home\n\nthe dog\n", encoding="utf-8")
    args = ["--file", str(source), "--chat", "--system", "be kind", *GREEDY]
    assert cli.main(["generate", str(model), *args]) == 0
    shown = capsys.readouterr().out
    assert "<|system|>be kind</s><|user|>go home</s><|assistant|>" in shown
    assert "<|system|>be kind</s><|user|>the dog</s><|assistant|>" in shown


def test_info_shows_backends_model_and_plan(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", str(model), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"nanoengine {__version__}" in shown
    assert "naive: available" in shown
    assert "LlamaForCausalLM: 2 layers" in shown
    assert "KV cache: 512 bytes a token" in shown
    assert "parameters" not in shown
    assert cli.main(["info", str(model), "--load", *SMALL]) == 0
    assert "64 blocks" in capsys.readouterr().out


def test_two_real_llms_live_side_by_side_and_close(model: Path) -> None:
    options: dict[str, object] = {"device": "cpu", "attention_backend": "naive"}
    make: Callable[[], LLM] = lambda: LLM(model, num_kv_blocks=32, **options)  # noqa: E731
    params = SamplingParams(temperature=0, max_tokens=6)
    with make() as a, make() as b:
        first = a.generate("the dog", params, use_tqdm=False)
        a.close()
        second = b.generate("the dog", params, use_tqdm=False)
    assert first[0].outputs == second[0].outputs


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other_name", ["same", "relative", "symlink", "hard link"])
def test_the_output_may_not_be_the_file_that_is_read(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other_name: str,
) -> None:
    """2.4: it would be emptied before its first line is read."""
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n"b"\n', encoding="utf-8")
    sink = tmp_path / "out.jsonl"
    if other_name == "same":
        sink = source
    elif other_name == "relative":
        monkeypatch.chdir(tmp_path)
        sink = Path("../") / tmp_path.name / "in.jsonl"
    elif other_name == "symlink":
        sink.symlink_to(source)
    else:
        os.link(source, sink)
    monkeypatch.setattr("nanoengine.llm.LLM", None)
    assert cli.main(["generate", str(model), "--file", str(source), "--output", str(sink)]) == 2
    assert "is the file of --file" in capsys.readouterr().err
    assert source.read_text(encoding="utf-8") == '"a"\n"b"\n'


@pytest.mark.parametrize("path", ["nodir/out.jsonl", ".", "in.jsonl/out.jsonl"])
def test_an_output_that_cant_be_written_is_refused_before_the_model_loads(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
) -> None:
    """2.4: not after minutes of loading, and not by a traceback."""
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n', encoding="utf-8")
    monkeypatch.setattr("nanoengine.llm.LLM", None)
    command = ["generate", str(model), "--file", str(source), "--output", str(tmp_path / path)]
    assert cli.main(command) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("error: --output")
    assert "can't be written" in captured


def test_a_full_disk_and_a_model_that_is_none_are_errors_of_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2.4: what was written before stays, also if the model can't be loaded."""
    source, kept = tmp_path / "in.jsonl", tmp_path / "kept.jsonl"
    source.write_text('"the dog"\n', encoding="utf-8")
    command = ["generate", str(model), "--file", str(source), *GREEDY, "--output"]
    assert cli.main([*command, "/dev/full"]) == 2
    captured = capsys.readouterr().err
    assert "can't be written: No space left on device; it holds 0 whole records" in captured
    kept.write_text("earlier records\n", encoding="utf-8")
    assert cli.main(["generate", "/no/such", *command[2:], str(kept)]) == 2
    assert kept.read_text(encoding="utf-8") == "earlier records\n"
    assert cli.main([*command, str(kept)]) == 0
    assert kept.read_text(encoding="utf-8").startswith('{"index": 0')


@pytest.mark.parametrize(
    ("target", "status"), [("| head -c 1 > /dev/null", 141), ("> /dev/full", 2)]
)
def test_output_that_nobody_takes_is_no_traceback(target: str, status: int) -> None:
    """2.4: a closed pipe and a full disk behind standard output."""
    code = (
        "import sys; from nanoengine.cli import main as cli, info;"
        "info.main = lambda args: print('x' * 10**6) or 0;"
        "sys.exit(cli.main(['info', 'm']))"
    )
    command = f"set -o pipefail; {sys.executable} -c {shlex.quote(code)} {target}"
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, "Traceback" in run.stderr) == (status, False), run.stderr
    assert "Exception ignored" not in run.stderr
    assert status == 141 or run.stderr == "error: [Errno 28] No space left on device\n"


BAD_LINES = {
    b'{"prompt"': "not JSON",
    b"[" * 200_000: "not JSON",
    b'"caf\xe9"': "not UTF-8",
    b'"\\ud800"': "can't be encoded",
    b'{"prompt_token_ids": [5, 6], "prompt": "\\ud800"}': "can't be encoded",
    b'{"prompt_token_ids": [5, 6], "cache_salt": "\\ud800"}': "can't be encoded",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "can't be encoded",
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}': (
        "chat_template_kwargs"
    ),
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 5}': (
        "chat_template_kwargs"
    ),
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "'image_url'",
    b"5": "must be a string",
    b"1" * 5000: "not JSON",
}


def test_a_bad_line_is_its_own_record_with_its_number(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2.5: all others are answered; order and count are kept."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line for bad in BAD_LINES for line in (b'"the dog"', bad, b"")]
    source.write_bytes(codecs.BOM_UTF8 + b"\r\n".join(lines))
    command = ["generate", str(model), "--file", str(source), *GREEDY]
    assert cli.main([*command, "--output", str(sink)]) == 1
    assert f"{len(BAD_LINES)} prompts failed" in capsys.readouterr().err
    records = [json.loads(line) for line in sink.read_text(encoding="utf-8").splitlines()]
    assert [record["index"] for record in records] == list(range(2 * len(BAD_LINES)))
    assert [record["line"] for record in records] == [
        number for i in range(len(BAD_LINES)) for number in (3 * i + 1, 3 * i + 2)
    ]
    (text,) = expected(model, "the dog")
    assert [r["outputs"][0]["text"] for r in records[::2]] == [text] * len(BAD_LINES)
    for record, message in zip(records[1::2], BAD_LINES.values(), strict=True):
        assert record["outputs"][0]["finish_reason"] == "error"
        assert message in record["outputs"][0]["error"]
    assert cli.main(command) == 1
    assert "error: line 2: the line is not JSON" in capsys.readouterr().out


def test_a_text_file_may_be_of_windows_and_hold_a_line_that_is_no_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2.5: the byte order mark and the line ends are no part of a prompt."""
    source = tmp_path / "in.txt"
    source.write_bytes(codecs.BOM_UTF8 + b"the dog\r\ncaf\xe9\r\n\r\n go home\n")
    assert cli.main(["generate", str(model), "--file", str(source), *GREEDY]) == 1
    shown = capsys.readouterr().out
    assert "[0] 'the dog'\n" in shown
    assert "error: line 2: the line is not UTF-8" in shown
    assert "[2] ' go home'\n" in shown
