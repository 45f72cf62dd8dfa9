"""transformers with static, left-padded batches: the baseline of `bench.py --compare hf`."""

import harness
from harness import Loaded, Options
from workloads import Request

BATCH = 32


def start(options: Options) -> Loaded:
    """Loads the checkpoint."""
    import torch
    import transformers

    from nanoengine.cli.hf_baseline import HFBaseline
    from nanoengine.cli.workload import WorkItem

    torch.set_num_threads(options.threads)
    baseline = HFBaseline(
        str(options.model),
        dummy=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_size=BATCH,
    )
    baseline.model.generation_config.eos_token_id = None  # Why: every output has a given length.

    def generate(requests: list[Request]) -> list[list[int]]:
        items = [
            WorkItem(prompt_token_ids=tuple(prompt), max_tokens=count) for prompt, count in requests
        ]
        return baseline.generate(items, temperature=0)

    return Loaded(generate=generate, version=transformers.__version__)


if __name__ == "__main__":
    harness.main("transformers", start, ("none",))
