"""Ranks as threads of this process: the same plans, pipes and sums by gloo, without the second and
a half that each process takes to load torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest

from nanoengine.parallel import executor, rank


class ThreadRank:
    """As much of a `Popen` of a rank as `RankProcesses` uses."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **options: Any) -> None:
        number = int(command[3])
        pipe, *listeners = map(os.dup, pass_fds)
        self._socket = socket.socket(fileno=os.dup(pipe))
        self.stdin = self._socket
        self._thread = threading.Thread(
            target=self._run, args=(number, Connection(pipe), listeners), daemon=True
        )
        self._thread.start()

    def _run(self, number: int, connection: Connection, listeners: list[int]) -> None:
        _LISTENERS.value = listeners
        with connection, contextlib.suppress(EOFError, OSError):  # it was ended
            rank._run(rank._start(number, connection), connection, answers=number == 0)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # once more
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        if self._thread is not threading.current_thread():
            self._thread.join()
        return 0


_LISTENERS = threading.local()


def _next(connection: Connection) -> Any:
    """What the parent sends next, where ending the process would end the tests."""
    message = connection.recv()
    if isinstance(message, rank.Setup) and _LISTENERS.value:
        return dataclasses.replace(message, listener=_LISTENERS.value.pop())
    return message


@pytest.fixture(name="thread_ranks")
def thread_ranks_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with ranks have threads for them."""
    fake = type("subprocess", (), {"Popen": ThreadRank, "PIPE": subprocess.PIPE})
    monkeypatch.setattr(executor, "subprocess", fake)
    monkeypatch.setattr(rank, "_next", _next)
