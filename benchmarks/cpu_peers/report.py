"""From the runners' JSON lines to a table and a report. Pure functions without a clock.

    python benchmarks/cpu_peers/report.py REPORT.json ...

prints the short tables of docs/benchmarks.md from the files of `compare.py --json`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.roofline import Card, Formats, ideal_seconds
from benchmarks.suite.workloads import requests_of

Line = Mapping[str, Any]

DISTURBED_CORES = 0.2
"""A run is disturbed if other processes used this many cores: one busy process slows spinning
OpenMP threads several times."""

ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:])(?:[A-Za-z]:\\|~?/)(?:[^\s'\",;:()\[\]/]+/)*([^\s'\",;:()\[\]/]*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks of the machine in this run: 1e9 bytes/s, and 1e9 multiplications and additions per
    second with operands of each dtype ("float32", and "bfloat16", "int8" if the CPU has such
    instructions), with the widest instructions of `isa`."""

    isa: str
    read_gbs: float
    gflops: dict[str, float]

    def limits(self, quantization: str, dtype: str = "float32") -> Card:
        """The rates that a line is compared with: int8 products if its weights are quantized, else
        products in its compute dtype."""
        floats = max(self.gflops["float32"], self.gflops.get(dtype, 0))
        quantized = quantization in ("int8", "int4") or quantization.endswith(".gguf")
        whole = self.gflops.get("int8", 0) if quantized else 0
        return Card(
            bytes_per_s=1e9 * self.read_gbs,
            flops_per_s=1e9 * max(floats, whole),
            attention_flops_per_s=1e9 * floats,
        )


def best_of(found: list[Peaks]) -> Peaks:
    """The largest of each value. Why: other processes can only make one smaller."""
    kinds = found[0].gflops
    return Peaks(
        isa=found[0].isa,
        read_gbs=max(peaks.read_gbs for peaks in found),
        gflops={kind: max(peaks.gflops[kind] for peaks in found) for kind in kinds},
    )


def label_of(line: Line) -> str:
    """The name of a configuration: the peer, and how its weights are stored."""
    return f"{line['peer']} {precision_of(line['quantization'])}"


def precision_of(quantization: str) -> str:
    """float32, int8, int4 or default: peers of one precision are compared."""
    return "float32" if quantization == "none" else quantization


def _natural(workload: str) -> tuple[int, int]:
    return "WBT".index(workload[0]), int(workload[1:])


def is_valid(line: Line) -> bool:
    """Whether no other process disturbed the run."""
    return bool(line["other_cores"] <= DISTURBED_CORES)


def rows(
    lines: Iterable[Line], config: dict[str, Any], peaks: Peaks, scale: float
) -> list[dict[str, Any]]:
    """One row per workload and configuration: medians and spreads over its valid lines.

    If all lines were disturbed, the row says so and has no share and no ratio. Its `beside` has the
    same values for runs with busy processes, if there were any.
    """
    timed = [line for line in lines if line["workload"] != "G"]
    found = []
    for workload in sorted({line["workload"] for line in timed}, key=_natural):
        here = [line for line in timed if line["workload"] == workload]
        quiet, beside = (
            _group(
                [line for line in here if bool(line.get("beside")) == busy], config, peaks, scale
            )
            for busy in (False, True)
        )
        for row, other in product(quiet, beside):
            if (row["peer"], row["precision"]) == (other["peer"], other["precision"]):
                row["beside"] = other | {"kept": _ratio(other, row)}
        quiet.sort(key=lambda row: (row["precision"], -row["output_tok_s"]))
        found += quiet
    return found


def _group(
    lines: list[Line], config: dict[str, Any], peaks: Peaks, scale: float
) -> list[dict[str, Any]]:
    """The rows of one workload, without or with busy processes, and the ratios between them."""
    group = [
        _row([line for line in lines if label_of(line) == label], config, peaks, scale)
        for label in sorted({label_of(line) for line in lines})
    ]
    for row in group:
        same = [other for other in group if other["precision"] == row["precision"]]
        ours = next((other for other in same if other["peer"] == "nanoengine"), None)
        row["nanoengine_is"] = ours and _ratio(ours, row)
        if row is ours:
            ratios = [_ratio(ours, other) for other in same if other is not ours]
            # Why none: a disturbed peer may be the best one.
            row["over_best_peer"] = None if None in ratios else min(ratios, default=None)
    return group


