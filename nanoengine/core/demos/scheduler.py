"""The scheduler: chunks, decodes, a preemption, and who waits for what, step by step."""

from __future__ import annotations

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.settings.params import SamplingParams

REQUESTS = (("a", 11, 9), ("b", 7, 8), ("c", 6, 4), ("d", 3, 3))
"""Name, tokens of the prompt, tokens to sample."""


def main() -> None:
    """Prints a line a step: what each sequence computes, the pool, and why."""
    layout = KVLayout(num_blocks=9, block_size=4, block_bytes=1, groups=(KVGroup(layers=(0,)),))
    scheduler = Scheduler(
        BlockManager(layout, watermark_frac=0.0), max_num_seqs=3, max_num_batched_tokens=8
    )
    for number, (name, prompt, output) in enumerate(REQUESTS):
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        tokens = [20 * number + i for i in range(prompt)]
        request = Request(name, tokens, params, arrival=number)
        scheduler.add(request, seed=0, stop_ids=frozenset(), max_num_tokens=len(tokens) + output)
    print("3 rows, 8 blocks of 4 tokens, a budget of 8 tokens a step; each samples the token 1")
    print("p8 computes 8 tokens of a prompt, d decodes, - waits, x is preempted, * ends\n")
    print("step  a   b   c   d   pool")
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        names = {seq.row: seq.seq_id for seq in scheduler.running}
        pool = str(scheduler.block_manager.pool)
        result = StepResult(token_ids=[[1] if n else [] for n in plan.num_logits])
        waiting = [seq_id for seq_id, _ in plan.waits]
        done = {request.request_id for request in scheduler.commit(plan, result)}
        print(f"{plan.step:4}  {_cells(plan, names, waiting, done)}{pool}  {_why(plan)}".rstrip())


def _cells(plan: StepPlan, names: dict[int, int], waiting: list[int], done: set[str]) -> str:
    cells = dict.fromkeys(waiting, "-")
    for row, start, count in zip(plan.rows, plan.starts, plan.num_scheduled_tokens, strict=True):
        seq_id = names[row]
        cells[seq_id] = f"p{count}" if start < REQUESTS[seq_id][1] else "d"
        cells[seq_id] = f"p{count}" if count > 1 else cells[seq_id]
        cells[seq_id] += "*" if REQUESTS[seq_id][0] in done else ""
    cells |= {preemption.seq_id: "x" for preemption in plan.preempted}
    return "".join(f"{cells.get(i, ''):<4}" for i in range(len(REQUESTS)))


def _why(plan: StepPlan) -> str:
    parts = []
    for new in plan.admitted:
        cached = f", {new.num_cached_tokens} tokens cached" if new.num_cached_tokens else ""
        parts.append(f"{REQUESTS[new.seq_id][0]} admitted{cached}")
    for victim, num_computed, _ in plan.preempted:
        name = REQUESTS[victim][0]
        parts.append(f"no block is free: {name} gives up {num_computed} computed tokens")
    parts += [f"{REQUESTS[seq_id][0]} lacks {lacks}" for seq_id, lacks in plan.waits[:1]]
    return "; ".join(parts)
