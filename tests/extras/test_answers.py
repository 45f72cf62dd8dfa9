"""Functions and questions of the Berkeley Function Calling Leaderboard, with forced tool calls.

The data comes with the package bfcl-eval (`pip install --no-deps bfcl-eval`). The demo model gives
no sensible answers. The test shows that each finished answer consists of calls of the given
functions that follow their schemas.
"""

from __future__ import annotations

import collections
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path

CATEGORIES = {
    "simple_python": 90,
    "simple_java": 30,
    "simple_javascript": 20,
    "multiple": 50,
    "parallel": 40,
    "parallel_multiple": 40,
    "live_simple": 40,
    "live_multiple": 40,
}
"""The number of rows per category."""

TYPES = {
    **{"dict": "object", "HashMap": "object", "tuple": "array", "Array": "array"},
    **{"ArrayList": "array", "float": "number", "double": "number", "long": "integer"},
    **{"String": "string", "char": "string", "Boolean": "boolean"},
}
"""The leaderboard's type names that differ from JSON Schema's."""

ENDS = {'"': 32.0, "}": 28.0, "]": 30.0, ",": 20.0}
"""Logit bias for the characters that end JSON values."""

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{{ tools[0]['function']['name'] }}"
)


def schema(given: Any) -> Any:
    """Converts a leaderboard schema to JSON Schema; an unknown type allows any value."""
    if isinstance(given, list):
        return [schema(one) for one in given]
    if not isinstance(given, dict):
        return given
    found = {key: schema(value) for key, value in given.items()}
    kind = found.get("type")
    if isinstance(kind, str):
        found["type"] = TYPES.get(kind, kind)
        if kind in ("any", ""):
            del found["type"]
    return found


def rows(folder: Path, counts: dict[str, int]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yields id, question, tools."""
    for name, count in counts.items():
        lines = (folder / f"BFCL_v4_{name}.json").read_text(encoding="utf-8").splitlines()
        for line in lines[:: max(len(lines) // count, 1)][:count]:
            row = json.loads(line)
            tools = [
                {"type": "function", "function": one | {"parameters": schema(one["parameters"])}}
                for one in row["function"]
            ]
            yield row["id"], row["question"][0][-1]["content"], tools


def outcome(completion: Any, tools: list[dict[str, Any]]) -> str:
    """Returns the outcome of an answer; raises if a finished one violates its schema."""
    if completion.error is not None:
        return completion.error
    if completion.finish_reason == "length":
        assert completion.parse_error or completion.tool_calls
        return "cut"
    assert completion.parse_error is None
    assert completion.tool_calls
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in completion.tool_calls:
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]]
        )
    return "valid"


def count(folder: Path, llm: LLM, max_tokens: int) -> collections.Counter[str]:
    """Counts the outcomes; there is one call per row, with the row's tools."""
    found = collections.Counter[str]()
    encode = llm.get_tokenizer().encode
    # Why: without the bias, the model never ends a string or a number.
    bias = {encode(mark, add_special_tokens=False)[-1]: size for mark, size in ENDS.items()}
    for number, (name, question, tools) in enumerate(rows(folder, CATEGORIES)):
        (output,) = llm.chat(
            [{"role": "user", "content": question[:400]}],
            SamplingParams(temperature=2, max_tokens=max_tokens, seed=number, logit_bias=bias),
            tools=tools,
            tool_choice="required",
            chat_template=TEMPLATE,
            use_tqdm=False,
            on_error="record",
        )
        try:
            found[outcome(output.outputs[0], tools)] += 1
        except Exception as error:
            raise AssertionError(f"{name}: {output.outputs[0]}") from error
    return found


@pytest.mark.extra
def test_enforced_tool_calls_match_their_schemas() -> None:
    """Of 350 rows, none is refused and no finished one violates a schema; some are truncated."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None:
        pytest.skip("bfcl-eval is not installed")
    with LLM(demo_model_path()) as llm:
        found = count(Path(str(spec.origin)).parent / "data", llm, max_tokens=300)
    assert found.keys() == {"valid", "cut"} and found.total() == sum(CATEGORIES.values())
    assert found["valid"] > 250
