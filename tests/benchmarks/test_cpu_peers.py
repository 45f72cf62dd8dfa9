"""benchmarks/cpu_peers: workloads to the token, the roofline, the report, and what is skipped."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
import types
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import safetensors.torch
import torch

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
    """A runner's line, undisturbed and of workload W3."""
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
def test_workloads_to_the_token(name, scale, expected):
    assert counts(name, scale=scale) == expected


def test_rounds_do_the_same_work_on_other_tokens():
    for name in ("W1", "W2", "W3"):
        first, second = (requests_of(name, vocab_size=4096, seed=seed) for seed in (0, 1))
        assert [(len(p), n) for p, n in first] == [(len(p), n) for p, n in second]
        assert first[0][0][:16] != second[0][0][:16]
    assert warm_up(4096)[0][0][:16] != requests_of("W1", vocab_size=4096)[0][0][:16]


def test_ids_keep_clear_of_special_tokens():
    for vocab_size in (512, 4096, 151_936):
        for prompt, _ in requests_of("W1", vocab_size=vocab_size):
            assert max(prompt) < min(vocab_size, 4096) - 96


@pytest.mark.parametrize("name", ["W9", "B0", "B", "T-1", "B8x"])
def test_an_unknown_workload_is_refused(name):
    with pytest.raises(ValueError, match=f"one of W1, W2, W3, G, Bn or Tn, got '{name}'"):
        requests_of(name, vocab_size=4096)


def test_only_w2_shares_a_prefix():
    shared = {
        name: shared_prefix(requests_of(name, vocab_size=4096)) for name in ("W1", "W2", "W3")
    }
    assert shared == {"W1": 0, "W2": 512, "W3": 0}
    assert shared_prefix([([1, 2, 3], 1), ([1, 2, 3], 1)]) == 2  # a token of its own for each


# --- roofline -------------------------------------------------------------------------------------


def plain_cost(dense_params: int, head_params: int) -> ModelCost:
    """A model of one layer, whose attention has one head of one number."""
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1, "hidden_size": 1,
           "intermediate_size": 1, "vocab_size": 1}  # fmt: skip
    cost = ModelCost.from_config(one, 4)
    return replace(cost, dense_params=dense_params, head_params=head_params)


def test_every_step_takes_the_larger_of_computing_and_reading():
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


def test_rows_hold_medians_spreads_shares_and_ratios():
    lines = [line(speed=s, round=i) for i, s in enumerate((30.0, 20.0, 40.0))]
    lines += [line("vllm", speed=s, round=i) for i, s in enumerate((15.0, 20.0, 10.0))]
    ours, theirs = report.rows(lines, CONFIG, PEAKS, 1.0)
    assert (ours["peer"], ours["output_tok_s"], ours["spread"]) == ("nanoengine", 30.0, [20, 40])
    assert (theirs["output_tok_s"], theirs["nanoengine_is"]) == (15.0, 2.0)  # of 2, 1 and 4
    requests = requests_of("W3", vocab_size=4096)
    cost = ModelCost.from_config(CONFIG, 4)
    seconds = ideal_seconds(cost, requests, PEAKS.limits("none"), Formats())
    assert ours["roofline_share"] == pytest.approx(30.0 * seconds / 128, abs=5e-4)


def test_disturbed_runs_enter_no_median():
    lines = [line(speed=30.0), line(speed=3.0, other_cores=0.9), line("vllm", other_cores=0.21)]
    ours, theirs = report.rows(lines, CONFIG, PEAKS, 1.0)
    assert (ours["output_tok_s"], ours["disturbed_runs"], ours["valid"]) == (30.0, 1, True)
    assert not theirs["valid"]
    assert theirs["roofline_share"] is theirs["nanoengine_is"] is None


def test_precisions_are_compared_apart_and_quantized_ones_against_int8_products():
    lines = [line(), line(quantization="int8", speed=20.0, body_bits=8, head_bits=8)]
    rows = {row["precision"]: row for row in report.rows(lines, CONFIG, PEAKS, 1.0)}
    assert rows["int8"]["nanoengine_is"] == rows["float32"]["nanoengine_is"] == 1.0
    assert PEAKS.limits("int8").flops_per_s == 200e9
    assert PEAKS.limits("int8").attention_flops_per_s == 100e9
    assert PEAKS.limits("none").flops_per_s == 100e9
    assert rows["int8"]["roofline_tok_s"] > rows["float32"]["roofline_tok_s"]


