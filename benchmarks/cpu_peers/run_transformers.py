"""transformers with static, left-padded batches: the baseline of `bench.py --compare hf`."""

import harness
from harness import Loaded, Options

from nanoengine.bench.workload import WorkItem

BATCH = 32


def start(options: Options) -> Loaded:
    """Loads the checkpoint."""
    import torch
    import transformers

    from benchmarks.suite.hf_baseline import HFBaseline

    torch.set_num_threads(options.threads)
    baseline = HFBaseline(
        str(options.model),
        dummy=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_size=BATCH,
    )
    baseline.model.generation_config.eos_token_id = None  # Why: every output has a given length.

    def generate(requests: list[WorkItem]) -> list[list[int]]:
        return baseline.generate(requests, temperature=0)

    return Loaded(generate=generate, version=transformers.__version__)


if __name__ == "__main__":
    harness.main("transformers", start, ("none",))
