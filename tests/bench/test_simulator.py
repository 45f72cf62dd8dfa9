"""The simulator: it makes the engine's decisions without a model."""

from __future__ import annotations

import gc
import json

import pytest

from nanoengine.bench.simulator import TimeModel, make_scheduler, simulate
from nanoengine.bench.workload import Scale, WorkItem, random_workload
from nanoengine.cli.main import main
from nanoengine.core.plan import StepPlan
from nanoengine.core.policies import Predictive
from nanoengine.core.sequence import Request
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run

SMALL = list(random_workload(Scale(24, (5, 40), (5, 40)), 1))


def test_it_counts_what_an_engine_counts():
    engine = make_engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, eos_token_ids=())
    for i, item in enumerate(SMALL):
        prompt = [token % 50 for token in item.prompt_token_ids]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=item.max_tokens))
    run(engine)
    stats = engine.stats()
    scheduler = make_scheduler(
        num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, watermark_frac=0
    )
    report = simulate(SMALL, scheduler)
    assert report.preemptions == stats.preemptions > 0
    for name in ("steps", "output_tokens", "prefill_tokens", "recomputed_tokens"):
        assert getattr(report, name) == getattr(stats, name), name
    assert report.peak_blocks == 39


@pytest.mark.parametrize("policy", [None, Predictive()])
def test_requests_of_hidden_length_stop_at_their_length(policy):
    scheduler = make_scheduler(num_blocks=200, block_size=4, max_num_seqs=8, policy=policy)
    report = simulate(SMALL, scheduler, length_cap=60)
    assert report.output_tokens == sum(item.max_tokens for item in SMALL)
    assert (report.requests, report.failed) == (24, 0)


@pytest.mark.parametrize("length_cap", [None, 60])
def test_memory_does_not_grow_with_the_workload(length_cap):
    scheduler = make_scheduler(num_blocks=60, block_size=4, max_num_seqs=8)

    def num_alive() -> int:
        gc.collect()
        return sum(type(thing) is Request for thing in gc.get_objects())

    before, alive = num_alive(), []

    def pulled():
        for number, item in enumerate(random_workload(Scale(200, (5, 40), (5, 20)), 1)):
            if number % 40 == 39:
                alive.append(num_alive() - before)
            yield item

    assert simulate(pulled(), scheduler, length_cap=length_cap).requests == 200
    assert max(alive) <= 8 + 8 + 8, "running requests, queued ones, and just finished ones"


def test_a_request_that_is_too_large_is_counted_and_the_others_run():
    items = [WorkItem((1,) * 100, 5), *SMALL]
    report = simulate(items, make_scheduler(num_blocks=24, block_size=4))
    assert (report.requests, report.failed) == (25, 1)
    assert report.output_tokens == sum(item.max_tokens for item in SMALL)


def test_the_standard_workload_runs_in_a_third_of_the_blocks_it_could_use():
    """Prediction wastes under a tenth of the prefill, where the closest peer wastes 46 %, and the
    estimated time is no longer."""
    items = list(random_workload())
    model = TimeModel(step_s=2.5e-3, token_s=3e-6, context_s=29e-9)
    plain, careful = (
        simulate(
            items,
            make_scheduler(num_blocks=171, block_size=256, policy=policy),
            time_model=model,
        )
        for policy in (None, Predictive())
    )
    assert plain.prefill_waste_frac > 0.3
    assert careful.prefill_waste_frac < 0.1
    assert (careful.requests, careful.failed) == (256, 0) and careful.preemptions > 0
    assert careful.steps <= plain.steps
    assert careful.estimated_s < plain.estimated_s


def test_the_time_model_recovers_the_terms_of_its_data():
    tokens, context = [1, 64, 512, 7, 3], [10, 900, 2000, 5000, 70]
    seconds = [0.002 + 0.0001 * t + 1e-6 * c for t, c in zip(tokens, context, strict=True)]
    model = TimeModel.fit(tokens, context, seconds)
    assert model.step_s == pytest.approx(0.002)
    assert model.token_s == pytest.approx(0.0001)
    assert model.context_s == pytest.approx(1e-6)
    plan = StepPlan(step=0, rows=[0, 1], starts=[9, 0], num_scheduled_tokens=[1, 5])
    assert model.step(plan) == pytest.approx(0.002 + 6e-4 + 15e-6)


def test_no_term_of_the_time_model_is_negative():
    model = TimeModel.fit([1, 2, 3, 4], [40, 30, 20, 10], [4.0, 3.0, 2.0, 1.5])
    assert min(model.step_s, model.token_s, model.context_s) >= 0


def test_simulate_prints_a_report(tmp_path, capsys):
    rows = tmp_path / "lengths.csv"
    rows.write_text("ContextTokens,GeneratedTokens\n20,5\n9,12\n")
    bench = tmp_path / "bench.json"
    columns = {"tokens": [1, 8, 3], "context_tokens": [9, 8, 30], "seconds": [0.5, 0.5, 0.5]}
    bench.write_text(json.dumps({"step_records": columns}))
    arguments = [
        "simulate",
        "--num-blocks",
        "20",
        "--workload",
        str(rows),
        "--step-times",
        str(bench),
    ]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["output_tokens"], report["steps"]) == (17, 12)
    assert report["estimated_s"] == pytest.approx(6.0)
    assert main(arguments) == 0
    assert "2.8 output tok/s" in capsys.readouterr().out
