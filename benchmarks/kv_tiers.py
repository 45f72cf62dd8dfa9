"""What KV tiers save: `python benchmarks/kv_tiers.py --model small`.

    restart   questions on documents, after a restart: with a disk tier that contains the documents'
              blocks, and without tiers; the time to first token is reported as well
    preempt   more requests than the pool can hold: preempted requests are loaded from host memory
              or recomputed. With `admission="watermark"`, because the default policy avoids
              preemptions

Every run is a new engine; loading the model is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from side_by_side import Clock, Run, compare, model_options, parser, report

from nanoengine import LLM, DiskTier, HostTier, SamplingParams
from nanoengine.settings.tiers import Tier


def timed(
    options: dict[str, Any], tiers: Sequence[Tier], prompts: list[list[int]], output_len: int
) -> Run:
    """One run on a new engine."""
    with LLM(**options, kv_tiers=tuple(tiers)) as llm:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        clock = Clock()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock.read()
        stats = llm.stats()
    first = [output.metrics.ttft_s for output in outputs if output.metrics]
    return Run(
        seconds=seconds | {"first token": statistics.mean(first)},
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        counts={
            "prefill tokens": stats.prefill_tokens,
            "preemptions": stats.preemptions,
            **{f"blocks loaded from {t.name}": t.loaded_blocks for t in stats.tiers},
            **{f"stored in {t.name}": t.stored_blocks for t in stats.tiers},
        },
    )


def restart(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Requests on documents whose blocks were stored on disk by an earlier process."""
    draw = random.Random(0)
    documents = [
        [draw.randrange(10, 200) for _ in range(args.prefix_len)] for _ in range(args.documents)
    ]
    prompts = [
        document + [draw.randrange(10, 200) for _ in range(16)]
        for document in documents
        for _ in range(args.num_requests)
    ]
    with tempfile.TemporaryDirectory() as directory:
        tiers = [HostTier(gib=args.host_gib), DiskTier(directory, gib=args.disk_gib)]
        timed(options, tiers, prompts, 1)  # fills the directory
        return compare(
            f"restart: {args.documents} documents of {args.prefix_len} tokens,"
            f" {args.num_requests} questions on each, {args.output_len} out",
            {
                "disk tier": lambda: timed(options, tiers, prompts, args.output_len),
                "no tier": lambda: timed(options, (), prompts, args.output_len),
            },
            args.rounds,
        )


def preempt(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """More requests than blocks: all prompts fit, but not with their outputs.

    Why the outputs are long: a preempted sequence finds its blocks on the device until other
    sequences have used them.
    """
    draw = random.Random(1)
    length, size, output_len = args.prefix_len, options["block_size"], args.grow_by
    prompts = [[draw.randrange(10, 200) for _ in range(length)] for _ in range(args.growing)]
    pool = {
        "num_kv_blocks": (-(-length // size) + 1) * len(prompts) + 1,
        "max_model_len": length + output_len,
        "watermark_frac": 0.0,
        "admission": "watermark",
    }
    tiers = [HostTier(gib=args.host_gib)]
    return compare(
        f"preempt: {len(prompts)} prompts of {length} tokens, {output_len} out,"
        f" {pool['num_kv_blocks'] - 1} blocks of {size}",
        {
            "host tier": lambda: timed(options | pool, tiers, prompts, output_len),
            "no tier": lambda: timed(options | pool, (), prompts, output_len),
        },
        args.rounds,
    )


PAIRS = {"restart": restart, "preempt": preempt}


def main() -> None:
    """Runs the pairs and prints them."""
    options = parser(__doc__)
    options.add_argument("--block-size", type=int, default=16)
    options.add_argument("--prefix-len", type=int, default=512)
    options.add_argument("--documents", type=int, default=1)
    options.add_argument("--num-requests", type=int, default=8, help="on each document")
    options.add_argument("--output-len", type=int, default=16)
    options.add_argument("--growing", type=int, default=6, help="requests of the preempt pair")
    options.add_argument("--grow-by", type=int, default=256, help="tokens that these generate")
    options.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    options.add_argument("--host-gib", type=float, default=1.0)
    options.add_argument("--disk-gib", type=float, default=4.0)
    args = options.parse_args()
    with model_options(args) as model:
        model["block_size"] = args.block_size
        report(args, [PAIRS[name](args, model) for name in args.pairs])


if __name__ == "__main__":
    main()
