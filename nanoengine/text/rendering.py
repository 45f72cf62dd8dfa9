"""Renderer: runs Jinja templates in a process of its own, within limits of time and memory.

    Renderer ── source, variables ─▶ this file as a program ── jinja2, or transformers' chats
             ◀── text, or the error ──   its alarm ends it after RENDER_S, its memory is bounded

A template is a program, of a checkpoint or a row. jinja's sandbox bounds what it reaches, not what
it takes: ten characters make a hundred gigabytes in one call into C, which no thread can end. What
is left to a template is RENDER_S of one core for each rendering, and RENDER_BYTES. Windows has no
alarm: a watch of faulthandler's takes its place, a thread for each rendering.

Called by `text/chat_template.py` and `jobs/rows.py`. A process runs for each kind of template, from
the first one on; the first of chats waits 0.6 s for transformers. Perf: 36 us for a short chat of
the demo model's, 21 without a process of its own (two Zen 5 cores).
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
"""Longest time that a template may take. A real one takes less than a millisecond."""

TIMED_OUT = -signal.SIGALRM if hasattr(signal, "SIGALRM") else 1
"""The exit code after that."""

RENDER_BYTES = 1 << 30
"""Memory that templates may take beside the program itself; not bounded where /proc is not."""

MOST_CHARS = 1 << 26
"""Longest text that comes back; RENDER_BYTES would otherwise come, too."""


class Renderer:
    """A process that renders, from the first template on.

    Args:
        kind: "row": a template over the columns of a row. "chat": what a tokenizer of transformers
            with this chat template makes of a conversation.
    """

    def __init__(self, kind: Literal["row", "chat"]) -> None:
        self._kind = kind
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        # Why: a forked process would read what its parent asked for.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def begin(self) -> subprocess.Popen[bytes]:
        """Starts the process, if it does not run, and does not wait for it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                path = os.pathsep.join(filter(None, sys.path))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, self._kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                    # Why a group of its own: Ctrl-C is for the parent.
                    process_group=0,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
            return self._process

    def render(self, *request: object) -> str:
        """What the program's function of this kind gives for a request.

        Raises:
            TimeoutError: it takes longer than RENDER_S.
            MemoryError: it takes more than RENDER_BYTES.
            ValueError: the template or what it calls has raised; the message is theirs.
        """
        sent = pickle.dumps((RENDER_S, request))
        with self._lock:
            try:
                process = self.begin()
                process.stdin.write(sent)
                process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # Why: what has been asked for would answer the next one.
                self._end()
                raise
            if not line.endswith(b"\n"):
                self._end()
                if process.returncode == TIMED_OUT:
                    raise TimeoutError(f"it did not end within {RENDER_S:g} s")
                raise ValueError(f"the process that renders it ended with {process.returncode}")
        text, error = json.loads(line)
        if error == "MemoryError":
            raise MemoryError(f"it takes more than {RENDER_BYTES >> 20} MiB")
        if error is not None:
            raise ValueError(error)
        return str(text)

    def _forget(self) -> None:
        self._lock, self._process = threading.RLock(), None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


# --- the program ----------------------------------------------------------------------------------


def _renderer(kind: str) -> Any:
    """The function of a kind."""
    if kind == "chat":
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        class TemplateTokenizer(PreTrainedTokenizerBase):
            """One that knows nothing but this."""

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
        """None: the names of the columns that the template asks for."""
        if columns is None:
            compiled(template)
            return " ".join(find_undeclared_variables(environment.parse(template)))
        return compiled(template).render(columns)

    return row


def _bound_memory() -> None:
    import resource

    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        most, (_, hard) = own + RENDER_BYTES, resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _end_after(seconds: float) -> None:
    """Ends this process after a time; 0: not any more."""
    if hasattr(signal, "SIGALRM"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _main(kind: str) -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    render = _renderer(kind)
    with contextlib.suppress(ImportError):
        _bound_memory()
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while True:
        try:
            seconds, request = pickle.load(requests)
        except EOFError:
            return
        answer: tuple[str | None, str | None]
        _end_after(seconds)
        try:
            text = str(render(*request))
            if len(text) > MOST_CHARS:
                raise ValueError(f"it makes {len(text):,} characters of at most {MOST_CHARS:,}")
            answer = text, None
        except MemoryError:
            answer = None, "MemoryError"
        except Exception as error:  # Why: templates are programs, and raise anything.
            answer = None, str(error) or type(error).__name__
        if answer[1] == "MemoryError":
            gc.collect()  # Why: a cycle holds what the template had, and the next one lacked it.
        _end_after(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
