"""`nanoengine completion SHELL`: the script that completes commands and options in a shell.

tyro writes it, from the options of all commands.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Literal, get_args

import tyro

from nanoengine.checks import nearest
from nanoengine.cli import groups
from nanoengine.cli import main as program
from nanoengine.errors import ConfigError

Shell = Literal["bash", "zsh", "fish"]

USAGE = """usage: nanoengine completion SHELL

Prints the script that completes commands and options in bash, zsh or fish.

  bash   nanoengine completion bash > ~/.local/share/bash-completion/completions/nanoengine
  zsh    nanoengine completion zsh > ~/.zfunc/_nanoengine      (with ~/.zfunc in fpath)
  fish   nanoengine completion fish > ~/.config/fish/completions/nanoengine.fish

A new shell has it; `source <(nanoengine completion bash)` gives it to this one."""


def main(args: Sequence[str]) -> int:
    """Prints the script; returns the exit status.

    Raises:
        ConfigError: no shell, or an unknown one.
    """
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if len(args) > 1 or args[0] not in get_args(Shell):
        given = " ".join(args)
        hint = nearest(given, get_args(Shell))
        raise ConfigError(f"nanoengine completion SHELL: unknown shell {given!r}; {hint}")
    tyro.extras.subcommand_cli_from_dict(
        {name: _options(name) for name in program.COMMANDS},
        prog="nanoengine",
        args=["--tyro-print-completion", args[0]],
        config=(tyro.conf.OmitArgPrefixes,),
    )
    raise AssertionError("tyro prints a script and exits")


def _options(command: str) -> type:
    """The options of a command; none where it reads its command line itself."""
    options_class, _ = program.COMMANDS[command]
    if options_class is None:
        return dataclasses.make_dataclass(command, [])
    module = importlib.import_module(f"nanoengine.cli.{command.replace('-', '_')}")
    return groups.grouped(getattr(module, options_class))
