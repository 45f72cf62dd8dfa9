"""Derived values of all measured rows: shares of the GPU's peaks and of the roofline, and tables.

Called by `gpu_visit.py` at the end, with the available rows. Pure functions from rows to rows and
text.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.suite.cost import ModelCost
from benchmarks.suite.gpu.engine import SHAPE
from benchmarks.suite.gpu.parts import REASONS, Row
from benchmarks.suite.roofline import H200_MEASURABLE, Card, decode_step, roofline
from benchmarks.suite.shapes import SHAPES
from nanoengine.bench.workload import random_workload

METHOD = {
    "timing of kernels": "median of 20 replays of a CUDA graph, between CUDA events",
    "copy": "one buffer of random bf16 onto another; bytes read plus bytes written",
    "gemm": "square matrices of random bf16 numbers, 2 n^3 FLOPs",
    "attention": "one layer through AttentionBackend.forward, the store of new tokens included;"
    " random paged KV in random block order, bf16; launches sized for a context of 4,096; layers"
    " with 256 MiB of KV or more alternate, so that the L2 cache has no hits",
    "GB/s of decode": "keys and values of all contexts, each byte once",
    "TFLOP/s of prefill": "4 FLOPs per visible (query, key) pair, head and element of the head dim",
    "tokens": "greedy, of the demo model, compared with plain torch in float32 on the CPU",
    "parity": "against plain torch in float64 on the same inputs; the tolerance is a few roundings"
    " of the dtype for outputs of size 1",
    "standard workload": "256 requests, seed 0, 142,827 prompt and 133,966 output tokens,"
    " temperature 0.6, ignore_eos; the Qwen3-0.6B shape with random weights, bf16; one short"
    " warm-up; load and warm-up left out",
    "decode steps": "gpu_ms: between CUDA events around the part's call; host_ms: the rest of the"
    " step's wall time; kernels: torch profiler, which slows the host down",
    "roofline": "benchmarks.suite.roofline with the best copy and GEMM rate of this report",
}


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """The parts with shares added, the summary, and how values were measured."""
    peaks = _rows(results, "peaks")
    copy_gbs = max((row["gbs"] for row in peaks if "gbs" in row), default=None)
    gemm_tflops = max((row["tflops"] for row in peaks if "tflops" in row), default=None)
    card = None
    if copy_gbs and gemm_tflops:
        card = Card(bytes_per_s=copy_gbs * 1e9, flops_per_s=gemm_tflops * 1e12)
    add: dict[str, Callable[[Row], Row]] = {
        "decode attention": lambda row: _share(row, "gbs", copy_gbs),
        "prefill attention": lambda row: _share(row, "tflops", gemm_tflops),
        "decode steps": lambda row: _ideal_step(row, card),
    }
    parts = {
        name: result | {"rows": [row | add.get(name, _nothing)(row) for row in result["rows"]]}
        for name, result in results.items()
    }
    parity = _rows(results, "tokens") + _rows(results, "parity")
    summary = {
        "copy_gbs": copy_gbs,
        "gemm_tflops": gemm_tflops,
        "parity_checked": sum("ok" in row for row in parity),
        "parity_wrong": [row["case"] for row in parity if not row.get("ok", True)],
        "standard_workload": _standard(results, card),
    }
    return {"summary": summary, "parts": parts, "method": METHOD}


def _rows(results: dict[str, Any], part: str) -> list[Row]:
    return results.get(part, {}).get("rows", [])


def _nothing(row: Row) -> Row:
    return {}


def _share(row: Row, key: str, peak: float | None) -> Row:
    """The share of the peak that a row reached, if both were measured."""
    return {"share": row[key] / peak} if peak and key in row else {}


def _ideal_step(row: Row, card: Card | None) -> Row:
    if card is None or "context_tokens" not in row:
        return {}
    cost = ModelCost.from_config(SHAPES[SHAPE], 2)
    parts = decode_step(cost, batch=row["batch"], context=row["context_tokens"], card=card)
    return {"ideal_ms": 1e3 * sum(parts), "share": 1e3 * sum(parts) / row["step_ms"]}


def _speeds(results: dict[str, Any], part: str) -> list[float]:
    return [r["output_tokens_per_s"] for r in _rows(results, part) if "output_tokens_per_s" in r]


def _standard(results: dict[str, Any], card: Card | None) -> dict[str, Any]:
    """The median of the rounds, and its share of the ideal on this GPU and on an H200."""
    speeds = _speeds(results, "standard workload")
    found: dict[str, Any] = {"rounds": speeds}
    if speeds:
        found["output_tokens_per_s"] = statistics.median(speeds)
    for name, of in (("this card", card), ("an H200 of 4.3 TB/s, 790 TFLOP/s", H200_MEASURABLE)):
        if of is None:
            continue
        for kv, entry in (("bf16", 2), ("fp8", 1)):
            ideal = standard_roofline(of, entry)
            found[f"ideal on {name}, {kv} KV"] = ideal
            if speeds and kv == "bf16":
                found[f"share of {name}"] = found["output_tokens_per_s"] / ideal
    return found


@functools.cache
def standard_roofline(card: Card, kv_element_bytes: int) -> float:
    """Output tokens per second of the standard workload on an ideal engine."""
    items = random_workload()
    lengths = [(len(item.prompt_token_ids), item.max_tokens) for item in items]
    cost = ModelCost.from_config(SHAPES[SHAPE], 2)
    return roofline(cost, lengths, card, kv_element_bytes=kv_element_bytes).output_tokens_per_s


# --- text -----------------------------------------------------------------------------------------


def format_report(report: dict[str, Any]) -> str:
    """The tables, at most 100 columns wide; the JSON has more."""
    machine, summary, parts = report["hardware"], report["summary"], report["parts"]
    standard = summary["standard_workload"]
    lines = [
        f"{machine.get('gpu', machine['cpu'])}, driver {machine.get('driver_version', '-')},"
        f" torch {report['versions'].get('torch', '-')}, {report['date']}",
        f"copy {_number(summary['copy_gbs'])} GB/s, GEMM {_number(summary['gemm_tflops'])} TFLOP/s",
        f"parity: {summary['parity_checked']} checked, wrong: {summary['parity_wrong'] or 'none'}",
        f"standard workload: {_number(standard.get('output_tokens_per_s'))} output tok/s",
        *(f"  {name}: {_value(standard[name])}" for name in standard if name.startswith("share")),
        *(f"  {name}: {_value(standard[name])}" for name in standard if name.startswith("ideal")),
    ]
    lines += _attention("decode attention", parts, "batch", "context", "gbs", "GB/s")
    lines += _attention("prefill attention", parts, "prompts", "length", "tflops", "TFLOP/s")
    names = ("forward", "head", "sampler")
    columns = ("wall", "ideal", *names, "host")
    lines += ["", f"{'decode steps [ms]':<20}" + "".join(f"{name:>10}" for name in columns)]
    steps = _rows(parts, "decode steps")
    for row in steps:
        if "gpu_ms" in row:
            gpu = row["gpu_ms"]
            together = [sum(gpu.values())] if names[0] not in gpu else []
            cells = [row["step_ms"], row.get("ideal_ms")]
            cells += [*together, *(gpu.get(name) for name in names)][: len(names)]
            cells.append(row["host_ms"])
            label = f"  batch {row['batch']}"
            lines.append(f"{label:<20}" + "".join(f"{_number(cell):>10}" for cell in cells))
    if any("forward, head, sampler" in row.get("gpu_ms", {}) for row in steps):
        lines.append("  (one graph contains forward, head and sampler: forward has their sum)")
    lines += ["", *_left_out(parts)]
    return "\n".join(lines)


def _attention(
    part: str, parts: dict[str, Any], rows_by: str, columns_by: str, key: str, unit: str
) -> list[str]:
    """A table of speeds, with shares of the GPU's peak: one line per backend and batch."""
    rows = [row for row in parts.get(part, {}).get("rows", []) if key in row]
    columns = sorted({row[columns_by] for row in rows})
    head = f"{part}, {unit} (share)"
    lines = ["", f"{head:<36}" + "".join(f"{f'{columns_by} {c}':>15}" for c in columns)]
    for backend, size in dict.fromkeys((row["backend"], row[rows_by]) for row in rows):
        found = {r[columns_by]: r for r in rows if (r["backend"], r[rows_by]) == (backend, size)}
        cells = [_cell(found.get(column), key) for column in columns]
        label = f"  {backend}, {rows_by} {size}"
        lines.append(f"{label:<36}" + "".join(f"{cell:>15}" for cell in cells))
    return lines


def _cell(row: Row | None, key: str) -> str:
    if row is None:
        return "-"
    return f"{row[key]:,.0f} {row['share']:5.0%}" if "share" in row else f"{row[key]:,.0f}"


def _left_out(parts: dict[str, Any]) -> list[str]:
    """All cases without values, each with its reason."""
    lines = []
    for name, result in parts.items():
        for kind in ("skipped", "failed"):
            if kind in result:
                lines.append(f"{name}: {kind}: {result[kind]}")
        for row in result["rows"]:
            lines += [
                f"{name}: {row['case']} {kind}: {row[kind]}" for kind in REASONS if kind in row
            ]
    return ["not measured:", *(f"  {line}"[:100] for line in lines)] if lines else []


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _value(value: float) -> str:
    return f"{value:.1%}" if value < 10 else f"{value:,.0f} output tok/s"
