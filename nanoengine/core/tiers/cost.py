"""CostModel: is a block sooner loaded from a tier, or computed again?

    load       setup_s + bytes / measured bandwidth        for each tier that the blocks pass
    recompute  tokens / measured prefill rate

A tier that is not used tells nothing new, so one slow load could close it for good. So a load that
looks too slow is tried again when that costs little beside what has been computed since the tier
was last heard of, and what it takes then counts in place of all before.

Kept by Tiers; fed with what steps and copies took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.plan import StepPlan, StepResult

MIN_PREFILL_TOKENS = 16
"""A step tells the prefill rate if each of its sequences computes this many tokens on average."""
RETRY_SHARE = 0.05
"""A load is tried again if it adds at most this share to the forwards since the tier's last one."""


@dataclass(slots=True)
class Rate:
    """Units a second over recent work; older work counts less, by a tenth each time.

    `silent_s` are the seconds that forwards took since the last work or doubt.
    """

    amount: float = 0.0
    seconds: float = 0.0
    silent_s: float = 0.0
    _is_doubted: bool = False

    def add(self, amount: float, seconds: float) -> None:
        """Takes note of work done."""
        weight = 0.0 if self._is_doubted else 0.9
        self.amount = weight * self.amount + amount
        self.seconds = weight * self.seconds + seconds
        self.silent_s, self._is_doubted = 0.0, False

    def doubt(self) -> None:
        """The next work is to count alone."""
        self.silent_s, self._is_doubted = 0.0, True

    @property
    def is_known(self) -> bool:
        """False until something has been measured."""
        return self.amount > 0 and self.seconds > 0

    def time_for(self, amount: float) -> float:
        """Seconds that an amount takes at this rate."""
        return amount * self.seconds / self.amount


@dataclass(slots=True)
class LoadCost:
    """What it takes to bring blocks up from one tier. `policy`: "auto", "load" or "recompute".

    >>> host = LoadCost(block_bytes=5_120_000)
    >>> host.rate.add(28e9, 1.0)
    >>> f"{1e3 * host.seconds(1):.3f} ms a block, {1e3 * host.seconds(256):.1f} ms for 256"
    '0.183 ms a block, 46.8 ms for 256'
    """

    block_bytes: int
    setup_s: float = 0.0
    policy: str = "auto"
    rate: Rate = field(default_factory=Rate)

    def seconds(self, num_blocks: int) -> float:
        """Seconds for blocks that are loaded together."""
        if num_blocks == 0:
            return 0.0
        return self.setup_s + self.rate.time_for(num_blocks * self.block_bytes)


@dataclass(slots=True, kw_only=True)
class CostModel:
    """Weighs loading against prefilling; blocks on disk pass through the host, and pay for both."""

    host: LoadCost
    disk: LoadCost
    prefill: Rate = field(default_factory=Rate)

    def prefer_load(
        self, tier: str, *, num_host: int, num_disk: int, num_tokens: int, num_host_before: int = 0
    ) -> tuple[bool, str]:
        """Whether `num_tokens` more tokens are taken from a tier, and why.

        Saying yes to a load that looks too slow uses up the time that allows it, loaded or not.

        Args:
            tier: "host" or "disk", the one that would be used in addition; its policy may decide.
            num_host: blocks that would be loaded from host memory in all, those from disk included.
            num_disk: blocks that would be read from disk.
            num_host_before: blocks loaded from host memory in any case.
        """
        loads = [(self.host, num_host), (self.disk, num_disk)]
        asked = self.host if tier == "host" else self.disk
        policy, rate = asked.policy, asked.rate
        prefix = f"{num_tokens} tokens of it are in the {tier} tier"
        if policy != "auto":
            return policy == "load", f"{prefix}: {policy}, as its policy says"
        if not all(cost.rate.is_known for cost, n in loads if n) or not self.prefill.is_known:
            return True, f"{prefix}: load, since rates are not measured yet"
        load_s = sum(cost.seconds(n) for cost, n in loads) - self.host.seconds(num_host_before)
        prefill_s = self.prefill.time_for(num_tokens)
        times = f"loading takes {1e3 * load_s:.3g} ms and computing {1e3 * prefill_s:.3g} ms"
        if load_s < prefill_s:
            return True, f"{prefix}: load, as {times}"
        if load_s - prefill_s <= RETRY_SHARE * rate.silent_s:
            reason = f"{prefix}: load, to measure it again after {rate.silent_s:.3g} s without"
            rate.doubt()
            return True, f"{reason}, though {times}"
        return False, f"{prefix}: recompute, as {times}"

    def observe(self, plan: StepPlan, result: StepResult, block_bytes: int) -> None:
        """Learns the rates from a step that has run."""
        times = result.times
        for cost in (self.host, self.disk):
            cost.rate.silent_s += times.forward_s
        if times.load_s > 0:
            loaded = sum(len(t.tier_ids) for t in plan.transfers if t.kind == "load")
            self.host.rate.add(loaded * block_bytes, times.load_s)
        if times.forward_s > 0 and plan.num_tokens >= MIN_PREFILL_TOKENS * len(plan.rows):
            self.prefill.add(plan.num_tokens, times.forward_s)
