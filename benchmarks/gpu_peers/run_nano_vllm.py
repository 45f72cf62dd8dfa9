"""nano-vllm on the standard workload, with selectable attention kernels.

It uses the package flash_attn, which takes long to build. `--kernels fa3` and `--kernels triton`
replace it by the folder shim/: the same two functions with vLLM's FlashAttention-3 or nanoengine's
Triton kernels, so that two engines can be compared with the same kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import LIMITS, TEMPERATURE, Engine, WorkItem, arguments, finish, run


def load(model: str, kernels: str, eager: bool) -> Engine:
    """The engine; it requires a tokenizer."""
    if kernels != "flash_attn":
        os.environ["FLASH_ATTN_SHIM"] = kernels
        sys.path.insert(0, str(Path(__file__).parent / "shim"))
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, enforce_eager=eager, **LIMITS)

    def generate(items: list[WorkItem]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=i.max_tokens, ignore_eos=True)
            for i in items
        ]
        prompts = [list(item.prompt_token_ids) for item in items]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output["token_ids"]) for output in outputs]

    return Engine(generate, {"attention": kernels, "eager": eager})


def main() -> None:
    """Prints the JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--kernels", choices=("flash_attn", "fa3", "triton"), default="flash_attn")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    run(args, lambda: load(args.model, args.kernels, args.eager))
    finish()


if __name__ == "__main__":
    main()
