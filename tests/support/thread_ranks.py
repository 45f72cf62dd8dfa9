"""Ranks as threads of this process: the same plans, pipes and gloo all-reduces, without the 1.5 s
per process to load torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

from nanoengine.ranks import executor, rank


class ThreadRank:
    """The part of a `Worker` that `RankProcesses` uses."""

    def __init__(self, module: str, number: int, *, descriptors: list[int]) -> None:
        self.pipe, theirs = Pipe()
        self._socket = socket.socket(fileno=os.dup(theirs.fileno()))
        listeners = [os.dup(descriptor) for descriptor in descriptors]
        self._thread = threading.Thread(
            target=self._run, args=(number, theirs, listeners), daemon=True
        )
        self._thread.start()

    def _run(self, number: int, connection: Connection, listeners: list[int]) -> None:
        _LISTENERS.value = listeners
        with connection, contextlib.suppress(EOFError, OSError):  # the rank was killed
            parent = ParentOfThread(connection)
            rank._run(rank._start(number, parent), parent, replies=number == 0)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # already shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self.describe_exit()

    def describe_exit(self) -> str:
        if self._thread is not threading.current_thread():
            self._thread.join()
        return "exited with 0"


_LISTENERS = threading.local()


class ParentOfThread(rank.Parent):
    """Raises an exception instead of ending the process, which runs the tests."""

    def next(self) -> Any:
        message = super().next()
        if isinstance(message, rank.Setup) and _LISTENERS.value:
            return dataclasses.replace(message, listener=_LISTENERS.value.pop())
        return message

    def _end(self) -> NoReturn:
        raise EOFError


@pytest.fixture(name="thread_ranks")
def thread_ranks_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with ranks run them in threads."""
    monkeypatch.setattr(executor, "Worker", ThreadRank)
