"""Figures of the benchmark's reports, by matplotlib: labelled axes with units, on a light
background.

The colours are by Okabe and Ito, for all types of colour vision; each series also has its own
marker or line style. Called by `plot.py`; the only file that imports matplotlib.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.suite.ablate import ratios_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
STYLE = {
    "font.size": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "nanoengine",  # the same figure gives the same file
    "svg.fonttype": "none",
}
Report = dict[str, Any]
Named = Sequence[tuple[str, Report]]


def all_of(reports: Named) -> dict[str, Figure]:
    """The figures that these reports allow, by file name."""
    kinds = {
        "throughput": ("points", throughput),
        "waits": ("points", lambda found: waits(found, "points", "value")),
        "rates": ("rates", lambda found: waits(found, "rates", "rate")),
        "ablation": ("switches", ablation),
        "pool": ("pool", pool),
        "runs": ("step_times_s", runs),
    }
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, (key, draw) in kinds.items():
            found = [(label, report) for label, report in reports if report.get(key)]
            if found:
                drawn[name] = draw(found)
    return drawn


def throughput(reports: Named) -> Figure:
    """Output tok/s by the swept value, with the roofline of the same steps."""
    figure, axes = _figure()
    for (label, report), colour, marker in zip(_labelled(reports), *_styles(), strict=False):
        points = report["points"]
        at = range(len(points))
        measured = [point["output_tokens_per_s"] for point in points]
        roofline = [point["roofline"]["output_tokens_per_s"] for point in points]
        axes.plot(at, measured, color=colour, marker=marker, label=_join(label, "measured"))
        axes.plot(at, roofline, color=colour, linestyle="--", label=_join(label, "roofline"))
    first = reports[0][1]
    _log(axes.yaxis)
    axes.set_xticks(range(len(first["points"])), [str(p["value"]) for p in first["points"]])
    axes.set_xlabel(_title(first["sweep"]))
    axes.set_ylabel("generated tokens per second")
    axes.set_title(_heading("Throughput, and the limit of memory and cores", first))
    axes.legend()
    return figure


def waits(reports: Named, key: str, value: str) -> Figure:
    """TTFT and ITL: the share of requests that waited less."""
    figure, (first, gap) = _figure(columns=2)
    colours = itertools.cycle(COLOURS)
    lines = itertools.cycle(LINES)
    for label, report in _labelled(reports):
        unit = "requests/s" if key == "rates" else report["sweep"]
        for point in report[key]:
            name = _join(label, f"{point[value]:g} {unit}" if key == "rates"
                         else f"{unit} {point[value]}")  # fmt: skip
            style = {"color": next(colours), "linestyle": next(lines)}
            for axes, what in ((first, "ttft_s"), (gap, "itl_s")):
                if point[what]:
                    axes.plot([1e3 * max(s, 1e-5) for s in point[what]], range(101),
                              label=name, **style)  # fmt: skip
    for axes, what in ((first, "time to first token [ms]"), (gap, "time to next token [ms]")):
        _log(axes.xaxis)
        axes.set_xlabel(what)
        axes.set_ylim(0, 100)
    first.set_ylabel("share that waited at most this long [%]")
    figure.legend(*first.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(_heading("How long requests wait", reports[0][1]), fontsize=12)
    return figure


def ablation(reports: Named) -> Figure:
    """The speed of an engine with one feature switched: each round, and their median."""
    names = list(dict.fromkeys(name for _, report in reports for name, _ in _switched(report)))
    figure, axes = _figure(height=1.6 + 0.42 * len(names))
    offsets = [0.22 * (i - (len(reports) - 1) / 2) for i in range(len(reports))]
    for (label, report), shift, colour, marker in zip(reports, offsets, *_styles(), strict=False):
        for name, ratios in _switched(report):
            at, ordered = names.index(name) + shift, sorted(ratios)
            median = statistics.median(ratios)
            axes.plot([ordered[0], ordered[-1]], [at, at], color=colour, linewidth=2)
            axes.plot([median], [at], color=colour, marker=marker, markersize=8)
            axes.annotate(f"{median:.2f}", (ordered[-1], at), (6, -4), textcoords="offset points")
        axes.plot([], [], color=colour, marker=marker, label=label)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3]
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_xlim(low, high * 1.12)
    axes.set_xlabel("speed relative to the base: median and range of rounds")
    axes.set_title(_heading("One feature switched at a time", reports[0][1]))
    if len(reports) > 1:
        figure.legend(loc="outside lower right")
    return figure


def _switched(report: Report) -> Iterator[tuple[str, list[float]]]:
    for switch in report["switches"]:
        if "seconds" in switch:
            yield f"{switch['name']}: {switch['to']}", ratios_of(switch)


def pool(reports: Named) -> Figure:
    """Recomputed prefill by pool size, from the simulator."""
    figure, axes = _figure()
    colours, markers = _styles()
    for label, report in _labelled(reports):
        for policy in dict.fromkeys(point["policy"] for point in report["pool"]):
            points = [point for point in report["pool"] if point["policy"] == policy]
            axes.plot(
                [100 * point["share"] for point in points],
                [100 * point["prefill_waste_frac"] for point in points],
                color=next(colours), marker=next(markers), label=_join(label, policy),
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([10, 20, 50, 100], ["10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_xlabel("size of the pool [% of the blocks of all requests at their ends]")
    axes.set_ylabel("recomputed prefill [%]")
    axes.set_ylim(bottom=0)
    axes.set_title("Recomputed prefill by size of the pool, from the simulator")
    axes.legend()
    return figure


def runs(reports: Named) -> Figure:
    """Compares runs: tok/s with the roofline, and shares of the run's time."""
    figure, (speed, parts) = _figure(columns=2, height=1.8 + 0.6 * len(reports))
    names = [label or report["model"] for label, report in reports]
    for at, (_, report) in enumerate(reports):
        speed.barh(at, report["output_tokens_per_s"], color=COLOURS[0], height=0.6)
        speed.text(report["output_tokens_per_s"], at, f" {report['output_tokens_per_s']:,.0f}",
                   va="center")  # fmt: skip
        times = dict(report["step_times_s"], other_s=max(report["outside_steps_s"], 0.0))
        total, left = sum(times.values()) or 1.0, 0.0
        for part, colour, hatch in zip(times, COLOURS, _hatches(), strict=False):
            share = 100 * times[part] / total
            parts.barh(at, share, left=left, color=colour, hatch=hatch, edgecolor="#ffffff80",
                       height=0.6, label=part.removesuffix("_s") if at == 0 else None)  # fmt: skip
            left += share
    for axes in (speed, parts):
        axes.set_yticks(range(len(names)), names if axes is speed else [""] * len(names))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    speed.margins(x=0.2)
    speed.set_xlabel("generated tokens per second")
    speed.xaxis.set_major_formatter(_number)
    parts.set_xlabel("share of the run's time [%]")
    figure.legend(loc="outside right center")
    return figure


