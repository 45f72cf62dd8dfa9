"""A GPU visit on an emulated GPU, with parts that crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.suite import gpu_visit
from benchmarks.suite.gpu import kernels, processes
from benchmarks.suite.gpu import parts as gpu_parts
from benchmarks.suite.gpu_visit import Step
from tests.support.packages import NEEDED, modules_missing_with

pytestmark = [
    pytest.mark.guards(
        "benchmarks/suite/**/*.py", "example.py", "bench.py", "nanoengine/bench/*.py",
        "nanoengine/settings/*.py", "tests/gpu/*.py", "tests/support/*_gpu.py",
        "tests/support/emulated_visit.py",
    ),
    pytest.mark.timeout(600),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
LACKED = modules_missing_with([*NEEDED, *gpu_visit.PACKAGES])
"""Packages that are installed here and may be missing on the visited machine."""


def test_every_part_runs(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    names = [*gpu_visit.VISIT, *gpu_visit.AFTER, "qwen3-30b-a3b"]
    assert {*names} == {*gpu_visit.steps_of(tmp_path / "visit.json")}
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({LACKED}));"
    code += " runpy.run_module('tests.support.emulated_visit', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, env=env | {"OUT": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = (tmp_path / "visit.log").read_text()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + log[-4000:]
    report = json.loads((tmp_path / "visit.json").read_text())
    assert list(report["parts"]) == names
    assert len(list(tmp_path.iterdir())) <= 6, "files that come back from there are few"
    for row in [row for part in report["parts"].values() for row in part["rows"]]:
        assert "failed" not in row and "skipped" not in row, row
        assert "refused" not in row or row["case"].startswith("flash_attn"), row
    for name in ("llama3-8b", "qwen3-30b-a3b"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["output_tokens_per_s"] > 0
    assert report["summary"]["standard_workload"]["output_tokens_per_s"] > 0


def test_counters_are_measured_for_an_existing_case(tmp_path):
    """With a wrong name, ncu counted three launches of the first case, at batch 1."""
    case = gpu_visit.steps_of(tmp_path / "visit.json")["counters"].command[-1]
    assert case in [case.name for case in kernels.decode_cases(torch.device("cpu"), None)]


def test_the_tests_for_a_gpu_need_no_package_that_a_visit_lacks():
    """The packages that the preparation unpacks are enough."""
    code = f"import sys; sys.modules.update(dict.fromkeys({LACKED})); import pytest; "
    code += "sys.exit(pytest.main(['tests/gpu', '--collect-only', '-qp', 'no:cacheprovider']))"
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# --- failures -------------------------------------------------------------------------------------

PYTHON = [sys.executable, "-c"]
FAILING = """
import time
import torch

def broken():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_first():
    assert 1 == 1

def test_illegal():
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, broken
    broken()

def test_later():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

def test_slow():
    time.sleep(60)
