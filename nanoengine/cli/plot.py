"""`nanoengine plot bench.json...`: draws reports of the benchmark, several of a kind side by side.

What a report holds decides which figures there are (`cli/figures.py`); each is written as SVG for
pages and as PNG for everything else. `bench --plot DIR` draws its own report the same way.
"""

from __future__ import annotations

import importlib.util
import json as json_module
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nanoengine.errors import ConfigError, MissingDependencyError

METADATA = {"svg": {"Date": None}}
"""Of the files. Why no date: the same numbers are the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotArgs:
    """Draws reports of `nanoengine bench --json`, side by side, as SVG and PNG."""

    reports: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files that `--json` has written; those of one kind share a figure."""
    out: Path = Path("plots")
    """The directory that the figures go into; made if missing."""


def main(args: PlotArgs) -> None:
    """Draws, and prints the files that it wrote.

    Raises:
        ConfigError: a file is no report of the benchmark, or nothing in it can be drawn.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    if not args.reports:
        raise ConfigError("plot needs a file that `nanoengine bench --json FILE` has written")
    draw([(path.stem, read(path)) for path in args.reports], args.out)


def require_matplotlib() -> None:
    """Raises MissingDependencyError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("figures need matplotlib: pip install 'nanoengine[plot]'")


def read(path: Path) -> dict[str, Any]:
    """A report of the benchmark.

    Raises:
        ConfigError: the file is none.
    """
    try:
        report = json_module.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(report, dict) or "hardware" not in report:
        raise ConfigError(f"{path} is no report of `nanoengine bench --json`")
    return report


def draw(reports: Sequence[tuple[str, dict[str, Any]]], directory: Path) -> None:
    """Writes each figure that named reports allow, and prints where."""
    from nanoengine.cli import figures

    drawn = figures.all_of(reports)
    if not drawn:
        raise ConfigError("these reports hold nothing that can be drawn")
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for suffix in ("svg", "png"):
            figure.savefig(directory / f"{name}.{suffix}", dpi=144, metadata=METADATA.get(suffix))
        print(f"{directory / name}.svg and .png")
