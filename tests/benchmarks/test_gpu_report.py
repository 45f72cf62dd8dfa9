"""The GPU report without a GPU: budgets, cases, tables and JSON, with fake clocks and timers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.suite import gpu_visit, peak
from benchmarks.suite.gpu import engine, kernels, processes, records, suite
from benchmarks.suite.gpu.engine import Probe
from benchmarks.suite.gpu.kernels import Heads, make_inputs
from benchmarks.suite.gpu.parts import Case, drive, run_cases
from benchmarks.suite.gpu.summary import format_report, standard_roofline, summarize
from benchmarks.suite.gpu.timing import Seam, Seams, kernel_table, kernel_times
from benchmarks.suite.main import main
from benchmarks.suite.peak import Peaks
from benchmarks.suite.roofline import H200_MEASURABLE
from nanoengine.errors import ConfigError, MissingDependencyError
from tests.support.packages import NEEDED, absent

pytestmark = pytest.mark.guards("benchmarks/**/*.py", "nanoengine/bench/*.py")

CPU = torch.device("cpu")
TINY = Heads(num_heads=4, num_kv_heads=2, head_dim=32)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


# --- cases and budgets ----------------------------------------------------------------------------


def cases_of(clock, *costs):
    """Cases that cost so many seconds; an exception in the place of a cost is raised."""

    def measure(cost):
        if isinstance(cost, Exception):
            raise cost
        clock.now += cost
        return {"cost": cost}

    for number, cost in enumerate(costs):
        yield Case(f"case {number}", lambda cost=cost: measure(cost))


def test_a_spent_budget_names_what_is_left():
    clock = Clock()
    rows = list(run_cases("part", cases_of(clock, 4, 5, 6, 1, 1), budget_s=10, clock=clock))
    assert rows[:3] == [{"case": f"case {i}", "cost": cost} for i, cost in enumerate((4, 5, 6))]
    reason = "the part's 10 s were spent"
    assert rows[3:] == [{"case": f"case {i}", "skipped": reason} for i in (3, 4)]


def test_refusals_and_failures_do_not_stop_a_part():
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


def test_a_lost_gpu_stops_a_part_and_a_refusal_does_not_ask():
    clock, asked = Clock(), []

    def still_usable():
        asked.append(1)
        return "the GPU answers no more"

    cases = cases_of(clock, MissingDependencyError("no flash_attn"), RuntimeError("illegal"), 1)
    rows = list(run_cases("part", cases, budget_s=10, clock=clock, still_usable=still_usable))
    assert [list(row)[1] for row in rows] == ["refused", "failed", "skipped"]
    assert rows[2]["skipped"] == "after the failure of case 1: the GPU answers no more"
    assert len(asked) == 1


def test_a_part_that_cannot_begin_says_why():
    def cases():
        raise ConfigError("unknown option 'overlap'")
        yield

    rows = list(run_cases("workload", cases(), budget_s=10, clock=Clock()))
    assert rows == [{"case": "workload", "refused": "unknown option 'overlap'"}]


def test_the_drive_keeps_to_the_total_and_saves_after_each_part():
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
    """Runs the work once and says that it took a second a call."""

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


def test_decode_reads_several_layers_so_that_no_cache_serves_them(monkeypatch):
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


def test_every_backend_and_size_has_a_case():
    names = [case.name for case in kernels.decode_cases(CPU, FakeTimer())]
    assert len(names) == len(set(names)) == 2 * 4 * 3
    assert "triton 256 x 4096" in names
    assert len(list(kernels.parity_cases(CPU))) == 2 * 2 * 6


@pytest.mark.parametrize("what", list(kernels.PARITY))
def test_parity_of_the_oracle_with_itself(monkeypatch, what):
    lengths, options = kernels.PARITY[what]
    short = [(min(q, 20), min(q, 20) + (c - q) // 50) for q, c in lengths]
    monkeypatch.setitem(kernels.PARITY, what, (short, options))
    row = kernels.parity_row(CPU, "naive", torch.float32, what, TINY)
    assert row["ok"]
    assert row["stored"]
    assert 0 < row["max_error"] < row["tolerance"]


def test_parity_sees_a_wrong_result_and_a_wrong_store(monkeypatch):
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
    for what, expected in (("result", (False, True)), ("store", (False, False))):
        broken[:] = [what]
        row = kernels.parity_row(CPU, "naive", torch.float32, "short", TINY)
        assert (row["ok"], row["stored"]) == expected


def test_inputs_are_a_batch_as_the_engine_makes_it():
    inputs = make_inputs(
        [(1, 20), (1, 3), (5, 40)], heads=TINY, block_size=16, dtype=torch.float32, device=CPU,
        layers=2, max_seq_len=100,
    )  # fmt: skip
    batch = inputs.batch
    assert (batch.num_tokens, batch.num_seqs, batch.num_decodes) == (7, 3, 2)
    assert (batch.max_query_len, batch.max_seq_len) == (5, 100)
    assert batch.positions.tolist() == [19, 2, 35, 36, 37, 38, 39]
    assert batch.block_tables.shape == (1, 3, 7)
    used = [t for row, n in zip(batch.block_tables[0], (2, 1, 3), strict=True) for t in row[:n]]
    assert sorted(map(int, used)) == [1, 2, 3, 4, 5, 6]
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([1, 1, 5]))
    blocks = batch.block_tables[0, rows, batch.positions // 16]
    assert torch.equal(batch.slot_mapping[0], blocks * 16 + batch.positions % 16)
    k_caches = torch.stack([cache.k_cache for cache in inputs.caches])
    assert k_caches.shape == (2, 7, 16, 2, 32)
    assert not inputs.q.is_contiguous()
    assert k_caches.abs().min() > 0


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


def test_an_option_that_the_engine_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="unknown option 'warp_drive'"):
        next(engine.workload_cases({"warp_drive": True}, 1))


class FakeEvent:
    """A moment of the host's clock, in ms."""

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


