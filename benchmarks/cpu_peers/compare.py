"""Compares nanoengine with every installed peer on one CPU: one command, a table and JSON.

    python benchmarks/cpu_peers/compare.py --model CHECKPOINT --envs ENVIRONMENTS --json FILE
    python benchmarks/cpu_peers/compare.py --model CHECKPOINT-bf16 --envs ENVIRONMENTS --defaults
    python benchmarks/cpu_peers/compare.py --model CHECKPOINT --envs ENVIRONMENTS --beside 1
    python benchmarks/cpu_peers/compare.py --gguf FILE ... --envs ENVIRONMENTS --json FILE

Each round runs every configuration once, each in a separate process, and starts with the next one
(A B C, B C A, C A B): slow changes of the machine affect all, and no configuration always follows
the same one, whose memory the system may still be freeing. A run that other processes disturbed is
repeated and then marked; medians exclude it. Missing peers are listed with the reason. With
`--beside N`, each run is repeated while N other processes keep one core busy each. With `--gguf`,
nanoengine and llama.cpp run the same files, with default settings.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import harness
import report

from benchmarks.suite.workloads import is_workload

HERE = Path(__file__).resolve().parent
QUIET_SECONDS = 2.0
BUSY = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(1_000_000):
        pass
"""
"""Keeps a core busy until about 20 ms after its parent has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The environment of a peer, and the converted checkpoint that each quantization needs ("":
    none).

    `env` None is the interpreter that runs this program.
    """

    env: str | None
    package: str
    converted: dict[str, str]


PEERS = {
    "nanoengine": Peer(
        env=None,
        package="nanoengine",
        converted=dict.fromkeys(("none", "int8", "int4", "default"), ""),
    ),
    "openvino": Peer(
        env="ov",
        package="openvino_genai",
        converted={
            "none": "-ov-fp32", "int8": "-ov-int8", "int4": "-ov-int4", "default": "-ov",
        },
    ),
    "vllm": Peer(env="vllm", package="vllm", converted={"none": "", "default": ""}),
    "llamacpp": Peer(
        env="lcpp",
        package="llama_cpp",
        converted={
            "none": "-f32.gguf", "int8": "-q8_0.gguf", "int4": "-q4_0.gguf",
            "default": "-bf16.gguf",
        },
    ),
    "transformers": Peer(env=None, package="transformers", converted={"none": ""}),
}  # fmt: skip


OF_GGUF = ("nanoengine", "llamacpp")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Fields of a `ModelConfig` that runners and the report use."""


def folder_of_shape(file: Path) -> Path:
    """A folder with the file's name and a config.json with its model's sizes, which runners
    read."""
    from nanoengine.checkpoint.config import load_model_config

    config = load_model_config(file)
    folder = Path(tempfile.mkdtemp(), file.stem)
    atexit.register(shutil.rmtree, folder.parent)
    folder.mkdir()
    sizes = {name: getattr(config, name) for name in SIZES}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A peer with one quantization."""

    name: str
    quantization: str

    @property
    def label(self) -> str:
        """Its name in the report."""
        return f"{self.name} {report.precision_of(self.quantization)}"


def interpreter(peer: Peer, envs: Path | None) -> Path | None:
    """The peer's Python interpreter, if it exists."""
    if peer.env is None:
        return Path(sys.executable)
    found = envs / peer.env / "bin" / "python" if envs else None
    return found if found and found.exists() else None


def has_package(python: Path, package: str) -> bool:
    """Whether the interpreter finds the package; it is not imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def skip_reason(
    entry: Entry,
    *,
    model: Path,
    converted: Path,
    envs: Path | None,
    find: Callable[[Path, str], bool] = has_package,
) -> str | None:
    """Why an entry can't run here; None if it can."""
    peer = PEERS[entry.name]
    python = interpreter(peer, envs)
    if python is None:
        where = f"{peer.env}/bin/python under --envs" if envs else "--envs was not given"
        return f"no interpreter: {where}"
    if not find(python, peer.package):
        return f"{peer.package} is not installed in its environment"
    suffix = peer.converted.get(entry.quantization, "")
    if suffix and not (converted / (model.name + suffix)).exists():
        return f"{model.name + suffix} is not among the conversions"
    return None


