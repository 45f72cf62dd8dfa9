"""`nanoengine COMMAND ...`: finds the command, parses its options, prints errors in one line.

A command is a module, `nanoengine.cli.COMMAND`, with a dataclass of options, `CommandArgs`, from
which tyro derives the command line and help, and with a function `main` of these options. A module
without such a class parses its command line itself, and its docstring is the help. Only the module
of the chosen command is imported, so help does not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from nanoengine import __version__
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.settings.checks import nearest, quoted

COMMANDS = {
    "batch": "run files of rows as a job that can be resumed",
    "generate": "complete prompts from the command line, a file or stdin",
    "chat": "chat with a model in the terminal",
    "bench": "measure the speed of a model on this machine",
    "viz": "write a trace as an HTML page, to step through a run",
    "simulate": "try pool sizes and admission policies on a workload, without a model",
    "explain": "describe a traced run, request or step in sentences",
    "embed": "write an embedding vector for each text of a file",
    "compare": "compare quantizations or files of a model with a reference",
    "eval": "score a model on tasks of lm-evaluation-harness",
    "learn": "write the small engine in seven days, checked against the reference",
    "info": "show whether a model fits and how it runs, the device and versions",
}

HELP = ("-h", "--help", "--help-all")

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses as in shells: after Ctrl-C, and when the reader of the output has exited."""


def usage() -> str:
    """The help of `nanoengine` itself; the first commands run as they are."""
    commands = "\n".join(f"  {name:<10}  {what}" for name, what in COMMANDS.items())
    return f"""nanoengine {__version__}: LLM inference, offline

try it with the small bundled model, demo:
  nanoengine generate demo --prompt "Once upon a time"
  nanoengine chat demo
  echo '{{"prompt": "The dog"}}' | nanoengine batch demo - --output answers.jsonl

commands:
{commands}

nanoengine COMMAND --help shows the options of a command."""


def find_command(name: str) -> tuple[Any, type | None]:
    """The module of a command, and the class of its options if it has one."""
    module = importlib.import_module(f"nanoengine.cli.{name}")
    return module, getattr(module, f"{name.capitalize()}Args", None)


def parse(options_class: type, prog: str, args: Sequence[str]) -> Any:
    """Parses a command line.

    Raises:
        ConfigError: an option is unknown or out of range, or options contradict each other.
        SystemExit: the value of an option is invalid, or help was requested; a text was printed.
    """
    import tyro

    from nanoengine.cli.command_line import flat_class, help_text
    from nanoengine.cli.options import SamplingArgs, subset

    if requested := next((one for one in args if one in HELP), None):
        print(help_text(options_class, prog, is_full=requested == HELP[-1]))
        sys.exit(0)
    config = (tyro.conf.DisallowNone,)  # Why: an option that is not given is None.
    flat, unknown = tyro.cli(
        flat_class(options_class), prog=prog, args=args, config=config, return_unknown_args=True
    )
    for name in unknown[:1]:
        names = ["--" + field.replace("_", "-") for field in flat.__dataclass_fields__]
        is_text = not name.startswith("-") and "--prompt" in names
        hint = "give a text as --prompt 'TEXT'" if is_text else nearest(name, names)
        raise ConfigError(f"unknown argument {quoted(name)}: {hint}")
    options = subset(options_class, flat)
    if "sampling" in options_class.__dataclass_fields__:
        options["sampling"] = SamplingArgs(**subset(SamplingArgs, flat))
    return options_class(**options)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2 for an error with an explanation."""
    _open_standard_streams()
    if argv is None:  # Why: garbage collection at exit takes 0.6 of 3.1 s (Zen 3).
        atexit.register(_skip_final_collection)
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    if not args or args[0] in HELP:
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"nanoengine {__version__}")
        return 0
    name = args[0]
    try:
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
        module, options_class = find_command(name)
        options: object = args[1:]
        if options_class is not None:
            options = parse(options_class, f"nanoengine {name}", args[1:])
        elif not args[1:] or args[1] in HELP:
            print(module.__doc__.rstrip())
            return 0
        with warnings.catch_warnings():
            # Why: the user of a command doesn't need the location in the code.
            warnings.showwarning = lambda text, *_, **__: print("warning:", text, file=sys.stderr)
            status = int(module.main(options) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (NanoEngineError, OSError) as error:
        if isinstance(error, OSError):
            _discard_output()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _skip_final_collection() -> None:
    if "triton" not in sys.modules:  # which would report its remaining objects as leaks
        gc.freeze()


def _open_standard_streams() -> None:
    """Opens missing standard streams (as after `2>&-`), because otherwise the next opened file gets
    their descriptor, and then the messages. Output is UTF-8 on every terminal."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            if name == "stdout":  # Why read-only: commands then report a closed stdout.
                os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # It gets the lowest number.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _discard_output() -> None:
    """Discards the remaining output, because Python would report the error again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
