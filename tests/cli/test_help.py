"""The help of each command: --help and --help-all."""

from __future__ import annotations

import dataclasses
import re

import pytest

from nanoengine.cli import command_line
from nanoengine.cli import main as cli
from nanoengine.cli.batch import BatchArgs
from nanoengine.cli.field_docs import field_docs
from nanoengine.cli.options import SamplingArgs
from nanoengine.errors import ConfigError

COMMANDS = [name for name in cli.COMMANDS if cli.find_command(name)[1] is not None]


def options_class(command: str) -> type:
    found = cli.find_command(command)[1]
    assert found is not None
    return found


def help_of(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(shown: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?--([a-z][\w-]*)", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "titles", "examples"),
    [
        ("generate", ["model", "prompts", "answers", "output"], 3),
        ("batch", ["model", "prompts", "answers", "output"], 3),
        ("chat", ["model", "prompts", "answers"], 3),
        ("bench", ["model", "answers", "output", "options"], 3),
        ("info", ["model", "options"], 2),
    ],
)
def test_help_is_one_screen_of_the_main_options(
    command: str,
    titles: list[str],
    examples: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = help_of(command, "--help", capsys)
    full = help_of(command, "--help-all", capsys)
    assert help_of("help", command, capsys) == short
    assert re.findall(r"^\w+$", short, re.MULTILINE) == titles
    assert len(short.splitlines()) <= 45
    assert short.partition("examples:")[2].count(f"nanoengine {command} ") == examples + 1
    assert set(options_in(short)) < set(options_in(full))
    count = len(command_line.options_of(options_class(command)))
    assert short.endswith(f"\n\nnanoengine {command} --help-all shows all {count} options.\n")
    for shown in (short, full):
        options = shown.partition(f"\n{titles[0]}\n")[2]
        assert max(map(len, options.splitlines())) <= 80
        assert not re.search("None:|default: (None|False|-)|{None}", options)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_option_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls = options_class(command)
    shown = options_in(help_of(command, "--help-all", capsys))
    assert sorted(shown) == sorted(set(shown))
    not_options = {"kv_tiers", "logits_processors", "sampling", "inputs", "chat"}
    names = {field.name for field in dataclasses.fields(cls)} - not_options
    missing = names - {name.replace("-", "_") for name in shown}
    options = command_line.options_of(cls)
    assert missing == {one.name for one in options if one.usage[0] != "-"} & names, "positional"
    docs = field_docs(cls)
    assert all(docs[name] for name in names)


def test_common_options_exist() -> None:
    classes = (*map(options_class, COMMANDS), SamplingArgs)
    existing = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert len(set(command_line.NAMES)) == sum(len(v.split()) for v in command_line.COMMON.values())
    # The last names are options of the next version.
    assert set(command_line.NAMES) <= existing


def test_help_writes_types_and_choices_as_they_are_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = help_of("batch", "--help-all", capsys)
    for usage in (
        "--dry-run ", "--reorder, --no-reorder ", "--seed INT ", "--kv-disk PATH ", "--stop STR ",
        "--stop-token-ids INT ...", "--logit-bias INT FLOAT ...", "--dtype auto|... ",
        "--load-format auto|dummy", "--overlap True|False ",
    ):  # fmt: skip
        assert f"\n  {usage}" in shown, usage
    assert "One of auto, float32, float64, bfloat16, float16. (default: auto)" in " ".join(
        shown.split()
    )
    assert "  -o, --output PATH " in help_of("viz", "--help", capsys)
    assert "--help-all" not in help_of("viz", "--help", capsys)


def test_an_unknown_option_suggests_one_that_help_does_not_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["batch", "demo", "a", "--output", "b", "--max-num-seq", "3"]) == 2
    assert "did you mean '--max-num-seqs'?" in capsys.readouterr().err
    assert "--max-num-seqs" not in help_of("batch", "--help", capsys)


def test_options_of_all_groups_reach_the_command_and_are_checked() -> None:
    argv = ["m", "a", "b", "--output", "o", "--raw", "--dtype", "float32", "--kv-cache-gib", "2"]
    args = cli.parse(BatchArgs, "x", [*argv, "--max-num-seqs", "3", "--top-k", "4"])
    assert (args.model, args.inputs, args.output, args.raw) == ("m", ("a", "b"), "o", True)
    assert (args.dtype, args.kv_cache_gib, args.max_num_seqs) == ("float32", 2.0, 3)
    assert args.sampling.top_k == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="kv_cache_gib must be greater than 0"):
        cli.parse(BatchArgs, "x", ["m", "a", "--output", "o", "--kv-cache-gib", "0"])
