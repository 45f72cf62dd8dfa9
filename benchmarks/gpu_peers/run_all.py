"""Compares engines on one GPU: `run_all.py --model DIR`; see README.md.

In every round each engine runs once, in a separate process: A B C, A B C, A B C. So a GPU that gets
warm or slow affects all. Each line is appended to the output file at once. A missing engine is
listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Peer(NamedTuple):
    """A row of the table: its interpreter (PEER_PYTHON_<name>), script and options."""

    label: str
    python: str
    script: str
    options: tuple[str, ...] = ()


PEERS = (
    Peer("nanoengine", "NANOENGINE", "run_nanoengine.py"),
    Peer(
        "nanoengine, fp8 KV", "NANOENGINE", "run_nanoengine.py", ("--option", "kv_cache_dtype=fp8")
    ),
    Peer("nano-vllm", "NANO_VLLM", "run_nano_vllm.py"),
    Peer("nano-vllm, nanoengine's kernels", "NANO_VLLM", "run_nano_vllm.py",
         ("--kernels", "triton")),
    Peer("nano-vllm, FA3", "NANO_VLLM", "run_nano_vllm.py", ("--kernels", "fa3")),
    Peer("vllm", "VLLM", "run_vllm.py"),
    Peer("vllm, one process", "VLLM", "run_vllm.py", ("--one-process",)),
)  # fmt: skip

Start = Callable[[Peer, list[str], float], str]
"""Runs a peer's script with more arguments and a time limit; its standard output."""


def start(peer: Peer, arguments: list[str], limit_s: float) -> str:
    """Runs it in a separate process; its other output goes to the terminal."""
    python = os.environ.get(f"PEER_PYTHON_{peer.python}", sys.executable)
    command = [python, str(HERE / peer.script), *peer.options, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    return done.stdout


def run_once(peer: Peer, arguments: list[str], limit_s: float, start: Start) -> dict[str, Any]:
    """The JSON line of one run: the last line that is valid JSON."""
    arguments = [*arguments, "--label", peer.label]
    try:
        lines = start(peer, arguments, limit_s).splitlines()
    except subprocess.TimeoutExpired:
        return {"label": peer.label, "failed": f"took longer than {limit_s:.0f} s"}
    except OSError as error:
        return {"label": peer.label, "skipped": f"its interpreter can't be run: {error.strerror}"}
    for line in reversed(lines):
        if line.startswith("{"):
            return json.loads(line)
    return {"label": peer.label, "failed": "ended without a result"}


def run_rounds(
    peers: list[Peer],
    rounds: int,
    arguments: list[str],
    limit_s: float,
    keep: Callable[[dict[str, Any]], None],
    start: Start = start,
) -> list[dict[str, Any]]:
    """All runs, round by round; a skipped peer is not tried again."""
    results, skipped = [], set()
    for number in range(1, rounds + 1):
        for peer in peers:
            if peer.label in skipped:
                continue
            result = run_once(peer, arguments, limit_s, start) | {"round": number}
            if "skipped" in result:
                skipped.add(peer.label)
            results.append(result)
            keep(result)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Medians and spread, and failures."""
    lines = [
        f"{'engine':<34}{'tokens':>9}{'seconds':>9}{'tok/s':>9}{'spread':>17}{'copy GB/s':>11}"
    ]
    for label in dict.fromkeys(result["label"] for result in results):
        runs = [r for r in results if r["label"] == label]
        timed = [r for r in runs if "seconds" in r]
        if timed:
            speeds = sorted(r["output_tokens_per_s"] for r in timed)
            spread = f"{speeds[0]:,.0f}-{speeds[-1]:,.0f}"
            lines.append(
                f"{label:<34}{timed[0]['output_tokens']:>9,}"
                f"{statistics.median(r['seconds'] for r in timed):>9.2f}"
                f"{statistics.median(speeds):>9,.0f}{spread:>17}"
                f"{statistics.median(r['copy_gbs'] for r in timed):>11,.0f}"
            )
        for run in runs:
            for kind in ("skipped", "failed"):
                if kind in run:
                    lines.append(f"{label:<34}{kind} in round {run['round']}: {run[kind]}")
    return "\n".join(lines)


def main() -> None:
    """Runs the peers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory that make_checkpoint.py wrote")
    parser.add_argument("--peers", nargs="+", default=[peer.label for peer in PEERS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds of one run, load included"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-peers.jsonl"))
    args = parser.parse_args()
    known = {peer.label: peer for peer in PEERS}
    if wrong := [label for label in args.peers if label not in known]:
        parser.error(f"unknown peers {wrong}; known: {list(known)}")
    scale = ["--requests", str(args.requests), "--longest", str(args.longest)]

    def keep(result: dict[str, Any]) -> None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        text = f"{result['seconds']:.2f} s" if "seconds" in result else "no result"
        print(f"round {result['round']}: {result['label']}: {text}", flush=True)

    peers = [known[label] for label in args.peers]
    results = run_rounds(peers, args.rounds, ["--model", args.model, *scale], args.limit, keep)
    print(table(results))


if __name__ == "__main__":
    main()
