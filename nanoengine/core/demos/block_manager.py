"""Block tables: a prompt is admitted, finds what is cached, grows, forks, copies on write, ends."""

from __future__ import annotations

from nanoengine.core.block_manager import BlockManager, Verdict
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.sequence import Request, Sequence
from nanoengine.settings.params import SamplingParams

SIZE = 4


def make_sequence(number: int, prompt: list[int]) -> Sequence:
    """A sequence as the Scheduler makes it; its row is its number."""
    request = Request(str(number), prompt, SamplingParams())
    return Sequence(
        request, seq_id=number, index=0, token_ids=list(prompt), seed=0, stop_ids=frozenset(),
        max_num_tokens=100, row=number,
    )  # fmt: skip


def compute(manager: BlockManager, seq: Sequence) -> None:
    """What a step does to a sequence: room, counters, and full blocks into the index."""
    count = len(seq.token_ids) - seq.num_computed_tokens
    assert manager.may_append(seq, count)
    seq.num_computed_tokens += count
    manager.prefix_cache.register(seq)


def main() -> None:
    """Prints tables and pool after each move."""
    layout = KVLayout(num_blocks=10, block_size=SIZE, block_bytes=1, groups=(KVGroup(layers=(0,)),))
    manager, named = BlockManager(layout, watermark_frac=0.0), dict[str, Sequence]()

    def show(what: str) -> None:
        tables = "   ".join(f"{name} {seq.block_tables[0]}" for name, seq in named.items())
        print(f"{manager.pool}  {what}\n{'':12}{tables}")

    def admit(name: str, seq: Sequence) -> int:
        admission = manager.can_allocate(seq)
        assert admission.verdict is Verdict.OK
        manager.allocate(seq, admission)
        compute(manager, seq)
        named[name] = seq
        return admission.num_cached_tokens

    a = make_sequence(0, list(range(10)))
    admit("a", a)
    show("a, a prompt of 10 tokens, gets 3 blocks of 4; two of them are full")
    cached = admit("b", make_sequence(1, [*range(8), 20, 21, 22, 23, 24]))
    show(f"b begins alike: {cached} of its 13 tokens are cached, and 2 blocks are fresh")
    a.token_ids += [30, 31]
    compute(manager, a)
    show("a decodes 2 tokens: its third block is full, and nothing was taken")
    a.token_ids += [32]
    compute(manager, a)
    show("one token more passes the block's end: a takes a block")
    child = a.fork(seq_id=2, index=1, seed=1)
    child.row = 2
    manager.fork(a, child)
    named["c"] = child
    show("c is a fork of a: it shares all four blocks, and nothing is copied")
    child.token_ids += [40]
    compute(manager, child)
    copy = manager.copies[-1]
    show(f"c writes into the shared block: it gets a copy, {copy.src} to {copy.dst}, first")
    large = make_sequence(3, [50] * 12)
    verdict = manager.can_allocate(large).verdict.value
    show(f"d, 12 tokens, needs 3 blocks, and {manager.pool.num_free} are free: {verdict}")
    manager.deallocate(a)
    manager.deallocate(named.pop("b"))
    del named["a"]
    show("a and b end: what is full stays cached, what c uses stays active")
    admit("d", large)
    show("d is admitted into empty blocks; what b has left stays cached")
    verdict = manager.can_allocate(make_sequence(4, [60] * 40)).verdict.value
    show(f"e, 40 tokens, needs 10 blocks, the whole pool has {manager.pool.num_usable}: {verdict}")
    manager.check(list(named.values()))
