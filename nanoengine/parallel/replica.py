"""One replica: a process with its own LLM, which answers the rows that its parent sends.

    parent ── options ─────────────────> LLM(**options)
           <── EngineInfo, EngineStats, pid ──  or why the model can't be loaded
           ── Row, Row, ..., None ─────> llm.stream     one stream; then the next
           <── RequestOutput, Stats ────                in the order in which rows finish
           <── RuntimeError ────────────                the stream has raised; another may follow

`replicas.py` starts it as a worker (`worker.py`).
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
"""Interval at which a replica reports its counters, as often as the live line changes [s]."""


def main(connection: Connection, *cores: int) -> None:
    """Serves one parent until it exits.

    Args:
        cores: the cores to run on; none: any.
    """
    faulthandler.enable()
    if cores:
        os.sched_setaffinity(0, cores)  # Why here: torch and numba count cores when they load.
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
        raise  # Why: the engine is dead, or the parent.
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        feed.discard_rest()


def _receive(connection: Connection, feed: RowQueue[Row]) -> None:
    """Receives rows, and ends this process with its parent, even during a step.

    Why a thread: the parent can always send, so parent and replica never wait for each other.
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
        self._told = time.monotonic()

    def on_step(self, plan: object, result: object, scheduler: object) -> None:
        """Sends the counters at intervals."""
        if time.monotonic() - self._told > STATS_S:
            self._told = time.monotonic()
            self._connection.send(self._llm.stats())
