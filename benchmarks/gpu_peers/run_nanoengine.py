"""nanoengine on the standard workload; `--option kv_cache_dtype=fp8` sets options of the engine."""

from __future__ import annotations

import json
from typing import Any

from common import LIMITS, TEMPERATURE, Engine, WorkItem, arguments, run


def options_of(pairs: list[str]) -> dict[str, Any]:
    """`name=value`; the value is JSON, or else a string."""
    found = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def load(model: str, options: dict[str, Any]) -> Engine:
    """The engine, without a tokenizer."""
    from nanoengine import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True, **LIMITS | options)

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

    info = llm.info
    return Engine(generate, {"attention": info.attention_backend, "dtype": info.dtype})


def main() -> None:
    """Prints the JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    run(args, lambda: load(args.model, options_of(args.option)))


if __name__ == "__main__":
    main()
