"""A StepPlan as text for users; called by its `__str__`."""

from __future__ import annotations

from typing import Any

from nanoengine.settings.checks import counted


def format_plan(plan: Any) -> str:
    """What a step runs, one line per item, with the reasons for unusual events.

    Args:
        plan: a `StepPlan`, whose file imports this one.
    """
    tokens, sequences = counted(plan.num_tokens, "token"), counted(len(plan.rows), "sequence")
    num_single = sum(n == 1 for n in plan.num_scheduled_tokens)
    lines = [
        f"step {plan.step}: {tokens} in {sequences} ({num_single} with one token),"
        f" {sum(n > 0 for n in plan.num_logits)} sampled"
    ]
    for new in plan.admitted:
        lines.append(
            f"  admit seq {new.seq_id} to row {new.row}: {counted(len(new.token_ids), 'token')},"
            f" {new.num_cached_tokens} of them cached"
        )
    lines += [f"  fork row {f.parent_row} to row {f.row} as seq {f.seq_id}" for f in plan.forks]
    lines += [f"  copy block {c.src} to {c.dst} (copy-on-write)" for c in plan.block_copies]
    for t in plan.transfers:
        lines.append(f"  {t.kind} {counted(len(t.tier_ids), 'block')}, {t.tier} tier")
    lines += [
        f"  preempt seq {p.seq_id} at {p.num_computed_tokens} tokens: {p.reason}"
        for p in plan.preempted
    ]
    lines += [f"  {reason}" for reason in plan.reasons]
    return "\n".join(lines)
