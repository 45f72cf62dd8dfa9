"""Worker: a process that runs one module of this package, connected by a pipe.

    Worker(module, *numbers) ── starts ──> module.main(pipe, *numbers)

Ranks and replicas are workers. A worker does not run the caller's script.

No worker outlives its parent: it watches its pipe, which closes when the parent exits. A stopped
worker can't watch, so on Linux the kernel kills it.
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
    " from nanoengine.ranks.worker import run; run(module, *map(int, numbers.split()))"
)
"""The program of a worker. Why not multiprocessing's spawn: it would run the caller's script."""

EXIT_TIMEOUT_S = 5.0
"""Time for a process to exit after its pipe has closed [s]."""

PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that this process gets when the thread that started it ends."""


class Worker:
    """A process on this machine.

    Args:
        module: the module whose `main` it runs, with its end of the pipe and `numbers`.
        descriptors: further file descriptors that it inherits.
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
                "replicas and tensor_parallel_size above 1 are not supported on Windows: remove"
                " them, or use WSL"
            )
        self.pipe, child_end = Pipe()
        # Why not from other threads: the worker would be killed when the thread ends.
        is_tied = sys.platform == "linux" and (
            threading.current_thread() is threading.main_thread()
        )
        with child_end:
            arguments = [child_end.fileno(), os.getpid(), int(is_tied), *numbers]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, module, " ".join(map(str, arguments)), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Why: another program may read this process's output.
                pass_fds=[child_end.fileno(), *descriptors],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C at the terminal then interrupts only the parent.
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kills the process, even if it is stopped; may be called from any thread."""
        self._process.kill()
        self._process.wait()

    def describe_exit(self) -> str:
        """Waits for the exit of a process that has closed its pipe. Returns a description, such as
        "exited with 1"."""
        self.pipe.close()
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def run(module: str, pipe: int, parent: int, is_tied: int, *numbers: int) -> None:
    """The main function of the process; `pipe` is its descriptor, `parent` the parent's pid."""
    if is_tied:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has exited before prctl
        os._exit(1)
    importlib.import_module(module).main(Connection(pipe), *numbers)
