"""usage: nanoengine completion SHELL

Prints the script that completes commands and options in bash, zsh or fish.

  bash   nanoengine completion bash > ~/.local/share/bash-completion/completions/nanoengine
  zsh    nanoengine completion zsh > ~/.zfunc/_nanoengine      (with ~/.zfunc in fpath)
  fish   nanoengine completion fish > ~/.config/fish/completions/nanoengine.fish

A new shell has it; `source <(nanoengine completion bash)` gives it to this one.
"""
# tyro writes it, from the options of all commands. What it leaves out is added here: what commands
# do, and files where no option is typed, as inputs are.

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence

import tyro

from nanoengine.cli import groups
from nanoengine.cli import main as program
from nanoengine.errors import ConfigError
from nanoengine.settings.checks import nearest

# What goes behind tyro's script, whose last line asks its function in zsh: files where that has
# nothing to say.
FILES: dict[str, str] = {
    "bash": """
_nanoengine_or_files() {
  _tyro_nanoengine
  [[ -n "${COMPREPLY[*]}" ]] || COMPREPLY=()
}
complete -o default -F _nanoengine_or_files nanoengine
""",
    "zsh": " || _files\n",
    "fish": """
complete --command nanoengine --force-files --condition \\
  'test (count (commandline -opc)) -gt 1; and string match -qr -- "^[^-]" (commandline -ct)'
""",
}


def main(args: Sequence[str]) -> int:
    """Prints the script; returns the exit status.

    Raises:
        ConfigError: no shell, or an unknown one.
    """
    if len(args) > 1 or args[0] not in FILES:
        given = " ".join(args)
        raise ConfigError(f"completion: unknown shell {given!r}; {nearest(given, FILES)}")
    with contextlib.redirect_stdout(io.StringIO()) as written, contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            {name: _options(*program.find_command(name)) for name in program.COMMANDS},
            prog="nanoengine",
            args=["--tyro-print-completion", args[0]],
            config=(tyro.conf.OmitArgPrefixes,),
        )
    script = written.getvalue().rstrip()
    for name, what in program.COMMANDS.items():
        known, told = (f"{name!r}: {{'description': {text!r}" for text in (name, what))
        script = script.replace(known, told)
    print(script + FILES[args[0]])
    return 0


def _options(_: object, options_class: type | None) -> type:
    """The options of a command; none where it reads its command line itself."""
    return groups.grouped(options_class) if options_class else dataclasses.make_dataclass("_", [])
