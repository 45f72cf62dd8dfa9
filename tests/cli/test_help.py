"""The help of commands, in groups, and what completes them in a shell."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.cli import groups
from nanoengine.cli import main as cli
from nanoengine.cli.batch import BatchArgs
from nanoengine.cli.docs import field_docs
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
    """The options of each box of a help."""
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
def test_help_has_every_option_once_and_says_what_it_does(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cls = options_class(command)
    told = [name for box in boxes(help_of(command, capsys)).values() for name in box]
    assert sorted(told) == sorted(set(told))
    not_told = {"kv_tiers", "logits_processors", "sampling", "inputs"}
    names = {field.name for field in dataclasses.fields(cls)} - not_told
    missing = {name.replace("_", "-") for name in names} - set(told)
    assert missing <= {"model", "recording", "reference", "models"}  # which are positional
    docs = field_docs(cls)
    assert all(docs[name] for name in names)


def test_groups_name_options_that_there_are() -> None:
    there = {field.name for name in COMMANDS for field in dataclasses.fields(options_class(name))}
    boxes = (names for box, (_, names) in groups.GROUPS.items() if box != "model")
    named = [name for names in boxes for name in names.split()]
    assert len(set(named)) == len(named)
    assert set(named) <= groups.BOXES.keys() <= there
    assert {groups.BOXES[field.name] for field in dataclasses.fields(EngineConfig)} == {
        "model", "memory", "scheduling", "watching",
    }  # fmt: skip


def test_options_of_all_groups_reach_the_command_and_are_checked() -> None:
    given = ["m", "a", "b", "--output", "o", "--chat", "--dtype", "float32", "--kv-cache-gib", "2"]
    args = cli.parse(BatchArgs, "x", [*given, "--max-num-seqs", "3", "--top-k", "4"])
    assert (args.model, args.inputs, args.output, args.chat) == ("m", ("a", "b"), "o", True)
    assert (args.dtype, args.kv_cache_gib, args.max_num_seqs) == ("float32", 2.0, 3)
    assert args.sampling.top_k == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="kv_cache_gib must be greater than 0"):
        cli.parse(BatchArgs, "x", ["m", "a", "--output", "o", "--kv-cache-gib", "0"])


# --- completion -----------------------------------------------------------------------------------


def test_completion_of_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bahs"]) == 2
    assert "unknown shell 'bahs'; did you mean 'bash'?" in capsys.readouterr().err
    assert cli.main(["completion"]) == 0
    assert "completion bash >" in capsys.readouterr().out


def write_script(shell: str, path: Path) -> None:
    command = [sys.executable, "-m", "nanoengine.cli.main", "completion", shell]
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (path.parent / "rows.jsonl").touch()


def need(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    """No file was completed: not an input, of which each batch has one."""
    need("bash")
    script = tmp_path / "completion.bash"
    write_script("bash", script)
    lines = ["nanoengine ba", "nanoengine batch --temp", "nanoengine chat --dtype ''"]
    press_tab = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); $complete; echo "${COMPREPLY[*]}"'
    asked = "".join(f"COMP_WORDS=({line}); {press_tab}\n" for line in lines)
    run = f"source {script}\ncomplete=$(complete -p nanoengine | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
    done = subprocess.run(["bash", "-c", run + asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "batch",
        "--template --temperature",
        "auto float32 float64 bfloat16 float16",
    ]
    tab = "bind 'set bell-style none'\nnanoengine batch demo ro\t\n"
    run = f'PS1=; source {script}\nnanoengine() {{ echo "given: $*"; }}\n{tab}exit\n'
    done = in_a_terminal(["bash", "--norc", "--noprofile", "-i"], run, tmp_path)
    assert "given: batch demo rows.jsonl" in done


def test_zsh_completes_commands_options_and_files(tmp_path: Path) -> None:
    need("zsh")
    write_script("zsh", tmp_path / "_nanoengine")
    lines = ["nanoengine ba", "nanoengine batch --tempe", "nanoengine batch demo ro"]
    typed = "".join(f"{line}\t\n" for line in lines)
    run = "PS1=; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D\n"
    run += "nanoengine() { echo given: $*. }\n"
    done = in_a_terminal(["zsh", "-f", "-i"], f"{run}{typed}exit\n", tmp_path)
    given = re.findall(r"^given: (.*?)\.\s*$", done, re.MULTILINE)
    assert given == ["batch", "batch --temperature", "batch demo rows.jsonl"], done


def test_fish_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    need("fish")
    write_script("fish", tmp_path / "nanoengine.fish")
    found = []
    for line in ("nanoengine ba", "nanoengine batch --tempe", "nanoengine batch demo rows.",
                 "nanoengine chat --dtype bf"):  # fmt: skip
        run = f"source nanoengine.fish; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", run],
            capture_output=True, text=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        found.append([tuple(one.split("\t")) for one in done.stdout.splitlines()])
    assert found[0] == [("batch", cli.COMMANDS["batch"])]
    assert [flag for flag, _ in found[1]] == ["--temperature"]
    assert found[2][0][0] == "rows.jsonl"
    assert [value for value, _ in found[3]] == ["bfloat16"]


def in_a_terminal(command: list[str], typed: str, directory: Path) -> str:
    """What a program shows that somebody types to."""
    ours, theirs = os.openpty()
    shown = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, start_new_session=True
    ) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        with contextlib.suppress(OSError):  # as it ends
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        assert process.wait(60) is not None
    os.close(ours)
    return shown.decode(errors="replace")