"""


def failing_tests(folder, limit_s, *every):
    """A part whose tests fail on a GPU."""
    (folder / "test_it.py").write_text(FAILING)
    plain = ["-qc", os.devnull, "--rootdir", str(folder), "-p", "tests.gpu.conftest"]
    command = [sys.executable, "-m", "pytest", *plain, str(folder / "test_it.py")]
    return Step(limit_s, command, every)


def visit(monkeypatch, folder, steps, repeats=0, **looks):
    """Exit code and report of a visit with these parts."""
    monkeypatch.setattr(gpu_visit, "steps_of", lambda file: steps)
    monkeypatch.setattr(gpu_visit, "VISIT", tuple(steps))
    monkeypatch.setattr(gpu_visit, "RERUNS", tuple((name, *how) for name, how in looks.items()))
    monkeypatch.setattr(gpu_visit, "REPEATS", repeats)
    monkeypatch.setattr(gpu_parts, "MIN_PART_S", 0.1)
    monkeypatch.setattr(processes, "ENDINGS", [(s, min(t, 3)) for s, t in processes.ENDINGS])
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this process may be a worker itself
    with pytest.raises(SystemExit) as ended:
        gpu_visit.main()
    return ended.value.code, json.loads((folder / "visit.json").read_text())


HANG = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(99)']); print('child', p.pid, flush=True); p.wait()"
)
IGNORE = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
CRASH = (
    "import ctypes, os; file = open(os.environ['GPU_ROWS'], 'a');"
    """ file.write('{"case": "first"}\\n{"case": "hal'); file.close(); ctypes.string_at(0)"""
)


@pytest.mark.parametrize(
    ("limit_s", "command", "failed", "known", "rows"),
    [
        (2, [*PYTHON, HANG], "ended after 2 s", "waitpid", []),
        (2, [*PYTHON, IGNORE], "ended after 2 s", "Fatal Python error: Aborted", []),
        (30, [*PYTHON, "import no_torch"], "exit code 1: ModuleNotFound", "No module named", []),
        (30, [*PYTHON, CRASH], "exit code -11", "Segmentation fault", [{"case": "first"}]),
        (30, ["no-program"], "exit code 127: ", "No such file or directory: 'no-program'", []),
    ],
    ids=["hangs", "ignores SIGINT", "can't import", "crashes", "is not there"],
)
def test_a_failing_stack_voids_no_other_result(
    monkeypatch, tmp_path, limit_s, command, failed, known, rows
):
    steps = {"stack": Step(limit_s, command), "fine": Step(30, [*PYTHON, "print('well')"])}
    code, report = visit(monkeypatch, tmp_path, steps)
    stack, fine = report["parts"].values()
    assert code == 1
    assert stack["failed"].startswith(failed)
    *before, end = stack["rows"]
    assert before == rows
    assert known in "\n".join(end["log"])
    assert "failed" not in fine
    log = (tmp_path / "visit.log").read_text()
    assert log.count("well\n") == 1 and known in log
    for pid in re.findall(r"^child (\d+)", log, re.MULTILINE):
        with contextlib.suppress(psutil.NoSuchProcess):  # otherwise it is an unreaped zombie
            child = psutil.Process(int(pid))
            assert child.status() == psutil.STATUS_ZOMBIE or child.wait(10) is None


def test_a_failing_test_is_saved_at_once_and_run_again(monkeypatch, tmp_path):
    """Another test hangs: pytest would list failures only at the end."""
    steps = {"kernels": failing_tests(tmp_path, 12)}
    show = "import os, sys; print(os.environ.get('CUDA_LAUNCH_BLOCKING'), sys.argv[1:3])"
    look = {"CUDA_LAUNCH_BLOCKING": "1"}, (*PYTHON, show)
    code, report = visit(monkeypatch, tmp_path, steps, blocking=look)
    assert code == 1
    kernels, again = report["parts"].values()
    assert kernels["failed"].startswith("ended after 12 s")
    first, illegal, later = kernels["rows"][:3]
    assert first["case"].endswith("test_first") and first["seconds"] >= 0
    assert illegal["case"].endswith("test_illegal")
    assert illegal["failed"].endswith("an illegal memory access was encountered")
    assert any("broken()" in line for line in illegal["traceback"])
    assert later["case"].endswith("test_later") and "failed" in later
    assert "KeyboardInterrupt" in "\n".join(kernels["rows"][-1]["log"])
    assert list(report["parts"]) == ["kernels", "rerun: blocking"]
    assert "failed" not in again
    assert "1 ['-m', 'pytest']" in (tmp_path / "visit.log").read_text()


def test_a_dead_cuda_context_ends_only_its_worker(monkeypatch, tmp_path):
    every = "-n1", "-k", "not slow"
    _, report = visit(monkeypatch, tmp_path, {"kernels": failing_tests(tmp_path, 60, *every)})
    found = {}
    for row in report["parts"]["kernels"]["rows"]:
        found.setdefault(row["case"].rpartition("::")[2], []).append(row)
    assert "seconds" in found["test_first"][0] and "seconds" in found["test_later"][0]
    assert "an illegal memory access" in found["test_illegal"][0]["failed"]


def test_a_second_visit_runs_the_parts_that_did_not_pass(tmp_path):
    parts = {name: {"rows": [{"case": "a"}]} for name in gpu_visit.VISIT[:-1]}
    parts["tokens"]["rows"].append({"case": "b", "ok": False})
    parts["example"]["failed"] = "exit code 1"
    parts["peaks"]["skipped"] = "the report's 540 s were spent"
    (tmp_path / "first.json").write_text(json.dumps({"parts": parts}))
    names = gpu_visit.left_by(tmp_path / "first.json")
    assert names == ["stack", "tokens", "peaks", "example", "families", *gpu_visit.AFTER]
    assert {*names} <= {*gpu_visit.steps_of(tmp_path / "visit.json")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_no_part_passes(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        gpu_visit.main("stack", "tokens", "kernels")
    assert ended.value.code == 1
    parts = json.loads((tmp_path / "visit.json").read_text())["parts"]
    stack, *others = parts.values()
    assert "finds no GPU" in stack["rows"][0]["refused"]
    assert {part["failed"] for part in others} == {"not run: torch finds no GPU"}


def test_a_visit_fits_into_ten_minutes_and_two_into_fifteen():
    slowest_end = sum(seconds for _, seconds in processes.ENDINGS)
    assert gpu_visit.TOTAL_S + slowest_end + 20 < 600
    assert gpu_visit.TOTAL_S + gpu_visit.AGAIN_S + 2 * 60 < 900


def test_the_preparation_unpacks_what_the_tests_need(monkeypatch, tmp_path, capsys):
    """No package registry is used: one wheel represents all packages."""
    commands = []

    def download(command, check):
        commands.append(command)
        folder = command[command.index("-d") + 1]
        with zipfile.ZipFile(Path(folder) / "some-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/__init__.py", "")

    monkeypatch.setattr(gpu_visit, "FOLDER", tmp_path / ".visit")
    monkeypatch.setattr(gpu_visit.subprocess, "run", download)
    monkeypatch.setattr(gpu_visit, "commit", lambda: "0a1b")
    gpu_visit.main("prepare")
    assert (tmp_path / ".visit" / "commit").read_text() == "0a1b\n"
    assert (tmp_path / ".visit" / "site" / "some" / "__init__.py").exists()
    assert f"pytest=={pytest.__version__}" in commands[0]
