"""The overlapped loop and captured decode steps on a real GPU give the tokens of the eager loop.

The tests use float32, in which other sequences and padding of a batch do not change tokens.
"""

import pytest
import torch

from nanoengine.settings.params import SamplingParams
from tests.support.engines import checkpoint, make_engine, random_prompts, run, tokens

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=2, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, min_p=0.02, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
]
EDITED = SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2, max_tokens=40)
CACHES = [{"kv_cache_gib": 0.1}, {"num_kv_blocks": 24, "block_size": 16}]
"""Enough space for all sequences at once, and so little that some wait."""


def engine_of(**options):
    model = checkpoint("qwen3", head_dim=64)
    defaults = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
    return make_engine(model, **defaults | {"max_num_seqs": 24} | options)


@pytest.mark.parametrize("params", [*PARAMS, EDITED])
@pytest.mark.parametrize("options", CACHES)
def test_overlap_and_graphs_do_not_change_tokens(params, options):
    prompts = random_prompts(30, [1, 7, 16, 33, 90])
    plain = engine_of(enforce_eager=True, overlap=False)
    expected = tokens(run(plain, prompts, params))
    plain.close()
    for eager, overlap in ((True, True), (False, False), (False, True)):
        engine = engine_of(enforce_eager=eager, overlap=overlap, **options)
        assert tokens(run(engine, prompts, params)) == expected, (eager, overlap)
        engine.close()


def test_a_launch_of_decodes_never_synchronizes():
    engine = engine_of(overlap=True, debug_checks=False)
    launch = engine.executor.launch

    def watched(plan):
        if set(plan.num_scheduled_tokens) != {1}:
            return launch(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.executor.launch = watched
    run(engine, random_prompts(8, [5]), [params for params in PARAMS for _ in range(2)])
