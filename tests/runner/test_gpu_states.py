"""Models whose layers keep states, on a GPU that is not there: whatever the engine does, tokens are
those of the CPU; decodes are graphs, and the prompts of a step take as many launches as one."""

from __future__ import annotations

import pytest

from nanoengine import SamplingParams
from nanoengine.core.plan import StepPlan
from nanoengine.runner.decode_step import DecodeStep
from tests.support.attention_cases import DEVICE
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts
from tests.support.gpu_tokens import ON_GPU, SIZES, check_tokens

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one"),
    # Why: the interpreter takes half a minute.
    pytest.mark.guards(
        "nanoengine/*/triton*.py",
        "nanoengine/models/states.py",
        "nanoengine/models/mamba.py",
        "nanoengine/runner/states.py",
        "nanoengine/runner/decode_step.py",
        "nanoengine/runner/graphs.py",
        "tests/support/emulated_gpu.py",
        "tests/support/gpu_tokens.py",
    ),
]
FORKED = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
CASES = {
    "hits": ({"num_kv_blocks": 60}, greedy(6)),
    "chunks": ({"num_kv_blocks": 60, "max_num_batched_tokens": 21}, greedy(6)),
    "small": ({"num_kv_blocks": 7}, greedy(12)),
    "forks": ({"num_kv_blocks": 60}, FORKED),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("lfm2", case) for case in CASES),
        *((family, "chunks") for family in ("qwen3_5", "falcon_h1", "nemotron_h")),
        ("bamba", "small"),
    ],
)
def test_tokens_are_those_of_the_cpu(family, case):
    options, params = CASES[case]
    _, stats = check_tokens(family, params, replays=8, **options)
    assert stats.cache_hit_tokens > 16
    assert (stats.preemptions > 0) is (case == "small")


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
