"""The grouped help of each command."""

from __future__ import annotations

import dataclasses
import re

import pytest

from nanoengine.cli import groups
from nanoengine.cli import main as cli
from nanoengine.cli.batch import BatchArgs
from nanoengine.cli.field_docs import field_docs
from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig

COMMANDS = [name for name in cli.COMMANDS if cli.find_command(name)[1] is not None]


def options_class(command: str) -> type:
    found = cli.find_command(command)[1]
    assert found is not None
    return found


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def boxes(shown: str) -> dict[str, list[str]]:
    """Returns the options in each box of a help text."""
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if title := re.match(r"╭─ (.*?) ─+╮", line):
            found[title[1]] = []
        elif option := re.match(r"│ (?:-\w [^-]*, )?--([a-z][\w-]+|n)", line):
            found[list(found)[-1]].append(option[1])
    return found


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        ("generate", ["model", "memory", "scheduling", "watching", "sampling"]),
        ("batch", ["model", "memory", "scheduling", "watching", "sampling"]),
        ("chat", ["model", "memory", "scheduling", "watching", "sampling"]),
        ("bench", ["model", "memory", "scheduling", "watching"]),
    ],
)
def test_help_is_in_groups_with_three_examples(
    command: str, titles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(command, capsys)
    found = boxes(shown)
    named = [title.removesuffix(" options") for title in found if title.endswith(" options")]
    assert named == titles
    assert all(found[f"{title} options"] for title in titles)
    assert shown.partition("examples:")[2].count(f"nanoengine {command} ") == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_option_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls = options_class(command)
    shown = [name for box in boxes(help_of(command, capsys)).values() for name in box]
    assert sorted(shown) == sorted(set(shown))
    not_options = {"kv_tiers", "logits_processors", "sampling", "inputs"}
    names = {field.name for field in dataclasses.fields(cls)} - not_options
    missing = {name.replace("_", "-") for name in names} - set(shown)
    assert missing <= {"model", "recording", "reference", "models", "directory"}  # positional
    docs = field_docs(cls)
    assert all(docs[name] for name in names)


def test_groups_contain_only_existing_options() -> None:
    classes = map(options_class, COMMANDS)
    existing = {field.name for cls in classes for field in dataclasses.fields(cls)}
    boxes = (names for box, (_, names) in groups.GROUPS.items() if box != "model")
    grouped = [name for names in boxes for name in names.split()]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) <= groups.BOXES.keys() <= existing
    assert {groups.BOXES[field.name] for field in dataclasses.fields(EngineConfig)} == {
        "model", "memory", "scheduling", "watching",
    }  # fmt: skip


def test_options_of_all_groups_reach_the_command_and_are_checked() -> None:
    argv = ["m", "a", "b", "--output", "o", "--chat", "--dtype", "float32", "--kv-cache-gib", "2"]
    args = cli.parse(BatchArgs, "x", [*argv, "--max-num-seqs", "3", "--top-k", "4"])
    assert (args.model, args.inputs, args.output, args.chat) == ("m", ("a", "b"), "o", True)
    assert (args.dtype, args.kv_cache_gib, args.max_num_seqs) == ("float32", 2.0, 3)
    assert args.sampling.top_k == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="kv_cache_gib must be greater than 0"):
        cli.parse(BatchArgs, "x", ["m", "a", "--output", "o", "--kv-cache-gib", "0"])
