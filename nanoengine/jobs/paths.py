"""The files of a job: which ones it writes, which ones globs skip, and how they move aside."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from nanoengine.errors import ConfigError
from nanoengine.jobs.record_log import lock_path
from nanoengine.jobs.source import STDIN, Input

STDOUT = "-"
LINES = ("", ".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet")
"""Suffixes of outputs: JSON lines, which pipes get too, and tables."""


def real_path(name: str | os.PathLike[str]) -> Path:
    """The path of a file with links resolved, because a rewrite would replace the link.

    Raises:
        ConfigError: it is a directory, or not a valid name.
    """
    if "\0" in str(name):
        raise ConfigError(f"output {str(name)!r} can't be written: a name of a file has no NUL")
    path = Path(os.path.realpath(name) if os.path.islink(name) else name)
    if path.is_dir():
        raise ConfigError(f"output {str(name)!r} can't be written: it is a directory")
    return path


def relative(path: str, start: str, of: ModuleType = os.path) -> str:
    """The path relative to a directory, with / on all systems; unchanged if it is on another
    drive."""
    try:
        path = of.relpath(path, start)
    except ValueError:  # Windows
        return path
    return path.replace(of.sep, "/")


class Paths:
    """The files of a job.

    Args:
        output, errors, summary_json: see `JobOptions`.

    Attributes:
        output: the final file, records or a table.
        table: the suffix of a table; empty for JSON lines.
        table_log: the records that a table is made from.
        manifest: identifies the job of the output.
        runs: the journal, see `journal.py`.
        errors_manifest: records which output the file of errors belongs to; None: no such file.
        errors_of: the path of that output, relative to the file of errors.

    Raises:
        ConfigError: one of them is a directory, or has the suffix of another format; the summary
            can't be written.
    """

    def __init__(self, output: str, errors: str | None, summary_json: Path | None) -> None:
        self.output = real_path(output)
        suffix = Path(output).suffix.lower()
        self.table = suffix if suffix in TABLES else ""
        if suffix not in (*LINES, *TABLES):
            told = f"can't be written as {suffix}: name it .jsonl, .csv, .tsv or .parquet"
            raise ConfigError(f"output {output!r} {told}")
        if self.table and self.output.exists() and not self.output.is_file():
            raise ConfigError(f"output {output!r} is no file, so it takes only JSON lines")
        self.table_log, self.manifest, self.runs = (
            self.output.with_name(f"{self.output.name}.job.{what}")
            for what in ("jsonl", "json", "runs")
        )
        self._errors = None if errors is None else real_path(errors)
        self.errors_manifest: Path | None = None
        if self._errors is not None:
            self.errors_manifest = self._errors.with_name(f"{self._errors.name}.job.json")
            # Why relative: both files may be moved together.
            self.errors_of = relative(
                os.path.realpath(self.output), os.path.realpath(self._errors.parent)
            )
        named = {"--output": output, "--errors": errors, "--summary-json": summary_json}
        self._named = {
            option: real_path(name)
            for option, name in named.items()
            if name is not None and name != STDOUT
        }
        summary = self._named.get("--summary-json", self.output)
        place = summary if summary.exists() else summary.parent
        if summary_json is not None and not os.access(place, os.W_OK):
            told = "can't be written: no such directory, or no right to"
            raise ConfigError(f"--summary-json {str(summary)!r} {told}")

    def check(self, inputs: Iterable[Input]) -> None:
        """Raises ConfigError if an output is also an input, or two outputs are the same file."""
        files = [one.name for one in inputs if one.name != STDIN]
        own = (self.table_log, self.manifest, self.runs, self.errors_manifest)
        taken = {os.path.realpath(path) for path in own if path is not None}
        for one in files:
            if os.path.realpath(one) in taken:
                raise ConfigError(f"input {one!r} is a file of the job: name another output")
        for option, path in self._named.items():
            if any(path.exists() and os.path.samefile(path, one) for one in files):
                raise ConfigError(f"output {str(path)!r} is an input: write to another file")
            if os.path.realpath(path) in taken:
                raise ConfigError(f"{option} {str(path)!r} is a file of the job: name another")
            taken.add(os.path.realpath(path))
        if self._errors is not None and self._errors.suffix.lower() not in LINES:
            raise ConfigError(f"--errors {str(self._errors)!r} has JSON lines: name it .jsonl")

    def is_own(self, name: str) -> bool:
        """Whether a glob's match belongs to this job, or to an earlier one that was moved aside."""
        files = [*self._files(), *self._named.values()]
        if self.errors_manifest is not None:
            files.append(self.errors_manifest)
        own = [*files, *(path.with_name(f"{path.name}.tmp") for path in files)]
        own += map(lock_path, files)
        number = next(filter(str.isdecimal, Path(name).name.split(".")[::-1]), None)
        if number is not None and self._numbered(self.manifest, number).exists():
            own += [self._numbered(path, number) for path in files]
        return os.path.realpath(name) in map(os.path.realpath, own)

    def _files(self) -> list[Path]:
        """The manifest first: without it no process treats the other files as its own."""
        files = (self.manifest, self.output, self._errors, self.runs, self.table_log)
        return [path for path in files if path is not None]

    def move_aside(self) -> None:
        """Renames the files of an earlier job with an unused number."""
        old = [path for path in self._files() if path.exists() and path.stat().st_size]
        numbers = map(str, itertools.count(1))
        number = next(n for n in numbers if not any(self._numbered(p, n).exists() for p in old))
        for path in old:
            os.replace(path, self._numbered(path, number))

    def _numbered(self, path: Path, number: str) -> Path:
        """out.jsonl.job.json -> out.1.jsonl.job.json; the old job can be resumed with that name."""
        base = self.output if path.name.startswith(self.output.name) else path
        rest = path.name.removeprefix(base.name)
        return path.with_name(f"{base.stem}.{number}{base.suffix}{rest}")
