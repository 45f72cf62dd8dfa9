"""Quantization error of a trained model, SmolLM2-135M-Instruct: KL to its float32 weights.

Random weights and the demo model have no activation outliers, and hide their cost. Each bound is
1.3 times the measured value. With one activation scale per token, the GGUF file has 0.049 and int8
0.053; with a group's largest weight at -8, int4 has 0.42; and an int8 cache without a Hadamard
matrix has 0.0008.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoengine.cli.main import main
from tests.support.trained_models import smollm2_gguf, write_float32

pytestmark = pytest.mark.extra

BOUNDS = {
    "": 0.0047,  # the file itself, with int8 activations
    "@dtype=float32,quantization=int8": 0.0048,
    "@dtype=float32,quantization=int4": 0.0145,
    "@dtype=float32,kv_cache_dtype=int8": 0.00028,
}
"""Settings after a path -> largest mean KL [nats]."""


@pytest.mark.timeout(600)
def test_kl_to_the_weights_in_float32(tmp_path: Path) -> None:
    file, exact, report = smollm2_gguf(), tmp_path / "float32.gguf", tmp_path / "report.json"
    write_float32(file, exact)
    models = [f"{exact if settings else file}{settings}" for settings in BOUNDS]
    assert (
        main(["compare", str(exact), *models, "--answer-tokens", "0", "--json", str(report)]) == 0
    )
    found = {one["model"]: one["kl_mean"] for one in json.loads(report.read_text())["models"]}
    most = dict(zip(models, BOUNDS.values(), strict=True))
    assert {model: kl for model, kl in found.items() if not 0 < kl <= most[model]} == {}