def test_a_default_is_held_to_what_it_computes_in():
    modern = report.Peaks(
        isa="avx512_bf16", read_gbs=10, gflops={"float32": 100, "bfloat16": 400, "int8": 800}
    )
    assert modern.limits("default", "bfloat16").flops_per_s == 400e9
    assert modern.limits("default", "bfloat16").attention_flops_per_s == 400e9
    assert modern.limits("default", "float32").flops_per_s == 100e9
    assert PEAKS.limits("default", "bfloat16").flops_per_s == 100e9  # no such products there
    lines = [
        line("vllm", 8.0, quantization="default", dtype="bfloat16"),
        line("nanoengine", 2.0, quantization="default"),
    ]
    theirs, ours = report.rows(lines, CONFIG, modern, 1.0)
    assert {row["precision"] for row in (theirs, ours)} == {"default"}
    assert (theirs["computes_in"], ours["computes_in"]) == ("bfloat16", "float32")
    assert theirs["nanoengine_is"] == 0.25


def test_the_machine_is_what_it_reached_at_best():
    later = report.Peaks(isa="avx2", read_gbs=11, gflops={"float32": 90, "int8": 210})
    assert report.best_of([PEAKS, later]) == report.Peaks(
        isa="avx2", read_gbs=11, gflops={"float32": 100, "int8": 210}
    )


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


def test_the_table_shows_every_row_and_every_reason():
    made = {
        "model": "small", "hardware": {"cpu": "a CPU"}, "threads": 2, "scale": 1.0, "rounds": 2,
        "peaks": asdict(PEAKS),
        "rows": report.rows([line(), line("vllm", other_cores=1.0)], CONFIG, PEAKS, 1.0),
        "agreement": report.agreement([greedy("vllm", [[1]]), greedy("nanoengine", [[2]])]),
        "skipped": {"llamacpp int8": "no interpreter"},
    }  # fmt: skip
    text = report.table(made)
    assert "| float32 | nanoengine 1 | 10.0 |" in text
    assert text.count("DISTURBED") == 1
    assert "FLOAT32 PEERS DISAGREE: nanoengine float32" in text
    assert "skipped: llamacpp int8: no interpreter" in text


def test_a_prompt_is_told_in_seconds_and_workloads_by_their_size():
    lines = [
        line(workload=name, speed=speed, seconds=1 / speed, output_tokens=1, round=i)
        for name in ("T16320", "T4032", "B8", "B128")
        for i, speed in enumerate((0.02, 0.025, 0.04))
    ]
    made = {
        "model": "small", "hardware": {"cpu": "a CPU"}, "threads": 2, "scale": 1.0, "rounds": 3,
        "peaks": asdict(PEAKS), "rows": report.rows(lines, CONFIG, PEAKS, 1.0), "agreement": None,
        "skipped": {},
    }  # fmt: skip
    text = report.table(made)
    assert [row["workload"] for row in made["rows"]] == ["B8", "B128", "T4032", "T16320"]
    assert text.count("| nanoengine 1 | 40.00 | 25.00 to 50.00 |") == 2
    assert text.count("s to the first token") == text.count("output tok/s") == 2
    assert "a CPU, avx2, 2 threads; 10.0 GB/s read, 100 GFLOP/s float32, 200 GFLOP/s int8" in text


def test_the_short_table_has_a_line_a_workload_and_a_column_an_engine(tmp_path):
    speeds = {"nanoengine": (300.0, 200.0, 400.0), "vllm": (150.0, 200.0, 100.0)}
    lines = [
        line(peer, speed, workload=workload, round=i)
        for workload in ("W1", "W3")
        for peer, given in speeds.items()
        for i, speed in enumerate(given)
    ]
    lines += [
        line("openvino", 0.5, workload="T4032"),
        line("openvino", workload="W3", other_cores=1),
    ]
    made = {
        "model": "small", "hardware": {"cpu": "a CPU"}, "threads": 2, "scale": 0.25, "rounds": 3,
        "peaks": asdict(PEAKS), "rows": report.rows(lines, CONFIG, PEAKS, 0.25),
    }  # fmt: skip
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made))
    done = subprocess.run(
        [sys.executable, FOLDER / "report.py", path], capture_output=True, text=True, check=True
    )
    first, _, head, _, *rows = done.stdout.splitlines()
    assert first.startswith("a CPU, 2 threads, instruction set avx2; 10 GB/s read, 100 GFLOP/s")
    assert head == (
        "| small, float32, scale 0.25, 3 rounds | nanoengine | openvino | vllm | of the limit |"
    )
    assert rows[0].startswith("| W1 | 300 (200 to 400) |  | 150 (100 to 200): 2.00x |"), rows
    assert rows[1].startswith("| W3 | 300 (200 to 400) | disturbed | 150 (100 to 200): 2.00x |")
    assert rows[2] == "| T4032, s |  | 2.00 |  |  |"