@contextmanager
def busy_processes(count: int, seconds: float) -> Iterator[list[int]]:
    """Ids of this many processes that keep one core busy each, at most for this time."""
    command = [sys.executable, "-c", BUSY, str(os.getpid()), str(seconds)]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_entry(
    entry: Entry, names: list[str], args: argparse.Namespace, seed: int, beside: Sequence[int]
) -> tuple[list[dict[str, Any]], str | None]:
    """The output lines of one process, and its error, if any; `beside` are the ids of busy
    processes."""
    python = interpreter(PEERS[entry.name], args.envs)
    command = [
        str(python), str(HERE / f"run_{entry.name}.py"), "--model", str(args.model),
        "--converted", str(args.converted), "--quantization", entry.quantization,
        "--threads", str(args.threads), "--scale", str(args.scale), "--seed", str(seed),
        "--workload", *names, "--beside", *map(str, beside),
    ]  # fmt: skip
    error = None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout, check=False
        )
        printed = done.stdout
        if done.returncode:
            last = (done.stderr.strip() or printed.strip()).splitlines()[-1:]
            error = f"exit status {done.returncode}: {' '.join(last)[-300:]}"
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode()
        error = f"longer than {args.timeout} s"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"peer"')]
    return lines, error and report.without_paths(error)