# --- what they share ------------------------------------------------------------------------------


def _labelled(reports: Named) -> Named:
    """A single report needs no name."""
    return reports if len(reports) > 1 else [("", report) for _, report in reports]


def _log(axis: Axis) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_number)


def _number(value: float, _: int) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _figure(columns: int = 1, height: float = 4.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.6 * columns if columns > 1 else 7.5, height))
    return figure, figure.subplots(1, columns)


def _styles() -> tuple[Iterator[str], Iterator[str]]:
    return itertools.cycle(COLOURS), itertools.cycle(MARKERS)


def _hatches() -> Iterable[str]:
    return itertools.cycle(("", "//", "..", "xx", "\\\\", "--", "++"))


def _join(label: str, what: str) -> str:
    return f"{label}: {what}" if label else what


def _title(option: str) -> str:
    """An option as an axis label."""
    units = {"max_num_seqs": "most sequences at once", "block_size": "tokens per block",
             "max_num_batched_tokens": "token budget of a step"}  # fmt: skip
    return f"{units[option]} ({option})" if option in units else option


def _heading(title: str, report: Report) -> str:
    machine = report["hardware"].get("gpu") or report["hardware"]["cpu"]
    threads = "" if "gpu" in report["hardware"] else f", {report['hardware']['threads']} threads"
    return f"{title}\n{report.get('model', '')} on {machine}{threads}"