def test_a_row_tells_what_is_kept_beside_busy_processes():
    speeds = {
        "nanoengine": ((40.0, 60.0), (30.0, 30.0)),  # quiet, beside: of each round
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
    assert ours["beside"]["kept"] == 0.625  # of 0.75 and 0.5
    assert (ours["over_best_peer"], ours["beside"]["over_best_peer"]) == (1.25, 1.25)
    assert (theirs["nanoengine_is"], theirs["beside"]["nanoengine_is"]) == (1.25, 2.25)
    made = {
        "model": "small", "hardware": {"cpu": "a CPU"}, "threads": 2, "scale": 1.0, "rounds": 2,
        "beside": 1, "peaks": asdict(PEAKS), "rows": list(rows.values()), "agreement": None,
        "skipped": {},
    }  # fmt: skip
    for text in (report.table(made), report.summary(made)):
        assert "| beside 1 busy | precision | peer | quiet | beside | kept |" in text
        ours_line = (
            "| nanoengine | 50.0 (40.0 to 60.0) | 30.0 (30.0 to 30.0) | 62% | 1.25x | 1.25x |"
        )
        assert f"| W3 | float32 {ours_line}" in text
        assert (
            "| openvino | 40.0 (40.0 to 40.0) | 15.0 (10.0 to 20.0) | 38% | 1.25x | 2.25x |" in text
        )


def test_a_disturbed_peer_may_be_the_best():
    lines = [line(), line("vllm", 5.0), line("openvino", 2.0, other_cores=1.0)]
    rows = {row["peer"]: row for row in report.rows(lines, CONFIG, PEAKS, 1.0)}
    assert rows["nanoengine"]["over_best_peer"] is None
    assert rows["vllm"]["nanoengine_is"] == 2.0
    assert "beside" not in report.table({
        "model": "small", "hardware": {"cpu": "a CPU"}, "threads": 2, "scale": 1.0, "rounds": 2,
        "peaks": asdict(PEAKS), "rows": list(rows.values()), "agreement": None, "skipped": {},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("compare.py --model /home/me/small --rounds 2", "compare.py --model small --rounds 2"),
        ("in '/opt/x/y.py', line 3", "in 'y.py', line 3"),
        ("~/peers/ov and 3 tok/s, a/b", "ov and 3 tok/s, a/b"),
        ("--json=/var/out/r.json", "--json=r.json"),
    ],
)
def test_reports_name_no_directories(text, expected):
    assert report.without_paths(text) == expected


# --- what runs ------------------------------------------------------------------------------------


def reason(name: str, tmp_path: Path, quantization: str = "none", found: bool = True, **changes):
    options = {"model": Path("small"), "converted": tmp_path, "envs": tmp_path} | changes
    entry = compare.Entry(name=name, quantization=quantization)
    return compare.skip_reason(entry, find=lambda *_: found, **options)


def test_a_missing_peer_is_skipped_with_its_reason(tmp_path):
    assert reason("openvino", tmp_path) == "no interpreter: ov/bin/python under --envs"
    assert reason("vllm", tmp_path, envs=None) == "no interpreter: --envs was not given"
    python = tmp_path / "ov" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    missing = reason("openvino", tmp_path, found=False)
    assert missing == "openvino_genai is not installed in its environment"
    lacking = reason("openvino", tmp_path, "int8")
    assert lacking == "small-ov-int8 is not among the conversions"
    (tmp_path / "small-ov-int8").mkdir()
    assert reason("openvino", tmp_path, "int8") is None
    assert reason("nanoengine", tmp_path, "int4") is None
    assert reason("openvino", tmp_path, "default") == "small-ov is not among the conversions"
    assert reason("nanoengine", tmp_path, "default") is None


def test_packages_are_looked_up_without_importing_them():
    assert compare.has_package(Path(sys.executable), "json")
    assert not compare.has_package(Path(sys.executable), "no_such_package")


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
        ("vllm", ["W1", "W3"]), ("nanoengine", ["W1", "W3"]),  # another begins each round
    ]  # fmt: skip
    assert (failed, rounds) == ({}, 2)
    assert [entry["valid"] for entry in lines if entry["workload"] == "W3"].count(False) == 1


