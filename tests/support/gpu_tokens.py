"""One model on the emulated GPU beside the same one by plain torch on the CPU.

Used by the tests of layers that are more than attention and an MLP: `tests/runner/test_gpu_*.py`.
"""

from __future__ import annotations

from typing import Any

from nanoengine.core.engine_stats import EngineStats
from nanoengine.settings.params import SamplingParams
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, make_engine, random_prompts, run, tokens

SIZES: dict[str, Any] = {
    "max_num_seqs": 3, "max_model_len": 64, "block_size": 16, "dtype": "float32"
}  # fmt: skip
ON_GPU = {"device": "cuda", "attention_backend": "triton"}
WAIT = {"event.synchronize, runner/transfers.py wait"}
"""The one for sampled tokens."""
[_SHARED] = random_prompts(1, [36], seed=3)
PROMPTS = [_SHARED + tail for tail in random_prompts(2, [7, 1], seed=4)]
PROMPTS += random_prompts(2, [13, 1], seed=5)
"""Two that begin alike, and two short ones."""


def check_tokens(
    family: str,
    params: SamplingParams,
    prompts: list[list[int]] = PROMPTS,
    fields: dict[str, Any] | None = None,
    replays: int = 4,
    runs: int = 2,
    **options: Any,
) -> tuple[EmulatedGPU, EngineStats]:
    """Holds tokens of equal runs to those of the CPU, one prompt at a time; that nothing waits but
    for tokens, more than `replays` decodes are graphs, and no memory is left.

    Args:
        fields: of the model's config.
        options: of the engine on the GPU.
    """
    directory, options = checkpoint(family, **(fields or {})), {"num_kv_blocks": 60} | options
    plain = make_engine(
        directory, **SIZES, num_kv_blocks=60, attention_backend="naive",
        enable_prefix_caching=False,
    )  # fmt: skip
    expected = [tokens(run(plain, [prompt], params))[0] for prompt in prompts]
    with EmulatedGPU() as gpu:
        engine = make_engine(directory, **SIZES, **ON_GPU, **options)
        gpu.waits.clear()
        for _ in range(runs):
            assert tokens(run(engine, prompts, params)) == expected
        scored = params.prompt_logprobs is not None  # what they ask for is fetched when it is there
        assert scored or (set(gpu.waits) == WAIT and gpu.num_replayed > replays)
        stats = engine.stats()
        engine.close()
        assert not gpu.disorder
        assert gpu.num_allocated == 0
    return gpu, stats
