"""The GPU report without a GPU: budgets, cases, tables and JSON, with fake clocks and timers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.suite import gpu_visit, peak
from benchmarks.suite.gpu import engine, kernels, processes, suite
from benchmarks.suite.gpu.engine import Probe
from benchmarks.suite.gpu.kernels import Heads
from benchmarks.suite.gpu.parts import Case, drive, run_cases
from benchmarks.suite.gpu.summary import standard_roofline, summarize
from benchmarks.suite.gpu.timing import kernel_table, kernel_times
from benchmarks.suite.main import main
from benchmarks.suite.peak import Peaks
from benchmarks.suite.roofline import H200_MEASURABLE
from nanoengine.errors import ConfigError, MissingDependencyError
from tests.support.packages import NEEDED, modules_missing_with

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

CPU = torch.device("cpu")
TINY = Heads(num_heads=4, num_kv_heads=2, head_dim=32)


class Clock:
    """A clock that advances only when a test advances it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


# --- cases and budgets ----------------------------------------------------------------------------


def cases_of(clock, *costs):
    """Cases with these costs in seconds; an exception instead of a cost is raised."""

    def measure(cost):
        if isinstance(cost, Exception):
            raise cost
        clock.now += cost
        return {"cost": cost}

    for number, cost in enumerate(costs):
        yield Case(f"case {number}", lambda cost=cost: measure(cost))


def test_a_spent_budget_lists_the_cases_that_were_not_run():
    clock = Clock()
    rows = list(run_cases("part", cases_of(clock, 4, 5, 6, 1, 1), budget_s=10, clock=clock))
    assert rows[:3] == [{"case": f"case {i}", "cost": cost} for i, cost in enumerate((4, 5, 6))]
    reason = "the part's 10 s were spent"
    assert rows[3:] == [{"case": f"case {i}", "skipped": reason} for i in (3, 4)]


def test_unsupported_and_failing_cases_do_not_stop_a_part():
    clock = Clock()
    errors = [ConfigError("block_size must\nbe 256"), RuntimeError("wrong shape"), 1]
    rows = list(run_cases("part", cases_of(clock, *errors), budget_s=10, clock=clock))
    traceback = rows[1].pop("traceback")
    assert rows == [
        {"case": "case 0", "refused": "block_size must"},
        {"case": "case 1", "failed": "RuntimeError: wrong shape"},
        {"case": "case 2", "cost": 1},
    ]
    assert "raise cost" in "".join(traceback)


def test_a_lost_gpu_stops_a_part_and_an_unsupported_case_does_not_check_the_gpu():
    clock, asked = Clock(), []

    def still_usable():
        asked.append(1)
        return "the GPU answers no more"

    cases = cases_of(clock, MissingDependencyError("no flash_attn"), RuntimeError("illegal"), 1)
    rows = list(run_cases("part", cases, budget_s=10, clock=clock, still_usable=still_usable))
    assert [list(row)[1] for row in rows] == ["refused", "failed", "skipped"]
    assert rows[2]["skipped"] == "after the failure of case 1: the GPU answers no more"
    assert len(asked) == 1


def test_the_suite_respects_the_total_budget_and_saves_after_each_part():
    clock, saved, budgets = Clock(), [], {}
    parts = [(name, 50.0) for name in "abcd"]

    def run(name, budget_s):
        budgets[name] = budget_s
        clock.now += budget_s if name != "b" else 20
        return [{"case": name}], "it crashed" if name == "b" else None

    results = drive(parts, run, total_s=90, clock=clock, save=lambda r: saved.append(json.dumps(r)))
    assert budgets == {"a": 50, "b": 40, "c": 20}
    assert list(results) == list("abcd")
    assert results["b"] == {
        "rows": [{"case": "b"}], "budget_s": 40, "seconds": 20, "failed": "it crashed",
    }  # fmt: skip
    assert results["d"] == {"rows": [], "skipped": "the report's 90 s were spent"}
    assert [list(json.loads(text)) for text in saved] == [list("abcd")[: n + 1] for n in range(4)]