def test_each_run_is_repeated_beside_processes_that_end_with_it(tmp_path, monkeypatch):
    calls, used, began = [], [], []

    def run(entry, names, args, seed, beside):
        began.append(harness.seconds_of(beside))
        while beside and harness.seconds_of(beside) - began[-1] < 0.1:
            time.sleep(0.01)
        calls.append((entry.name, names, len(beside)))
        used.extend(beside)
        return [line(entry.name, workload=name) for name in names if name != "G"], None

    monkeypatch.setattr(compare, "run_entry", run)
    entries = [compare.Entry(name=name, quantization="none") for name in ("nanoengine", "vllm")]
    options = arguments(tmp_path, rounds=1, workloads=["W3"], beside=2)
    lines, _, _ = compare.run_rounds(entries, options)
    assert calls == [
        ("nanoengine", ["G", "W3"], 0), ("nanoengine", ["W3"], 2),
        ("vllm", ["G", "W3"], 0), ("vllm", ["W3"], 2),
    ]  # fmt: skip
    assert [line["beside"] for line in lines] == [0, 2, 0, 2]
    assert len(set(used)) == 4
    assert not [pid for pid in used if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("how", ["parent killed", "time is up"])
def test_a_busy_process_ends_by_itself(how):
    seconds = 15 if how == "parent killed" else 0.2
    code = (
        f"import sys, time; sys.path[:0] = ['.', {str(FOLDER)!r}]; import compare\n"
        f"with compare.busy_processes(1, {seconds}) as pids:\n"
        "    print(*pids, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=FOLDER.parents[1]
    )
    stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    if how == "parent killed":
        parent.kill()
    try:
        for _ in range(1000):
            # Its parent has not taken note of its end: a zombie.
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.01)
        pytest.fail("it goes on")
    finally:
        parent.kill()
        parent.communicate()


def test_processes_that_are_meant_to_disturb_are_not_others(monkeypatch):
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


def test_a_peer_that_fails_is_not_run_again_and_says_why(tmp_path, monkeypatch):
    calls = []

    def run(entry, names, args, seed, beside):
        calls.append(entry.name)
        return ([], "exit status 1: no") if entry.name == "vllm" else ([line()], None)

    monkeypatch.setattr(compare, "run_entry", run)
    entries = [compare.Entry(name=name, quantization="none") for name in ("vllm", "nanoengine")]
    _, failed, _ = compare.run_rounds(entries, arguments(tmp_path))
    assert calls == ["vllm", "nanoengine", "nanoengine"]
    assert failed == {"vllm float32": "exit status 1: no"}


def test_no_round_begins_that_would_pass_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_entry", lambda *_, **__: ([line()], None))
    entries = [compare.Entry(name="vllm", quantization="none")]
    _, _, rounds = compare.run_rounds(entries, arguments(tmp_path, rounds=3, minutes=0))
    assert rounds == 1


def test_a_runner_s_failure_is_told_without_paths(tmp_path):
    args = argparse.Namespace(
        envs=None, model=tmp_path / "nothing", converted=tmp_path, threads=1, scale=1.0, timeout=60
    )
    entry = compare.Entry(name="nanoengine", quantization="none")
    lines, error = compare.run_entry(entry, ["W3"], args, seed=0, beside=[])
    assert lines == []
    assert error.startswith("exit status 1: FileNotFoundError")
    assert str(tmp_path) not in error


# --- conversion for llama.cpp ---------------------------------------------------------------------


@pytest.fixture
def convert_gguf(monkeypatch):
    """The converter, with a stand-in for gguf, which only the environment of llama.cpp has."""
    gguf = types.ModuleType("gguf")
    gguf.GGMLQuantizationType = gguf.LlamaFileType = MagicMock()
    gguf.TokenType = SimpleNamespace(CONTROL="control", NORMAL="normal")
    gguf.GGUFWriter = object
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    monkeypatch.delitem(sys.modules, "convert_gguf", raising=False)
    return importlib.import_module("convert_gguf")


