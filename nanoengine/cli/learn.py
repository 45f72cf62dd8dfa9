"""`nanoengine learn DIR`: writes the course, seven days to write the small engine, and checks it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nanoengine.errors import ConfigError

NUM_DAYS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnArgs:
    """Writes a course of seven days, in which you write the small engine, or checks one day.

    examples:
      nanoengine learn course
      nanoengine learn course --check 1

    Attributes:
        directory: Directory of the course.
        check: Compare this day's functions with the reference, and measure what they gain.
    """

    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    check: int | None = None

    def __post_init__(self) -> None:
        if self.check is not None and not 1 <= self.check <= NUM_DAYS:
            raise ConfigError(f"--check must be a day, 1 to {NUM_DAYS}, got {self.check}")


def main(args: LearnArgs) -> int:
    """Writes or checks; returns 1 if the day is not done.

    Raises:
        ConfigError: the directory has a course already, or none to check.
    """
    from nanoengine.cli import course

    if args.check is None:
        course.write_course(args.directory)
        print(f"{args.directory}: begin with {args.directory / 'README.md'}")
        return 0
    line = ""
    for line in course.check(args.directory, args.check):
        print(line, flush=True)
    return int(not line.endswith("is done"))
