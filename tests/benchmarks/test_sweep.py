"""`bench.py --sweep`, `--rate` and simulated pools; figures of all reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.suite import limits, main, sweep
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.peak import Peaks
from nanoengine.bench.workload import WorkItem
from nanoengine.core.plan import StepTimes
from nanoengine.errors import ConfigError
from nanoengine.observe.metrics import StepRecord

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

SCALE = ["--num-requests", "4", "--input-len", "8", "40", "--output-len", "3", "9"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs", "NAME=VALUE"),
        ("max_num_seqs=1,,2", "NAME=VALUE"),
        ("max_num_seq=1", "no option 'max_num_seq'"),
    ],
)
def test_an_invalid_sweep_raises(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.parse(text)


def test_a_sweep_has_a_point_for_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    pool = ["--num-kv-blocks", "64", "--json", str(path)]
    assert main.main(["--sweep", "max_num_seqs=1,4", *pool, *SCALE]) == 0
    report, text = json.loads(path.read_text()), capsys.readouterr().out
    one, four = report["points"]
    assert [one["value"], four["value"]] == [1, 4]
    assert one["mean_batch"] == 1 < four["mean_batch"]
    # A batch of one reads all weights per token, so a larger batch has more headroom.
    assert one["roofline"]["output_tokens_per_s"] < four["roofline"]["output_tokens_per_s"]
    for point in (one, four):
        assert len(point["ttft_s"]) == len(point["itl_s"]) == 101
        assert point["ttft_s"] == sorted(point["ttft_s"])
    assert len(re.findall(r"^\| [14] \| [\d.]+ \| [\d,]+ \|", text, re.M)) == 2


def test_requests_arrive_at_a_rate_and_latency_counts_from_the_scheduled_arrival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    pool = ["--num-kv-blocks", "64", "--json", str(path)]
    assert main.main(["--rate", "50", "2000", *pool, *SCALE]) == 0
    report = json.loads(path.read_text())
    slow, fast = report["rates"]
    assert (slow["rate"], fast["rate"]) == (50, 2000)
    assert slow["seconds"] >= sweep.arrivals(4, 50.0, 0)[-1]
    for point in (slow, fast):
        assert 0 < point["ttft_s"][0] <= point["ttft_s"][100] <= point["e2e_s"][100]
    assert "| 50 |" in capsys.readouterr().out
    assert main.main(["--rate", "0", *SCALE]) == 2
    assert "rate must be above 0" in capsys.readouterr().err


def test_smaller_pools_waste_more_and_prediction_wastes_less() -> None:
    items = [WorkItem(tuple(range(i, i + 40)), 60) for i in range(24)]
    points = sweep.pool_waste(items)
    waste = {
        policy: [p["prefill_waste_frac"] for p in points if p["policy"] == policy]
        for policy in sweep.POLICIES
    }
    assert waste["watermark"][0] > waste["watermark"][-1] == 0
    assert max(waste["predictive"]) < max(waste["watermark"])


def test_the_roofline_of_a_step_is_the_longer_of_memory_and_compute_time() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1,
              "intermediate_size": 8, "vocab_size": 16}  # fmt: skip
    cost = ModelCost.from_config(config, 4)
    record = StepRecord(
        time_s=0.0, rows=[0], starts=[0], num_scheduled=[5], num_logits=[1], num_sampled=[1],
        admitted=[], times=StepTimes(),
    )  # fmt: skip
    flops, nbytes = cost.step(record)
    for read_gbs, gflops, reads in ((1.0, 1e9, 1.0), (1e9, 1.0, 0.0)):
        peaks = Peaks(read_gbs=read_gbs, gemm_gflops=gflops, dtype="float32", by="test")
        found = limits.least_time([record, record], cost, peaks, 6)
        seconds = 2e-9 * (nbytes if reads else flops)
        assert found["seconds"] == pytest.approx(seconds)
        assert found["output_tokens_per_s"] == pytest.approx(6 / seconds)
        assert found["memory_frac"] == reads