def _row(lines: list[Line], config: dict[str, Any], peaks: Peaks, scale: float) -> dict[str, Any]:
    """Median and spread of one configuration on one workload."""
    valid = [line for line in lines if is_valid(line)]
    first, used = lines[0], valid or lines
    speeds = [line["output_tok_s"] for line in used]
    requests = requests_of(first["workload"], vocab_size=config["vocab_size"], scale=scale)
    formats = Formats(**{name: first[name] for name in ("body_bits", "head_bits", "kv_bits")})
    ideal_s = ideal_seconds(
        ModelCost.from_config(config, 4), requests,
        peaks.limits(first["quantization"], first["dtype"]), formats,
    )  # fmt: skip
    median = statistics.median(speeds)
    limit = first["output_tokens"] / ideal_s
    return {
        "workload": first["workload"],
        "peer": first["peer"],
        "version": first["version"],
        "precision": precision_of(first["quantization"]),
        "computes_in": first["dtype"],
        "valid": bool(valid),
        "runs": len(used),
        "disturbed_runs": len(lines) - len(valid),
        "output_tok_s": median,
        "seconds": statistics.median(line["seconds"] for line in used),
        "spread": [min(speeds), max(speeds)],
        "by_round": {str(line["round"]): line["output_tok_s"] for line in used},
        "roofline_tok_s": round(limit, 1),
        "roofline_share": round(median / limit, 3) if valid else None,
        "peak_rss_mib": max(line["peak_rss_mib"] for line in used),
        "load_s": statistics.median(line["load_s"] for line in used),
        "other_cores": max(line["other_cores"] for line in used),
    }


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The speed of one relative to the other: the median over the rounds that both have."""
    if not (one["valid"] and other["valid"]):
        return None
    both = one["by_round"].keys() & other["by_round"].keys()
    ratios = [one["by_round"][number] / other["by_round"][number] for number in both]
    return round(statistics.median(ratios), 3) if ratios else None


def agreement(lines: Iterable[Line]) -> dict[str, Any] | None:
    """The number of greedy ids of workload G that each configuration shares with the reference.

    The reference is transformers, or else the first float32 peer. Float32 peers that differ are
    listed, because they do not compute the same model. Quantized ones may differ; their counts are
    reported.
    """
    ids = {label_of(line): line["ids"] for line in lines if line["workload"] == "G"}
    floats = [label for label in ids if label.endswith(" float32")]
    if not floats:
        return None
    reference = "transformers float32" if "transformers float32" in floats else floats[0]
    expected = [token for answer in ids[reference] for token in answer]
    same = {
        label: sum(a == b for a, b in zip(expected, (t for x in answers for t in x), strict=True))
        for label, answers in ids.items()
    }
    return {
        "reference": reference,
        "tokens": len(expected),
        "same": same,
        "float32_differ": [label for label in floats if same[label] < len(expected)],
    }


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown page: one table per workload, then what was skipped and why."""
    peaks = report["peaks"]
    text = [
        f"{report['model']}: {report['hardware']['cpu']}, {peaks['isa']}, {report['threads']}"
        f" threads; {peaks['read_gbs']:.1f} GB/s read, "
        + ", ".join(f"{rate:,.0f} GFLOP/s {kind}" for kind, rate in peaks["gflops"].items())
    ]
    for workload in dict.fromkeys(row["workload"] for row in report["rows"]):
        text += [
            "",
            f"{workload}, scale {report['scale']:g}, {report['rounds']} rounds",
            "",
            "| precision | peer |"
            f" {'s to the first token' if is_time(workload) else 'output tok/s'}"
            " | spread | of the limit | nanoengine is | peak MiB | load s | runs |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        text += [_table_row(row) for row in report["rows"] if row["workload"] == workload]
    text += _beside(report)
    found = report["agreement"]
    if found:
        same = ", ".join(f"{label} {count}" for label, count in found["same"].items())
        text += ["", f"Greedy ids equal to {found['reference']}'s, of {found['tokens']}: {same}"]
        if found["float32_differ"]:
            text.append(f"FLOAT32 PEERS DISAGREE: {', '.join(found['float32_differ'])}")
    text += [""] * bool(report["skipped"])
    text += [f"skipped: {label}: {reason}" for label, reason in report["skipped"].items()]
    return "\n".join(text)


def is_time(workload: str) -> bool:
    """Whether a workload is reported as seconds to its only token, not as tokens per second."""
    return workload.startswith("T")


def _table_row(row: dict[str, Any]) -> str:
    middle, low, high = _figures(row)
    runs = (
        f"{row['runs']} of {row['runs'] + row['disturbed_runs']}" if row["valid"] else "DISTURBED"
    )
    cells = [
        row["precision"],
        f"{row['peer']} {row['version']}",
        middle,
        f"{low} to {high}",
        "-" if row["roofline_share"] is None else f"{row['roofline_share']:.0%}",
        "-" if row["nanoengine_is"] is None else f"{row['nanoengine_is']:.2f}x",
        f"{row['peak_rss_mib']:,}",
        f"{row['load_s']:.1f}",
        runs,
    ]
    return f"| {' | '.join(cells)} |"


def summary(report: dict[str, Any]) -> str:
    """One short table per precision. It has one line per workload and one column per engine with
    the median, the range and the speed of nanoengine relative to it; the last column is
    nanoengine's share of the limit."""
    peaks, rates = report["peaks"], report["peaks"]["gflops"]
    text = [
        f"{report['hardware']['cpu']}, {report['threads']} threads, instruction set {peaks['isa']};"
        f" {peaks['read_gbs']:.0f} GB/s read, "
        + ", ".join(f"{rate:,.0f} GFLOP/s {kind}" for kind, rate in rates.items())
    ]
    for precision in dict.fromkeys(row["precision"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["precision"] == precision]
        peers = sorted({row["peer"] for row in rows}, key=lambda peer: (peer != "nanoengine", peer))
        scale = "" if report["scale"] == 1 else f", scale {report['scale']:g}"
        first = f"{report['model']}, {precision}{scale}, {report['rounds']} rounds"
        text += ["", f"| {' | '.join([first, *peers, 'of the limit'])} |"]
        text += ["|---" * (len(peers) + 2) + "|"]
        for workload in dict.fromkeys(row["workload"] for row in rows):
            found = {row["peer"]: row for row in rows if row["workload"] == workload}
            reached = found.get("nanoengine", {}).get("roofline_share")
            cells = [_short(found[peer]) if peer in found else "" for peer in peers]
            cells = [workload + ", s" * is_time(workload), *cells]
            text.append(f"| {' | '.join(cells)} | {f'{reached:.0%}' if reached else ''} |")
    text += _beside(report)
    return "\n".join(text)


def _short(row: dict[str, Any]) -> str:
    """Median and range of a row, and nanoengine's ratio to another engine."""
    is_ours = row["peer"] == "nanoengine" or row["nanoengine_is"] is None
    return _range(row) + ("" if is_ours else f": {row['nanoengine_is']:.2f}x")


def _range(row: dict[str, Any]) -> str:
    """Median and range of a row."""
    if not row["valid"]:
        return "disturbed"
    middle, low, high = _figures(row)
    return f"{middle}{f' ({low} to {high})' if row['runs'] > 1 else ''}"


def _beside(report: dict[str, Any]) -> list[str]:
    """A table of the runs with busy processes: one line per row, with both rates and their ratio,
    and nanoengine's ratio to each engine, or in its own line to the best one."""
    rows = [row for row in report["rows"] if "beside" in row]
    if not rows:
        return []
    text = ["", f"| with {report['beside']} busy | precision | peer | quiet | busy | kept"
            " | nanoengine is, quiet | busy |", "|---" * 8 + "|"]  # fmt: skip
    for row in rows:
        both, kept = (row, row["beside"]), row["beside"]["kept"]
        ratios = [each.get("over_best_peer", each["nanoengine_is"]) for each in both]
        cells = [
            row["workload"] + ", s" * is_time(row["workload"]),
            row["precision"],
            row["peer"],
            *map(_range, both),
            "-" if kept is None else f"{kept:.0%}",
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        ]
        text.append(f"| {' | '.join(cells)} |")
    return text


def _figures(row: dict[str, Any]) -> tuple[str, str, str]:
    """Median, minimum and maximum: tokens per second, or seconds to the first token."""
    speeds = (row["output_tok_s"], *row["spread"])
    if is_time(row["workload"]):
        middle, high, low = (f"{1 / speed:.2f}" for speed in speeds)
    else:
        middle, low, high = (f"{speed:.{1 if speed < 100 else 0}f}" for speed in speeds)
    return middle, low, high


def without_paths(text: str) -> str:
    """The text with every absolute path replaced by its last part: reports contain no directories.

    >>> without_paths("--model /home/me/small failed in '/opt/x/y.py'")
    "--model small failed in 'y.py'"
    """
    return ABSOLUTE_PATH.sub(lambda match: match[1], text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(summary(json.loads(Path(name).read_text(encoding="utf-8"))), end="\n\n")
