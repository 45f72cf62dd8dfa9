"""Installed packages that another machine may not have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from importlib import metadata

NEEDED = ("torch", "triton", "transformers", "safetensors", "xxhash", "numpy")
"""The packages that a machine with a GPU and torch has."""


def modules_missing_with(packages: Iterable[str]) -> list[str]:
    """Installed modules that a machine with only `packages` and their dependencies lacks."""
    found, queue = {"pip", "setuptools"}, list(packages)
    while queue:
        name = canonical(queue.pop())
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                requires = metadata.requires(name) or []
                queue += [re.split(r"[^\w.-]", r)[0] for r in requires if "extra ==" not in r]
    owners = metadata.packages_distributions().items()
    missing = [
        m for m, names in owners if m.isidentifier() and not found & {*map(canonical, names)}
    ]
    return sorted({*missing} - {"tests", "nanoengine", "benchmarks"})


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
