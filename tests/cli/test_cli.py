"""The command line: help without torch, one-line errors, and each command on a tiny real model."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine import LLM, DiskTier, HostTier, SamplingParams, __version__
from nanoengine.cli import info
from nanoengine.cli import main as cli
from nanoengine.cli.bench import BenchArgs
from nanoengine.cli.generate import GenerateArgs
from nanoengine.cli.info import InfoArgs
from nanoengine.cli.options import WITHOUT_OPTION, engine_options, sampling_fields
from nanoengine.jobs.progress import CUT
from nanoengine.jobs.rows import RowOptions, RowReader
from nanoengine.jobs.source import Input, Line
from nanoengine.settings.config import EngineConfig
from tests.support.sampling_fields import sample_values
from tests.support.text_fixtures import text_checkpoint

SMALL = ["--device", "cpu", "--attention-backend", "naive", "--num-kv-blocks", "64"]
GREEDY = [*SMALL, "--max-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"))


def expected(model: Path, *prompts: object) -> list[str]:
    """Returns the library's greedy texts for these prompts."""
    with LLM(model, device="cpu", attention_backend="naive", num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        outputs = llm.generate(list(prompts), params, use_tqdm=False)  # type: ignore[arg-type]
        assert llm.info.num_kv_blocks == 64
        return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)
    for line in re.findall("  .*(nanoengine [a-z]+ demo.*)", shown):
        _, command, *options = shlex.split(line)
        found = cli.find_command(command)[1]
        assert found is not None
        assert cli.parse(found, "x", options).model == "demo"
    assert len(re.findall("nanoengine [a-z]+ demo", shown)) == 3


