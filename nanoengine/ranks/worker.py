"""Worker: a process that runs one module of this package, connected by a pipe.

    Worker(module, *numbers) ── starts ──> module.main(pipe, *numbers)

Ranks and replicas are workers. A worker is a separate program, which does not load the caller's
script.

No worker outlives its parent: it watches its pipe, which closes with the parent. A stopped process
can't watch it, so on Linux the kernel kills it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nanoengine.errors import ConfigError

PROGRAM = (
    "import sys; module, numbers, sys.path[:] = sys.argv[1], sys.argv[2], sys.argv[3:];"
    " from nanoengine.ranks.worker import begin; begin(module, *map(int, numbers.split()))"
)
"""The program of a worker. Why not multiprocessing's spawn: it would run the caller's script."""

ENDED_S = 5.0
"""Time for a process to exit after its pipe has closed [s]."""

PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that this process gets when the thread that started it ends."""


class Worker:
    """A process on this machine.

    Args:
        module: the module whose `main` it runs, with its end of the pipe and `numbers`.
        descriptors: further file descriptors that it needs.
        environment: environment variables that differ from this process's.

    Attributes:
        pipe: the pipe to the process.

    Raises:
        ConfigError: on Windows.
    """

    def __init__(
        self,
        module: str,
        *numbers: int,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError(
                "replicas and tensor_parallel_size above 1 hand open pipes to processes, which"
                " Windows does not: leave them out, or use WSL"
            )
        self.pipe, theirs = Pipe()
        # Why not from other threads: they end before this process does.
        is_tied = sys.platform == "linux" and (
            threading.current_thread() is threading.main_thread()
        )
        with theirs:
            given = [theirs.fileno(), os.getpid(), int(is_tied), *numbers]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, module, " ".join(map(str, given)), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Why: another program may read this process's output.
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Why: Ctrl-C at the terminal is for the parent.
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kills the process, even if it is stopped; may be called from any thread."""
        self._process.kill()
        self._process.wait()

    def how_ended(self) -> str:
        """Waits for the exit of a process that has closed its pipe, and describes it."""
        self.pipe.close()
        try:
            code = self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def begin(module: str, pipe: int, parent: int, is_tied: int, *numbers: int) -> None:
    """The main function of the process; `pipe` is its descriptor, `parent` the parent's pid."""
    if is_tied:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before prctl
        os._exit(1)
    importlib.import_module(module).main(Connection(pipe), *numbers)
