"""Every model family on an emulated GPU, with Triton's compiler; see `support/compiling_gpu.py`.

Triton's interpreter does not show launches whose arguments can't be bound, or kernels that don't
compile. On a GPU, these are fatal for an engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import FAMILIES

ROOT = Path(__file__).parents[2]
ODD = [
    'gemma4 {"head_dim": 8, "global_head_dim": 40}',
    'deepseek_v3 {"kv_lora_rank": 33, "qk_rope_head_dim": 6, "qk_nope_head_dim": 5, "v_head_dim":'
    ' 7, "vocab_size": 257}',
]
"""Sizes that are not powers of two, and sizes below the minimum of a GPU's matmul."""


@pytest.mark.guards(
    "nanoengine/attention/*.py", "nanoengine/kernels/triton*.py", "nanoengine/layers/*.py",
    "nanoengine/models/*.py", "nanoengine/runner/*.py", "nanoengine/runner/sampling/*.py",
    "tests/data/models.yaml", "tests/support/*_gpu.py",
)  # fmt: skip
@pytest.mark.timeout(600)
def test_every_family_starts_and_runs_on_a_gpu_in_bfloat16():
    """The prompts are longer than a step's budget: mixtures of experts once failed in a step with a
    single chunk."""
    families = [*FAMILIES, *ODD]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compiling_gpu", *families]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["family"] for row in rows] == families
    for row in rows:
        assert "error" not in row, row
        assert row["launches"] > 100, row
        assert not (row["disorder"] or row["left"] or row["waits"]), row
    assert sum(row["compiled"] for row in rows) > 50
