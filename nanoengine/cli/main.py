"""`nanoengine COMMAND ...`: finds the command, parses its options, turns errors into one line.

A command is a module, `nanoengine.cli.COMMAND`: a dataclass of options, `CommandArgs`, of which
tyro derives its command line and help, and a `main` that takes it. One without such a class reads
its command line itself, and its help is its module's docstring. Only the module of the chosen
command is imported, so help comes up without torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from nanoengine import __version__
from nanoengine.cli import groups
from nanoengine.errors import ConfigError, NanoEngineError

COMMANDS = {
    "batch": "answer files of rows; what is finished is kept, and a run resumes",
    "generate": "complete prompts of the command line, a file or stdin",
    "chat": "talk to a model, turn by turn",
    "bench": "measure how fast a model runs here",
    "viz": "draw a trace as a page, to step through a run and look at it",
    "simulate": "try pool sizes and admission policies on a workload, no model",
    "explain": "say in sentences what a trace shows: run, request or step",
    "trace": "convert a trace for Perfetto",
    "embed": "write a vector for each text of a file",
    "compare": "measure what quantization or another file changes in a model",
    "eval": "score a model on tasks of lm-evaluation-harness",
    "info": "show versions, device, attention backends and a model",
    "completion": "print what completes these commands in bash, zsh or fish",
}

HELP = ("-h", "--help")

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses as shells have them: after Ctrl-C, and when nobody reads the output any more."""


def usage() -> str:
    """The help of `nanoengine` itself."""
    commands = "\n".join(f"  {name:<10}  {what}" for name, what in COMMANDS.items())
    return f"""nanoengine {__version__}: LLM inference, offline

usage: nanoengine COMMAND [OPTIONS]

{commands}

nanoengine COMMAND --help shows the options of a command."""


def find_command(name: str) -> tuple[Any, type | None]:
    """The module of a command, and the class of its options if it has one."""
    module = importlib.import_module(f"nanoengine.cli.{name}")
    return module, getattr(module, f"{name.capitalize()}Args", None)


def parse(options_class: type, prog: str, args: Sequence[str]) -> Any:
    """The options on a command line.

    Raises:
        ConfigError: they contradict each other, or one is out of range.
        SystemExit: one is unknown or can't be read, which was printed; or help was.
    """
    parsed = tyro.cli(
        groups.grouped(options_class),
        prog=prog,
        description=(inspect.getdoc(options_class) or "").partition("\n\nAttributes:")[0],
        args=args,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return groups.flat(options_class, parsed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2 for an error that has an explanation."""
    _open_standard_streams()
    if argv is None:  # Why: Python's end walks all that has been loaded, 0.6 of 3.1 s (Zen 3).
        atexit.register(_end_without_a_walk)
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in (*HELP, "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"nanoengine {__version__}")
        return 0
    name = args[0]
    try:
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
        module, options_class = find_command(name)
        options: object = args[1:]
        if options_class is not None:
            options = parse(options_class, f"nanoengine {name}", args[1:])
        elif not args[1:] or args[1] in HELP:
            print(module.__doc__.rstrip())
            return 0
        status = int(module.main(options) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except (NanoEngineError, OSError) as error:
        if isinstance(error, OSError):
            _drop_output()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _end_without_a_walk() -> None:
    if "triton" not in sys.modules:  # which would tell what it has left as leaks
        gc.freeze()


def _open_standard_streams() -> None:
    """A process may be started without some, as by `2>&-`: the file that is opened next would take
    the place, and the messages. What is written is UTF-8 as in files, whatever the terminal has."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            if name == "stdout":  # Why not writable: who must write to it finds that it can't.
                os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # It gets the lowest number.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _drop_output() -> None:
    """Sends what is left of the output nowhere: Python would complain of it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
