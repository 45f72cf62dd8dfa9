"""A visit to a machine with an NVIDIA GPU, in three commands of at most ten minutes.

    python -m benchmarks.suite.gpu_visit prepare    before, where there is a registry of packages:
                                                    makes .visit, which the checkout takes along
    OUT=folder python -m benchmarks.suite.gpu_visit 1    is it right, and the headline
    OUT=folder python -m benchmarks.suite.gpu_visit 2    families, the engine, options on and off
    OUT=folder python -m benchmarks.suite.gpu_visit 3    larger models, a small batch, counters
    OUT=folder python -m benchmarks.suite.gpu_visit 3 llama3-8b      a part of it alone

Such a machine may have no registry, no make and no pytest, and little time. So each part has a
process, a limit and a log (`OUT/PART.txt`) of its own, and `OUT/summary.json` is written anew after
each: a crash or a hang costs that part alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.gpu.parts import Part, Row, drive
from benchmarks.suite.gpu.records import ROOT, card, commit, write

FOLDER = ROOT / ".visit"
TOTAL_S = 575.0
"""Seconds of a visit: a command there may take ten minutes."""
PACKAGES = (
    "pytest", "pytest-xdist", "pytest-timeout", "execnet", "iniconfig", "pluggy", "packaging",
    "pygments", "psutil",
)  # fmt: skip
"""What runs the tests, and may be missing there."""
OF_THE_CARD = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
STACK = """\
import sys, torch, transformers, triton
print(sys.version, torch.__version__, triton.__version__, transformers.__version__)
print(torch.cuda.get_device_properties(0), torch.zeros(1, device="cuda"), torch.cuda.mem_get_info())
"""
"""Fails where torch finds no GPU."""
SHOWN = 12
"""Last lines of each log that are printed at the end."""


class Step(NamedTuple):
    """A part of a visit: what it is called, its limit in seconds, and its command."""

    name: str
    limit_s: float
    command: list[str]


def visits(out: Path) -> dict[str, list[Step]]:
    """The parts of each visit, in the order of worth; results go to `out`."""

    def tests(name: str, limit_s: float, *files: str) -> Step:
        paths = [f"tests/gpu/test_{file}_gpu.py" for file in files]
        options = ["-q", "-n8", "--dist=load", "--durations=8", "--maxfail=25"]
        return Step(name, limit_s, [sys.executable, "-m", "pytest", *paths, *options])

    def report(name: str, limit_s: float, *parts: str) -> Step:
        path = str(out / f"{name}.json")
        command = [sys.executable, "bench.py", "--gpu-report", "--out", path, "--parts", *parts]
        return Step(name, limit_s, command)

    def bench(name: str, limit_s: float, shape: str, *options: str) -> Step:
        limits = ["--max-model-len=4096", "--max-num-batched-tokens=16384"]
        model = ["--shape", shape, "--load-format=dummy", *limits]
        path = str(out / f"{name}.json")
        command = [sys.executable, "bench.py", *model, "--json", path, *options]
        return Step(name, limit_s, command)

    stack = Step("stack", 40, [sys.executable, "-c", STACK])
    steps = ("plain", "+ graphs", "+ overlap", "+ fused kernels", "+ fp8 KV")
    counted = [
        "ncu", "--clock-control=none", "-k", "regex:decode_kernel", "-c", "3",
        "--section=SpeedOfLight", "--section=Occupancy",
    ]  # fmt: skip
    part = [sys.executable, "-m", "benchmarks.suite.gpu.suite", "decode attention", "40"]
    return {
        "1": [
            stack,
            Step("example", 50, [sys.executable, "example.py"]),
            tests("kernels", 90, "kernels", "sampling"),
            tests("paths", 110, "overlap", "fused", "layers"),
            report(
                "report", 310,
                "peaks", "parity", "decode attention", "standard workload", "decode steps",
            ),
        ],
        "2": [
            stack,
            tests("families", 200, "models", "engine"),
            report("ablation", 260, *(f"ablation: {name}" for name in steps)),
            report("prefill", 60, "peaks", "prefill attention"),
        ],
        "3": [
            stack,
            bench("llama3-8b", 120, "llama3-8b"),
            bench("qwen3-30b-a3b", 150, "qwen3-30b-a3b", "--num-requests=64"),
            bench("small-batch", 70, "qwen3-0.6b", "--num-requests=32", "--rounds=3"),
            Step("counters", 90, [*counted, *part, str(out / "counted.jsonl")]),
        ],
    }  # fmt: skip


def main(name: str, *only: str) -> None:
    """Runs a visit, or parts of it, and prints the ends of their logs; or prepares one.

    Raises:
        SystemExit: always after a visit: 1 if a part failed or was skipped, else 0.
    """
    if name == "prepare":
        prepare()
        return
    out = Path(os.environ.get("OUT", ""))
    steps = {step.name: step for step in visits(out).get(name, [])}
    if not os.environ.get("OUT") or not out.is_dir() or not steps or not set(only) <= set(steps):
        sys.exit(f"{__doc__}\nOUT={out} must be a folder, and {name} {only} one of the above")
    about = {
        "visit": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": sys.version,
        "card": card(*OF_THE_CARD),
    }
    parts = [
        Part(name=step.name, budget_s=step.limit_s, cases=tuple)
        for step in steps.values()
        if not only or step.name in only
    ]

    def save(results: dict[str, Any]) -> None:
        write(out / "summary.json", about | {"parts": results})
        done, result = list(results.items())[-1]
        print(f"{done}: {result.get('skipped') or result.get('failed') or 'done'}", flush=True)

    wrong: dict[str, str | None] = {}

    def launch(part: str, budget_s: float) -> tuple[list[Row], str | None]:
        if wrong.get("stack"):  # Why: the tests would all be skipped, and pass.
            return [], "not run: torch finds no GPU, see stack.txt"
        rows, wrong[part] = run(out, steps[part].command, part, budget_s)
        return rows, wrong[part]

    results = drive(parts, launch, total_s=TOTAL_S, clock=time.monotonic, save=save)
    for log in (out / f"{part.name}.txt" for part in parts):
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()[-SHOWN:]
            print(f"--- {log.name}", *lines, sep="\n")
    sys.exit(any("failed" in result or "skipped" in result for result in results.values()))


def run(out: Path, command: list[str], name: str, budget_s: float) -> tuple[list[Row], str | None]:
    """Runs a part in a process of its own; its command and exit code, and what went wrong."""
    path = [str(ROOT), str(FOLDER / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (out / f"{name}.txt").open("w") as log:
        code = execute(command, budget_s, log, env)
    wrong = None
    if code != 0:
        wrong = f"ended after {budget_s:.0f} s" if code is None else f"exit code {code}"
    return [{"case": " ".join(command), "exit_code": code}], wrong


def execute(command: list[str], limit_s: float, log: Any, env: dict[str, str]) -> int | None:
    """The exit code of a command; None: it and what it started were ended at the limit."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        print(error, file=log)
        return 127
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def prepare() -> None:
    """Writes the commit, and the packages that the tests need, unpacked: of the versions that are
    installed here, built for Python 3.12 on Linux."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "commit").write_text(commit() + "\n")
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_28")]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        options = ["--only-binary=:all:", "--python-version=3.12", *platforms]
        subprocess.run([*command, *options, *wanted], check=True)
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(FOLDER / "site")
    print(f"{FOLDER} has {commit()} and {', '.join(wanted)}: take it along with the checkout")


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
