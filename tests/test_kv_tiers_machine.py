"""The engine's machine with tiers below it: copies that come late, fail, or are cut off.

The fake executor checks that whatever a sequence reads is its own prefix, so a stale, torn or
mixed-up block in any tier is found at the first read. Checks run after each rule.
"""

from __future__ import annotations

import math
from collections import deque
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from nanoengine.core.disk_tier import DiskCopy, Finished
from nanoengine.core.places import Content
from nanoengine.core.prefixes import Prefixes
from nanoengine.core.tier_cost import CostModel, LoadCost, Rate
from nanoengine.core.tiers import Tiers
from nanoengine.sampling_params import SamplingParams
from tests.fake_executor import FakeExecutor, expected_output, make_engine, run
from tests.test_core_machines import QUICK, SOAK, EngineMachine


class FakeDisk:
    """A DiskStorage whose copies happen after a while, and fail now and then.

    Bytes are read and written only at the end of a copy: whoever does not keep a block until then
    is found out.
    """

    def __init__(self, host: dict[int, list[int | None]], random: Random) -> None:
        self.host = host
        self.random = random
        self.can_write = True
        self.files: dict[Content, list[int | None]] = {}
        self.queue: deque[DiskCopy] = deque()
        self.ended: list[Finished] = []
        self.closed = False

    def scan(self, prefixes: Prefixes) -> list[Content]:
        return list(self.files)

    def submit(self, copy: DiskCopy) -> None:
        assert not self.closed
        self.queue.append(copy)

    def finish(self, ok: bool = True) -> None:
        """Ends the first copy under way."""
        copy = self.queue.popleft()
        if copy.kind == "remove":
            ok = self.files.pop(copy.content, None) is not None
        elif copy.kind == "write" and ok:
            self.files[copy.content] = list(self.host[copy.host_id])
        elif copy.kind == "read":
            slots = self.files.get(copy.content)
            ok = ok and slots is not None
            # Why: a read that fails may leave anything in its host block.
            self.host[copy.host_id] = list(slots) if ok and slots else [-1]
            if not ok:
                self.files.pop(copy.content, None)
        self.ended.append(Finished(copy, ok, 0.001))

    def collect(self, wait_s: float) -> list[Finished]:
        for _ in range(min(self.random.choice([0, 0, 1, 2, 6]), len(self.queue))):
            self.finish(ok=self.random.random() < 0.9)
        while self.queue and (wait_s == math.inf or (wait_s and not self.ended)):
            self.finish()
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.collect(math.inf)
        self.closed = True


class TierMachine(EngineMachine):
    """Small tiers under a small pool; a disk that takes its time."""

    # Why more than the machine has: a prefix must have left the device when it comes again.
    families = tuple([(3 + k * i + i * i) % 43 for i in range(90)] for k in range(7))

    def make_tiers(self, executor: FakeExecutor) -> Tiers:
        random = Random(self.random.random())
        self.tier_disk = FakeDisk(executor.host, random)
        cost = CostModel(
            host=LoadCost(1, 0.001, random.choice(["auto", "load", "load", "load"])),
            disk=LoadCost(1, 0.001, random.choice(["auto", "load", "load", "load", "recompute"])),
        )
        if random.random() < 0.5:  # else nothing is measured, and auto loads
            cost.prefill = Rate(random.choice([1.0, 2000.0, 1e6]), 1.0)
            cost.host.rate = cost.disk.rate = Rate(500.0, 1.0)
        self.tiers = Tiers(
            executor.layout,
            num_host_blocks=random.choice([1, 4, 8, 16, 40]),
            cost=cost,
            lazy=random.random() < 0.3,
            disk=self.tier_disk if random.random() < 0.8 else None,
            num_disk_blocks=random.choice([5, 40, 200, 200]),
        )
        return self.tiers

    @property
    def has_tiers(self) -> bool:
        return isinstance(self.scheduler.block_manager.tiers, Tiers)

    @rule(seed=st.integers(0, 100))
    def file_is_lost(self, seed: int) -> None:
        if self.has_tiers and self.tier_disk.files and seed % 4 == 3:
            key = Random(seed).choice(list(self.tier_disk.files))
            del self.tier_disk.files[key]

    @rule(dice=st.integers(0, 20))
    def disk_is_full(self, dice: int) -> None:
        if self.has_tiers and dice == 19:
            self.tier_disk.can_write = False

    @rule(dice=st.integers(0, 9))
    def reset(self, dice: int) -> None:
        if dice < 9:
            return
        in_use = bool(self.scheduler.num_running)
        under_way = self.engine._under_way
        if self.has_tiers and under_way is not None:
            in_use = in_use or bool(under_way.plan.transfers)
        if not self.engine.overlap:
            assert self.engine.reset_prefix_cache() is not in_use
        elif in_use:
            assert not self.engine.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Why: copies of steps that were aborted and never committed end with a later commit.
        self.add_one(Random(0))
        super().teardown()
        if self.has_tiers:
            assert not self.tiers.disk.pool.counts()["active"] + self.tiers.host.counts()["active"]
            self.engine.close()
            assert self.tier_disk.files == {} and not self.tier_disk.queue


def test_machine():
    run_state_machine_as_test(TierMachine, settings=settings(QUICK, max_examples=40))


@pytest.mark.soak
def test_machine_for_long():
    run_state_machine_as_test(TierMachine, settings=SOAK)


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("lazy", [False, True])
def test_pressure(windows, lazy):
    """A long run in which most prefixes have left the device when they come again."""
    random = Random(5)
    disks: list[FakeDisk] = []

    def make_tiers(executor: FakeExecutor) -> Tiers:
        disks.append(FakeDisk(executor.host, random))
        cost = CostModel(host=LoadCost(1), disk=LoadCost(1))  # nothing measured: it loads
        return Tiers(
            executor.layout,
            num_host_blocks=20 * len(windows),
            cost=cost,
            lazy=lazy,
            disk=disks[0],
            num_disk_blocks=60 * len(windows),
        )

    engine = make_engine(
        1 + 24 * len(windows), 4, windows=windows, max_num_seqs=8, make_tiers=make_tiers
    )
    running, aborted = [], set()
    for number in range(150):
        prompt = [(3 + number % 9 * i + i * i) % 43 for i in range(random.choice([21, 30, 41]))]
        params = SamplingParams(max_tokens=random.choice([1, 9, 25]), ignore_eos=True)
        running.append(engine.add_request(str(number), prompt, params))
        for _ in range(random.randrange(12)):
            engine.step() if engine.has_unfinished() else None
        if random.random() < 0.1 and engine.abort(str(number)):
            aborted.add(str(number))
        if random.random() < 0.05 and disks[0].files:
            del disks[0].files[random.choice(list(disks[0].files))]
    run(engine)
    for request in running:
        (seq,) = request.sequences
        expected = expected_output(
            request.prompt_token_ids, seq.seed, request.params.max_tokens, seq.stop_ids
        )
        assert request.request_id in aborted or seq.output_token_ids == expected
    engine.close()
    host, disk = engine.stats().tiers
    assert host.loaded_blocks > 50 and disk.loaded_blocks > 20 and disk.failed_copies > 5
    assert engine.stats().preemptions > 0 or len(windows) > 1
    assert host.active_blocks == disk.active_blocks == 0
    assert len(disks[0].files) <= 60 * len(windows)
