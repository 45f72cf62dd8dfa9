"""Errors that would stop the GPU tests before any kernel runs and can be found without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import test_overlap_gpu

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("options", test_overlap_gpu.CACHES)
def test_options_of_the_overlap_tests_are_compatible(options):
    on_cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "naive"}
    engine = test_overlap_gpu.engine_of(**options, **on_cpu)
    assert engine.info.num_kv_blocks >= 24
    engine.close()


def test_another_package_named_tests_does_not_hide_these(tmp_path):
    """Some packages install `tests`; Python prefers it to a folder without `__init__.py`."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = "from importlib.util import find_spec; print(find_spec('tests.support.engines').origin)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(ROOT / "tests" / "support" / "engines.py"), done.stderr