# --- kernels --------------------------------------------------------------------------------------


class FakeTimer:
    """Runs the work once and reports a second per call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, work):
        work()
        self.calls += 1
        return 1.0


def test_peaks_count_both_directions_and_all_products():
    timer = FakeTimer()
    rows = [
        case.measure() for case in kernels.peak_cases(CPU, timer, copy_mib=[1], gemm_sizes=[16])
    ]
    assert rows == [
        {"mib": 1, "gbs": 2 * 2**20 / 1e9},
        {"size": 16, "tflops": 2 * 16**3 / 1e12},
    ]
    assert timer.calls == 2


def test_decode_benchmarks_rotate_layers_so_that_the_l2_cache_has_no_hits(monkeypatch):
    monkeypatch.setattr(kernels, "ROTATED_BYTES", 100_000)
    kv_bytes = 3 * 33 * 2 * 2 * 32 * 2
    cases = list(
        kernels.decode_cases(
            CPU, FakeTimer(), backends=["naive"], batches=[3], contexts=[33], heads=TINY
        )
    )
    assert [case.name for case in cases] == ["naive 3 x 33"]
    layers = -(-100_000 // kv_bytes)
    row = cases[0].measure()
    assert row["us"] == pytest.approx(1e6 / layers)
    assert row["gbs"] == pytest.approx(kv_bytes * layers / 1e9)


def test_prefill_counts_the_visible_pairs():
    (case,) = kernels.prefill_cases(
        CPU, FakeTimer(), backends=["naive"], lengths=[8], tokens=24, heads=TINY
    )
    row = case.measure()
    assert (row["prompts"], row["length"]) == (3, 8)
    assert row["tflops"] == pytest.approx(4 * 4 * 32 * 3 * 36 / 1e12)


def test_the_parity_check_detects_wrong_results_and_wrong_stores(monkeypatch):
    forward = kernels.make_backend(
        "naive", device=CPU, dtype=torch.float32, head_dim=32, block_size=16
    ).__class__.forward

    broken: list[str] = []

    def off(self, q, k, v, cache, batch):
        out = forward(self, q, k, v, cache, batch)
        if q.dtype == torch.float32:
            out = out + 1e-3 if broken == ["result"] else out
            cache.k_cache[0, 0, 0, 0] += broken == ["store"]
        return out

    monkeypatch.setattr("nanoengine.attention.naive.NaiveBackend.forward", off)
    monkeypatch.setitem(kernels.PARITY, "short", ([(1, 5), (3, 4)], {}))
    cases = {"nothing": (True, True), "result": (False, True), "store": (False, False)}
    for what, expected in cases.items():
        broken[:] = [what]
        row = kernels.parity_row(CPU, "naive", torch.float32, "short", TINY)
        assert (row["ok"], row["stored"]) == expected


# --- engine ---------------------------------------------------------------------------------------

SMALL = {
    "device": "cpu", "attention_backend": "naive", "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "max_model_len": 256, "num_kv_blocks": 200,
    "dtype": "bfloat16",  # Why: on a CPU it has no kernels that must be compiled first.
}  # fmt: skip


def test_the_workload_runs_in_rounds_without_a_cache_hit(monkeypatch):
    peaks = Peaks(read_gbs=1.0, gemm_gflops=1.0, dtype="float32", by="torch.mm")
    monkeypatch.setattr(peak, "measure_peaks", lambda *_, **__: peaks)
    scale = {"num_requests": 3, "input_len": (20, 30), "output_len": (2, 4)}
    cases = engine.workload_cases(SMALL, 2, shape="tiny", **scale)
    rows = [case.measure() for case in cases]
    assert len(rows) == 2
    for row in rows:
        assert row["workload"]["requests"] == 3
        assert row["prefill"]["tokens"] == row["workload"]["input_tokens"]
        assert row["output_tokens_per_s"] > 0
        assert row["engine"]["attention_backend"] == "naive"
        json.dumps(row)


def test_tokens_of_the_demo_model_are_compared():
    options = engine.ON_CPU | {"dtype": "float32"}
    expected = engine.demo_tokens(options, 5)
    row = engine.token_row(options, expected)
    assert row == {"equal": [5, 5, 5], "of": [5, 5, 5], "ok": True}
    expected[1][3] += 1
    row = engine.token_row(options, expected)
    assert row == {"equal": [5, 3, 5], "of": [5, 5, 5], "ok": False}


class FakeEvent:
    """A time stamp of the host's clock, in ms."""

    def record(self):
        self.ms = 1e3 * time.perf_counter()

    def elapsed_time(self, end):
        return end.ms - self.ms


