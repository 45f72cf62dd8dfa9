"""Renderer: runs Jinja templates in a separate process, with a time limit and a memory limit.

    Renderer ── source, variables ─▶ this file as a program ── jinja2, or transformers' chats
             ◀── text, or the error ──   an alarm ends it after RENDER_S; its memory is limited

A template is a program from a checkpoint or a row. jinja's sandbox limits what it can access, but
not its time and memory: ten characters can allocate a hundred gigabytes in one C call, which no
thread can interrupt. So each rendering is limited to RENDER_S on one core, and to RENDER_BYTES. On
Windows, which has no alarm, a timeout of faulthandler with one thread per rendering replaces it.

`text/chat_template.py` and `jobs/rows.py` call it. There is one process per kind of template, which
the first template starts; for chats it imports transformers, in 0.6 s. Perf: 36 us for a short chat
of the demo model, 21 us without a separate process (two Zen 5 cores).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any, Literal

RENDER_S = 5.0
"""Time limit per rendering. Templates of real checkpoints take less than a millisecond."""

TIMED_OUT = -signal.SIGALRM if hasattr(signal, "SIGALRM") else 1
"""Exit code of the process after a timeout."""

RENDER_BYTES = 1 << 30
"""Memory limit of templates, in addition to the program. Without /proc there is no limit."""

MAX_CHARS = 1 << 26
"""Maximum length of a result, which is sent through a pipe."""


class Renderer:
    """A process that renders templates of one kind; it is started by the first one.

    Args:
        kind: "row": a template with the columns of a row as variables; "chat": a chat template,
            rendered as transformers renders it.
    """

    def __init__(self, kind: Literal["row", "chat"]) -> None:
        self._kind = kind
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        # Why: a forked process would read results of its parent.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    def begin(self) -> subprocess.Popen[bytes]:
        """Starts the process if it is not running, without waiting for it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                path = os.pathsep.join(filter(None, sys.path))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, self._kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                    # Why a separate group: Ctrl-C is for the parent.
                    process_group=0,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
            return self._process

    def render(self, *request: object) -> str:
        """Renders a template; see `_renderer` for the arguments.

        Raises:
            TimeoutError: it takes longer than RENDER_S.
            MemoryError: it needs more than RENDER_BYTES.
            ValueError: the template or a function that it calls raised an error with this message.
        """
        sent = pickle.dumps((RENDER_S, request))
        with self._lock:
            try:
                process = self.begin()
                process.stdin.write(sent)
                process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # Why: the next call would receive a late result.
                self._stop()
                raise
            if not line.endswith(b"\n"):
                self._stop()
                if process.returncode == TIMED_OUT:
                    raise TimeoutError(f"it did not end within {RENDER_S:g} s")
                raise ValueError(f"the rendering process exited with {process.returncode}")
        text, error = json.loads(line)
        if error == "MemoryError":
            raise MemoryError(f"it needs more than {RENDER_BYTES >> 20} MiB")
        if error is not None:
            raise ValueError(error)
        return str(text)

    def _forget(self) -> None:
        self._lock, self._process = threading.RLock(), None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


# --- the program ----------------------------------------------------------------------------------


def _renderer(kind: str) -> Any:
    """Returns the function that renders templates of a kind."""
    if kind == "chat":
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        class TemplateTokenizer(PreTrainedTokenizerBase):
            """A tokenizer that only renders chats."""

            special_tokens_map: Any = None

            def __init__(self, template: Any, special_tokens: dict[str, Any]) -> None:
                self.chat_template, self.special_tokens_map = template, special_tokens

        def chat(template: Any, special_tokens: Any, messages: Any, options: Any) -> Any:
            tokenizer = TemplateTokenizer(template, special_tokens)
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)

        return chat

    import jinja2
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    compiled = functools.lru_cache(environment.from_string)

    def row(template: str, columns: dict[str, Any] | None) -> str:
        """Renders a template. If `columns` is None, returns the names of the columns it uses."""
        if columns is None:
            compiled(template)
            return " ".join(find_undeclared_variables(environment.parse(template)))
        return compiled(template).render(columns)

    return row


def _limit_memory() -> None:
    import resource

    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit, (_, hard) = used + RENDER_BYTES, resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_time(seconds: float) -> None:
    """Ends this process after this time; 0 removes the limit."""
    if hasattr(signal, "SIGALRM"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _main(kind: str) -> None:
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    render = _renderer(kind)
    with contextlib.suppress(ImportError):
        _limit_memory()
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while True:
        try:
            seconds, request = pickle.load(requests)
        except EOFError:
            return
        result: tuple[str | None, str | None]
        _limit_time(seconds)
        try:
            text = str(render(*request))
            if len(text) > MAX_CHARS:
                raise ValueError(f"its text has {len(text):,} characters of at most {MAX_CHARS:,}")
            result = text, None
        except MemoryError:
            result = None, "MemoryError"
        except Exception as error:  # Why all: templates are programs, and raise anything.
            result = None, str(error) or type(error).__name__
        if result[1] == "MemoryError":
            gc.collect()  # Why: a cycle would keep memory that the next template needs.
        _limit_time(0)
        results.write(json.dumps(result).encode() + b"\n")
        results.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
