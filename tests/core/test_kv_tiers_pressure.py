"""Tiers under pressure: a long run in which most prefixes have left the device when they return.

tests/core/test_engine_machine.py has tiers in every combination; this run is sure to use them hard.
"""

from __future__ import annotations

from random import Random

import pytest

from nanoengine.core.tiers.cost import CostModel, LoadCost
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.settings.params import SamplingParams
from tests.support.fake_disk import FakeDisk
from tests.support.fake_executor import FakeExecutor, expected_output, make_engine, run


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("lazy", [False, True])
def test_pressure(windows, lazy):
    random = Random(5)
    disks: list[FakeDisk] = []

    def make_tiers(executor: FakeExecutor) -> TieredPrefixCache:
        disks.append(FakeDisk(executor.host, random))
        cost = CostModel(host=LoadCost(1), disk=LoadCost(1))  # nothing measured: it loads
        return TieredPrefixCache(
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
