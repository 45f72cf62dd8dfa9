"""One replica: a process with its own LLM, which runs the rows that its parent sends.

    parent ── options ─────────────────> LLM(**options)
           <── EngineInfo, EngineStats, pid ──  or the error if the model can't be loaded
           ── Row, Row, ..., None ─────> llm.stream     one stream; then the next
           <── RequestOutput, Stats ────                in the order in which rows finish
           <── RuntimeError ────────────                the stream has failed; another may follow

Started by `replicas.py` as a worker (`worker.py`).
"""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nanoengine.errors import NanoEngineError
from nanoengine.jobs.prefetch import RowQueue
from nanoengine.text.prompt_forms import Row

if TYPE_CHECKING:
    from nanoengine.llm import LLM

STATS_S = 0.25
"""Interval at which a replica reports its counters [s]; the progress line changes as often."""


def main(connection: Connection, *cores: int) -> None:
    """Serves one parent until it exits.

    Args:
        cores: the cores to run on; empty: all.
    """
    faulthandler.enable()
    if cores:
        os.sched_setaffinity(0, cores)  # Before the imports of torch and numba, which count cores.
    try:
        options = connection.recv()
    except (EOFError, OSError):
        return
    feed: RowQueue[Row] = RowQueue()
    threading.Thread(target=_receive, args=(connection, feed), daemon=True).start()
    from nanoengine.llm import LLM

    try:
        llm = LLM(**options)
    except NanoEngineError as error:
        connection.send(error)
        return
    gc.freeze()  # Why: see `jobs.work.gc_frozen`; this process has no other work.
    connection.send((llm.info, llm.stats(), os.getpid()))
    llm.engine.observers.append(_Reporter(connection, llm))
    while True:
        _serve(connection, feed, llm)


def _serve(connection: Connection, feed: RowQueue[Row], llm: LLM) -> None:
    """Runs one stream, from its first row to its end."""
    try:
        for output in llm.stream(iter(feed), on_error="record"):
            feed.row_finished()
            connection.send(output)
    except (NanoEngineError, OSError):
        raise  # the engine is dead, or the parent has exited
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        feed.discard_rest()


def _receive(connection: Connection, feed: RowQueue[Row]) -> None:
    """Receives rows. Exits the process as soon as the parent exits, even during a step.

    Why in a thread: the parent can always send, so the two never wait for each other.
    """
    try:
        while True:
            feed.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


class _Reporter:
    """An observer that sends the engine's counters to the parent."""

    def __init__(self, connection: Connection, llm: LLM) -> None:
        self._connection, self._llm = connection, llm
        self._reported_at = time.monotonic()

    def on_step(self, plan: object, result: object, scheduler: object) -> None:
        """Sends the counters at intervals."""
        if time.monotonic() - self._reported_at > STATS_S:
            self._reported_at = time.monotonic()
            self._connection.send(self._llm.stats())
