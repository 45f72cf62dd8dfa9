"""Benchmark workloads: requests of prompt ids and output lengths, random or read from a file.

`nanoengine bench`, `nanoengine simulate` and the repository's benchmarks use it, the latter also in
environments of other engines: it only needs the standard library. Requests are generated lazily, so
a workload of any length needs little memory.
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
from typing import Any, NamedTuple

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import require_positive

DRAWN_IDS = 10_001
"""Upper bound of random prompt ids."""

Encode = Callable[[str], SequenceOf[int]]
"""Encodes text to token ids."""


class WorkItem(NamedTuple):
    """One request: prompt ids, and exactly `max_tokens` tokens to generate."""

    prompt_token_ids: SequenceOf[int]
    max_tokens: int


class Scale(NamedTuple):
    """The number of requests, and the shortest and longest random prompt and output [tokens]."""

    num_requests: int = 256
    input_len: tuple[int, int] = (100, 1024)
    output_len: tuple[int, int] = (100, 1024)


STANDARD, SMOKE = Scale(), Scale(32, (12, 128), (12, 128))


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The workload of a benchmark, and its number of rounds.

    Attributes:
        dataset: random, shared-prefix, or a file: .jsonl (prompts), .csv
            (ContextTokens,GeneratedTokens).
        smoke: A scale for small machines: 32 requests, lengths 12-128 (standard: 256, and
            100-1024).
        num_requests: Number of requests, or of rows of the file; None: 256, or 32 with
            `--smoke`.
        input_len: Shortest and longest random prompt [tokens]; with shared-prefix, without the
            common prefix.
        output_len: Shortest and longest output [tokens].
        prefix_len: Length of the common prefix of shared-prefix [tokens].
        temperature: 0 is greedy.
        rounds: Timed rounds, each with new ids; the median is reported.

    Raises:
        ConfigError: a value is out of range.
    """

    dataset: str = "random"
    smoke: bool = False
    num_requests: int | None = None
    input_len: tuple[int, int] | None = None
    output_len: tuple[int, int] | None = None
    prefix_len: int = 512
    temperature: float = 0.6
    rounds: int = 1

    def __post_init__(self) -> None:
        require_positive(self, ConfigError, "num_requests", "prefix_len", "rounds")
        for name in ("input_len", "output_len"):
            low, high = getattr(self, name) or (1, 1)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} must be a range of positive lengths, got {low} {high}")

    def items(self, seed: int, encode: Encode) -> Iterator[WorkItem]:
        """The requests, before `fit`; explicit options take precedence over the scale."""
        default = SMOKE if self.smoke else STANDARD
        scale = Scale(*(getattr(self, name) or getattr(default, name) for name in Scale._fields))
        return make_workload(self.dataset, scale, self.prefix_len, seed, encode)


def make_workload(
    name: str, scale: Scale, prefix_len: int, seed: int, encode: Encode
) -> Iterator[WorkItem]:
    """The requests of a workload with this name, or of a file.

    Raises:
        ConfigError: there is no such workload and no such file.
    """
    if name in ("standard", "random"):
        return random_workload(scale, seed)
    if name == "shared-prefix":
        return shared_prefix_workload(scale, prefix_len, seed)
    path = Path(name)
    if path.suffix not in (".csv", ".jsonl") or not path.is_file():
        raise ConfigError(
            "the workload must be random, shared-prefix, or an existing .csv or .jsonl file, got"
            f" {name!r}"
        )
    return file_workload(path, scale, seed, encode)


def random_workload(scale: Scale = STANDARD, seed: int = 0) -> Iterator[WorkItem]:
    """Independent random prompts. The defaults are a common standard workload.

    The order of the draws is part of the workload: per request its length and its ids, then all
    output lengths after the last prompt. Why prompts are drawn twice: the output lengths are needed
    at once, while the large prompts are generated lazily.
    Source: nano-vllm `bench.py`, whose published figures use it.

    >>> items = list(random_workload())
    >>> sum(len(i.prompt_token_ids) for i in items), sum(i.max_tokens for i in items)
    (142827, 133966)
    """
    ahead, draw = random.Random(seed), random.Random(seed)

    def prompt(draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.randrange(DRAWN_IDS) for _ in range(draw.randint(*scale.input_len)))

    for _ in range(scale.num_requests):
        prompt(ahead)
    for _ in range(scale.num_requests):
        yield WorkItem(prompt(draw), ahead.randint(*scale.output_len))