CPU_PROBE = Probe(
    make_event=FakeEvent,
    synchronize=lambda: None,
    activity=torch.profiler.ProfilerActivity.CPU,
    timer=FakeTimer(),
)


def test_a_step_is_split_into_its_parts():
    cases = engine.step_cases(
        SMALL, shape="tiny", batches=(3, 1), prompt_len=40, num_steps=6, probe=CPU_PROBE
    )
    rows = {case.name: case.measure() for case in cases}
    names = ["batch 3", "head, batch 3", "batch 1", "head, batch 1", "kernels, batch 3"]
    assert list(rows) == names
    assert rows["head, batch 3"] == {"batch": 3, "head_ms": 1e3}
    for batch in (3, 1):
        row = rows[f"batch {batch}"]
        assert set(row["gpu_ms"]) == {"forward", "head", "sampler"}
        assert all(ms > 0 for ms in row["gpu_ms"].values())
        assert sum(row["gpu_ms"].values()) + row["host_ms"] == pytest.approx(row["step_ms"])
        assert row["engine_ms"]["forward_s"] > 0
        assert 40 * batch < row["context_tokens"] < 100 * batch
    assert rows["kernels, batch 3"]["kernels"] == 0  # a CPU has none


def test_a_profile_lists_its_kernels():
    device = torch.autograd.DeviceType
    averages = [
        SimpleNamespace(key="gemm", count=20, self_device_time_total=4e4, device_type=device.CUDA),
        SimpleNamespace(key="attn", count=10, self_device_time_total=6e4, device_type=device.CUDA),
        SimpleNamespace(key="aten::mm", count=9, self_device_time_total=9, device_type=device.CPU),
    ]
    table = kernel_table(kernel_times(averages), num_steps=10, most=1)
    assert table["busy_ms"] == pytest.approx(10)
    assert table["kernels"] == 3
    assert table["longest"] == [{"name": "attn", "calls": 1, "us": 6e3}]


# --- the report -----------------------------------------------------------------------------------


def results():
    """Example results of all parts of a report."""
    return {
        "peaks": {
            "rows": [
                {"case": "copy 1", "gbs": 4000.0},
                {"case": "copy 2", "gbs": 4300.0},
                {"case": "gemm 1", "tflops": 790.0},
                {"case": "gemm 2", "failed": "RuntimeError: out of memory"},
            ],
            "seconds": 9.0,
        },
        "parity": {
            "rows": [{"case": "a", "ok": True}, {"case": "b", "ok": False}, {"case": "c"}],
            "seconds": 9.0,
        },
        "decode attention": {
            "rows": [
                {
                    "case": "triton 64 x 512", "backend": "triton", "batch": 64, "context": 512,
                    "us": 10.0, "gbs": 2150.0,
                },
                {"case": "flash_attn 64 x 512", "refused": "needs the package flash-attn"},
            ],
            "seconds": 9.0,
        },
        "standard workload": {
            "rows": [
                {"case": f"round {i}", "output_tokens_per_s": s}
                for i, s in enumerate((17_000.0, 18_000.0, 19_000.0))
            ],
            "seconds": 40.0,
        },
        "decode steps": {
            "rows": [
                {
                    "case": "batch 256", "batch": 256, "context_tokens": 146_000, "step_ms": 10.0,
                    "gpu_ms": {"forward": 6.0, "head": 1.0, "sampler": 1.5}, "host_ms": 1.5,
                }
            ],
            "seconds": 9.0,
        },
        "standard workload, fp8 KV": {"rows": [], "skipped": "the report's 440 s were spent"},
    }  # fmt: skip


