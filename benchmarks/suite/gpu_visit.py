"""Measurements on a machine with an NVIDIA GPU: one command of about nine minutes.

    python -m benchmarks.suite.gpu_visit prepare    before, on a machine with a package registry:
                                                    makes .visit, which is copied with the checkout
    OUT=folder python -m benchmarks.suite.gpu_visit                  the visit
    OUT=folder python -m benchmarks.suite.gpu_visit again VISIT      four minutes: what did not pass
                                                    in the file VISIT, then counters
    OUT=folder python -m benchmarks.suite.gpu_visit PART ...         only these parts

Such a machine may have no registry, no make and no pytest, and little time. So each part has its
own process and limit, and its results are written to OUT at once:

    visit.jsonl   a line per case or test, with its values or its traceback, as soon as it ends
    visit.json    all rows by part, and their summary; rewritten after each part
    visit.log     the output of the processes

The first failure is run again, alone: with blocking launches, without CUDA graphs, and by
compute-sanitizer. Remaining time is used to repeat the standard workload. `bench.py --gpu-report`
runs the parts without tests, reruns and repetition.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.gpu import processes
from benchmarks.suite.gpu.parts import Row, drive
from benchmarks.suite.gpu.records import card, commit, write

FOLDER = processes.SITE.parent
TOTAL_S, AGAIN_S = 540.0, 200.0
"""Seconds of a visit, and of a second one. A command may take ten minutes there; both, and two
starts of the machine, take at most fifteen."""
RERUN_S = 40.0
"""Seconds of each rerun of a failure."""
REPEATS = 4
ENOUGH_S = 60.0
"""The standard workload is repeated only if this much time is left."""
GRACE_S = 15.0
"""A part of the report starts no case in this many seconds before its process is ended."""
SECONDS = "SECONDS"
"""Placeholder in a command for the seconds in which a part of the report may start cases."""
PACKAGES = (
    "pytest", "pytest-xdist", "pytest-timeout", "execnet", "iniconfig", "pluggy", "packaging",
    "pygments", "psutil",
)  # fmt: skip
"""What runs the tests, and may be missing there."""
OF_THE_CARD = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
WORKLOAD = "standard workload"
LIMITS_S = {
    "stack": 120, "tokens": 60, "peaks": 30, "parity": 60, "decode attention": 60, WORKLOAD: 70,
    "decode steps": 60, f"{WORKLOAD}, fp8 KV": 50, "prefill attention": 40,
}  # fmt: skip
"""Parts of the report, in order, and the time limit of each [s]."""
VISIT = (
    "stack", "tokens", WORKLOAD, "peaks", "decode attention", "decode steps", "example", "parity",
    "kernels", "paths", "families",
)  # fmt: skip
"""The parts of a visit, the most important ones first."""
AFTER = ("counters", "prefill attention", "standard workload, fp8 KV", "llama3-8b")
"""Parts of a second visit if nothing failed."""
RERUNS: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
    ("blocking", {"CUDA_LAUNCH_BLOCKING": "1"}, ()),
    ("eager", {}, (sys.executable, "-m", "benchmarks.suite.gpu_visit", "eager")),
    ("memcheck", {}, ("compute-sanitizer", "--tool=memcheck", sys.executable)),
)
"""Name, environment, and what replaces the interpreter in the command."""


class Step(NamedTuple):
    """A part: its limit in seconds and its command.

    Attributes:
        every: the end of the command that runs all cases.
        by_case: replaces `every` and a case's name to run that case alone.
    """

    limit_s: float
    command: list[str]
    every: tuple[str, ...] = ()
    by_case: bool = False


def steps_of(file: Path) -> dict[str, Step]:
    """All parts of a visit whose report is `file`."""
    suite = [sys.executable, "-m", "benchmarks.suite.gpu.suite"]
    rows = str(file.with_suffix(".jsonl"))

    def tests(limit_s: float, *files: str) -> Step:
        every = "-n8", "--dist=load", *(f"tests/gpu/test_{file}_gpu.py" for file in files)
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=60", "--durations=8"]
        return Step(limit_s, command, every, by_case=True)

    def report(name: str, limit_s: float) -> Step:
        return Step(limit_s, [*suite, name, SECONDS, rows], by_case=True)

    def bench(shape: str, limit_s: float, *options: str) -> Step:
        limits = ["--max-model-len=4096", "--max-num-batched-tokens=16384"]
        command = [sys.executable, "bench.py", "--shape", shape, "--load-format=dummy", *limits]
        return Step(limit_s, [*command, "--json", str(file.with_name(f"{shape}.json")), *options])

    counters = [
        "ncu", "--clock-control=none", "-k", "regex:decode_kernel", "-c", "3",
        "--section=SpeedOfLight", "--section=Occupancy",
    ]  # fmt: skip
    one_case = "decode attention", SECONDS, rows, "triton 256 x 1024"
    return {
        **{name: report(name, limit_s) for name, limit_s in LIMITS_S.items()},
        "example": Step(90, [sys.executable, "example.py"]),
        "kernels": tests(90, "kernels", "sampling"),
        "paths": tests(110, "overlap", "fused", "layers"),
        "families": tests(200, "models", "engine"),
        "counters": Step(90, [*counters, *suite, *one_case]),
        "llama3-8b": bench("llama3-8b", 120),
        "qwen3-30b-a3b": bench("qwen3-30b-a3b", 150, "--num-requests=64"),
    }


def main(*arguments: str) -> None:
    """Runs a visit or parts of it, or prepares one.

    Raises:
        SystemExit: always after parts: 1 if something failed or was skipped, else 0.
    """
    if arguments[:1] == ("prepare",):
        return prepare()
    if arguments[:1] == ("eager",):
        return eager(*arguments[1:])
    out, again = Path(os.environ.get("OUT", "")), arguments[:1] == ("again",)
    steps = steps_of(out / "visit.json")
    names = left_by(Path(arguments[1])) if again and len(arguments) == 2 else arguments or VISIT
    if not os.environ.get("OUT") or not out.is_dir() or not set(names) <= set(steps):
        sys.exit(
            f"{__doc__}\nOUT={out} must be a folder, and {arguments} must be parts of {[*steps]}"
        )
    visit = Visit(out / "visit.json", steps, AGAIN_S if again else TOTAL_S)
    results = visit.run(names, repeat=not arguments)
    sys.exit(any(map(is_wrong, results.values())))


def report(file: Path, only: list[str] | None = None) -> None:
    """`bench.py --gpu-report`: measures, prints tables, and rewrites `file` after each part.

    Args:
        only: names of parts; None: all.

    Raises:
        ConfigError: there is no CUDA GPU, no such part, or the file can't be written.
    """
    import torch

    from nanoengine.bench.throughput import require_directory
    from nanoengine.errors import ConfigError

    require_directory(file, "out")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"the GPU report measures an NVIDIA GPU, and torch {torch.__version__} finds none here"
        )
    if unknown := sorted(set(only or ()) - set(LIMITS_S)):
        raise ConfigError(f"--parts must be from {[*LIMITS_S]}, got {unknown}")
    names = [name for name in LIMITS_S if not only or name in only]
    Visit(file, steps_of(file), TOTAL_S).run(names, rerun=False)


class Visit:
    """Runs parts, and keeps their results in `file` and in other files of its folder."""

    def __init__(self, file: Path, steps: dict[str, Step], total_s: float) -> None:
        self.file, self.rows, self.log = file, file.with_suffix(".jsonl"), file.with_suffix(".log")
        self.steps, self.total_s, self.started = steps, total_s, time.monotonic()
        self.jobs: dict[str, tuple[list[str], dict[str, str]]] = {
            name: ([*step.command, *step.every], {}) for name, step in steps.items()
        }
        self.results: dict[str, Any] = {}
        hardware = card(*OF_THE_CARD)
        self.about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "python": sys.version,
            "hardware": {"gpu": hardware.get("name"), "cpu": "", **hardware},
        }

    def run(
        self, names: Iterable[str], *, rerun: bool = True, repeat: bool = False
    ) -> dict[str, Any]:
        """The results of all parts, by part.

        Args:
            rerun: run the first failure again.
            repeat: repeat the standard workload in the remaining time.
        """
        drive(
            self.run_in_order(names, rerun, repeat), self.launch,
            total_s=self.total_s, clock=time.monotonic, save=self.save,
        )  # fmt: skip
        try:  # Why here: these import torch, and a failure there must not lose results.
            from benchmarks.suite.gpu.summary import format_report, summarize
            from nanoengine.version import versions

            report = self.about | {"versions": versions()} | summarize(self.results)
            write(self.file, report)
            print(format_report(report))
            print(f"written to {self.file}")
        except Exception:
            traceback.print_exc()
        return self.results

    def run_in_order(
        self, names: Iterable[str], rerun: bool, repeat: bool
    ) -> Iterator[tuple[str, float]]:
        """The parts in order; after the first failed one, its reruns."""
        for name in names:
            yield name, self.steps[name].limit_s
            case = wrong_case(self.results[name])
            if case is not None and name != "stack" and rerun:
                rerun = False
                yield from self.second_looks(self.steps[name], case)
        for i in range(1, REPEATS + 1) if repeat else ():
            if self.started + self.total_s - time.monotonic() < ENOUGH_S:
                return
            self.jobs[f"{WORKLOAD}, again {i}"] = self.jobs[WORKLOAD]
            yield f"{WORKLOAD}, again {i}", self.steps[WORKLOAD].limit_s

    def second_looks(self, step: Step, case: str) -> Iterator[tuple[str, float]]:
        """The case alone, if possible, in each of the variants of `RERUNS`."""
        command = [*step.command, *((case,) if step.by_case and case else step.every)]
        for name, env, program in RERUNS:
            job = [*program, *command[1:]] if program else command
            self.jobs[f"rerun: {name}"] = job, env
            yield f"rerun: {name}", RERUN_S

    def launch(self, name: str, budget_s: float) -> tuple[list[Row], str | None]:
        """Runs a part, unless there is no GPU."""
        stack = self.results.get("stack", {"rows": []})["rows"]
        if any(row["case"] == "GPU" and "refused" in row for row in stack):
            return [], "not run: torch finds no GPU"
        words, env = self.jobs[name]
        seconds = str(max(budget_s - GRACE_S, 1.0))
        command = [seconds if word == SECONDS else word for word in words]
        part = json.dumps({"part": name})
        for path, text in ((self.rows, part), (self.log, f"=== {name}: {command}")):
            with path.open("a") as file:
                print(text, file=file)
        env = env | {"GPU_ROWS": str(self.rows)}
        return processes.run(command, budget_s, self.rows, self.log, env)

    def save(self, results: dict[str, Any]) -> None:
        """Writes all results so far, and prints how the last part ended."""
        self.results = results
        write(self.file, self.about | {"parts": results})
        name, result = list(results.items())[-1]
        print(f"{name}: {result.get('skipped') or result.get('failed') or 'done'}", flush=True)
        for row in filter(is_bad, result["rows"]):
            print(f"  {row['case']}: {row.get('failed', 'wrong')}", flush=True)


def is_bad(row: Row) -> bool:
    """Whether a case failed, or gave a wrong result."""
    return "failed" in row or row.get("ok") is False


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a part did not run, ended early, or has a bad case."""
    return "failed" in result or "skipped" in result or any(map(is_bad, result["rows"]))