def shared_prefix_workload(scale: Scale, prefix_len: int, seed: int = 0) -> Iterator[WorkItem]:
    """Random prompts after one common prefix; `input_len` counts each request's own tokens."""
    draw = random.Random(seed)
    prefix = tuple(draw.randrange(DRAWN_IDS) for _ in range(prefix_len))
    for ids, length in random_workload(scale, draw.randrange(2**32)):
        yield WorkItem((*prefix, *ids), length)


def file_workload(path: Path, scale: Scale, seed: int, encode: Encode) -> Iterator[WorkItem]:
    """Requests from the first rows of a file.

    A JSON row has `prompt` or `prompt_token_ids`, and `max_tokens`, which is drawn if missing. A
    CSV row has lengths in the columns ContextTokens and GeneratedTokens, as in the Azure LLM
    inference traces; its ids are drawn.

    Raises:
        ConfigError: a row can't be used.
    """
    draw = random.Random(seed)

    def of_json(line: str) -> WorkItem:
        row = json.loads(line)
        prompt = row["prompt_token_ids"] if "prompt_token_ids" in row else row["prompt"]
        ids = encode(prompt) if isinstance(prompt, str) else prompt
        return WorkItem(tuple(ids), int(row.get("max_tokens", draw.randint(*scale.output_len))))

    def of_csv(row: dict[str, str]) -> WorkItem:
        inputs, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        if min(inputs, outputs) < 1:
            raise ValueError("a length below 1")
        return WorkItem(tuple(draw.choices(range(DRAWN_IDS), k=inputs)), outputs)

    needed = "be a JSON object with prompt or prompt_token_ids"
    with path.open(newline="", encoding="utf-8") as file:
        rows: Iterator[Any] = map(str.strip, file)
        read: Callable[[Any], WorkItem] = of_json
        if path.suffix == ".csv":
            rows, read = iter(csv.DictReader(file)), of_csv
            needed = "hold integers of at least 1 in ContextTokens and GeneratedTokens"
        numbered = ((number, row) for number, row in enumerate(rows, 1) if row)
        for number, row in islice(numbered, scale.num_requests):
            try:
                item = read(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}: row {number} must {needed} ({type(error).__name__}: {error})"
                ) from error
            yield item


def fit(
    items: SequenceOf[WorkItem], vocab_size: int, max_model_len: int, *, cap: bool
) -> tuple[list[WorkItem], list[str]]:
    """The items adapted to this model, and notes on all changes.

    Ids are taken modulo the vocabulary. Lengths beyond the context are cut if `cap` allows it
    (lengths of a real trace): first the prompt, with at least one token left of prompt and output.

    Raises:
        ConfigError: an item is longer than the context and may not be cut, or is empty.
    """
    notes, fitted, num_cut = [], [], 0
    for ids, length in items:
        if not ids or length < 1:
            raise ConfigError("a benchmark request needs a prompt and at least one output token")
        if len(ids) + length > max_model_len:
            if not cap:
                raise ConfigError(
                    f"a request of {len(ids)} + {length} tokens exceeds max_model_len="
                    f"{max_model_len}; choose shorter --input-len / --output-len, or --smoke"
                )
            num_cut += 1
            length = min(length, max_model_len - 1)
        kept = ids[: max_model_len - length]
        fitted.append(WorkItem(tuple(token % vocab_size for token in kept), length))
    if any(max(ids) >= vocab_size for ids, _ in items):
        notes.append(f"prompt ids are taken modulo the vocabulary of {vocab_size:,}")
    if num_cut:
        notes.append(f"{num_cut} of {len(items)} requests are cut to a context of {max_model_len}")
    return fitted, notes


def shift_ids(items: SequenceOf[WorkItem], by: int, vocab_size: int) -> list[WorkItem]:
    """The same workload with other ids, so that a round has no prefix cache hits from earlier ones.

    >>> shift_ids([WorkItem((0, 9), 1)], 1, 10)
    [WorkItem(prompt_token_ids=(1, 0), max_tokens=1)]
    """
    return [
        WorkItem(tuple((token + by) % vocab_size for token in ids), length) for ids, length in items
    ]
