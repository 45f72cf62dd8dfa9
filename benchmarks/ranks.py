"""What ranks cost on one machine: `python benchmarks/ranks.py --model small`.

The same decodes with one rank and with two (or `--ranks`) over gloo, alternating, in float32.
Layers are not fused in either, because ranks do not support fused layers. Each rank has its share
of the CPU's threads, and the total computation is equal, so the difference is the cost of pipes,
processes and all-reduces. `fused` is one rank with the default settings.

If the number of KV heads of a shape is not divisible by the ranks, it gets as many KV heads as
query heads: `small` has 10 instead of 5.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from side_by_side import Run, compare, model_options, parser, report

from nanoengine.layers.cpu_decoder import FusedLayers
from nanoengine.llm import LLM
from nanoengine.settings.params import SamplingParams


def plain_layers(**options: Any) -> LLM:
    """An LLM with one rank whose layers are not fused."""
    with mock.patch.object(FusedLayers, "supports", return_value=False):
        return LLM(**options)


def split_heads(directory: Path, ranks: int) -> None:
    """Changes a shape's config.json so that the ranks divide its KV heads."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["num_key_value_heads"] % ranks:
        config["num_key_value_heads"] = config["num_attention_heads"]
        file.write_text(json.dumps(config), encoding="utf-8")


def decodes(llm: LLM, num_seqs: int, num_tokens: int) -> Callable[[], Run]:
    """Sequences with a short prompt, and the seconds of a step of all of them."""
    prompts = [{"prompt_token_ids": [7 + i, 8, 9, 10]} for i in range(num_seqs)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def run() -> Run:
        llm.reset_prefix_cache()
        steps = llm.stats().steps
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        steps = llm.stats().steps - steps
        tokens = [output.outputs[0].token_ids for output in outputs]
        return Run(seconds={"a step": seconds / steps}, tokens=tokens, counts={"steps": steps})

    return run


def main() -> None:
    """Compares with one row per step, and with several."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    args = options.parse_args()
    with model_options(args) as llm_options:
        if llm_options.get("load_format") == "dummy":
            split_heads(Path(llm_options["model"]), args.ranks)
        llm_options |= {
            "dtype": "float32",
            "device": "cpu",
            "num_kv_blocks": 256,
            "max_num_seqs": 32,
        }
        variants = {
            "one rank": plain_layers(**llm_options),
            f"{args.ranks} ranks": LLM(**llm_options, tensor_parallel_size=args.ranks),
            "fused": LLM(**llm_options),
        }
        found = []
        for rows in args.rows:
            each = {
                variant: decodes(llm, rows, args.max_tokens) for variant, llm in variants.items()
            }
            found.append(compare(f"decodes, {rows} rows per step", each, args.rounds))
        for llm in variants.values():
            llm.close()
    report(args, found)


if __name__ == "__main__":
    main()
