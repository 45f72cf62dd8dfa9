"""Models of every kind on a GPU that is not there. Whatever the engine does, tokens and
log-probabilities are those of plain torch on the CPU; decodes are graphs; launches are counted.

And every family through Triton's compiler, see `support/compiling_gpu.py`: a launch that can't be
bound or compiled, or that fails for one kind of step, can't be seen in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from nanoengine import SamplingParams
from nanoengine.attention import triton_latent
from nanoengine.core.plan import StepPlan
from nanoengine.runner.decode_step import DecodeStep
from tests.models.test_latent import STORED_SIZES
from tests.support.attention_cases import DEVICE
from tests.support.checkpoints import FAMILIES
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.gpu_tokens import ON_GPU, PROMPTS, SIZES, check_tokens
from tests.support.quantized_checkpoints import write_case

pytestmark = [pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one"),
              pytest.mark.timeout(600)]  # fmt: skip
EMULATED = pytest.mark.guards(  # Why: the interpreter takes a minute.
    "nanoengine/*/triton*.py", "nanoengine/models/*.py", "nanoengine/runner/states.py",
    "nanoengine/runner/decode_step.py", "nanoengine/runner/graphs.py",
    "tests/support/emulated_gpu.py", "tests/support/gpu_tokens.py",
)  # fmt: skip
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CHUNKS = {"max_num_batched_tokens": 21}
FORKED = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
CASES = [
    ("qwen3", greedy(12), {"num_kv_blocks": 7}),
    # Latents.
    ("deepseek_v2", greedy(4), {"fields": GROUPS}),
    ("deepseek_v3", greedy(4), CHUNKS),
    ("glm4_moe_lite", greedy(3), {}),
    ("minicpm3", greedy(4), {}),
    ("minicpm3", greedy(3), {"deterministic": True}),
    ("youtu", greedy(12), {"num_kv_blocks": 7}),
    # Recurrent states.
    *(("lfm2", params, options) for params, options in (
        (greedy(6), {}), (greedy(6), CHUNKS), (greedy(12), {"num_kv_blocks": 7}), (FORKED, {}),
    )),
    *((family, greedy(6), CHUNKS) for family in ("qwen3_5", "falcon_h1", "nemotron_h")),
    ("bamba", greedy(12), {"num_kv_blocks": 7}),
    # Layers of two head sizes, with windows, and with keys of an earlier layer.
    ("gemma4", greedy(4), CHUNKS),
    ("gemma4", SCORED, {"runs": 1}),
    ("gemma4", greedy(3), {"runs": 1, "replays": 0, "deterministic": True}),
    # Experts; in the second a step is a chunk of a prompt alone, whose rows give no logits.
    *((family, greedy(4), {}) for family in ("qwen3_moe", "phimoe")),
    ("qwen2_moe", greedy(4), {"max_num_batched_tokens": 16, "long_prefill_threshold": 16}),
    ("gemma4_moe", greedy(4), CHUNKS),
]  # fmt: skip


@pytest.fixture
def short_splits(monkeypatch):
    """Contexts of these lengths are split."""
    whole = triton_latent.latent_config
    monkeypatch.setattr(
        triton_latent, "latent_config", lambda *of: replace(whole(*of), split_tokens=16)
    )


@EMULATED
@pytest.mark.parametrize(("family", "params", "options"), CASES)
def test_tokens_are_those_of_the_cpu(short_splits, family, params, options):
    gpu, stats = check_tokens(family, params, **options)
    assert options.get("runs") == 1 or stats.cache_hit_tokens > 16
    assert (stats.preemptions > 0) is ("num_kv_blocks" in options)
    if "kv_lora_rank" in FAMILIES[family][1]:
        assert ("bmm" in gpu.kernels) is not options.get("deterministic", False)


@EMULATED
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_log_probabilities_are_those_of_the_cpu(family):
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def found(**options):
        engine = make_engine(
            checkpoint(family), **SIZES, num_kv_blocks=20, max_num_batched_tokens=16, **options
        )
        results = run(engine, PROMPTS[:3], asked)
        engine.close()
        return [
            [entry.logprob for entries in result.prompt_logprobs for entry in entries]
            for result in results
        ]

    expected = found(attention_backend="naive")
    with EmulatedGPU():
        ours = found(**ON_GPU)
    for mine, its in zip(ours, expected, strict=True):
        assert mine == pytest.approx(its, abs=2e-4)


@EMULATED
def test_launches_of_a_layer():
    """A dense family, a prompt and decodes outside of graphs, whose contexts are not split: 14 a
    layer, its MLP included. The fourth step has nothing to run."""
    launches = {}
    with EmulatedGPU() as gpu:
        for layers in (1, 3):
            engine = make_engine(
                checkpoint("youtu", num_hidden_layers=layers), **SIZES, **ON_GPU,
                num_kv_blocks=40, enforce_eager=True,
            )  # fmt: skip
            prompt = random_prompts(1, [20])[0]
            engine.add_request("0", prompt, greedy(3))
            launches[layers] = []
            while engine.has_unfinished():
                gpu.kernels.clear()
                engine.step()
                launches[layers].append(dict(gpu.kernels))
            engine.close()
    expected = {
        "mm": 6, "rms_norm_kernel": 3, "turn_latents_kernel": 1, "bmm": 2, "latent_kernel": 1,
        "gate_kernel": 1,
    }  # fmt: skip
    assert len(launches[1]) == 4
    for one, three in list(zip(launches[1], launches[3], strict=True))[:3]:
        found = Counter(three) - Counter(one)
        assert found == {name: 2 * count for name, count in expected.items()}


@EMULATED
def test_two_ranks_give_the_tokens_of_one():
    """In the interpreter alone: the emulated card is one. By processes: the interpreter is not made
    for threads."""
    directory, prompts = checkpoint("deepseek_v3"), PROMPTS[2:]
    one = make_engine(directory, **SIZES, num_kv_blocks=20)
    expected = tokens(run(one, prompts, greedy(3)))
    two = make_engine(
        directory, **SIZES, num_kv_blocks=20, attention_backend="triton", tensor_parallel_size=2
    )
    assert tokens(run(two, prompts, greedy(3))) == expected
    two.close()


@EMULATED
def test_a_model_stored_in_fp8_gives_the_tokens_of_its_float_weights(tmp_path):
    """In blocks of 128 x 128, as DeepSeek-V3 is."""
    floats = write_case(tmp_path, "block", "deepseek_v3", **STORED_SIZES)
    plain = make_engine(str(floats), **SIZES, num_kv_blocks=9, attention_backend="naive")
    expected = tokens(run(plain, PROMPTS[2:3], greedy(3)))
    with EmulatedGPU() as gpu:
        engine = make_engine(str(tmp_path / "quantized"), **SIZES, **ON_GPU, num_kv_blocks=9)
        assert tokens(run(engine, PROMPTS[2:3], greedy(3))) == expected
        engine.close()
        assert gpu.num_allocated == 0


@EMULATED
@pytest.mark.parametrize(("family", "most"), [("qwen3_5", 60), ("lfm2", 50), ("bamba", 60)])
def test_launches_do_not_depend_on_the_number_of_prompts(family, most):
    """By the step: all prompts, then decodes, of which the first has new rows to bring up."""
    directory, launches = checkpoint(family), []
    with EmulatedGPU() as gpu:
        engine = make_engine(directory, **SIZES, **ON_GPU, num_kv_blocks=40)
        for lengths in ([20], [9, 2, 11]):
            launches.append([])
            for prompt in random_prompts(len(lengths), lengths):
                engine.add_request(str(prompt), prompt, greedy(3))
            while engine.has_unfinished():
                gpu.kernels.clear()
                engine.step()
                launches[-1].append(sum(gpu.kernels.values()))
        engine.close()
    assert launches[0] == launches[1]
    prompts, *decodes = launches[0]
    assert prompts <= most
    assert max(decodes) <= 9


@EMULATED
def test_a_decode_that_reads_what_another_one_writes_is_no_graph():
    """The second sequence has found the state that the first one is to leave behind block 0, and
    computes one token from there on; the third is a stranger."""
    directory = checkpoint("lfm2")
    with EmulatedGPU():
        engine = make_engine(directory, **SIZES, **ON_GPU, num_kv_blocks=40)
        step: DecodeStep = engine.executor.graphed.step
        rows = engine.executor.rows
        rows.block_tables[-1, 0, 0] = rows.block_tables[-1, 1, 0] = 40
        rows.block_tables[-1, 1, 1], rows.block_tables[-1, 2, 0] = 41, 42
        late, apart = StepPlan(step=0), StepPlan(step=0)
        for plan, row in ((late, 1), (apart, 2)):
            plan.add(0, 15, 1, num_logits=1)
            plan.add(row, 17 - row, 1, num_logits=1)
        assert step.fits(apart)
        assert not step.fits(late)
        engine.close()


ROOT = Path(__file__).parents[2]
ODD = [
    'gemma4 {"head_dim": 8, "global_head_dim": 40}',
    'youtu {"kv_lora_rank": 33, "qk_rope_head_dim": 6, "qk_nope_head_dim": 5, "v_head_dim": 7,'
    ' "vocab_size": 257}',
]
"""Sizes that are no powers of two, and less than what a matrix product of a GPU takes at least."""


@pytest.mark.guards(
    "nanoengine/attention/*.py", "nanoengine/kernels/triton*.py", "nanoengine/layers/*.py",
    "nanoengine/models/*.py", "nanoengine/runner/*.py", "nanoengine/runner/sampling/*.py",
    "tests/data/models.yaml", "tests/support/*_gpu.py",
)  # fmt: skip
def test_every_family_starts_and_runs_on_a_gpu_in_bfloat16(tmp_path):
    """Their prompts are longer than a step's budget: mixtures of experts once died of a step that
    was a chunk alone."""
    families = [*FAMILIES, *ODD]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compiling_gpu", *families]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["family"] for row in rows] == families
    for row in rows:
        assert "error" not in row, row
        assert row["launches"] > 100, row
        assert not (row["disorder"] or row["left"] or row["waits"]), row
    assert sum(row["compiled"] for row in rows) > 50
