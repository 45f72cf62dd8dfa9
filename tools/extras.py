"""Prints the packages that all tests need, or with --models their trained models; `make
test-extras` installs them.

Why not `pip install -e ".[...]"`: that builds the package again, in a separate environment.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
LEFT_OUT = ("flash",)
"""Needs a CUDA compiler."""


def requirements() -> list[str]:
    """Packages of all extras that a CPU can use, and the package's own requirements, which other
    packages must not replace."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = {one for name in extras.keys() - set(LEFT_OUT) for one in extras[name]}
    return sorted(requirements.union(project["dependencies"]))


def models() -> list[str]:
    """Packages that contain trained models, to be installed without their dependencies."""
    groups = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["dependency-groups"]
    return list(groups["models"])


if __name__ == "__main__":
    print("\n".join(models() if sys.argv[1:] == ["--models"] else requirements()))
