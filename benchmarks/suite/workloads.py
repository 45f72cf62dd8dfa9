"""The workloads of all engines that are compared on a CPU: token ids, and exact output lengths.

    W1  32 requests, prompts of 64 to 256 tokens, outputs of 32 to 128
    W2  32 requests that share a prefix of 512 tokens, 32 own tokens, 32 out
    W3  one stream: prompt 128, output 128
    Bn  n requests of 64 tokens in and 64 out, 32 out from 128 requests on
    Tn  one prompt of n tokens to its first token
    G   4 short prompts, 8 tokens each: float32 peers must have the same greedy ids

`scale` selects the first part of the requests of W1 and W2, and of the output of W3 and Bn. Lengths
never depend on the seed, so that every round does the same work with other tokens. Standard library
only: this also runs in the environments of the peers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import takewhile

from nanoengine.bench.workload import WorkItem

WORKLOADS = ("W1", "W2", "W3", "G")
SIZED = re.compile(r"([BT])([1-9]\d*)")
PREFIX_LEN = 512


def is_workload(name: str) -> bool:
    """Whether `requests_of` knows the name."""
    return name in WORKLOADS or SIZED.fullmatch(name) is not None


def requests_of(name: str, *, vocab_size: int, seed: int = 0, scale: float = 1.0) -> list[WorkItem]:
    """The requests of a workload; ids are below 4,000, so that there are no special tokens.

    >>> work = requests_of("W3", vocab_size=4096)
    >>> [(len(prompt), output) for prompt, output in work]
    [(128, 128)]
    """
    draw = random.Random(f"{name}/{seed}")
    top = min(vocab_size, 4096) - 96

    def ids(count: int) -> list[int]:
        return [draw.randrange(top) for _ in range(count)]

    count = max(1, round(32 * scale))
    if name == "W1":
        lengths = random.Random("lengths of W1")
        sizes = [(lengths.randint(64, 256), lengths.randint(32, 128)) for _ in range(count)]
        return [WorkItem(ids(prompt), output) for prompt, output in sizes]
    if name == "W2":
        prefix = ids(PREFIX_LEN)
        return [WorkItem(prefix + ids(32), 32) for _ in range(count)]
    if name == "W3":
        return [WorkItem(ids(128), max(1, round(128 * scale)))]
    if name == "G":
        return [WorkItem(ids(5 + 3 * index), 8) for index in range(4)]
    sized = SIZED.fullmatch(name)
    if sized and sized[1] == "B":
        requests = int(sized[2])
        output = max(1, round((64 if requests < 128 else 32) * scale))
        return [WorkItem(ids(64), output) for _ in range(requests)]
    if sized:
        return [WorkItem(ids(int(sized[2])), 1)]
    raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, Bn or Tn, got {name!r}")


def warm_up(vocab_size: int) -> list[WorkItem]:
    """A few short requests with other ids, so that timed prompts have no prefix cache hits."""
    draw, top = random.Random("warm-up"), min(vocab_size, 4096) - 96
    sizes = (24, 32, 40)
    return [WorkItem([draw.randrange(top) for _ in range(size)], 6) for size in sizes]


def shared_prefix(requests: Sequence[WorkItem]) -> int:
    """The number of first tokens that all prompts share; at least one token of each is its own."""
    if len(requests) < 2:
        return 0
    columns = zip(*(ids[:-1] for ids, _ in requests), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
