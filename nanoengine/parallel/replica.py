"""One replica: a process with an LLM of its own, that answers the rows its parent sends.

    parent ── options ─────────────────> LLM(**options)
           <── EngineInfo, EngineStats, pid ──  or why the model can't be loaded
           ── Row, Row, ..., None ─────> llm.stream     one stream; then the next
           <── RequestOutput, Stats ────                in the order in which rows finish
           <── RuntimeError ────────────                the stream has raised; the next one may run

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
from nanoengine.jobs.feed import Feed
from nanoengine.text.prompt_forms import Row

if TYPE_CHECKING:
    from nanoengine.llm import LLM

STATS_S = 0.25
"""How often a replica tells its counters; as often as a live line is written."""


def main(connection: Connection, *cores: int) -> None:
    """Serves one parent until it is gone.

    Args:
        cores: those to run on; none: any.
    """
    faulthandler.enable()
    if cores:
        os.sched_setaffinity(0, cores)  # Why here: torch and numba count them when they load.
    try:
        options = connection.recv()
    except (EOFError, OSError):
        return
    feed: Feed[Row] = Feed()
    threading.Thread(target=_receive, args=(connection, feed), daemon=True).start()
    from nanoengine.llm import LLM

    try:
        llm = LLM(**options)
    except NanoEngineError as error:
        connection.send(error)
        return
    gc.freeze()  # Why: see `jobs.work.young_alone`; this process does nothing else.
    connection.send((llm.info, llm.stats(), os.getpid()))
    llm.engine.observers.append(_Reporter(connection, llm))
    while True:
        _serve(connection, feed, llm)


def _serve(connection: Connection, feed: Feed[Row], llm: LLM) -> None:
    """One stream, from its first row to its end."""
    try:
        for output in llm.stream(iter(feed), on_error="record"):
            feed.finished()
            connection.send(output)
    except (NanoEngineError, OSError):
        raise  # Why: the engine is dead, or the parent.
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        feed.drop()


def _receive(connection: Connection, feed: Feed[Row]) -> None:
    """Takes rows in, and ends this process with its parent, whatever it is doing then.

    Why a thread: the parent can always send, so it never waits for a replica that waits for it.
    """
    try:
        while True:
            feed.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


class _Reporter:
    """An observer that tells the parent how far the engine is."""

    def __init__(self, connection: Connection, llm: LLM) -> None:
        self._connection, self._llm = connection, llm
        self._told = time.monotonic()

    def on_step(self, plan: object, result: object, scheduler: object) -> None:
        """Sends the counters, now and then."""
        if time.monotonic() - self._told > STATS_S:
            self._told = time.monotonic()
            self._connection.send(self._llm.stats())