def wait_for_quiet(seconds: float, busy: Callable[[], float], cores: float) -> bool:
    """Waits until the machine uses fewer than `cores` for a moment, at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before, started = busy(), time.monotonic()
        time.sleep(QUIET_SECONDS)
        if (busy() - before) / (time.monotonic() - started) < cores:
            return True
    return False


def run_rounds(
    entries: list[Entry], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """Runs all rounds; returns the lines, the failures by label, and the number of rounds.

    The first round also checks the greedy ids. No round starts that would exceed `--minutes`.
    """
    lines: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    began, longest, done = time.monotonic(), 0.0, 0
    for number in range(args.rounds):
        started = time.monotonic()
        if number and started - began + longest > 60 * args.minutes:
            break
        first = number % len(entries)
        order = (*entries[first:], *entries[:first])
        for entry, count in product(order, dict.fromkeys((0, args.beside))):
            names = ["G"] * (number == count == 0) + args.workloads
            title = f"round {number} {entry.label}{f' with {count} busy' if count else ''}"
            for attempt in range(1 + args.retries):
                if entry.label in failed or not names:
                    break
                wait_for_quiet(args.quiet_wait, harness.busy_seconds, report.DISTURBED_CORES)
                before = time.monotonic()
                with busy_processes(count, args.timeout + 60) as beside:
                    new, error = run_entry(entry, names, args, 10 * number + attempt, beside)
                print(f"{title}: {time.monotonic() - before:.0f} s in all",
                      file=sys.stderr, flush=True)  # fmt: skip
                if error:
                    failed[entry.label] = error
                for line in new:
                    line |= {"round": number, "beside": count}
                    line |= {"valid": report.is_valid(line)} if line["workload"] != "G" else {}
                    speed = line.get("output_tok_s", "greedy ids")
                    mark = "" if line.get("valid", True) else " (disturbed)"
                    print(f"{title} {line['workload']}: {speed}{mark}", file=sys.stderr, flush=True)
                lines += new
                names = [line["workload"] for line in new if not line.get("valid", True)]
        done, longest = number + 1, max(longest, time.monotonic() - started)
    return lines, failed, done


def measure_machine(threads: int) -> report.Peaks:
    """The machine's read bandwidth and its FLOP/s, measured with nanoengine's kernels."""
    import torch

    from benchmarks.suite.peak import measure_cpu_peaks

    torch.set_num_threads(threads)
    found = measure_cpu_peaks()
    return report.Peaks(
        isa=found.isa,
        read_gbs=round(found.read_gbs, 2),
        gflops={kind: round(rate, 1) for kind, rate in found.gflops.items()},
    )


def build_report(
    args: argparse.Namespace,
    lines: list[dict[str, Any]],
    skipped: dict[str, str],
    rounds: int,
    machine: list[report.Peaks],
) -> dict[str, Any]:
    """The content of the table and the JSON file, without directories of this machine."""
    import torch

    from nanoengine.bench.throughput import hardware
    from nanoengine.version import versions

    # Why the larger of two measurements: other processes can only make one smaller.
    peaks = report.best_of(machine)
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": report.without_paths(shlex.join(["compare.py", *sys.argv[1:]])),
        "hardware": hardware(torch.device("cpu")),
        "versions": versions() | {line["peer"]: line["version"] for line in lines},
        "model": args.model.name,
        "scale": args.scale,
        "threads": args.threads,
        "rounds": rounds,
        "beside": args.beside,
        "peaks": asdict(peaks),
        "rows": report.rows(lines, config, peaks, args.scale) if lines else [],
        "agreement": report.agreement(lines),
        "skipped": skipped,
        "lines": [line for line in lines if line["workload"] != "G"],
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; lists are separated by commas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument

    def listed(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            if wrong := [word for word in text.split(",") if word not in allowed]:
                raise argparse.ArgumentTypeError(f"{wrong} not in {', '.join(allowed)}")
            return text.split(",")

        return split

    def sized(letter: str) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            names = [letter + word for word in text.split(",")]
            if wrong := [name[1:] for name in names if not is_workload(name)]:
                raise argparse.ArgumentTypeError(f"{wrong} must be numbers of at least 1")
            return names

        return split

    add("--model", type=Path, help="directory of a checkpoint (checkpoints.py)")
    add(
        "--gguf",
        type=Path,
        nargs="+",
        help="GGUF files of one folder and one shape, in place of --model and --quantization",
    )
    add(
        "--converted", type=Path, help="directory of its conversions; default: the parent directory"
    )
    add("--envs", type=Path, help="directory of the peers' environments: ov, vllm, lcpp")
    add("--peers", type=listed(tuple(PEERS)), default=list(PEERS))
    add("--quantization", type=listed(("none", "int8", "int4")), default=["none", "int8", "int4"])
    add(
        "--defaults",
        action="store_true",
        help="each engine's own precision for a bfloat16 checkpoint, in place of --quantization",
    )
    add(
        "--workloads",
        type=listed(("W1", "W2", "W3")),
        help="default: all three; none with --batches or --contexts",
    )
    add(
        "--batches",
        type=sized("B"),
        default=[],
        help="numbers of equal requests, such as 1,8,32,128,256",
    )
    add(
        "--contexts",
        type=sized("T"),
        default=[],
        help="prompt lengths for TTFT, such as 1024,4032,16320",
    )
    add(
        "--scale",
        type=float,
        default=1.0,
        help="part of W1's and W2's requests, of the output of W3 and --batches",
    )
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count())
    add("--beside", type=int, default=0, help="also measure with this many busy processes")
    add("--minutes", type=float, default=10, help="start no round that would end later than this")
    add("--timeout", type=int, default=600, help="seconds of one process")
    add("--quiet-wait", type=float, default=60, help="seconds to wait for a quiet machine")
    add("--retries", type=int, default=1, help="how often a disturbed run is repeated")
    add("--json", type=Path, help="write the report to this file")
    args = parser.parse_args(argv)
    if bool(args.gguf) == bool(args.model):
        parser.error("give --model or --gguf")
    if args.gguf:
        args.converted = args.gguf[0].parent
        args.quantization = [file.name for file in args.gguf]
        args.peers = [name for name in args.peers if name in OF_GGUF]
        args.model = folder_of_shape(args.gguf[0])
    args.model = args.model.resolve()
    args.converted = (args.converted or args.model.parent / "converted").resolve()
    if not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} holds no config.json")
    if args.defaults:
        args.quantization = ["default"]
        stored = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        dtype = stored.get("dtype", stored.get("torch_dtype"))
        if dtype != "bfloat16":
            parser.error(f"--defaults: a checkpoint stored in bfloat16, {args.model} is in {dtype}")
    sizes = args.batches + args.contexts
    args.workloads = (args.workloads or ([] if sizes else ["W1", "W2", "W3"])) + sizes
    if args.beside < 0:
        parser.error(f"--beside must be at least 0, got {args.beside}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: the directory of {args.json} does not exist")
    return args


def main() -> int:
    """Runs all available peers and prints the table; 1 if float32 peers disagree or nothing ran."""
    args = parse()
    skipped: dict[str, str] = {}
    entries = []
    for name in args.peers:
        for quantization in args.quantization:
            if quantization not in PEERS[name].converted and not args.gguf:
                continue
            entry = Entry(name=name, quantization=quantization)
            reason = skip_reason(entry, model=args.model, converted=args.converted, envs=args.envs)
            if reason:
                skipped[entry.label] = reason
            else:
                entries.append(entry)
    machine = [measure_machine(args.threads)]
    lines, failed, rounds = run_rounds(entries, args)
    machine.append(measure_machine(args.threads))
    result = build_report(args, lines, skipped | failed, rounds, machine)
    print(report.table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    found = result["agreement"]
    return int(not result["rows"] or bool(found and found["float32_differ"]))


if __name__ == "__main__":
    sys.exit(main())
