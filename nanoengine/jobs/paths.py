"""The paths of a job's files; globs skip these files, and --restart renames them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from nanoengine.errors import ConfigError
from nanoengine.jobs.record_log import lock_path
from nanoengine.jobs.source import STDIN, Input

STDOUT = "-"
LINE_SUFFIXES = ("", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
"""Suffixes of outputs: JSON lines, which is also the format for pipes, and tables."""


def resolved_path(name: str | os.PathLike[str]) -> Path:
    """The path of a file; a link is resolved, because a rewrite would replace the link.

    Raises:
        ConfigError: it is a directory, or not a valid name.
    """
    if "\0" in str(name):
        raise ConfigError(f"output {str(name)!r} can't be written: its name contains a NUL")
    path = Path(os.path.realpath(name) if os.path.islink(name) else name)
    if path.is_dir():
        raise ConfigError(f"output {str(name)!r} can't be written: it is a directory")
    return path


def relative(path: str, start: str, path_module: ModuleType = os.path) -> str:
    """The path relative to a directory, with / on all systems; unchanged if it is on another
    drive."""
    try:
        path = path_module.relpath(path, start)
    except ValueError:  # Windows
        return path
    return path.replace(path_module.sep, "/")


class JobPaths:
    """The files of a job.

    Args:
        output, errors, summary_json: see `JobOptions`.

    Attributes:
        output: the final file, records or a table.
        table: the suffix of a table; empty for JSON lines.
        table_log: the log of records that a table is written from.
        manifest: identifies the job of the output, see `manifest.py`.
        journal: see `journal.py`.
        errors_manifest: names the output of the --errors file; None without --errors.
        errors_of: the path of that output, relative to that file's directory.

    Raises:
        ConfigError: a path is a directory, or its suffix is not supported; the summary can't be
            written.
    """

    def __init__(self, output: str, errors: str | None, summary_json: Path | None) -> None:
        self.output = resolved_path(output)
        suffix = Path(output).suffix.lower()
        self.table = suffix if suffix in TABLE_SUFFIXES else ""
        if suffix not in (*LINE_SUFFIXES, *TABLE_SUFFIXES):
            message = f"can't be written as {suffix}: name it .jsonl, .csv, .tsv or .parquet"
            raise ConfigError(f"output {output!r} {message}")
        if self.table and self.output.exists() and not self.output.is_file():
            raise ConfigError(f"output {output!r} is not a regular file: it can't be {self.table}")
        self.table_log, self.manifest, self.journal = (
            self.output.with_name(f"{self.output.name}.job.{suffix}")
            for suffix in ("jsonl", "json", "runs")
        )
        self._errors = None if errors is None else resolved_path(errors)
        self.errors_manifest: Path | None = None
        if self._errors is not None:
            self.errors_manifest = self._errors.with_name(f"{self._errors.name}.job.json")
            # Why relative: both files may be moved together.
            self.errors_of = relative(
                os.path.realpath(self.output), os.path.realpath(self._errors.parent)
            )
        given = {"--output": output, "--errors": errors, "--summary-json": summary_json}
        self._given_paths = {
            option: resolved_path(name)
            for option, name in given.items()
            if name is not None and name != STDOUT
        }
        summary = self._given_paths.get("--summary-json", self.output)
        existing = summary if summary.exists() else summary.parent
        if summary_json is not None and not os.access(existing, os.W_OK):
            message = "can't be written: no such directory, or no permission"
            raise ConfigError(f"--summary-json {str(summary)!r} {message}")

    def check(self, inputs: Iterable[Input]) -> None:
        """Raises ConfigError if an output is also an input, or two outputs are the same file."""
        names = [source.name for source in inputs if source.name != STDIN]
        derived = (self.table_log, self.manifest, self.journal, self.errors_manifest)
        used_paths = {os.path.realpath(path) for path in derived if path is not None}
        for name in names:
            if os.path.realpath(name) in used_paths:
                raise ConfigError(f"input {name!r} is a file of the job: give another --output")
        for option, path in self._given_paths.items():
            if any(path.exists() and os.path.samefile(path, name) for name in names):
                raise ConfigError(f"{option} {str(path)!r} is an input: give another file")
            if os.path.realpath(path) in used_paths:
                raise ConfigError(f"{option} {str(path)!r} is a file of the job: give another file")
            used_paths.add(os.path.realpath(path))
        if self._errors is not None and self._errors.suffix.lower() not in LINE_SUFFIXES:
            raise ConfigError(f"--errors {str(self._errors)!r} must end in .jsonl or .ndjson")

    def is_job_file(self, name: str) -> bool:
        """Whether a file belongs to this job, or to an earlier job that was moved aside."""
        files = [*self._files(), *self._given_paths.values()]
        if self.errors_manifest is not None:
            files.append(self.errors_manifest)
        job_files = [*files, *(path.with_name(f"{path.name}.tmp") for path in files)]
        job_files += map(lock_path, files)
        number = next(filter(str.isdecimal, Path(name).name.split(".")[::-1]), None)
        if number is not None and self._numbered(self.manifest, number).exists():
            job_files += [self._numbered(path, number) for path in files]
        return os.path.realpath(name) in map(os.path.realpath, job_files)

    def _files(self) -> list[Path]:
        """The files to rename. The manifest comes first: no job resumes without it."""
        files = (self.manifest, self.output, self._errors, self.journal, self.table_log)
        return [path for path in files if path is not None]

    def move_aside(self) -> None:
        """Adds the first unused number to the names of an earlier job's files."""
        files = [path for path in self._files() if path.exists() and path.stat().st_size]
        numbers = map(str, itertools.count(1))
        number = next(n for n in numbers if not any(self._numbered(p, n).exists() for p in files))
        for path in files:
            os.replace(path, self._numbered(path, number))
            print(f"moved {path} to {self._numbered(path, number)}", file=sys.stderr)

    def _numbered(self, path: Path, number: str) -> Path:
        """out.jsonl.job.json -> out.1.jsonl.job.json; --output out.1.jsonl resumes the old job."""
        base = self.output if path.name.startswith(self.output.name) else path
        ending = path.name.removeprefix(base.name)
        return path.with_name(f"{base.stem}.{number}{base.suffix}{ending}")
