"""Writes `sample.trace.gz`: `python -m tests.observe.make_sample`.

Run it when the core's plans change, because a trace can only be read by a core that makes the same
plans. The run covers shared prefixes, forks, copies, preemptions and a tier.
"""

from __future__ import annotations

from pathlib import Path

from nanoengine import LLM, HostTier, SamplingParams
from nanoengine.assets import demo_model_path

SAMPLE = Path(__file__).parent / "sample.trace.gz"
LILY = (
    "Once upon a time there was a little girl named Lily. She liked to play with her red ball in"
    " the garden, and every day she "
)
FIRST = [
    LILY + "ran", LILY + "jumped", LILY + "sang", LILY + "ran", LILY + "slept", "The dog",
    "A big bear lived in the forest and he was", LILY + "looked", "Tom had a boat. One day",
    "The sun", LILY + "ran",
]  # fmt: skip
THEN = [LILY + "ran", LILY + "jumped", LILY + "sang"]


def make_params(count: int) -> list[SamplingParams]:
    """Returns parameters with four different lengths; the second and the eighth have n=2."""
    return [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=30 + 8 * (i % 4), ignore_eos=True,
            n=2 if i in (1, 7) else 1,
        )
        for i in range(count)
    ]  # fmt: skip


def main() -> None:
    """Runs the demo model."""
    with LLM(
        demo_model_path(), trace=SAMPLE, block_size=8, num_kv_blocks=20, max_num_seqs=5,
        max_num_batched_tokens=48, watermark_frac=0.0, admission="watermark",
        kv_tiers=[HostTier(gib=0.0004, policy="load")],
    ) as llm:  # fmt: skip
        for prompts in (FIRST, THEN):
            llm.generate(prompts, make_params(len(prompts)), use_tqdm=False)
        print(llm.stats())


if __name__ == "__main__":
    main()
