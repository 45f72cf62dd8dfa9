"""CostModel: is it faster to load a prefix from a tier, or to compute it again?

    load       setup_s + bytes / measured bandwidth        per tier that the blocks pass
    recompute  tokens / measured prefill rate

An unused tier is not measured either, so one slow load could disable it forever. Therefore a load
that seems too slow is tried again, once it would add little to the forward time since the last use.
The new time then replaces all earlier measurements.

Owned by the TieredPrefixCache, which reports how long steps and copies took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.core.plan import StepPlan, StepResult

MIN_PREFILL_TOKENS = 16
"""A step measures the prefill rate if its sequences compute this many tokens each, on average."""
RETRY_SHARE = 0.05
"""A load is tried again if it adds at most this share to the forward time since the last one."""


@dataclass(slots=True)
class Rate:
    """A measured rate in units per second: loaded bytes, or computed tokens.

    Each new measurement reduces the weight of all older ones by a tenth.

    Attributes:
        amount, seconds: weighted sums over all measurements.
        unused_s: seconds of forward passes since the last measurement or `start_over`.
    """

    amount: float = 0.0
    seconds: float = 0.0
    unused_s: float = 0.0
    _starts_over: bool = False

    def add(self, amount: float, seconds: float) -> None:
        """Adds a measurement."""
        weight = 0.0 if self._starts_over else 0.9
        self.amount = weight * self.amount + amount
        self.seconds = weight * self.seconds + seconds
        self.unused_s, self._starts_over = 0.0, False

    def start_over(self) -> None:
        """Makes the next measurement replace all earlier ones."""
        self.unused_s, self._starts_over = 0.0, True

    @property
    def is_known(self) -> bool:
        """False until something has been measured."""
        return self.amount > 0 and self.seconds > 0

    def time_for(self, amount: float) -> float:
        """Seconds that an amount takes at this rate."""
        return amount * self.seconds / self.amount


@dataclass(slots=True)
class LoadCost:
    """The time to load blocks from one tier into the tier above.

    `setup_s` is added to each load. `policy` is "auto" (whatever is faster), "load" or "recompute".

    >>> host = LoadCost(block_bytes=5_120_000)
    >>> host.rate.add(28e9, 1.0)
    >>> f"{1e3 * host.seconds(1):.3f} ms per block, {1e3 * host.seconds(256):.1f} ms for 256"
    '0.183 ms per block, 46.8 ms for 256'
    """

    block_bytes: int
    setup_s: float = 0.0
    policy: str = "auto"
    rate: Rate = field(default_factory=Rate)

    def seconds(self, num_blocks: int) -> float:
        """Seconds to load this many blocks together."""
        if num_blocks == 0:
            return 0.0
        return self.setup_s + self.rate.time_for(num_blocks * self.block_bytes)


@dataclass(slots=True, kw_only=True)
class CostModel:
    """Compares loading with computing. Blocks on disk pass through host memory and cost both."""

    host: LoadCost
    disk: LoadCost
    prefill: Rate = field(default_factory=Rate)

    def prefer_load(
        self, tier: str, *, num_host: int, num_disk: int, num_tokens: int, num_host_before: int = 0
    ) -> tuple[bool, str]:
        """Whether to load `num_tokens` more tokens from a tier, and the reason.

        A load that is tried although it seems too slow resets `unused_s`, even if it is not made.

        Args:
            tier: "host" or "disk": the tier that has these tokens. Its policy may decide.
            num_host: total number of blocks to load from host memory, including blocks from disk.
            num_disk: number of blocks to read from disk.
            num_host_before: number of blocks that are loaded from host memory in any case.
        """
        loads = [(self.host, num_host), (self.disk, num_disk)]
        cost = self.host if tier == "host" else self.disk
        policy, rate = cost.policy, cost.rate
        prefix = f"{num_tokens} tokens of it are in the {tier} tier"
        if policy != "auto":
            return policy == "load", f"{prefix}: {policy}, as its policy says"
        if not all(load.rate.is_known for load, n in loads if n) or not self.prefill.is_known:
            return True, f"{prefix}: load, since rates are not measured yet"
        load_s = sum(load.seconds(n) for load, n in loads) - self.host.seconds(num_host_before)
        prefill_s = self.prefill.time_for(num_tokens)
        times = f"loading takes {1e3 * load_s:.3g} ms and computing {1e3 * prefill_s:.3g} ms"
        if load_s < prefill_s:
            return True, f"{prefix}: load, as {times}"
        if load_s - prefill_s <= RETRY_SHARE * rate.unused_s:
            reason = f"{prefix}: load, to measure it again after {rate.unused_s:.3g} s without"
            rate.start_over()
            return True, f"{reason}, though {times}"
        return False, f"{prefix}: recompute, as {times}"

    def observe(self, plan: StepPlan, result: StepResult, block_bytes: int) -> None:
        """Updates the rates from a step that has run."""
        times = result.times
        for cost in (self.host, self.disk):
            cost.rate.unused_s += times.forward_s
        if times.load_s > 0:
            loaded = sum(len(t.tier_ids) for t in plan.transfers if t.kind == "load")
            self.host.rate.add(loaded * block_bytes, times.load_s)
        if times.forward_s > 0 and plan.num_tokens >= MIN_PREFILL_TOKENS * len(plan.rows):
            self.prefill.add(plan.num_tokens, times.forward_s)