def test_the_report_has_shares_of_peaks_and_of_the_roofline():
    report = summarize(results())
    summary, parts = report["summary"], report["parts"]
    assert (summary["copy_gbs"], summary["gemm_tflops"]) == (4300.0, 790.0)
    assert parts["decode attention"]["rows"][0]["share"] == pytest.approx(0.5)
    assert (summary["parity_checked"], summary["parity_wrong"]) == (2, ["b"])
    standard = summary["standard_workload"]
    assert standard["output_tokens_per_s"] == 18_000
    assert standard["ideal on this card, bf16 KV"] == pytest.approx(36_000, rel=0.002)
    assert standard["share of this card"] == pytest.approx(0.5, rel=0.002)
    assert standard["ideal on this card, fp8 KV"] == pytest.approx(63_500, rel=0.002)
    step = parts["decode steps"]["rows"][0]
    assert step["ideal_ms"] == pytest.approx(4.3, abs=0.1)
    assert step["share"] == pytest.approx(step["ideal_ms"] / 10)


def test_without_peaks_the_report_has_no_shares():
    found = results()
    found["peaks"] = {"rows": [], "failed": "it hung"}
    report = summarize(found)
    assert report["summary"]["copy_gbs"] is None
    assert "share" not in report["parts"]["decode attention"]["rows"][0]
    assert "share of this card" not in report["summary"]["standard_workload"]
    standard = report["summary"]["standard_workload"]
    ideal = standard["ideal on an H200 of 4.3 TB/s, 790 TFLOP/s, bf16 KV"]
    assert ideal == pytest.approx(standard_roofline(H200_MEASURABLE, 2))


def test_the_command_writes_after_each_part(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path, seen = tmp_path / "report.json", []

    def run(command, budget_s, rows, log, env):
        name = command[command.index("benchmarks.suite.gpu.suite") + 1]
        seen.append((name, json.loads(path.read_text())["parts"] if path.exists() else {}))
        return results().get(name, {"rows": []})["rows"], None

    monkeypatch.setattr(processes, "run", run)
    assert main(["--gpu-report", "--out", str(path)]) == 0
    names = [*gpu_visit.LIMITS_S]
    assert names == [*suite.make_parts(CPU, FakeTimer())]
    assert [name for name, _ in seen] == names
    assert [list(written) for _, written in seen] == [names[:n] for n in range(len(names))]
    report = json.loads(path.read_text())
    assert list(report["parts"]) == names
    assert report["summary"]["copy_gbs"] == 4300.0
    out = capsys.readouterr().out
    assert f"written to {path}" in out
    assert "peaks: done" in out
    seen.clear()
    asked = ["--parts", "prefill attention", "peaks"]
    assert main(["--gpu-report", "--out", str(path), *asked]) == 0
    assert [name for name, _ in seen] == ["peaks", "prefill attention"]
    assert main(["--gpu-report", "--out", str(path), "--parts", "peaks", "peeks"]) == 2
    assert "--parts must be from ['stack', 'tokens', 'peaks'," in capsys.readouterr().err


# --- a GPU machine with few packages --------------------------------------------------------------

# Why three more: required packages depend on them, but an engine without a bar does not need them.
ABSENT = [*modules_missing_with(NEEDED), "rich", "tqdm", "typer"]
WITHOUT = f"import os, sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"


def python(*arguments):
    root = Path(__file__).resolve().parents[2]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=root)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_command_needs_no_package_that_a_gpu_machine_may_lack():
    """The command once failed with ModuleNotFoundError, because its command line used tyro."""
    script = "import runpy; sys.argv = ['bench.py', '--gpu-report']; runpy.run_path('bench.py', "
    done = python("-c", WITHOUT + script + "run_name='__main__')")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: the GPU report measures an NVIDIA GPU, and torch")
    assert done.stderr.count("\n") == 1