def test_the_module_is_an_entry_point_and_options_need_no_torch() -> None:
    for module in ("nanoengine", "nanoengine.cli.main"):
        command = [sys.executable, "-m", module, "--version"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == f"nanoengine {__version__}"
    code = (
        "import sys; from nanoengine.cli.main import main, parse; main(['--help']);"
        "from nanoengine.cli.generate import GenerateArgs;"
        "parse(GenerateArgs, 'x', ['m', '--top-k', '5']);"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


TIERS = "--kv-disk needs --kv-disk-gib and --kv-host-gib"
REFUSED = {
    "generte": "unknown command 'generte'; did you mean 'generate'?",
    "generate m --output x": "--output needs --file",
    "generate m --prompt a --file b": "--file and --output can't be used with --prompt",
    "generate demo --raw --prompt a --system b": "--system needs a chat template",
    "generate m --prompt a --top-p 2": "top_p must be in (0, 1], got",
    "generate m --prompt a --n 2 --temperature 0": "n must be 1",
    "generate /no/model --prompt a --n 2 --choices a": "model directory '/no/model' does not exist",
    "generate demo --file x.xml": "input 'x.xml' does not exist",
    "chat /no/model --n 2": "--n must be 1",
    "chat /no/model --choices ,": "--choices: choice must contain at least one string",
    "generate /no/model --prompt a --choices a,b --regex c": "--choices and --regex define",
    "batch /no/model a.txt --output x --json-schema no.json": "--json-schema: [Errno 2] No such",
    "generate /no/model --prompt a --json-schema {}}": "--json-schema: json must be a schema, got",
    'chat /no/model --json-schema {"uniqueItems":true}': "--json-schema: structured_outputs can't",
    "generate /no/model --prompt a --choices a --ignore-eos": "ignore_eos must be False with",
    "generate m hello": "unknown argument 'hello': give a text as --prompt 'TEXT'",
    "info m --max-num-seq 3": "unknown argument '--max-num-seq': did you mean '--max-num-seqs'?",
    "info demo --max-model-len 4096": "max_model_len must be at most the model's context of 2048",
    "chat /no/model --top-p 7": "top_p must be in (0, 1], got 7",
    "info no-such": "model directory 'no-such' does not exist; hub ids have the form ORG/NAME",
    "info /no/such/dir": "model directory '/no/such/dir' does not exist",
    "generate . --prompt a": "model='.' is not a checkpoint: it has no config.json and no GGUF",
    "info m --kv-disk d": TIERS,
    "info m --kv-disk d --kv-disk-gib 1": TIERS,
    "info m --kv-host-gib 0": "HostTier gib must be greater than 0",
    "info m --max-num-seqs 0": "max_num_seqs must be at least 1, got 0",
    "embed demo a.txt --output v.json": "--output must end in .npy or .parquet",
    "embed demo a.txt --output v.npy --dimensions 0": "dimensions must be at least 1",
    "bench --smoke --json missing/report.json": "json='missing/report.json' is in a directory",
    "simulate --num-blocks 20 --workload nowhere.csv": "the workload must be random, shared-prefix",
    "simulate --num-blocks 20 --step-times no.json": "step_times='no.json' must be a report",
    "simulate --num-blocks 20 --block-size 7": "block_size must be a power of two",
    "simulate --num-blocks 20 --num-requests 0": "num_requests must be at least 1",
    "simulate --num-blocks 20 --workload text.jsonl": "text.jsonl: row 1 must be a JSON object",
}


@pytest.mark.parametrize("args", REFUSED)
def test_errors_are_one_line_and_status_2(
    args: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one")
    Path("text.jsonl").write_text('{"prompt": "text", "max_tokens": 3}\n')
    assert cli.main(args.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {REFUSED[args]}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("options_class", [GenerateArgs, InfoArgs])
def test_commands_have_the_options_of_the_engine(options_class: type[EngineConfig]) -> None:
    args = cli.parse(options_class, "x", ["m", "--max-num-seqs", "3", "--dtype", "float32"])
    options = engine_options(args)
    assert EngineConfig(**options) == EngineConfig(model="m", max_num_seqs=3, dtype="float32")


@pytest.mark.parametrize("options_class", [GenerateArgs, InfoArgs, BenchArgs])
def test_options_define_the_kv_tiers(options_class: type[EngineConfig]) -> None:
    model = ["--model", "m"] if options_class is BenchArgs else ["m"]
    host = [*model, "--kv-host-gib", "0.5"]
    disk = [*host, "--kv-disk", "kept", "--kv-disk-gib", "2"]
    for args, tiers in (
        (model, ()),
        (host, (HostTier(gib=0.5),)),
        (disk, (HostTier(gib=0.5), DiskTier(Path("kept"), gib=2.0))),
    ):
        assert engine_options(cli.parse(options_class, "x", args))["kv_tiers"] == tiers


def test_generate_reads_kv_blocks_that_an_earlier_run_wrote_to_disk(
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


def test_ctrl_c_has_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanoengine.cli.generate.main", interrupt)
    assert cli.main(["generate", "m"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_sampling_parameters_are_reported_with_their_sources(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path, rows, output = tmp_path / "m", tmp_path / "rows.txt", tmp_path / "out.jsonl"
    shutil.copytree(model, path)
    rows.write_text("the dog\n", encoding="utf-8")
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.5, "repetition_penalty": 1.25}), encoding="utf-8"
    )
    few = [*SMALL, "--max-tokens", "2"]
    authors = "temperature 0.5, repetition_penalty 1.25 (generation_config.json)"
    defaults = f"{authors}; max_tokens 256 (the commands' default; OpenAI rows have OpenAI's)"
    ours = "max_tokens 2 (set by the command)"
    mixed = (
        "sampling: temperature 1.5, max_tokens 2, presence_penalty 1.0, top_k 9 (set by the"
        " command); repetition_penalty 1.25 (generation_config.json)"
    )

    def first_line(*command: str) -> str:
        assert cli.main([*command]) == 0
        captured = capsys.readouterr()
        assert "sampling" not in captured.out
        return captured.err.splitlines(keepends=True)[0]

    simple = f"sampling: {authors}; {ours}\n"
    assert first_line("generate", str(path), "--prompt", "the", *few) == simple
    options = ["--temperature", "1.5", "--top-k", "9", "--presence-penalty", "1"]
    assert first_line("generate", str(path), "--prompt", "the", *options, *few) == f"{mixed}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    assert first_line("chat", str(path), *few) == f"loading {path} ...\n"
    batch = first_line("batch", str(path), str(rows), "--output", str(output), *options, *few)
    assert f"{mixed}; fields of a row take precedence\n" in batch
    job = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert (job["sampling_defaults"], job["rows"]["sampling"]["top_k"]) == (defaults, 9)
    source = "the engine's default; the checkpoint has none"
    no_defaults = f"sampling: temperature 1.0 ({source}); {ours}\n"
    assert first_line("generate", str(model), "--prompt", "the", *few) == no_defaults
    assert cli.main(["info", str(path), "--all", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert f"sampling: {defaults}\n" in shown
    assert "stop tokens: 2 '<|user|>' (config.json), 1 '</s>' (the tokenizer" in shown


def test_generate_streams_one_prompt(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["generate", str(model), "--raw", "--prompt", "the dog", *GREEDY]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected(model, "the dog")[0] + "\n"
    assert shown.err.endswith(f"\n[{CUT}]\n")


def test_generate_shows_several_prompts_in_order(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    prompts = ["--prompt", "the dog", "--prompt", "User:", "--prompt", ""]
    command = ["generate", str(model), *prompts, *GREEDY]
    assert cli.main(command) == 1
    talks = [{"messages": [{"role": "user", "content": text}]} for text in ("the dog", "User:")]
    texts = expected(model, *talks)
    shown = capsys.readouterr().out.replace("\r\x1b[K", "")
    first, second = (f"{text}\n[{CUT}]\n\n" for text in texts)
    assert shown.startswith(f"[0] the dog\n{first}[1] User:\n{second}[2] \nerror: ")
    assert cli.main([*command, "--json"]) == 1
    assert [json.loads(line)["_row"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]


def test_generate_writes_json_lines_without_a_terminal(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--raw", "--prompt", "the dog", "--prompt", "", "--prompt", "User:"]
    assert cli.main(["generate", str(model), *prompts, *GREEDY]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["the dog", "", "User:"]
    texts = [output["text"] for record in records for output in record["outputs"]]
    assert texts == expected(model, "the dog", "User:")
    assert "empty" in records[1]["error"]["message"]


def test_an_error_of_a_prompt_is_reported(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the error was about a prompt that is None."""
    command = ["generate", str(model), "--prompt", "the dog", "--reasoning-parser", "auto"]
    assert cli.main([*command, *GREEDY]) == 1
    assert "matches no known format" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_every_field_of_sampling_params_is_an_option() -> None:
    # --seed is the engine's, and --no-detokenize is checked below.
    values = {name: v for name, v in sample_values().items() if name not in ("seed", "detokenize")}
    assert values.keys().isdisjoint(WITHOUT_OPTION)
    args = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if name in ("stop", "bad_words"):
            args += [word for text in value for word in (option, text)]
        elif isinstance(value, bool):
            args += [option if value else f"--no-{option[2:]}"]
        elif isinstance(value, dict):
            args += [option, *(str(number) for pair in value.items() for number in pair)]
        else:
            args += [option, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    parsed = cli.parse(GenerateArgs, "x", ["m", *args])
    assert sampling_fields(parsed.sampling) == values
    assert sampling_fields(cli.parse(GenerateArgs, "x", ["m"]).sampling) == {}
    parsed_flag = cli.parse(GenerateArgs, "x", ["m", "--no-detokenize"]).sampling
    assert sampling_fields(parsed_flag) == {"detokenize": False}


def test_a_format_applies_to_rows_and_chats_that_set_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text('{"const":  7}', encoding="utf-8")
    own = {"prompt": "a", "structured_outputs": {"regex": "xyz"}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "text"}}
    Path("in.jsonl").write_text(f'"a"\n{json.dumps(own)}\n', encoding="utf-8")
    forms = {
        ("--choices", " yes, no,"): ("(yes|no)", {"choice": ["yes", "no"]}),
        ("--regex", "[ab]c"): ("[ab]c", {"regex": "[ab]c"}),
        ("--json-schema", "s.json"): ("7", {"json": '{"const": 7}'}),
        ("--json-schema", ' {"const": 8}'): ("8", {"json": '{"const": 8}'}),
    }
    for i, (options, (pattern, form)) in enumerate(forms.items()):
        assert cli.main(["batch", "demo", "in.jsonl", "--output", f"{i}.jsonl", *options]) == 0
        lines = Path(f"{i}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = {line["_row"]: line["outputs"][0]["text"] for line in map(json.loads, lines)}
        assert re.fullmatch(pattern, texts[0]) and texts[1] == "xyz"
        manifest = json.loads(Path(f"{i}.jsonl.job.json").read_text(encoding="utf-8"))
        greedy = {"temperature": 0.0} if "choice" in form else {}
        assert manifest["rows"]["sampling"] == {"structured_outputs": form} | greedy
        assert f" structured_outputs {{'{next(iter(form))}': " in capsys.readouterr().err
    options = RowOptions(sampling={"structured_outputs": {"regex": "[ab]c"}})
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    task = RowReader(options).task(Line(0, Input(name="x", form="jsonl"), 1, row), "chat")
    assert task.params.structured_outputs is None
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", "demo", "--choices", "yes,no"]) == 0
    assert capsys.readouterr().out.strip() in ("yes", "no")


def test_generate_runs_a_file_into_records_and_keeps_bad_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a job: the same command again does nothing, and a different one is refused."""
    talk = {"messages": [{"role": "user", "content": "go home"}]}
    rows = ["the dog", {"prompt": ""}, talk, {"prompt_token_ids": [5, 6]}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = ["--file", str(source), "--output", str(output)]
    command = ["generate", str(model), "--raw", *files, *GREEDY]
    assert cli.main(command) == 1
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [record["_row"] for record in records] == [0, 1, 2, 3]
    assert "empty" in records[1]["error"]["message"]
    good = [records[i]["outputs"][0]["text"] for i in (0, 2, 3)]
    assert good == expected(model, "the dog", talk, [5, 6])
    content = output.read_bytes()
    assert cli.main(command) == 1
    assert cli.main([*command, "--top-k", "3"]) == 2
    stderr = capsys.readouterr().err
    assert "top_k: it was null, it is 3" in stderr
    assert (
        "let `nanoengine batch` move this one with --restart" in stderr
    )  # this command has no such option
    assert output.read_bytes() == content


def test_generate_applies_a_system_message_to_prompts_from_stdin(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("go home\n\nthe dog\n", encoding="utf-8")
    args = ["--system", "be kind", *GREEDY]
    with source.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["generate", str(model), *args]) == 0
        records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        stdin.seek(0)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert cli.main(["generate", str(model), *args]) == 0
    system = {"role": "system", "content": "be kind"}
    talks = [[system, {"role": "user", "content": text}] for text in ("go home", "the dog")]
    texts = {record["prompt"]: record["outputs"][0]["text"] for record in records}
    assert [texts["go home"], texts["the dog"]] == expected(
        model, *({"messages": talk} for talk in talks)
    )
    shown = capfd.readouterr().out
    assert all(f"] {prompt}\n{text}\n" in shown for prompt, text in texts.items())


def test_info_answers_first_questions_and_all_of_them(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["info", str(model), "--device", "cpu"]
    assert cli.main(command) == 0
    short = capsys.readouterr().out
    titles = ["model", "weights", "memory", "answers", "arithmetic", "device"]
    assert re.findall(r"^\w+", short, re.MULTILINE) == titles
    assert short.endswith(f"nanoengine info {model} --all shows more.\n")
    assert len(short.splitlines()) <= 12
    assert "LlamaForCausalLM: 2 layers" in short
    assert "KV cache: 512 bytes per token in float32, 0.5 MiB per 1,000 tokens" in short
    assert re.search(r"memory +[\d.]+ GiB are free: the model fits, with at most [\d,]+ tok", short)
    assert "answers     chat template: yes\n" in short
    assert "tokens per second" not in short, "the weights are in the caches"
    assert cli.main([*command, "--all"]) == 0
    shown = capsys.readouterr().out
    assert set(short.splitlines()[1:4]) <= set(shown.splitlines())
    assert f"nanoengine {__version__}" in shown
    assert "naive: available" in shown
    quantized = "--quantization", "int4", "--kv-cache-dtype", "int8"
    assert cli.main([*command, "--all", *quantized]) == 0
    shown = capsys.readouterr().out
    assert "linear layers: int4 weights (quantized at load), int8 activations; sums" in shown
    assert "lossy: int4: mean KL of " in shown
    assert "            KV cache in int8: mean KL of " in shown


def test_info_estimates_speed_from_the_weights_that_a_token_reads() -> None:
    """Experts that are not chosen are not read, nor is an embedding that is not the head."""
    moe = SimpleNamespace(num_experts=8, num_experts_per_tok=2)
    model, device = SimpleNamespace(moe=moe, tie_word_embeddings=False), torch.device("cpu")
    sizes = {("embedding", "F32"): 2**28, ("experts", "F32"): 2**30, ("MLP", "F32"): 2**28}
    fits, speed = info.memory_lines(model, device, sizes, 1000)  # type: ignore[arg-type]
    assert ": the model fits, with at most " in fits
    read, rate, tokens = map(float, re.findall(r"([\d.,]+)(?= GiB|/s| tokens)", speed))
    assert read == 0.5
    assert tokens == pytest.approx(rate / read, rel=0.2)
    sizes = {("rest", "F32"): 2**50}
    assert "does not fit" in next(info.memory_lines(model, device, sizes, 1))  # type: ignore[arg-type]


def test_two_llms_run_in_one_process(model: Path) -> None:
    options: dict[str, object] = {"device": "cpu", "attention_backend": "naive"}
    make: Callable[[], LLM] = lambda: LLM(model, num_kv_blocks=32, **options)  # noqa: E731
    params = SamplingParams(temperature=0, max_tokens=6)
    with make() as a, make() as b:
        first = a.generate("the dog", params, use_tqdm=False)
        a.close()
        second = b.generate("the dog", params, use_tqdm=False)
    assert first[0].outputs == second[0].outputs


def test_info_prints_nothing_at_exit():
    """Regression: at exit, Triton printed a message per leaked object."""
    command = [sys.executable, "-m", "nanoengine.cli.main", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout.startswith("device ")) == ("", True)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status"), [("| head -c 1 > /dev/null", 141), ("> /dev/full", 2)]
)
def test_a_closed_or_full_output_causes_no_traceback(target: str, status: int) -> None:
    """Covers a closed pipe and a full disk as standard output."""
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


@pytest.mark.guards("nanoengine/cli/*.py")
@pytest.mark.parametrize(
    ("closed", "args", "status"),
    [("<&-", "--max-tokens 2", 0), (">&-", "--prompt hi --max-tokens 2", 0),
     ("2>&-", "--prompt hi --max-tokens 2", 0)],
)  # fmt: skip
def test_a_process_without_a_standard_stream_runs(closed: str, args: str, status: int) -> None:
    command = f"{sys.executable} -m nanoengine.cli.main generate demo {args} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "warning" not in done.stdout
