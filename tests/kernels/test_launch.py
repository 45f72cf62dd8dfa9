"""`launch` against Triton's own binder: what reaches the compiled kernel is the same.

Runs in a process of its own, with Triton's compiler and a driver that isn't there: the interpreter
and the compiler exclude each other.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_what_is_passed_is_what_the_binder_passes():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.launches"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["same", "kinds", "hooked", "renamed"]
