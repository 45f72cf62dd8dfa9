"""The process of a part: its limit, its rows and its log, which are kept if it crashes.

Used by `gpu_visit.py`. It needs only the standard library, so that a machine on which torch can't
be imported gets a report that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

from benchmarks.suite.gpu.records import ROOT

SITE = ROOT / ".visit" / "site"
"""Packages that a machine may lack: `gpu_visit.py` unpacks them there."""
ENDINGS = ((signal.SIGINT, 10.0), (signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0))
"""Signals for a process at its limit, and the seconds after each. At SIGINT pytest prints its
failures and Python its stack; at SIGABRT Python's fault handler prints the stacks of a process that
is inside the driver. A process that survives SIGKILL is left alone."""
LOG_LINES = 25
"""Number of last log lines that are kept of a part that ended early."""


def run(
    command: list[str], limit_s: float, rows: Path, log: Path, env: dict[str, str]
) -> tuple[list[dict[str, Any]], str | None]:
    """Runs a part in a separate process.

    Args:
        rows: the file to which the part appends a JSON line per result; existing lines are ignored.
        log: its stdout and stderr are appended here.
        env: environment variables in addition to this process's.

    Returns:
        The rows that it wrote, and why it ended early; None if it ended with exit code 0. If it
        ended early, the last row has the end of its log.
    """
    begin, begin_of_log = (path.stat().st_size if path.exists() else 0 for path in (rows, log))
    with log.open("a") as file:
        code = execute(command, limit_s, file, environment() | env)
    found = rows_of(rows, begin) if rows.exists() else []
    if code == 0:
        return found, None
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin_of_log)
        last = file.read().splitlines()[-LOG_LINES:]
    why = f"ended after {limit_s:.0f} s" if code is None else f"exit code {code}"
    return [*found, {"case": "end of its log", "log": last}], f"{why}: {''.join(last[-1:])}"


def environment() -> dict[str, str]:
    """The Python path of a part in addition to its command's: this checkout, and the unpacked
    packages."""
    path = [str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    always = dict.fromkeys(("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "HF_HUB_OFFLINE"), "1")
    return {**os.environ, **always, "PYTHONPATH": os.pathsep.join(path)}


def execute(command: list[str], limit_s: float, log: IO[str], env: dict[str, str]) -> int | None:
    """The exit code of a command, 127 if it can't be started; None: it was ended at its limit."""
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
        for ending, seconds in ENDINGS if process.poll() is None else ENDINGS[-1:]:
            with contextlib.suppress(
                ProcessLookupError
            ):  # also ends processes that the part has started
                os.killpg(process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def rows_of(path: Path, begin: int) -> list[dict[str, Any]]:
    """The complete lines after the first `begin` bytes; the last line of an ended process may be
    incomplete."""
    whole, _, _ = path.read_bytes()[begin:].rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
