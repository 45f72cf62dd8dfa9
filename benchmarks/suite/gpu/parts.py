"""Parts, cases and budgets: how a report is made in limited time, with a list of what was omitted.

    part  "decode attention", 60 s     in its own process: a crash or hang affects only this part
      case  "triton 64 x 1024"    ──▶ {"case": ..., "gbs": ...}
      case  "flash_attn 64 x 1024" ─▶ {"case": ..., "refused": "needs the package flash-attn ..."}
      case  "triton 256 x 4096"   ──▶ {"case": ..., "skipped": "the part's 60 s were spent"}

Nothing is omitted silently: each case gives one row, with values or with a reason. Called by
`gpu_visit.py` (`drive`) and by the process of a part (`run_cases`). Independent of torch and of a
GPU: the clock and the function that starts a part are arguments.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from nanoengine.errors import NanoEngineError

Row = dict[str, Any]
"""One case's name, and its values or one of `refused`, `failed`, `skipped` with the reason; a
failed case also has its `traceback`."""

REASONS = ("refused", "failed", "skipped")
TRACEBACK_LINES = 25
"""Number of last lines of a traceback that are kept."""


class Case(NamedTuple):
    """One measurement: a name, and the function that measures it."""

    name: str
    measure: Callable[[], Row]


def run_cases(
    name: str,
    cases: Iterable[Case],
    *,
    budget_s: float,
    clock: Callable[[], float],
    still_usable: Callable[[], str | None] = lambda: None,
) -> Iterator[Row]:
    """Measures the cases of a part until its time is spent; then it only lists the remaining ones.

    Args:
        name: name of the part.
        cases: the cases in order; a generator's code between two cases is set-up, and only runs
            when the next case starts.
        budget_s: seconds from now.
        still_usable: called after a failure; a returned text says why nothing more can be measured
            in this process. After an illegal access, everything on a GPU fails.
    """
    started, stop = clock(), None
    coming = iter(cases)
    while True:
        try:
            case = next(coming, None)
        except Exception as error:
            yield {"case": name, **_why(error)}
            return
        if case is None:
            return
        if stop is None and clock() - started >= budget_s:
            stop = f"the part's {budget_s:.0f} s were spent"
        if stop is not None:
            yield {"case": case.name, "skipped": stop}
            continue
        try:
            row = case.measure()
        except Exception as error:
            row = _why(error)
            if "failed" in row and (lost := still_usable()) is not None:
                stop = f"after the failure of {case.name}: {lost}"
        yield {"case": case.name, **row}


def _why(error: Exception) -> Row:
    """`refused` is one of nanoengine's own errors; anything else is a failure."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, NanoEngineError):
        return {"refused": first}
    lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
    return {"failed": f"{type(error).__name__}: {first}", "traceback": lines}


MIN_PART_S = 10.0
"""A part is not started with less time than this, because its process needs time to start."""

Launch = Callable[[str, float], tuple[list[Row], str | None]]
"""Runs one part with a budget; returns its rows, and why it ended early, if it did."""


def drive(
    parts: Iterable[tuple[str, float]],
    launch: Launch,
    *,
    total_s: float,
    clock: Callable[[], float],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs the parts in order and passes the results so far to `save` after each.

    Args:
        parts: their names and budgets; the next one is requested when the last one has ended.

    Returns:
        For each part its `rows`, the `seconds` it took and its `budget_s`; `skipped` or `failed`
        with the reason if it did not run or ended early.
    """
    started, results = clock(), {}
    for name, most_s in parts:
        begun = clock()
        budget_s = min(most_s, total_s - (begun - started))
        if budget_s < MIN_PART_S:
            reason = f"the report's {total_s:.0f} s were spent"
            results[name] = {"rows": [], "skipped": reason}
        else:
            rows, broken = launch(name, budget_s)
            result: dict[str, Any] = {"rows": rows, "budget_s": budget_s}
            result["seconds"] = round(clock() - begun, 1)
            if broken is not None:
                result["failed"] = broken
            results[name] = result
        save(results)
    return results
