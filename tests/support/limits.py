"""The time limit of each test. When it expires, stacks are shown, the test's processes are killed,
and the test fails, so that a hanging test does not block the others.

pytest-timeout finds the limit (`timeout` in pyproject.toml, or the marker) and requests a timer.
This timer also shows the processes that a test has started, since most hangs wait for one. If the
main thread never returns from compiled code, `faulthandler` ends the process a minute later, and
pytest-xdist starts another worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from types import FrameType
from typing import Any

import psutil
import pytest

GRACE_S = 60.0
"""How long a test may take to end after its limit."""
HAS_ALARM = hasattr(signal, "SIGALRM")


def stacks_of_threads() -> str:
    """The stack of each thread of this process."""
    frames = sys._current_frames()
    return "\n".join(
        f"thread {name}:\n" + "".join(traceback.format_stack(frame))
        for name, frame in frames.items()
    )


def stacks_of_children(since: float) -> str:
    """The stack of each child process; processes started after `since` are then killed."""
    stacks = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())[:500]
            stacks.append(f"process {child.pid} ({child.status()}): {command}\n{_dump(child.pid)}")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.create_time() >= since:
                child.kill()
    return "\n".join(stacks)


def _dump(pid: int) -> str:
    """py-spy's dump of a process, or the reason why there is none."""
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}\n"
    return done.stdout or f"no stack: {done.stderr}"


class Limits:
    """The plugin: timers for pytest-timeout."""

    def __init__(self) -> None:
        # Why a copy: while a test runs, its own output is captured.
        self._stderr = os.fdopen(os.dup(2), "w")
        self._previous_handler: Any = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Starts the timer of a test."""
        if not HAS_ALARM:
            return None
        started, limit_s = time.time(), settings.timeout

        def at_limit(number: int, frame: FrameType | None) -> None:
            stacks = f"{stacks_of_threads()}\n{stacks_of_children(started - 0.01)}"
            pytest.fail(f"{item.nodeid} took longer than {limit_s:g} s\n{stacks}", pytrace=False)

        self._previous_handler = signal.signal(signal.SIGALRM, at_limit)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=self._stderr)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        """Stops the timer."""
        if self._previous_handler is None:
            return None
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous_handler)
        self._previous_handler = None
        return True
