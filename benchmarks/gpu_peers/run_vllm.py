"""vLLM on the standard workload, offline: `vllm.LLM.generate` with token ids in and out."""

from __future__ import annotations

import os

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

from common import LIMITS, TEMPERATURE, Engine, WorkItem, arguments, finish, run


def load(model: str) -> Engine:
    """The engine with graphs and its default compilation."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, seed=0, **LIMITS)

    def generate(items: list[WorkItem]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=TEMPERATURE, max_tokens=i.max_tokens, ignore_eos=True, detokenize=False
            )
            for i in items
        ]
        prompts = [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    processes = "one" if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else "two"
    return Engine(generate, {"processes": processes})


def main() -> None:
    """Prints the JSON line."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--one-process", action="store_true", help="the core in the process of the front end"
    )
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if args.one_process else "1"
    run(args, lambda: load(args.model))
    finish()


if __name__ == "__main__":
    main()
