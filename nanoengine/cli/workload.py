"""What a benchmark runs: requests (prompt ids, output lengths), and shapes for random weights.

Called by `cli/bench.py` and `cli/simulate.py`; knows neither the engine nor torch. Requests are
made as they are pulled, so that a workload of any length takes little memory.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoengine.cli.draws import Draws
from nanoengine.errors import ConfigError

DRAWN_IDS = 10_000
"""Random prompt ids are drawn from 0 ... 10,000, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One request: prompt ids, and exactly `max_tokens` tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def random_workload(
    num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int
) -> Iterator[WorkItem]:
    """Independent random prompts. With the benchmark's defaults, the field's standard workload.

    The order of the draws is part of the workload: for each request its length and then its ids,
    and all output lengths after the last prompt. Why twice: the outputs' lengths are known at once
    and the prompts, which are large, are made one by one as they are pulled.
    Source: nano-vllm `bench.py`, whose published figures use it.

    >>> items = list(random_workload(256, (100, 1024), (100, 1024), seed=0))
    >>> sum(len(i.prompt_token_ids) for i in items), sum(i.max_tokens for i in items)
    (142827, 133966)
    """
    ahead, draw = Draws(seed), Draws(seed)
    for _ in range(num_requests):
        _draw_prompt(ahead, input_len)
    for length in ahead.integers(*output_len, num_requests).tolist():
        ids = tuple(_draw_prompt(draw, input_len).tolist())
        yield WorkItem(prompt_token_ids=ids, max_tokens=length)


def _draw_prompt(draw: Draws, input_len: tuple[int, int]) -> NDArray[np.int64]:
    return draw.integers(0, DRAWN_IDS, int(draw.integers(*input_len, 1)[0]))


def shared_prefix_workload(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    *,
    prefix_len: int,
    seed: int,
) -> Iterator[WorkItem]:
    """Random prompts behind one common prefix; `input_len` counts each request's own tokens."""
    draw = random.Random(seed)
    prefix = tuple(draw.randint(0, DRAWN_IDS) for _ in range(prefix_len))
    for own in random_workload(num_requests, input_len, output_len, draw.randrange(2**32)):
        yield WorkItem(prompt_token_ids=prefix + own.prompt_token_ids, max_tokens=own.max_tokens)


def jsonl_workload(
    path: Path,
    num_requests: int,
    output_len: tuple[int, int],
    seed: int,
    encode: Callable[[str], SequenceOf[int]],
) -> Iterator[WorkItem]:
    """Requests of a JSON-lines file: `prompt` or `prompt_token_ids`, and `max_tokens` if given.

    Where it is not, the output length is drawn.

    Raises:
        ConfigError: a line has neither kind of prompt, or is no JSON object.
    """
    draw = random.Random(seed)
    with path.open(encoding="utf-8") as file:
        for number, row in _rows((line.strip() for line in file), num_requests):
            try:
                record = json.loads(row)
                has_ids = "prompt_token_ids" in record
                ids = record["prompt_token_ids"] if has_ids else record["prompt"]
                ids = encode(ids) if isinstance(ids, str) else ids
                length = int(record.get("max_tokens", draw.randint(*output_len)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number} must be a JSON object with prompt or prompt_token_ids"
                    f" ({type(error).__name__}: {error})"
                ) from error
            yield WorkItem(prompt_token_ids=tuple(ids), max_tokens=length)


def csv_workload(path: Path, num_requests: int, seed: int) -> Iterator[WorkItem]:
    """Random prompts with the lengths of a CSV file, columns ContextTokens and GeneratedTokens.

    These are the columns of the Azure LLM inference traces, so that real lengths can be replayed.

    Raises:
        ConfigError: a column is missing or holds no positive integer.
    """
    draw = Draws(seed)
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in _rows(csv.DictReader(file), num_requests):
            try:
                inputs, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(inputs, outputs) < 1:
                    raise ValueError("a length below 1")
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}: row {number} must hold integers of at least 1 in ContextTokens and"
                    f" GeneratedTokens, got {row}"
                ) from error
            ids = tuple(draw.integers(0, DRAWN_IDS, inputs).tolist())
            yield WorkItem(prompt_token_ids=ids, max_tokens=outputs)


def _rows(rows: Any, num_requests: int) -> Any:
    """The first `num_requests` non-empty rows, numbered from 1."""
    return islice(((number, row) for number, row in enumerate(rows, 1) if row), num_requests)


def fit(
    items: SequenceOf[WorkItem], vocab_size: int, max_model_len: int, *, cap: bool
) -> tuple[list[WorkItem], list[str]]:
    """The items as this model can run them, and notes for the reader on everything that changed.

    Ids are taken modulo the vocabulary. Lengths beyond the context are cut where `cap` allows it
    (lengths of a real trace), the prompt's first, keeping at least one token of either.

    Raises:
        ConfigError: an item is longer than the context and may not be cut, or is empty.
    """
    notes, fitted, num_cut = [], [], 0
    for item in items:
        ids, length = item.prompt_token_ids, item.max_tokens
        if not ids or length < 1:
            raise ConfigError("a benchmark request needs a prompt and at least one output token")
        if len(ids) + length > max_model_len:
            if not cap:
                raise ConfigError(
                    f"a request of {len(ids)} + {length} tokens exceeds max_model_len="
                    f"{max_model_len}; choose shorter --input-len / --output-len, or --smoke"
                )
            length = min(length, max_model_len - 1)
            ids = ids[: max_model_len - length]
            num_cut += 1
        ids = tuple(token % vocab_size for token in ids)
        fitted.append(WorkItem(prompt_token_ids=ids, max_tokens=length))
    if any(token >= vocab_size for item in items for token in item.prompt_token_ids):
        notes.append(f"prompt ids are taken modulo the vocabulary of {vocab_size:,}")
    if num_cut:
        notes.append(
            f"{num_cut} of {len(items)} requests are cut to the context of {max_model_len}"
        )
    return fitted, notes


def shifted(items: SequenceOf[WorkItem], by: int, vocab_size: int) -> list[WorkItem]:
    """The same work with other ids, so that no round finds the prefixes of the round before.

    >>> shifted([WorkItem(prompt_token_ids=(0, 9), max_tokens=1)], 1, 10)[0].prompt_token_ids
    (1, 0)
    """
    return [
        WorkItem(
            prompt_token_ids=tuple((token + by) % vocab_size for token in item.prompt_token_ids),
            max_tokens=item.max_tokens,
        )
        for item in items
    ]


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4_096,
    },
    "small": {
        "hidden_size": 640,
        "intermediate_size": 1_920,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
    "qwen3-0.6b": {
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "torch_dtype": "bfloat16",
    },
}
"""Qwen3 models by size. Random weights measure speed as well as trained ones."""


def write_shape(name: str, directory: Path) -> None:
    """Writes the config.json of a shape: all that `load_format="dummy"` reads."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **SHAPES[name],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
