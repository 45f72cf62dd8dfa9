"""Worker: a process that runs one module of this package, with a pipe to it.

    Worker(module, *numbers) ── starts ──> module.main(pipe, *numbers)

Ranks and replicas are workers. Each loads nothing of the caller's: it is a program of its own.

No worker outlives its parent: it watches its pipe, which closes with the parent. A process that was
stopped watches nothing, so Linux is asked to kill it.
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
"""What a worker runs. Why not multiprocessing's spawn: it would run the caller's script again."""

ENDED_S = 5.0
"""Time for a process whose pipe has closed to be gone."""

PR_SET_PDEATHSIG = 1
"""Of prctl: the signal that this process gets when the thread that started it ends."""


class Worker:
    """A process on this machine.

    Args:
        module: whose `main` it runs, with its end of the pipe and `numbers`.
        descriptors: files that it needs, beside the pipe.
        environment: variables that differ from this process's.

    Attributes:
        pipe: to the process.

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
                stdout=2,  # Why: what this process prints may be read by a program.
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Why: a Ctrl-C at the terminal is for the parent.
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        """Ends it at once, even if it is stopped; from any thread."""
        self._process.kill()
        self._process.wait()

    def how_ended(self) -> str:
        """Waits until it is gone, which its pipe says that it is about to be."""
        self.pipe.close()
        try:
            code = self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def begin(module: str, pipe: int, parent: int, is_tied: int, *numbers: int) -> None:
    """What the process does; `pipe` is its descriptor, and `parent` who has started it."""
    if is_tied:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before Linux was asked
        os._exit(1)
    importlib.import_module(module).main(Connection(pipe), *numbers)
