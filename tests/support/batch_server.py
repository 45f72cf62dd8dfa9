"""Runs `nanoengine batch` in killable processes, forked from one that has imported everything.

    python -m tests.support.batch_server      a line of JSON in: {"args": [...], "crash_on": N}
                                              lines out: {"pid": ...}, then {"status": ...}

`crash_on`: `signal` kills the process in the step that admits a prompt of N tokens. `step_s`: the
duration of each step. `max_bytes`: the maximum size of a file that the process may write, to
simulate a full disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BatchServer:
    """The client side, for tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.batch_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, args: list[str], **options: Any) -> int:
        """Starts a run; returns its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"args": args, **options}) + "\n")
        return int(self._reply()["pid"])

    def wait(self) -> int:
        """The exit code of the run, or minus the signal that killed it."""
        return int(self._reply()["status"])

    def run(self, args: list[str], **options: Any) -> int:
        """Starts a run and waits for its end."""
        self.start(args, **options)
        return self.wait()

    def _reply(self) -> dict[str, int]:
        assert self._process.stdout is not None
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the server."""
        self._process.communicate(timeout=60)


def wait_for_lines(path: Path, count: int, pid: int) -> int:
    """Waits until a file has that many lines or the process has ended; returns the line count."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            found = path.read_bytes().count(b"\n")
            if found >= count or not _is_alive(pid):
                return found
        time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _child(request: dict[str, Any]) -> int:
    from nanoengine.cli.main import main
    from nanoengine.runner.model_runner import ModelRunner

    if "max_bytes" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_bytes"], resource.RLIM_INFINITY))
    launch = ModelRunner.launch

    def launch_or_crash(self: ModelRunner, plan: Any) -> Any:
        time.sleep(request.get("step_s", 0))
        if any(new.num_prompt_tokens == request.get("crash_on") for new in plan.admitted):
            os.kill(os.getpid(), request.get("signal", signal.SIGABRT))
        return launch(self, plan)

    ModelRunner.launch = launch_or_crash  # type: ignore[method-assign]
    return main(request["args"])


def serve() -> None:
    """Forks one process per request, one after another."""
    import torch

    import nanoengine.build
    import nanoengine.cli.batch
    import nanoengine.llm  # noqa: F401

    torch.set_num_threads(1)
    for request in _requests():
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.dup2(os.open(request.get("stdout", os.devnull), os.O_WRONLY), 1)
                os.dup2(os.open(request.get("stderr", os.devnull), os.O_WRONLY | os.O_CREAT), 2)
                status = _child(request)
            finally:
                os._exit(status)
        print(json.dumps({"pid": pid}), flush=True)
        _, how = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(how)}), flush=True)


if __name__ == "__main__":
    serve()
