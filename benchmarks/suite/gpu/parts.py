"""Parts, cases and budgets: how a report gets done in limited time, and says what it left out.

    part  "decode attention", 60 s     in a process of its own: what crashes or hangs is lost alone
      case  "triton 64 x 1024"    ──▶ {"case": ..., "gbs": ...}
      case  "flash_attn 64 x 1024" ─▶ {"case": ..., "refused": "needs the package flash-attn ..."}
      case  "triton 256 x 4096"   ──▶ {"case": ..., "skipped": "the part's 60 s were spent"}

Nothing is left out silently: each case gives one row, with numbers or with a reason. Called by
`gpu_visit.py` (`drive`) and by the process of a part (`run_cases`). Knows neither torch nor a
GPU: the clock and what launches a part are arguments.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from nanoengine.errors import NanoEngineError

Row = dict[str, Any]
"""One case's name, and its numbers or one of `refused`, `failed`, `skipped` with the reason; what
failed has its `traceback` as well."""

REASONS = ("refused", "failed", "skipped")
TRACEBACK_LINES = 25
"""Last lines of a traceback that are kept."""


class Case(NamedTuple):
    """One measurement: a name, and what measures it."""

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
    """Measures a part's cases in turn until its time is spent; then only names those that are left.

    Args:
        name: of the part.
        cases: one after the other; what a generator does between two of them is set-up, and is done
            only when it is the next case's turn.
        budget_s: seconds from now.
        still_usable: asked after a failure; a text says why nothing more can be measured here. A
            GPU that has met an illegal access fails in all that follows.
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
    """A refusal is one of nanoengine's own errors; anything else is a failure."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, NanoEngineError):
        return {"refused": first}
    lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
    return {"failed": f"{type(error).__name__}: {first}", "traceback": lines}


LEAST_S = 10.0
"""A part is not begun with less time than this: a process needs it to start."""

Launch = Callable[[str, float], tuple[list[Row], str | None]]
"""Runs a part by name with a budget; its rows, and why it ended early, if it did."""


def drive(
    parts: Iterable[tuple[str, float]],
    launch: Launch,
    *,
    total_s: float,
    clock: Callable[[], float],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs the parts in order and hands the results so far to `save` after each.

    Args:
        parts: their names and budgets; the next one is asked for when the last one has ended.

    Returns:
        For each part its `rows`, the `seconds` it took and its `budget_s`; `skipped` or `failed`
        with the reason if it did not run, or not to its end.
    """
    started, results = clock(), {}
    for name, most_s in parts:
        begun = clock()
        budget_s = min(most_s, total_s - (begun - started))
        if budget_s < LEAST_S:
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
