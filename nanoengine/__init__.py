"""nanoengine: two LLM inference engines, a small one to read and a large one to run.

Public names are loaded at first use (PEP 562), so `import nanoengine` does not import torch or
transformers. The names are listed in `__init__.pyi`, which type checkers also read.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

from nanoengine.version import __version__ as __version__

# Why: after each torch operation its OpenMP threads spin, by default for milliseconds, on the
# cores of `kernels/pool.py`. OpenMP reads the variable only when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {n: home for home, n in re.findall(r"\nfrom (\S+) import \(?\s*([A-Z]\w+)", _STUB)}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


# Programs written for vLLM also import from these modules; each has the names above.
for _module in ("inputs", "sampling_params"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
