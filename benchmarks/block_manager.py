"""Microseconds of the block manager's operations by size of the pool.

Run it as `python benchmarks/block_manager.py`.

Each pool is first churned until every block holds cached content, so that allocation evicts, as it
does in a long run. A prompt has 256 tokens, 16 blocks of 16. Medians of single calls.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.protocols import KVGroup, KVLayout
from nanoengine.core.sequence import Request, Sequence
from nanoengine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_LEN = 256
PARAMS = SamplingParams()


def make_sequence(token_ids: list[int]) -> Sequence:
    """A sequence as the scheduler makes it, in row 0."""
    request = Request("r", token_ids, PARAMS)
    seq = Sequence(
        request,
        seq_id=0,
        index=0,
        token_ids=list(token_ids),
        seed=0,
        stop_ids=frozenset(),
        max_num_tokens=2**20,
    )
    seq.row = 0
    return seq


def admit(manager: BlockManager, seq: Sequence) -> None:
    """Admission as the scheduler does it: look up, take, index what the step fills."""
    manager.allocate(seq, manager.can_allocate(seq))
    seq.num_computed_tokens = seq.num_tokens
    manager.register(seq)


def measure(num_blocks: int, num_rounds: int) -> dict[str, float]:
    """Median microseconds of each operation in a pool of `num_blocks`; building it in seconds."""
    draw = random.Random(0)
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., object], *args: object) -> None:
        start = time.perf_counter_ns()
        call(*args)
        times[name].append((time.perf_counter_ns() - start) / 1e3)

    start = time.perf_counter()
    layout = KVLayout(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        groups=(KVGroup(layers=(0,)),),
    )
    manager = BlockManager(layout)
    construct_s = time.perf_counter() - start
    for _ in range(num_blocks * BLOCK_SIZE // PROMPT_LEN + 1):
        seq = make_sequence([draw.getrandbits(17) for _ in range(PROMPT_LEN)])
        admit(manager, seq)
        manager.deallocate(seq)
        manager.updates.clear()
    for _ in range(num_rounds):
        seq = make_sequence([draw.getrandbits(17) for _ in range(PROMPT_LEN)])
        timed("allocate 16 blocks, none cached", admit, manager, seq)
        timed("may_append that takes a block", manager.may_append, seq, 1)
        seq.num_computed_tokens += 1
        timed("may_append inside a block", manager.may_append, seq, 1)
        timed("deallocate 17 blocks", manager.deallocate, seq)
        again = make_sequence(seq.token_ids)
        timed("allocate 16 blocks, 15 cached", admit, manager, again)
        manager.deallocate(again)
        manager.updates.clear()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"construct the pool [s]": construct_s, **medians}


def main() -> None:
    """Prints a table: operations by size of the pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1_000, help="calls of each operation")
    args = parser.parse_args()
    columns = [measure(size, args.rounds) for size in args.sizes]
    print(f"{'median us':<34}" + "".join(f"{size:>12,}" for size in args.sizes) + "   blocks")
    for name in columns[0]:
        print(f"{name:<34}" + "".join(f"{column[name]:>12.2f}" for column in columns))


if __name__ == "__main__":
    main()
