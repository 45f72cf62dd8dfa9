"""Signals: the effect of Ctrl-C and SIGTERM while a job runs."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from nanoengine.jobs.work import Work

ALARM = getattr(signal, "SIGALRM", None)
"""Ends the grace period. On Windows, a thread interrupts the main thread instead, as Ctrl-C."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the run; its requests are dropped."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


@dataclass
class Signals:
    """Handles Ctrl-C and SIGTERM while a job runs.

    After the first signal, `work` gives out no more rows, and running rows get `grace_s` seconds.
    A second signal, or the end of that time, raises `Stopped`. If nothing runs, the first does.

    Attributes:
        work: the work to stop; None: nothing runs.
        caught: number of the first signal.
    """

    grace_s: float
    work: Work | None = None
    caught: int | None = None
    _before: dict[int, Any] = field(default_factory=dict)
    _timer: threading.Timer | None = None

    def __enter__(self) -> Signals:
        for number in filter(None, (signal.SIGINT, signal.SIGTERM, ALARM)):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end_grace_after(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == ALARM or self.caught is not None or self.work is None:
            self.caught = self.caught or number
            raise Stopped(self.caught)
        self.caught = number
        self.work.is_stopping = True
        if not self.grace_s:
            raise Stopped(number)
        self._end_grace_after(self.grace_s)
        print(
            f"\nstopping: rows that run get {self.grace_s:g} s; once more to stop at once",
            file=sys.stderr,
        )

    def _end_grace_after(self, seconds: float) -> None:
        """Raises Stopped after this time; 0 cancels it."""
        if ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        elif seconds:
            self._timer = threading.Timer(seconds, _thread.interrupt_main)
            self._timer.daemon = True
            self._timer.start()
        elif self._timer is not None:
            self._timer.cancel()
