"""Microseconds of the block manager's operations by size of the pool.

Run it as `python benchmarks/block_manager.py`; with `--peer PATH`, a checkout of nano-vllm, the
same operations also run on its block manager.

Each pool is first filled until every block has cached content, so that allocations evict, as in a
long run. A prompt has 256 tokens in 16 blocks of 16. Values are medians of single calls. The two
sides alternate after several rounds, and rounds with hits come last, because one call must not
affect the processor caches of others (the peer searches its whole free list at a hit).
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.sequence import Request, Sequence
from nanoengine.settings.params import SamplingParams

BLOCK_SIZE = 16
PROMPT_LEN = 256
TURN = 20
"""Rounds of one side before the other one runs."""
PARAMS = SamplingParams()
Columns = dict[str, dict[str, float]]


def make_sequence(token_ids: list[int]) -> Sequence:
    """A sequence in row 0, as the scheduler creates it."""
    request = Request("r", token_ids, PARAMS)
    seq = Sequence(request, seq_id=0, index=0, token_ids=list(token_ids))
    seq.row = 0
    return seq


def admit(manager: BlockManager, seq: Sequence) -> None:
    """Admission as in the scheduler: look up, allocate, index the blocks that the step fills."""
    manager.allocate(seq, manager.can_allocate(seq))
    seq.num_computed_tokens = seq.num_tokens
    manager.prefix_cache.register(seq)


class Ours:
    """The operations on our block manager."""

    name = "nanoengine"

    def __init__(self, num_blocks: int) -> None:
        layout = KVLayout(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            block_bytes=1,
            groups=(KVGroup(layers=(0,)),),
        )
        self.manager = BlockManager(layout)

    def make(self, token_ids: list[int]) -> Any:
        """A new sequence."""
        return make_sequence(token_ids)

    def admit(self, seq: Any) -> None:
        """Looks up, allocates, indexes."""
        admit(self.manager, seq)

    def append(self, seq: Any) -> None:
        """Allocates a slot for one more token; inside a block, the scheduler does not call the
        manager."""
        if seq.num_computed_tokens >= seq.slots_ready_until:
            self.manager.may_append(seq, 1)
            seq.slots_ready_until = self.manager.slots_ready_until(seq)

    def advance(self, seq: Any) -> None:
        """Appends the token, after the plan has read the table's changes."""
        seq.num_computed_tokens += 1
        self.manager.updates = []

    def deallocate(self, seq: Any) -> None:
        """Frees the blocks."""
        self.manager.deallocate(seq)


class Peer:
    """The same on the block manager of a nano-vllm checkout, called as by its scheduler."""

    name = "nano-vllm"

    def __init__(self, num_blocks: int) -> None:
        module = importlib.import_module("nanovllm.engine.block_manager")
        self.sequence = importlib.import_module("nanovllm.engine.sequence").Sequence
        self.sequence.block_size = BLOCK_SIZE
        self.manager = module.BlockManager(num_blocks, BLOCK_SIZE)

    def make(self, token_ids: list[int]) -> Any:
        """A new sequence."""
        return self.sequence(token_ids)

    def admit(self, seq: Any) -> None:
        """Looks up, allocates, indexes."""
        self.manager.allocate(seq, self.manager.can_allocate(seq))
        seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
        self.manager.hash_blocks(seq)

    def append(self, seq: Any) -> None:
        """Allocates a slot for one more token, which the peer appends first."""
        if self.manager.can_append(seq):
            self.manager.may_append(seq)

    def advance(self, seq: Any) -> None:
        """Does nothing: the token is already appended."""
        seq.append_token(1)

    def deallocate(self, seq: Any) -> None:
        """Frees the blocks."""
        self.manager.deallocate(seq)


def find_peer(path: Path) -> str | None:
    """Makes the peer importable without the dependencies of its package; or returns why it can't
    be."""
    if not (path / "nanovllm" / "engine" / "block_manager.py").is_file():
        return f"no nanovllm/engine/block_manager.py in {path}"
    package = types.ModuleType("nanovllm")
    package.__path__ = [str(path / "nanovllm")]
    sys.modules["nanovllm"] = package
    try:
        manager = importlib.import_module("nanovllm.engine.block_manager").BlockManager
    except ImportError as error:
        return f"it can't be imported: {error}"
    if not hasattr(manager, "hash_blocks"):
        return "its block manager has another interface than the version compared with (bb823b3)"
    return None


def measure(sides: list[type[Ours] | type[Peer]], num_blocks: int, num_rounds: int) -> Columns:
    """Median microseconds of each operation in a pool of `num_blocks`; construction in seconds."""
    draw = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {side.name: defaultdict(list) for side in sides}
    pools: list[Ours | Peer] = []
    for side in sides:
        start = time.perf_counter()
        pools.append(side(num_blocks))
        times[side.name]["construct the pool [s]"].append(time.perf_counter() - start)

    def timed(pool: Ours | Peer, name: str, call: Callable[..., object], *args: object) -> None:
        start = time.perf_counter_ns()
        call(*args)
        times[pool.name][name].append((time.perf_counter_ns() - start) / 1e3)

    for pool in pools:
        for _ in range(num_blocks * BLOCK_SIZE // PROMPT_LEN + 1):
            seq = pool.make([draw.getrandbits(17) for _ in range(PROMPT_LEN)])
            pool.admit(seq)
            pool.deallocate(seq)

    def draw_prompt() -> list[int]:
        return [draw.getrandbits(17) for _ in range(PROMPT_LEN)]

    def without_hits(pool: Ours | Peer) -> None:
        seq = pool.make(draw_prompt())
        timed(pool, "allocate 16 blocks, none cached", pool.admit, seq)
        if isinstance(pool, Peer):
            pool.advance(seq)
        timed(pool, "a token that takes a block", pool.append, seq)
        pool.advance(seq)
        timed(pool, "a token inside a block", pool.append, seq)
        timed(pool, "deallocate 17 blocks", pool.deallocate, seq)

    def with_hits(pool: Ours | Peer) -> None:
        prompt = draw_prompt()
        for is_again in (False, True):
            seq = pool.make(prompt)
            if is_again:
                timed(pool, "allocate 16 blocks, 15 cached", pool.admit, seq)
            else:
                pool.admit(seq)
            pool.deallocate(seq)

    for one_round in (without_hits, with_hits):
        for start in range(0, num_rounds, TURN):
            for pool in pools:
                for _ in range(min(TURN, num_rounds - start)):
                    one_round(pool)
    return {
        side: {name: statistics.median(values) for name, values in found.items()}
        for side, found in times.items()
    }


def main() -> None:
    """Prints a table: operations by size of the pool, for both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1_000, help="calls of each operation")
    parser.add_argument("--peer", type=Path, help="a checkout of nano-vllm")
    args = parser.parse_args()
    sides: list[type[Ours] | type[Peer]] = [Ours]
    if args.peer:
        reason = find_peer(args.peer)
        if reason is None:
            sides.append(Peer)
        else:
            print(f"without the peer: {reason}")
    columns = [measure(sides, size, args.rounds) for size in args.sizes]
    print(f"{'median us':<44}" + "".join(f"{size:>12,}" for size in args.sizes) + "   blocks")
    for name in columns[0][Ours.name]:
        for side in sides:
            values = "".join(f"{column[side.name][name]:>12.2f}" for column in columns)
            print(f"{name:<33}{side.name:<11}{values}")


if __name__ == "__main__":
    main()