def test_a_step_is_taken_apart():
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


def test_seams_put_everything_back_and_name_what_is_missing():
    class Owner:
        def method(self):
            return "method"

    owner = Owner()
    owner.own = lambda: "own"
    kept = owner.own
    seams = Seams(
        [Seam("a", owner, "method"), Seam("b", owner, "own"), Seam("c", owner, "nothing")],
        FakeEvent,
    )
    assert seams.missing == ["c"]
    with seams:
        assert (owner.method(), owner.own(), owner.own()) == ("method", "own", "own")
    assert owner.own is kept
    assert "method" not in vars(owner)
    assert list(seams.total_ms()) == ["a", "b"]


def test_the_kernels_of_a_profile():
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


def test_a_profile_has_what_is_read_from_it():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).add(1)
    event = profile.key_averages()[0]
    assert {"key", "count", "self_device_time_total", "device_type"} <= set(dir(event))
    assert kernel_times(profile.key_averages()) == []


# --- the report -----------------------------------------------------------------------------------


def results():
    """A report's parts as a run might leave them."""
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


def test_shares_of_the_card_and_of_the_roofline():
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


def test_without_peaks_there_are_no_shares_but_a_report():
    found = results()
    found["peaks"] = {"rows": [], "failed": "it hung"}
    report = summarize(found)
    assert report["summary"]["copy_gbs"] is None
    assert "share" not in report["parts"]["decode attention"]["rows"][0]
    assert "share of this card" not in report["summary"]["standard_workload"]
    standard = report["summary"]["standard_workload"]
    ideal = standard["ideal on an H200 of 4.3 TB/s, 790 TFLOP/s, bf16 KV"]
    assert ideal == pytest.approx(standard_roofline(H200_MEASURABLE, 2))


