"""`nanoengine bench`: its report, on the real engine with an executor that computes nothing."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.bench.throughput import format_report, measure
from nanoengine.bench.workload import Scale, WorkOptions, random_workload
from nanoengine.cli import bench, main
from nanoengine.cli.bench import BenchArgs
from nanoengine.errors import ConfigError, NanoEngineError
from tests.support.fake_llm import MakeLLM, ScriptedExecutor
from tests.support.fake_llm import make_llm_fixture as make_llm_fixture

SMALL = {"num_requests": 6, "input_len": (20, 40), "output_len": (3, 9)}


@pytest.fixture
def llm(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Each step reports a forward time of one second."""
    run = ScriptedExecutor._run

    def timed(self: ScriptedExecutor, plan: Any) -> Any:
        result = run(self, plan)
        result.times.forward_s = 1.0
        return result

    monkeypatch.setattr(ScriptedExecutor, "_run", timed)
    return make_llm(num_blocks=200, max_model_len=2048, max_num_seqs=8)


def report_of(llm: LLM, **options: object) -> dict[str, Any]:
    return measure(llm, "a model", WorkOptions(**SMALL | options)).report


def test_options_of_the_engine_and_of_the_benchmark_share_one_command_line() -> None:
    line = "--model m --load-format dummy --num-kv-blocks 64 --input-len 5 9 --json out.json"
    assert main.parse(BenchArgs, "x", line.split()) == BenchArgs(
        model="m", load_format="dummy", num_kv_blocks=64, input_len=(5, 9), json=Path("out.json")
    )
    with pytest.raises(ConfigError, match="num_requests must be at least 1"):
        main.parse(BenchArgs, "x", ["--num-requests", "0"])


@pytest.mark.usefixtures("llm")
def test_the_figures_of_the_report_are_consistent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    bench.main(BenchArgs(**SMALL, max_num_seqs=4, json=path))
    report = json.loads(path.read_text())
    items = list(random_workload(Scale(6, (20, 40), (3, 9))))
    inputs, outputs = sum(len(ids) for ids, _ in items), sum(length for _, length in items)
    assert report["workload"]["input_tokens"] == report["prefill"]["tokens"] == inputs
    assert report["workload"]["output_tokens"] == outputs
    assert report["decode"]["tokens"] == outputs - 6
    assert report["prefill"]["seconds"] + report["decode"]["seconds"] >= report["steps"]
    assert report["max_batch"] == 4
    assert report["output_tokens_per_s"] == pytest.approx(outputs / report["seconds"][0])
    assert report["requests_per_s"] == pytest.approx(6 / report["seconds"][0])
    assert report["counters"]["prefill_tokens"] == inputs
    assert report["prefill_waste_frac"] == report["hit_rate"] == 0.0
    latency = report["latency"]["ttft_s"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= report["seconds"][0]
    assert len(report["step_records"]["seconds"]) == report["steps"]
    assert {"date", "command", "hardware", "versions"} <= set(report)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "prompt ids are taken modulo the vocabulary of 401" in text
    assert "load 0.00 s, start 0.00 s" in text
    assert f"6: {inputs} tokens in, {outputs} out" in text
    assert f"first token     {1e3 * latency['p50']:12,.1f}" in text


def test_only_hits_and_preemptions_of_timed_rounds_count(llm: LLM) -> None:
    report = report_of(llm, input_len=(1, 1), dataset="shared-prefix", prefix_len=64)
    # All six share eight blocks of 8; the first computes them, the others hit. The warm-up had
    # other ids, so it left no blocks to hit.
    assert report["counters"]["cache_hit_tokens"] == 5 * 64
    assert report["hit_rate"] == pytest.approx(5 * 64 / (6 * 65))
    assert report["counters"]["preemptions"] == 0


def test_the_report_shows_drafts_and_the_smoke_scale(llm: LLM) -> None:
    report = report_of(llm, smoke=True)
    assert report["notes"][0].startswith("smoke scale: 6 requests")
    assert "drafts" not in format_report(report)
    report["counters"] |= {"drafted_tokens": 1000, "accepted_tokens": 250, "saved_steps": 240}
    assert "\ndrafts          1,000 tokens, 25.0% accepted: 240 steps" in format_report(report)


def test_the_median_round_is_reported_and_also_run_alternates(llm: LLM) -> None:
    work, turns = WorkOptions(**SMALL | {"rounds": 3}), []
    measured = measure(llm, "m", work, turns.append)
    seconds = measured.report["seconds"]
    tokens = measured.report["workload"]["output_tokens"]
    assert measured.report["output_tokens_per_s"] == pytest.approx(tokens / sorted(seconds)[1])
    assert len(turns) == len({items[0].prompt_token_ids for items in turns}) == 3


def test_a_request_with_missing_tokens_stops_the_benchmark(llm: LLM) -> None:
    llm.engine.executor.hook = lambda plan: {0: "lost"} if plan.step == 3 else None
    with pytest.raises(NanoEngineError, match=r"request \d+ generated \d tokens instead of"):
        report_of(llm)


@pytest.mark.parametrize(
    "name",
    ["nanoengine.observe.metrics", "nanoengine.observe.hooks", "nanoengine.observe.trace",
     "nanoengine.bench.simulator", "nanoengine.bench.workload", "loc"],
)  # fmt: skip
def test_examples_in_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
