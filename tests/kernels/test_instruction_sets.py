"""Attention and a model give equal bits and tokens under each instruction set of this CPU.

Tiles have their own tests. These tests cover the kernels built from tiles, as a model calls them.
Each instruction set runs in its own process, which prints the results of the same computation.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.cpu_quantized import quantize_groups
from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.kernels.isa import CURRENT, available, cpu_features
from tests.support.attention_cases import Paged
from tests.support.engines import checkpoint, random_prompts

pytestmark = [
    pytest.mark.guards(
        "nanoengine/kernels/*gemm.py",
        "nanoengine/kernels/emit.py",
        "nanoengine/kernels/isa.py",
        "nanoengine/kernels/cpu_*.py",
        "nanoengine/kernels/attention_tasks.py",
        "nanoengine/kernels/exp.py",
    ),
    pytest.mark.timeout(400),  # Why: each instruction set compiles all kernels again.
]

ROOT = Path(__file__).resolve().parents[2]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
KINDS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
)
LENGTHS = [(1, 1), (1, 17), (1, 600), (4, 70), (33, 33), (40, 300)]  # decodes, a draft, chunks


def results(directory: str) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Under this process's instruction set: the tokens and log-probabilities per model format, and
    the bits of attention."""
    found: dict[str, Any] = {}
    logprobs: dict[str, list[list[float]]] = {}
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(4, (1, 5, 40, 150))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    sizes = {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "num_kv_blocks": 16,
    }
    for name, form in FORMS.items():
        with LLM(directory, device="cpu", skip_tokenizer_init=True, **sizes, **form) as llm:
            outputs = [
                output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)
            ]
        found[f"{name}, tokens"] = [list(result.token_ids) for result in outputs]
        logprobs[name] = [
            [by_token[token].logprob for token, by_token in zip(*pair, strict=True)]
            for pair in ((result.token_ids, result.logprobs) for result in outputs)
        ]
    for dtype, kv_dtype in KINDS:
        paged = Paged(lengths=LENGTHS, dtype=torch.float32, kv_dtype=kv_dtype)
        paged.dtype = dtype
        out = paged.run("cpu").numpy().tobytes()
        found[f"attention, {dtype} over {kv_dtype}"] = hashlib.sha256(out).hexdigest()
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)).numpy()
    for size in (UNIT, GROUP):
        values, groups = quantize_groups(x, size, 1)
        digest = hashlib.sha256(values.tobytes() + groups.tobytes()).hexdigest()
        found[f"activations in groups of {size}"] = digest
    return found, logprobs


# Why the others are off by default: each compiles all kernels again, half a minute of CPU time.
OTHERS = [isa.name for isa in available(cpu_features()) if isa.name != CURRENT.name]
FIRST = "avx2" if "avx2" in OTHERS else "generic_512"


@pytest.mark.skipif(not CURRENT.needs, reason="without fused multiply-adds bits may differ")
@pytest.mark.parametrize(
    "name", [FIRST] + [pytest.param(n, marks=pytest.mark.soak) for n in OTHERS if n != FIRST]
)
def test_a_model_has_the_same_results_under_another_instruction_set(name):
    directory = checkpoint("qwen3")
    code = f"from nanoengine.kernels import isa; isa.use({name!r});"
    code += "import json, sys; from tests.kernels.test_instruction_sets import results;"
    code += "print(json.dumps(results(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, directory],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found, logprobs), (expected, expected_logprobs) = (
        json.loads(done.stdout.splitlines()[-1]), results(directory),
    )  # fmt: skip
    assert found == expected
    for form, of_form in expected_logprobs.items():
        # Why not equal bits: the compiler may reorder the sums of norms. An activation between two
        # integers may then round to the other one in int8, which changed a log-probability by
        # 0.008. The tests above show that quantizers and products are equal.
        tolerance = 1e-5 if form == "float32" else 0.02
        torch.testing.assert_close(logprobs[form], of_form, rtol=0, atol=tolerance)


def logits_digest(directory: str) -> str:
    """The digest of all logits of a few steps."""
    digest = hashlib.sha256()
    with LLM(directory, device="cpu", skip_tokenizer_init=True, num_kv_blocks=16) as llm:
        model = llm.engine.executor.model
        compute = model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = compute(hidden)
            digest.update(found.numpy().tobytes())
            return found

        model.logits = logits
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, (5, 40))]
        llm.generate(prompts, SamplingParams(max_tokens=4, seed=1, logprobs=0), use_tqdm=False)
    return digest.hexdigest()


def test_logits_do_not_depend_on_the_instruction_set_of_torch():
    """With the same `cpu_isa`, all kernels up to the logits are this package's."""
    code = "import sys; from tests.kernels.test_instruction_sets import logits_digest;"
    code += "print(logits_digest(sys.argv[1]))"
    directory, variables = checkpoint("qwen3"), {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", code, directory],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == logits_digest(directory)
