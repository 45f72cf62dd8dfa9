"""What a grammar costs: `python benchmarks/structured.py --model small`.

W1 of `cpu_peers` (32 requests, prompts of 64 to 256 tokens, outputs of 32 to 128), greedy, in two
variants that alternate in one engine:

    free        any token is allowed
    structured  each request has its own JSON schema, new in each round: objects of texts, numbers
                and choices, in a list that is too long for the output

Both sample the same number of tokens. The time to compile the schemas counts; the tokenizer's
tables are built in the first round, which does not count. The texts differ.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from side_by_side import Clock, Run, compare, model_options, parser, report

from benchmarks.suite.shapes import SHAPES
from benchmarks.suite.workloads import requests_of
from nanoengine.bench.workload import WorkItem
from nanoengine.llm import LLM
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.structured import StructuredOutputs

sys.path.insert(0, str(Path(__file__).parent / "cpu_peers"))

from checkpoints import make_tokenizer


def schema(number: int) -> dict[str, Any]:
    """One of many different schemas; a complete text has at least 200 objects."""
    fields: dict[str, Any] = {
        f"title{number}": {"type": "string", "maxLength": 10 + number % 7},
        "count": {"type": "integer", "minimum": -number, "maximum": 1000 + number},
        "kind": {"enum": [f"kind {i}" for i in range(2 + number % 5)]},
        "share": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    }
    names = list(fields)[: 2 + number % 4]
    one = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
    return {"type": "array", "items": one, "minItems": 200}


def timed(llm: LLM, requests: list[WorkItem], schemas: list[dict[str, Any] | None]) -> Run:
    """One run with an empty cache."""
    llm.reset_prefix_cache()
    clock = Clock()
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=count,
            detokenize=False,
            ignore_eos=schema is None,
            structured_outputs=schema and StructuredOutputs(json=schema),
        )
        for (_, count), schema in zip(requests, schemas, strict=True)
    ]
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    seconds = clock.read()
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(ids) for ids in tokens] == [count for _, count in requests]
    return Run(seconds=seconds, tokens=tokens, counts={"output tokens": sum(map(len, tokens))})


def _add_tokenizer(directory: Path) -> None:
    """Gives a shape the tokenizer of the peers; its EOS ends complete texts."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    tokenizer = make_tokenizer(config["vocab_size"])
    path.write_text(json.dumps(config | {"eos_token_id": tokenizer.eos_token_id}))
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Runs both, alternating, and prints a table."""
    options = parser(__doc__)
    args = options.parse_args()
    numbers = itertools.count()
    with model_options(args) as model:
        if args.model in SHAPES:
            _add_tokenizer(Path(model["model"]))
        model |= {"skip_tokenizer_init": False}
        with LLM(**model, dtype="float32", device="cpu") as llm:
            requests = requests_of("W1", vocab_size=llm.info.vocab_size)
            found = compare(
                f"W1, {len(requests)} schemas",
                {
                    "free": lambda: timed(llm, requests, [None] * len(requests)),
                    "structured": lambda: timed(
                        llm, requests, [schema(next(numbers)) for _ in requests]
                    ),
                },
                args.rounds,
            )
        report(args, [found])


if __name__ == "__main__":
    main()