def wrong_case(result: dict[str, Any]) -> str | None:
    """The first bad case of a part; "" if the part itself crashed, or hung in its first case; None
    if a rerun would show nothing: a part that reaches its limit after some results is only slow."""
    rows = [row for row in result["rows"] if "log" not in row]
    bad = next((row["case"] for row in rows if is_bad(row)), None)
    crashed = "exit code" in result.get("failed", "")
    return "" if bad is None and (crashed or (not rows and "failed" in result)) else bad


def left_by(path: Path) -> list[str]:
    """The parts of a second visit: first the parts that have not passed in the first one."""
    parts = json.loads(path.read_text())["parts"]
    left = [name for name in VISIT[1:] if name not in parts or is_wrong(parts[name])]
    return ["stack", *left, *AFTER]


def eager(*command: str) -> None:
    """Runs a program of Python, `-m MODULE ...` or `PATH ...`, without CUDA graphs."""
    from nanoengine.runner.start import RunnerSetup

    RunnerSetup._uses_graphs = property(lambda runner: False)  # type: ignore[assignment]
    as_module = command[0] == "-m"
    sys.argv = list(command[as_module:])
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def prepare() -> None:
    """Writes the commit, and the packages that the tests need, unpacked: the versions that are
    installed here, built for Python 3.12 on Linux."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "commit").write_text(commit() + "\n")
    requirements = [f"{name}=={version(name)}" for name in PACKAGES]
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_28")]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        options = ["--only-binary=:all:", "--python-version=3.12", *platforms]
        subprocess.run([*command, *options, *requirements], check=True)
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(FOLDER / "site")
    print(f"{FOLDER} has {commit()} and {', '.join(requirements)}: copy it with the checkout")


if __name__ == "__main__":
    main(*sys.argv[1:])
