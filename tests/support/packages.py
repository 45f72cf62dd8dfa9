"""Which of the installed packages another machine may lack."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from importlib import metadata

NEEDED = ("torch", "triton", "transformers", "safetensors", "xxhash", "numpy")
"""The packages that a machine with a GPU and torch has."""


def absent(there: Iterable[str]) -> list[str]:
    """Modules of all packages that are installed here and that `there` does not depend on."""
    found, asked = {"pip", "setuptools"}, list(there)
    while asked:
        name = canonical(asked.pop())
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                requires = metadata.requires(name) or []
                asked += [re.split(r"[^\w.-]", r)[0] for r in requires if "extra ==" not in r]
    owners = metadata.packages_distributions().items()
    others = [m for m, names in owners if m.isidentifier() and not found & {*map(canonical, names)}]
    return sorted({*others} - {"tests", "nanoengine", "benchmarks"})


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
