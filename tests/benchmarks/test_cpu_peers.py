"""benchmarks/cpu_peers: exact workloads, the roofline, the report, and skipped runs."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu_peers"
sys.path.insert(0, str(FOLDER))

import compare  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402

from benchmarks.suite.cost import ModelCost  # noqa: E402
from benchmarks.suite.roofline import Card, Formats, ideal_seconds  # noqa: E402
from benchmarks.suite.workloads import requests_of, shared_prefix, warm_up  # noqa: E402

CONFIG = {
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
    "vocab_size": 4096,
}
PEAKS = report.Peaks(isa="avx2", read_gbs=10, gflops={"float32": 100, "int8": 200})


def counts(name: str, **options) -> tuple[int, int, int]:
    work = requests_of(name, vocab_size=4096, **options)
    return len(work), sum(len(prompt) for prompt, _ in work), sum(count for _, count in work)


def line(peer: str = "nanoengine", speed: float = 10.0, **changes) -> dict:
    """A result of a runner, undisturbed, for workload W3."""
    return {
        "peer": peer, "quantization": "none", "dtype": "float32", "version": "1", "load_s": 2.0,
        "body_bits": 32, "head_bits": 32, "kv_bits": 32, "workload": "W3", "requests": 1,
        "prompt_tokens": 128, "output_tokens": 128, "seconds": 128 / speed, "output_tok_s": speed,
        "own_cores": 2.0, "other_cores": 0.0, "peak_rss_mib": 1000, "round": 0, **changes,
    }  # fmt: skip


# --- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("W1", 1, (32, 5310, 2492)),
        ("W1", 0.25, (8, 1450, 654)),
        ("W2", 1, (32, 32 * 544, 32 * 32)),
        ("W2", 0.25, (8, 8 * 544, 8 * 32)),
        ("W3", 1, (1, 128, 128)),
        ("W3", 0.5, (1, 128, 64)),
        ("G", 1, (4, 38, 32)),
        ("B1", 1, (1, 64, 64)),
        ("B64", 1, (64, 64 * 64, 64 * 64)),
        ("B256", 1, (256, 256 * 64, 256 * 32)),
        ("B8", 0.25, (8, 8 * 64, 8 * 16)),
        ("T4032", 1, (1, 4032, 1)),
        ("T16320", 0.25, (1, 16320, 1)),
    ],
)
def test_workloads_have_exact_token_counts(name, scale, expected):
    assert counts(name, scale=scale) == expected


def test_rounds_have_the_same_lengths_and_other_tokens():
    for name in ("W1", "W2", "W3"):
        first, second = (requests_of(name, vocab_size=4096, seed=seed) for seed in (0, 1))
        assert [(len(p), n) for p, n in first] == [(len(p), n) for p, n in second]
        assert first[0][0][:16] != second[0][0][:16]
    assert warm_up(4096)[0][0][:16] != requests_of("W1", vocab_size=4096)[0][0][:16]


def test_only_w2_shares_a_prefix():
    shared = {
        name: shared_prefix(requests_of(name, vocab_size=4096)) for name in ("W1", "W2", "W3")
    }
    assert shared == {"W1": 0, "W2": 512, "W3": 0}
    assert shared_prefix([([1, 2, 3], 1), ([1, 2, 3], 1)]) == 2  # one token is not shared


# --- roofline -------------------------------------------------------------------------------------


def plain_cost(dense_params: int, head_params: int) -> ModelCost:
    """A model with one layer and one attention head of size one."""
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1, "hidden_size": 1,
           "intermediate_size": 1, "vocab_size": 1}  # fmt: skip
    cost = ModelCost.from_config(one, 4)
    return replace(cost, dense_params=dense_params, head_params=head_params)


def test_the_ideal_step_time_is_the_larger_of_compute_and_memory_time():
    cost, work = plain_cost(100, 50), [([1, 2, 3], 2)]
    slow_math = Card(bytes_per_s=1e18, flops_per_s=1)
    # Prefill: 3 tokens, 1 sampled, 6 pairs; decode: 1 token that attends to 4.
    flops = (2 * (3 * 100 + 50) + 4 * 6) + (2 * (100 + 50) + 4 * 4)
    assert ideal_seconds(cost, work, slow_math, Formats()) == pytest.approx(flops)
    slow_attention = Card(bytes_per_s=1e18, flops_per_s=1e18, attention_flops_per_s=1)
    assert ideal_seconds(cost, work, slow_attention, Formats()) == pytest.approx(4 * 6 + 4 * 4)
    slow_memory = Card(bytes_per_s=1, flops_per_s=1e18)
    numbers = (150 + 2 * 3) + (150 + 2 * 4)
    assert ideal_seconds(cost, work, slow_memory, Formats()) == pytest.approx(4 * numbers)
    narrow = Formats(body_bits=8, head_bits=16, kv_bits=4)
    expected = 2 * (100 + 2 * 50) + (2 * 3 + 2 * 4) / 2
    assert ideal_seconds(cost, work, slow_memory, narrow) == pytest.approx(expected)


def test_a_shared_prefix_is_computed_and_read_once():
    card = Card(bytes_per_s=1e18, flops_per_s=1, attention_flops_per_s=1e18)
    cost, prefix = plain_cost(1000, 0), list(range(100))
    shared = ideal_seconds(cost, [([*prefix, 101], 1), ([*prefix, 102], 1)], card, Formats())
    apart = [([*prefix, 101], 1), ([*prefix[::-1], 102], 1)]
    assert shared == pytest.approx(2 * 1000 * 102)
    assert ideal_seconds(cost, apart, card, Formats()) == pytest.approx(2 * 1000 * 202)


# --- report ---------------------------------------------------------------------------------------


def test_report_rows_have_medians_spreads_shares_and_ratios():
    lines = [line(speed=s, round=i) for i, s in enumerate((30.0, 20.0, 40.0))]
    lines += [line("vllm", speed=s, round=i) for i, s in enumerate((15.0, 20.0, 10.0))]
    ours, theirs = report.rows(lines, CONFIG, PEAKS, 1.0)
    assert (ours["peer"], ours["output_tok_s"], ours["spread"]) == ("nanoengine", 30.0, [20, 40])
    assert (theirs["output_tok_s"], theirs["nanoengine_is"]) == (15.0, 2.0)  # median of 2, 1, 4
    requests = requests_of("W3", vocab_size=4096)
    cost = ModelCost.from_config(CONFIG, 4)
    seconds = ideal_seconds(cost, requests, PEAKS.limits("none"), Formats())
    assert ours["roofline_share"] == pytest.approx(30.0 * seconds / 128, abs=5e-4)


def test_disturbed_runs_are_excluded_from_medians():
    lines = [line(speed=30.0), line(speed=3.0, other_cores=0.9), line("vllm", other_cores=0.21)]
    ours, theirs = report.rows(lines, CONFIG, PEAKS, 1.0)
    assert (ours["output_tok_s"], ours["disturbed_runs"], ours["valid"]) == (30.0, 1, True)
    assert not theirs["valid"]
    assert theirs["roofline_share"] is theirs["nanoengine_is"] is None


def test_precisions_are_compared_separately_and_quantized_ones_with_the_int8_peak():
    lines = [line(), line(quantization="int8", speed=20.0, body_bits=8, head_bits=8)]
    rows = {row["precision"]: row for row in report.rows(lines, CONFIG, PEAKS, 1.0)}
    assert rows["int8"]["nanoengine_is"] == rows["float32"]["nanoengine_is"] == 1.0
    assert PEAKS.limits("int8").flops_per_s == 200e9
    assert PEAKS.limits("int8").attention_flops_per_s == 100e9
    assert PEAKS.limits("none").flops_per_s == 100e9
    assert rows["int8"]["roofline_tok_s"] > rows["float32"]["roofline_tok_s"]


def test_a_default_precision_is_compared_with_the_peak_of_its_compute_dtype():
    modern = report.Peaks(
        isa="avx512_bf16", read_gbs=10, gflops={"float32": 100, "bfloat16": 400, "int8": 800}
    )
    assert modern.limits("default", "bfloat16").flops_per_s == 400e9
    assert modern.limits("default", "bfloat16").attention_flops_per_s == 400e9
    assert modern.limits("default", "float32").flops_per_s == 100e9
    assert PEAKS.limits("default", "bfloat16").flops_per_s == 100e9  # no bfloat16 products
    lines = [
        line("vllm", 8.0, quantization="default", dtype="bfloat16"),
        line("nanoengine", 2.0, quantization="default"),
    ]
    theirs, ours = report.rows(lines, CONFIG, modern, 1.0)
    assert {row["precision"] for row in (theirs, ours)} == {"default"}
    assert (theirs["computes_in"], ours["computes_in"]) == ("bfloat16", "float32")
    assert theirs["nanoengine_is"] == 0.25


def greedy(peer: str, ids: list[list[int]], quantization: str = "none") -> dict:
    return {"peer": peer, "quantization": quantization, "dtype": "float32", "version": "1",
            "workload": "G", "ids": ids}  # fmt: skip


def test_float32_peers_must_agree_and_quantized_ones_are_counted():
    found = report.agreement([
        greedy("nanoengine", [[1, 2], [3]]),
        greedy("transformers", [[1, 2], [3]]),
        greedy("vllm", [[1, 2], [4]]),
        greedy("openvino", [[9, 9], [9]], "int8"),
    ])  # fmt: skip
    assert found["reference"] == "transformers float32"
    assert found["same"]["openvino int8"] == 0
    assert found["float32_differ"] == ["vllm float32"]
    assert report.agreement([line()]) is None


def test_a_row_has_the_share_of_speed_kept_on_a_busy_machine():
    speeds = {
        "nanoengine": ((40.0, 60.0), (30.0, 30.0)),  # per round: alone, then next to busy processes
        "openvino": ((40.0, 40.0), (20.0, 10.0)),
        "llamacpp": ((20.0, 20.0), (30.0, 20.0)),
    }
    lines = [
        line(peer, speed, round=i, beside=count)
        for peer, both in speeds.items()
        for count, given in enumerate(both)
        for i, speed in enumerate(given)
    ]
    rows = {row["peer"]: row for row in report.rows(lines, CONFIG, PEAKS, 1.0)}
    ours, theirs = rows["nanoengine"], rows["openvino"]
    assert (ours["output_tok_s"], ours["beside"]["output_tok_s"]) == (50.0, 30.0)
    assert ours["beside"]["kept"] == 0.625  # the mean of 0.75 and 0.5
    assert (ours["over_best_peer"], ours["beside"]["over_best_peer"]) == (1.25, 1.25)
    assert (theirs["nanoengine_is"], theirs["beside"]["nanoengine_is"]) == (1.25, 2.25)


# --- runs -----------------------------------------------------------------------------------------


def arguments(tmp_path: Path, **changes) -> argparse.Namespace:
    options = {
        "rounds": 2, "minutes": 10, "retries": 1, "quiet_wait": 0, "workloads": ["W1", "W3"],
        "beside": 0, "timeout": 60,
    }  # fmt: skip
    return argparse.Namespace(**options | changes)


def test_rounds_interleave_and_a_disturbed_run_is_repeated_alone(tmp_path, monkeypatch):
    calls: list[tuple[str, list[str]]] = []

    def run(entry, names, args, seed, beside):
        disturbed = not calls
        calls.append((entry.name, names))
        return [
            line(entry.name, workload=name, other_cores=float(disturbed and name == "W3"))
            if name != "G" else greedy(entry.name, [[1]])
            for name in names
        ], None  # fmt: skip

    monkeypatch.setattr(compare, "run_entry", run)
    entries = [compare.Entry(name=name, quantization="none") for name in ("nanoengine", "vllm")]
    lines, failed, rounds = compare.run_rounds(entries, arguments(tmp_path))
    assert calls == [
        ("nanoengine", ["G", "W1", "W3"]), ("nanoengine", ["W3"]), ("vllm", ["G", "W1", "W3"]),
        ("vllm", ["W1", "W3"]), ("nanoengine", ["W1", "W3"]),  # each round begins with another peer
    ]  # fmt: skip
    assert (failed, rounds) == ({}, 2)
    assert [entry["valid"] for entry in lines if entry["workload"] == "W3"].count(False) == 1


def test_processes_of_the_benchmark_do_not_count_as_disturbance(monkeypatch):
    requests = [([1, 2], 3)]
    clocks = {"busy_seconds": iter((10.0, 14.0)), "seconds_of": iter((5.0, 6.5))}
    monkeypatch.setattr(harness, "busy_seconds", lambda: next(clocks["busy_seconds"]))
    monkeypatch.setattr(harness, "seconds_of", lambda _: next(clocks["seconds_of"]))
    times = SimpleNamespace(
        perf_counter=iter((0.0, 2.0)).__next__, process_time=iter((0.0, 2.4)).__next__
    )
    monkeypatch.setattr(harness, "time", times)
    found = harness.measure("W3", requests, lambda _: [[7, 8, 9]], [1])
    assert (found["own_cores"], found["beside_cores"], found["other_cores"]) == (1.2, 0.75, 0.05)


def test_a_failing_peer_is_not_run_again_and_its_error_is_reported(tmp_path, monkeypatch):
    calls = []

    def run(entry, names, args, seed, beside):
        calls.append(entry.name)
        return ([], "exit status 1: no") if entry.name == "vllm" else ([line()], None)

    monkeypatch.setattr(compare, "run_entry", run)
    entries = [compare.Entry(name=name, quantization="none") for name in ("vllm", "nanoengine")]
    _, failed, _ = compare.run_rounds(entries, arguments(tmp_path))
    assert calls == ["vllm", "nanoengine", "nanoengine"]
    assert failed == {"vllm float32": "exit status 1: no"}


# --- the runners' harness -------------------------------------------------------------------------


def test_a_run_is_timed_and_counted():
    work = requests_of("W3", vocab_size=4096, scale=0.1)

    def generate(requests):
        time.sleep(0.01)  # Why: seconds are rounded to 0.1 ms.
        return [[0] * count for _, count in requests]

    found = harness.measure("W3", work, generate)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (1, 128, 13)
    assert found["output_tok_s"] == pytest.approx(13 / found["seconds"], rel=0.01)
    assert found["peak_rss_mib"] > 1
    assert found["other_cores"] >= 0


def test_a_peer_that_stops_early_is_an_error():
    with pytest.raises(SystemExit, match=r"W1: output lengths \[1\], expected \[2\]"):
        harness.measure("W1", [([1], 2)], lambda _: [[7]])