def test_the_converter_reads_bfloat16_which_numpy_does_not_know(convert_gguf, tmp_path):
    stored = {
        "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "a": torch.arange(7.0),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(stored, path)
    read = dict(convert_gguf.read_tensors(path))
    assert list(read) == ["a", "b"]
    for name, numbers in read.items():
        assert numbers.dtype == np.float32
        assert np.array_equal(numbers, stored[name].float().numpy())
    safetensors.torch.save_file({"c": torch.ones(2, dtype=torch.float16)}, path)
    with pytest.raises(SystemExit, match="c is F16; only F32 and BF16 are read"):
        list(convert_gguf.read_tensors(path))


def test_the_converter_takes_texts_and_kinds_of_tokens(convert_gguf, tmp_path):
    config = dict.fromkeys(
        ("max_position_embeddings", "rms_norm_eps", "eos_token_id"), 1
    ) | CONFIG | {"vocab_size": 3, "rope_parameters": {"rope_theta": 1.0}}  # fmt: skip
    tokenizer = {
        "added_tokens": [{"id": 1, "content": "<end>"}],
        "model": {"vocab": {"a": 0, "old": 1, "b": 2}, "merges": [["a", "b"], "b a"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    writer = MagicMock()
    convert_gguf.write_metadata(writer, tmp_path)
    writer.add_token_list.assert_called_once_with(["a", "<end>", "b"])
    writer.add_token_types.assert_called_once_with(["normal", "control", "normal"])
    writer.add_token_merges.assert_called_once_with(["a b", "b a"])


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


def test_greedy_ids_are_given_as_they_are():
    found = harness.measure("G", [([1], 2)], lambda _: [[7, 8]])
    assert found == {"workload": "G", "ids": [[7, 8]]}


def test_a_peer_that_stops_early_is_refused():
    with pytest.raises(SystemExit, match=r"W1: output lengths \[1\], asked for \[2\]"):
        harness.measure("W1", [([1], 2)], lambda _: [[7]])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("run_*.py")), ids=lambda path: path.stem)
def test_every_runner_starts_without_its_peer_and_offers_what_compare_asks(path):
    name = path.stem.removeprefix("run_")
    done = subprocess.run(
        [sys.executable, "-S", str(path), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    offered = done.stdout.split("--quantization {", 1)[1].split("}", 1)[0].split(",")
    assert offered == list(compare.PEERS[name].converted)


def test_the_command_line_refuses_what_it_does_not_know(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for wrong, message in (
        (["--peers", "nobody"], "nobody"),
        (["--workloads", "W1,W7"], "W7"),
        (["--batches", "8,0"], "['0'] are no numbers from 1 on"),
        (["--contexts", "4k"], "['4k'] are no numbers from 1 on"),
        (["--defaults"], "a checkpoint stored in bfloat16"),
        (["--json", str(tmp_path / "no" / "r.json")], "does not exist"),
    ):
        with pytest.raises(SystemExit):
            compare.parse(["--model", str(tmp_path), *wrong])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.parse(["--model", str(tmp_path / "none")])
    assert compare.parse(["--model", str(tmp_path), "--peers", "vllm"]).peers == ["vllm"]


def test_the_command_line_says_what_runs(tmp_path):
    def parsed(*argv: str) -> tuple[list[str], list[str]]:
        args = compare.parse(["--model", str(tmp_path), *argv])
        return args.workloads, args.quantization

    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    three = ["W1", "W2", "W3"]
    assert parsed() == (three, ["none", "int8", "int4"])
    assert parsed("--defaults") == (three, ["default"])
    assert parsed("--batches", "1,256", "--contexts", "4032")[0] == ["B1", "B256", "T4032"]
    assert parsed("--workloads", "W3", "--batches", "8")[0] == ["W3", "B8"]


def test_a_cache_holds_the_largest_workload(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    token = 2 * 2 * 1 * 3 * 4  # keys and values, layers, heads, numbers, bytes
    options = harness.Options(
        model=tmp_path, converted=tmp_path, quantization="none", threads=1, batch=1, longest=1,
        tokens=5 * 2**30 // token,
    )  # fmt: skip
    assert options.kv_gib() == 10
    assert options.kv_gib(element_bytes=2) == 5
    assert replace(options, tokens=1).kv_gib() == 4
    # Qwen2's config names no head_dim: it is hidden_size / num_attention_heads, here 2 for 3.
    sizes = {name: size for name, size in CONFIG.items() if name != "head_dim"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert replace(options, tokens=6 * options.tokens).kv_gib() == 40
