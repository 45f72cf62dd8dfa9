"""Tiers: what the device evicts comes back from host memory, if it was stored there."""

from __future__ import annotations

from nanoengine.core.block_manager import BlockManager, Verdict
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.sequence import Request, Sequence
from nanoengine.core.tiers.cost import CostModel, LoadCost
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.settings.params import SamplingParams


def main() -> None:
    """Prints both pools after each step."""
    layout = KVLayout(num_blocks=6, block_size=4, block_bytes=1, groups=(KVGroup(layers=(0,)),))
    cost = CostModel(host=LoadCost(1, policy="load"), disk=LoadCost(1))
    cache = TieredPrefixCache(layout, num_host_blocks=8, cost=cost)
    manager = BlockManager(layout, prefix_cache=cache, watermark_frac=0.0)
    print("0 null   . empty   c cached   1 active\n")
    print("device  host")

    def show(what: str) -> None:
        print(f"{cache.pool}  {cache.host}  {what}")

    def run(step: int, prompt: list[int]) -> Sequence:
        """Admits and computes one prompt; the step's copies are planned, and then committed."""
        request = Request(str(step), prompt, SamplingParams())
        seq = Sequence(
            request, seq_id=step, index=0, token_ids=prompt, seed=0, stop_ids=frozenset(),
            max_num_tokens=99, row=0,
        )  # fmt: skip
        admission = manager.can_allocate(seq)
        assert admission.verdict is Verdict.OK
        manager.allocate(seq, admission)
        assert manager.may_append(seq, len(prompt) - seq.num_computed_tokens)
        cached, seq.num_computed_tokens = seq.num_computed_tokens, len(prompt)
        cache.register(seq)
        plan = StepPlan(step=step)
        plan.transfers = cache.take_transfers(plan)
        moves = [f"{t.kind} {len(t.device_ids)}" for t in plan.transfers]
        show(f"step {step}: {cached} of {len(prompt)} tokens cached; {', '.join(moves)} blocks")
        cache.commit(plan, StepResult(token_ids=[]))
        show("  committed: the copies are there, and what is stored can be found")
        return seq

    show("a device of 5 blocks of 4 tokens, and a host tier of 8")
    first = list(range(14))
    manager.deallocate(run(0, first))
    show("the prompt ends: its three full blocks stay cached, in both tiers")
    manager.deallocate(run(1, list(range(50, 67))))
    show("another prompt, of 5 blocks, has evicted them from the device")
    manager.deallocate(run(2, first))
    show("the first prompt came again: three loads in place of computing 12 tokens")
    stats = cache.tier_stats()[0]
    print(f"\nhost: {stats.stored_blocks} blocks stored, {stats.loaded_blocks} loaded")
    cache.check()
