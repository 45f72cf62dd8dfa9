"""Draws reports of the benchmark; several reports of one kind are compared.

    python -m benchmarks.suite.plot REPORT.json ... --out DIRECTORY

The content of a report determines its figures (`figures.py`); each is written as SVG and PNG.
`bench.py --plot DIR` draws its own report in the same way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoengine.errors import ConfigError, MissingDependencyError, NanoEngineError

METADATA = {"svg": {"Date": None}}
"""Metadata of the files. Why no date: the same values give the same file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draws, and prints the names of the written files; returns the exit status."""
    parser = argparse.ArgumentParser("plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+", help="files that --json has written")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="the figures' directory")
    args = parser.parse_args(argv)
    try:
        require_matplotlib()
        draw([(path.stem, read(path)) for path in args.reports], args.out)
    except NanoEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def require_matplotlib() -> None:
    """Raises MissingDependencyError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("figures need matplotlib: pip install -e '.[plot]'")


def read(path: Path) -> dict[str, Any]:
    """A report of the benchmark.

    Raises:
        ConfigError: the file is not a report.
    """
    try:
        report = json_module.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(report, dict) or "hardware" not in report:
        raise ConfigError(f"{path} is not a report of `bench.py --json`")
    return report


def draw(reports: Sequence[tuple[str, dict[str, Any]]], directory: Path) -> None:
    """Writes each figure that the reports allow, and prints its path."""
    from benchmarks.suite import figures

    drawn = figures.all_of(reports)
    if not drawn:
        raise ConfigError("these reports contain nothing that can be drawn")
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for suffix in ("svg", "png"):
            figure.savefig(directory / f"{name}.{suffix}", dpi=144, metadata=METADATA.get(suffix))
        print(f"{directory / name}.svg and .png")


if __name__ == "__main__":
    sys.exit(main())