def test_the_tables_name_everything_that_was_left_out():
    head = {
        "date": "2026-01-01T00:00:00+00:00",
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x", "driver_version": "580.1"},
        "versions": {"torch": "2.11.0"},
    }
    text = format_report(head | summarize(results()))
    assert max(map(len, text.splitlines())) <= 100
    for piece in (
        "NVIDIA H200, driver 580.1, torch 2.11.0",
        "copy 4,300 GB/s, GEMM 790 TFLOP/s",
        "wrong: ['b']",
        "2,150   50%",
        "gemm 2 failed: RuntimeError: out of memory",
        "flash_attn 64 x 512 refused: needs the package flash-attn",
        "standard workload, fp8 KV: skipped: the report's 440 s were spent",
    ):
        assert piece in text, text


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
    assert "--parts are of ['stack', 'tokens', 'peaks'," in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["--gpu-report"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the GPU report measures an NVIDIA GPU, and torch")
    assert error.count("\n") == 1


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        gpu_visit.report(tmp_path / "missing" / "report.json")


def test_a_machine_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "unknown: nvidia-smi" in records.card("driver_version", "clocks.sm")["driver_version"]


def test_a_report_names_its_commit_with_and_without_a_repository(tmp_path):
    assert records.commit(tmp_path) == "unknown: no repository"
    (tmp_path / ".visit").mkdir()
    (tmp_path / ".visit" / "commit").write_text("0a1b\n")
    assert records.commit(tmp_path) == "0a1b"
    (tmp_path / ".git").write_text("gitdir: /a/worktree/of/another/machine\n")
    assert records.commit(tmp_path) == "0a1b"
    for command in ("init -q", "-c user.name=n -c user.email=e commit -q --allow-empty -m m"):
        (tmp_path / ".git").is_file() and (tmp_path / ".git").unlink()
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    assert re.fullmatch("[0-9a-f]{40}", records.commit(tmp_path))
    (tmp_path / "new").touch()
    subprocess.run(["git", "-C", str(tmp_path), "add", "new"], check=True)
    assert records.commit(tmp_path).endswith("-dirty")


def test_the_process_of_a_part_writes_a_line_per_case(monkeypatch, tmp_path, capsys):
    cases = [Case("one", lambda: {"gbs": 1.5}), Case("two", lambda: {"gbs": 1 / 0})]
    monkeypatch.setattr(suite, "make_parts", lambda device, timer: {"p": lambda: cases})
    monkeypatch.setattr(suite, "gpu_trouble", lambda: None)
    path = tmp_path / "rows"
    suite.main("p", "30", str(path))
    suite.main("p", "30", str(path), "two")
    rows = list(map(json.loads, path.read_text().splitlines()))
    ends = ["the card after it"]
    assert [row["case"] for row in rows] == ["one", "two", *ends, "two", *ends]
    assert rows[0] == {"case": "one", "gbs": 1.5}
    assert rows[1]["failed"] == "ZeroDivisionError: division by zero"
    assert capsys.readouterr().err.count("ZeroDivisionError: division by zero") == 2


# --- a machine with a GPU and little else ---------------------------------------------------------

# Why three more: what is needed brings them, and an engine without a bar needs them not.
ABSENT = [*absent(NEEDED), "rich", "tqdm", "typer"]
WITHOUT = f"import os, sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
ON_AN_EMULATED_GPU = """
os.environ["TRITON_INTERPRET"] = "1"
from tests.support.emulated_gpu import EmulatedGPU
from benchmarks.suite import peak, shapes
from benchmarks.suite.gpu import engine, suite, summary

shapes.SHAPES["tiny"] |= {"num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 64}
peak.measure_peaks = lambda *_, **__: peak.Peaks(
    read_gbs=1.0, gemm_gflops=1.0, dtype="float32", by="x"
)
options = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 20, "max_num_seqs": 1,
           "max_model_len": 64, "max_num_batched_tokens": 64}
with EmulatedGPU():
    work = {"num_requests": 1, "input_len": (5, 5), "output_len": (3, 3)}
    cases = engine.workload_cases(options, 1, shape="tiny", **work)
    row = next(cases).measure()
print(row["engine"]["attention_backend"], row["workload"]["output_tokens"])
"""


def python(*arguments):
    root = Path(__file__).resolve().parents[2]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=root)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_command_needs_no_package_that_a_gpu_machine_may_lack():
    """It ended in ModuleNotFoundError: its command line was tyro's."""
    script = "import runpy; sys.argv = ['bench.py', '--gpu-report']; runpy.run_path('bench.py', "
    done = python("-c", WITHOUT + script + "run_name='__main__')")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: the GPU report measures an NVIDIA GPU, and torch")
    assert done.stderr.count("\n") == 1


def test_what_a_gpu_machine_may_lack_is_seen():
    assert {"tyro", "numba", "pytest", "hypothesis", "psutil"} <= {*absent(NEEDED)}
    assert not {"torch", "triton", "jinja2", "tokenizers", "numpy"} & {*absent(NEEDED)}


@pytest.mark.parametrize(
    "script", ["run_all", "run_nanoengine", "run_vllm", "run_nano_vllm", "make_checkpoint", "fa3"]
)
def test_the_scripts_beside_other_engines_start_without_them(script):
    path = f"benchmarks/gpu_peers/{script}.py"
    start = f"import runpy; sys.argv = ['{path}', '--help']; sys.path.insert(0, 'benchmarks/gpu_pe"
    done = python("-c", f"{WITHOUT}{start}ers'); runpy.run_path('{path}', run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: "), done.stdout


def test_the_workload_runs_on_a_gpu_without_those_packages():
    """An engine imported tqdm for a bar that nobody had asked for."""
    done = python("-c", WITHOUT + ON_AN_EMULATED_GPU)
    assert done.stdout == "triton 3\n", done.stderr
