"""A visit to a GPU: on a card that is not there, and with parts that crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.suite import gpu_visit
from benchmarks.suite.gpu import parts as gpu_parts
from benchmarks.suite.gpu_visit import Step
from tests.support.packages import NEEDED, absent

pytestmark = [
    pytest.mark.guards(
        "benchmarks/suite/**/*.py", "example.py", "bench.py", "nanoengine/bench/*.py",
        "nanoengine/settings/*.py", "tests/gpu/*.py", "tests/support/*_gpu.py",
        "tests/support/emulated_visit.py",
    ),
    pytest.mark.timeout(600),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
LACKED = absent([*NEEDED, *gpu_visit.PACKAGES])
"""What is installed here and may be missing where a visit goes."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Kernels that one visit has compiled serve the next."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize("visit", ["1", "2", "3"])
def test_every_part_runs(compiled, tmp_path, visit):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({LACKED}));"
    code += " runpy.run_module('tests.support.emulated_visit', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, visit], cwd=ROOT,
        env=env | {"OUT": str(tmp_path), "TRITON_CACHE_DIR": str(compiled)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    steps = {step.name: step for step in gpu_visit.visits(tmp_path)[visit]}
    assert list(parts) == list(steps)
    for name, part in parts.items():
        assert part["rows"][0]["exit_code"] == 0, (tmp_path / f"{name}.txt").read_text()[-4000:]
        log = (tmp_path / f"{name}.txt").read_text()
        if "--gpu-report" in steps[name].command:
            rows = json.loads((tmp_path / f"{name}.json").read_text())["parts"]
            for row in [row for found in rows.values() for row in found["rows"]]:
                assert "failed" not in row and "skipped" not in row, row
                assert "refused" not in row or row["case"].startswith("flash_attn"), row
        elif "bench.py" in steps[name].command:
            assert json.loads((tmp_path / f"{name}.json").read_text())["output_tokens_per_s"] > 0
        elif "pytest" in steps[name].command:
            assert log.count("tests/gpu/") >= 1 and "error" not in log.lower()
    if visit == "3":
        rows = map(json.loads, (tmp_path / "counted.jsonl").read_text().splitlines())
        assert any("gbs" in row for row in rows)


def test_the_tests_for_a_gpu_need_no_package_that_a_visit_lacks():
    """What the preparation unpacks is enough."""
    code = f"import sys; sys.modules.update(dict.fromkeys({LACKED})); import pytest; "
    code += "sys.exit(pytest.main(['tests/gpu', '--collect-only', '-qp', 'no:cacheprovider']))"
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def odd_parts(monkeypatch, tmp_path):
    """A visit of parts that crash, hang and can't be started; its summaries, one a part."""
    hang = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time;\
 time.sleep(99)']); print(p.pid, file=open({str(tmp_path / 'child')!r}, 'w'), flush=True); p.wait()"
    )
    steps = [
        Step(
            "crash", 30, [sys.executable, "-c", "import sys; print(1, flush=True); sys.exit('no')"]
        ),
        Step("hang", 2, [sys.executable, "-c", hang]),
        Step("missing", 30, ["a-program-that-is-not-there"]),
        Step("fine", 30, [sys.executable, "-c", "import benchmarks; print('well')"]),
    ]
    monkeypatch.setattr(gpu_visit, "visits", lambda out: {"1": steps})
    monkeypatch.setattr(gpu_parts, "LEAST_S", 1)
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def test_a_part_that_crashes_or_hangs_costs_itself_alone(odd_parts, monkeypatch, capsys):
    seen = []
    write = gpu_visit.write
    monkeypatch.setattr(
        gpu_visit,
        "write",
        lambda path, report: (seen.append([*report["parts"]]), write(path, report)),
    )
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        gpu_visit.main("1")
    assert ended.value.code == 1
    assert time.monotonic() - started < 60
    assert seen == [["crash", "hang", "missing", "fine"][: n + 1] for n in range(4)]
    summary = json.loads((odd_parts / "summary.json").read_text())
    assert summary["visit"] == "1" and len(summary["commit"]) >= 7
    codes = {name: part["rows"][0]["exit_code"] for name, part in summary["parts"].items()}
    assert codes == {"crash": 1, "hang": None, "missing": 127, "fine": 0}
    assert summary["parts"]["hang"]["failed"] == "ended after 2 s"
    assert "a-program-that-is-not-there" in (odd_parts / "missing.txt").read_text()
    assert (odd_parts / "crash.txt").read_text() == "1\nno\n"
    with contextlib.suppress(psutil.NoSuchProcess):  # else nobody has asked how it ended, yet
        child = psutil.Process(int((odd_parts / "child").read_text()))
        assert child.status() == psutil.STATUS_ZOMBIE or child.wait(10) is None
    assert "--- fine.txt\nwell\n" in capsys.readouterr().out


def test_parts_by_name(odd_parts):
    with pytest.raises(SystemExit) as ended:
        gpu_visit.main("1", "fine")
    assert ended.value.code == 0
    assert list(json.loads((odd_parts / "summary.json").read_text())["parts"]) == ["fine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_seems_to_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        gpu_visit.main("1")
    assert ended.value.code == 1
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    stack, *others = parts.values()
    assert stack["failed"] == "exit code 1"
    assert {part["failed"] for part in others} == {"not run: torch finds no GPU, see stack.txt"}


@pytest.mark.parametrize("asked", [["4"], [""], ["1", "report", "rapport"]])
def test_what_there_is_not_is_refused(monkeypatch, tmp_path, asked):
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit, match="A visit to a machine"):
        gpu_visit.main(*asked)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_for_results_nothing_starts(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit, match="OUT"):
        gpu_visit.main("1")


def test_a_visit_fits_into_ten_minutes(tmp_path):
    assert gpu_visit.TOTAL_S + 15 < 600
    for steps in gpu_visit.visits(tmp_path).values():
        assert sum(step.limit_s for step in steps[:-1]) < gpu_visit.TOTAL_S - 60


def test_the_preparation_unpacks_what_the_tests_need(monkeypatch, tmp_path, capsys):
    """The registry is left out: one wheel stands for all."""
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
