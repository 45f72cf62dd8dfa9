"""`nanoengine learn DIR`: writes a course of seven days on the small engine, and checks a day."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


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


def main(args: LearnArgs) -> int:
    """Writes or checks; returns 1 if the day is not done.

    Raises:
        ConfigError: the directory has a course already, or none to check, or there is no such day.
    """
    from nanoengine.cli import course

    if args.check is None:
        course.write_course(args.directory)
        print(f"written: begin with {args.directory / 'README.md'}")
        return 0
    return int(not course.check(args.directory, args.check))
