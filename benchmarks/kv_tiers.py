"""What KV tiers save: `python benchmarks/kv_tiers.py MODEL`.

Two pairs, run in turn (A B A B), medians of wall seconds and their ratio:

    restart   requests on a shared prefix after a restart: disk tier warm, or no tier
    preempt   a pool that holds a fraction of the requests: host tier, or recomputation

Each run makes a new engine; loading the model is not counted. Greedy tokens are compared: a run
that gives others is an error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from nanoengine import LLM, DiskTier, HostTier, SamplingParams
from nanoengine.tier_config import Tier


def timed(
    args: argparse.Namespace, tiers: Sequence[Tier], prompts: list[list[int]], **options: Any
) -> tuple[float, list[list[int]], dict[str, int]]:
    """Seconds, tokens, and counts of one run on a new engine."""
    with LLM(
        args.model,
        kv_tiers=tuple(tiers),
        skip_tokenizer_init=True,
        load_format=args.load_format,
        attention_backend=args.attention_backend,
        block_size=args.block_size,
        **options,
    ) as llm:
        # Why: kernels compile and caches fill at the first use; of other tokens, to hit nothing.
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        stats = llm.stats()
    counts = {"hit_tokens": stats.cache_hit_tokens, "preemptions": stats.preemptions,
              "prefill_tokens": stats.prefill_tokens}  # fmt: skip
    counts |= {f"{tier.name}_loaded_blocks": tier.loaded_blocks for tier in stats.tiers}
    return seconds, [list(output.outputs[0].token_ids) for output in outputs], counts


def compare(name: str, rounds: int, with_tier: Any, without: Any) -> dict[str, Any]:
    """Runs both in turn and sets them side by side.

    Raises:
        RuntimeError: they gave different tokens.
    """
    times: dict[str, list[float]] = {"with_tier": [], "without": []}
    counts = {}
    for _ in range(rounds):
        tokens = {}
        for which, one in (("with_tier", with_tier), ("without", without)):
            seconds, tokens[which], counts[which] = one()
            times[which].append(seconds)
        if tokens["with_tier"] != tokens["without"]:
            raise RuntimeError(f"{name}: the tier changed the tokens")
    medians = {which: statistics.median(values) for which, values in times.items()}
    return {
        "name": name,
        "seconds": times,
        "median_s": medians,
        "speedup": medians["without"] / medians["with_tier"],
        "counts": counts,
    }


def restart(args: argparse.Namespace) -> dict[str, Any]:
    """Requests on a shared prefix, after a restart on a directory that holds the prefix."""
    draw = random.Random(0)
    prefix = [draw.randrange(10, 200) for _ in range(args.prefix_len)]
    prompts = [
        prefix + [draw.randrange(10, 200) for _ in range(16)] for _ in range(args.num_requests)
    ]
    with tempfile.TemporaryDirectory() as directory:
        tiers = [HostTier(gib=args.host_gib), DiskTier(directory, gib=args.disk_gib)]
        timed(args, tiers, prompts)  # fills the directory
        return compare(
            "restart",
            args.rounds,
            lambda: timed(args, tiers, prompts),
            lambda: timed(args, (), prompts),
        )


def preempt(args: argparse.Namespace) -> dict[str, Any]:
    """More requests than blocks: those that are preempted come back from the host, or do not."""
    draw = random.Random(1)
    length = args.prefix_len
    prompts = [
        [draw.randrange(10, 200) for _ in range(length)] for _ in range(2 * args.num_requests)
    ]
    each = -(-(length + args.output_len) // args.block_size)
    prompt_blocks = -(-length // args.block_size)
    # Prompts of all fit, so that all start; what they grow to does not.
    pool = {
        "num_kv_blocks": max(prompt_blocks * len(prompts), each) + 2,
        "max_model_len": length + args.output_len,
        "watermark_frac": 0.0,
    }
    return compare(
        "preempt",
        args.rounds,
        lambda: timed(args, [HostTier(gib=args.host_gib)], prompts, **pool),
        lambda: timed(args, (), prompts, **pool),
    )


def main() -> None:
    """Runs both pairs and prints them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prefix-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-gib", type=float, default=1.0)
    parser.add_argument("--disk-gib", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object a pair")
    args = parser.parse_args()
    for pair in (restart, preempt):
        found = pair(args)
        if args.json:
            print(json.dumps(found))
            continue
        medians = found["median_s"]
        print(
            f"{found['name']:<8} with tier {medians['with_tier']:.3f} s, without"
            f" {medians['without']:.3f} s: {found['speedup']:.2f} times as fast"
        )
        for which, counts in found["counts"].items():
            print(f"         {which:<9} " + ", ".join(f"{v} {k}" for k, v in counts.items()))


if __name__ == "__main__":
    main()
