"""Runs programs with nanoengine instead of vLLM, in this process and in others."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoengine import as_vllm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def vllm_modules() -> Iterator[None]:
    """vLLM's modules for one test."""
    path, finders = list(sys.path), list(sys.meta_path)
    as_vllm.install()
    try:
        yield
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "nanovllm")]:
            del sys.modules[name]


def run_here(program: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a program without changes."""
    monkeypatch.setattr(sys, "argv", [str(program), *arguments])
    runpy.run_path(str(program), run_name="__main__")


def run_in_process(
    *arguments: str, cwd: Path, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m nanoengine.as_vllm ARGUMENTS`; its exit status must be `code`."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "nanoengine.as_vllm", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done
