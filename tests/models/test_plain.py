"""Plain first: what nobody asked for is not loaded, and not on the page of the plain model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.checkpoint.config import load_model_config
from nanoengine.models.decoder import CausalLM
from nanoengine.models.loader import model_class
from tests.support.engines import checkpoint

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("models", "layers", "attention", "kernels")
PLAIN = {
    "models", "models.decoder", "models.loader",
    "layers", "layers.attention", "layers.collectives", "layers.embedding", "layers.kernels",
    "layers.layer", "layers.linear", "layers.norm", "layers.rotary", "layers.shard",
    "attention", "attention.base", "attention.batch", "attention.fp8",
}  # fmt: skip
OF_A_CPU = {
    "models.cpu", "layers.cpu_decoder", "layers.packed", "layers.placement", "attention.cpu",
}  # fmt: skip
GENERATE = """
import json, sys
from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
options = {"attention_backend": sys.argv[1], "device": "cpu", "num_kv_blocks": 64}
with LLM(demo_model_path(), **options) as llm:
    llm.generate("Tom", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(json.dumps([name for name in sys.modules]))
"""


@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_a_plain_generate_loads_the_plain_model_and_one_kernel_set(backend):
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, backend], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    ours = {name.removeprefix("nanoengine.") for name in loaded if name.startswith("nanoengine.")}
    ours = {name for name in ours if name.partition(".")[0] in ROOMS}
    assert "triton" not in loaded
    if backend == "naive":
        assert ours == PLAIN | {"attention.naive"}
        assert "numba" not in loaded
    else:
        assert {name for name in ours if name.partition(".")[0] != "kernels"} == PLAIN | OF_A_CPU


@pytest.mark.parametrize(
    ("family", "overrides", "plain"),
    [
        ("llama", {"attention_bias": True}, True),
        ("qwen3", {}, True),
        ("mistral", {}, True),  # windows
        ("gemma3", {}, False),  # norms on both sides, two kinds of rotation
        ("qwen3_moe", {}, False),
        ("lfm2", {}, False),  # states
        ("granite", {}, False),  # factors
    ],
)
def test_what_the_plain_model_computes_is_the_plain_model(family, overrides, plain):
    config = load_model_config(checkpoint(family, **overrides))
    assert (model_class(config) is CausalLM) is plain
