"""Graceful shutdown of a job on Ctrl-C and SIGTERM."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from nanoengine.jobs.work import Work

ALARM = getattr(signal, "SIGALRM", None)
"""The signal when the shutdown timeout ends. On Windows, a thread interrupts the main thread."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the run; running rows are dropped and run again in the next run."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


@dataclass
class Signals:
    """Handles Ctrl-C and SIGTERM while a job runs.

    After the first signal, `work` gives out no more rows, and running rows get
    `shutdown_timeout_s` seconds. A second signal, or the end of that time, raises `Stopped`.
    If `work` is None, the first signal raises it.

    Attributes:
        work: the work to stop; None: no rows are running.
        signal_number: the first signal; None: none so far.
    """

    shutdown_timeout_s: float
    work: Work | None = None
    signal_number: int | None = None
    _previous_handlers: dict[int, Any] = field(default_factory=dict)
    _timer: threading.Timer | None = None

    def __enter__(self) -> Signals:
        for number in filter(None, (signal.SIGINT, signal.SIGTERM, ALARM)):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._set_timeout(0)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == ALARM or self.signal_number is not None or self.work is None:
            self.signal_number = self.signal_number or number
            raise Stopped(self.signal_number)
        self.signal_number = number
        self.work.is_stopping = True
        if not self.shutdown_timeout_s:
            raise Stopped(number)
        self._set_timeout(self.shutdown_timeout_s)
        left = f"running rows have {self.shutdown_timeout_s:g} s to finish"
        print(f"\nstopping: {left}; a second signal stops at once", file=sys.stderr)

    def _set_timeout(self, seconds: float) -> None:
        """Raises `Stopped` after this time; 0 cancels the timeout."""
        if ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        elif seconds:
            self._timer = threading.Timer(seconds, _thread.interrupt_main)
            self._timer.daemon = True
            self._timer.start()
        elif self._timer is not None:
            self._timer.cancel()
