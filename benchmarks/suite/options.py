"""The command line of `python bench.py`, by argparse alone: it runs where torch does.

The options of the workload and of the engine are the fields of `WorkOptions` and `EngineConfig`.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from benchmarks.suite.shapes import SHAPES
from nanoengine.bench.workload import WorkOptions
from nanoengine.cli.field_docs import field_docs
from nanoengine.settings.config import EngineConfig


def make_parser() -> argparse.ArgumentParser:
    """What `python bench.py --help` shows."""
    parser = argparse.ArgumentParser(
        "bench.py",
        usage="bench.py [a question] [options of the workload and of the engine]",
        description="Measures nanoengine: throughput compared with the limits of the hardware,"
        " and more.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument_group("a question").add_mutually_exclusive_group().add_argument
    add("--gpu-report", action="store_true", help="measure an NVIDIA GPU: docs/gpu.md")
    add(
        "--ablate",
        action="store_true",
        help="switch one feature off at a time, in rounds that alternate with the given engine",
    )
    add(
        "--sweep",
        metavar="NAME=VALUE,...",
        help="an option of the engine, and its values to run",
    )
    add(
        "--rate",
        type=float,
        nargs="+",
        help="let requests arrive randomly, on average at this rate per second, not all at once;"
        " several rates run one after the other",
    )
    add(
        "--compare",
        choices=("hf", "small"),
        help="hf: run transformers on the same work, in alternating rounds. small: run"
        " nanoengine/small and the large engine: the gain of each of its packages",
    )
    add = parser.add_argument
    add("--compare-batch-size", type=int, default=32, help="sequences of a batch of transformers")
    add(
        "--shape",
        choices=SHAPES,
        default=None,
        help="a standard shape instead of a model; needs --load-format dummy",
    )
    add("--json", type=Path, default=None, help="write all numbers to this file")
    add("--plot", type=Path, default=None, help="draw them into this directory; needs matplotlib")
    add("--out", type=Path, default=Path("gpu-report.json"), help="the file of --gpu-report")
    add("--parts", nargs="+", default=None, help="of --gpu-report: only these parts")
    add_fields(parser.add_argument_group("the workload"), WorkOptions)
    add_fields(parser.add_argument_group("the engine"), EngineConfig)
    return parser


def add_fields(parser: Any, options_class: type) -> None:
    """One option per field that a command line can give."""
    docs, hints = field_docs(options_class), get_type_hints(options_class)
    for one in fields(options_class):
        kinds = _kinds(hints[one.name])
        how: dict[str, Any] = {"type": str if str in kinds else value_of}
        if bool in kinds:
            how = {"action": argparse.BooleanOptionalAction}
        elif tuple[int, int] in kinds:
            how = {"type": int, "nargs": 2}
        elif any(get_origin(kind) is tuple for kind in kinds):
            continue  # objects, for programs
        text = docs[one.name].replace("%", "%%")
        parser.add_argument(f"--{one.name.replace('_', '-')}", help=text, **how)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def value_of(word: str) -> Any:
    """A number, a bool, None, or the word itself; the class checks it.

    >>> [value_of(word) for word in ("4", "0.5", "true", "None", "int8")]
    [4, 0.5, True, None, 'int8']
    """
    named = {"true": True, "false": False, "none": None}
    if word.lower() in named:
        return named[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The parsed question, and the given options of workload and engine.

    Raises:
        SystemExit: an option is unknown or invalid, which was printed; or help was printed.
    """
    args = make_parser().parse_args(argv)
    names = {one.name for cls in (WorkOptions, EngineConfig) for one in fields(cls)}
    values = {name: value for name, value in vars(args).items() if name in names}
    for name in ("input_len", "output_len"):
        if name in values:
            values[name] = tuple(values[name])
    for name in ("gpu_report", "ablate", "sweep", "rate", "compare"):
        if not hasattr(args, name):
            setattr(args, name, None)
    return args, values
