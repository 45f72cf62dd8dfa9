"""The lock of an engine, and the order of calls: one thread at a time, one call at a time.

    engine.step, LLM's loops    with lock.hold():    threads that already wait get the lock first
    other methods of an engine  @exclusive()         wait, and get the lock next

    generate, chat, beam_search   are exclusive from beginning to end: a second thread waits
    stream                        holds no lock between two outputs: the next call ends it

The lock consists of two locks, because a thread that steps in a loop would acquire a single one
again before a waiting thread wakes up. So a waiting thread holds `waiting`, and a thread that wants
the lock again must first acquire `waiting`.

Each `LLMEngine` has an `EngineLock`, each `LLM` has `Calls`. A process that was forked after an
engine was created never gets the lock (fork_guard.py). Neither class depends on what an engine
does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, Literal, Self, TypeVar, cast

from nanoengine.errors import EngineDeadError, NanoEngineError
from nanoengine.fork_guard import watch

Method = TypeVar("Method", bound=Callable[..., Any])


class EngineLock:
    """The lock of one engine.

    Attributes:
        why_closed: why the engine can't be used any more; "" while it can.
        is_changing: whether the thread that holds the lock is inside a change.
        deferred: calls that this thread has made inside the change; they run after it.
    """

    def __init__(self) -> None:
        self.why_closed = ""
        self.is_changing, self.deferred = False, list[Callable[[], Any]]()
        self.make_locks()
        watch(self)

    def make_locks(self) -> None:
        """Creates new locks, which no thread holds.

        Why locks are only acquired by plain `with`: after an interrupt between acquiring a lock and
        recording it, the lock would never be released.
        """
        self.waiting, self.lock = threading.RLock(), threading.RLock()
        self.owner: int | None = None  # the thread that holds `lock`

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the lock over several calls, after the threads that already wait have had it."""
        thread = threading.get_ident()
        if self.owner == thread:
            yield
            return
        with self.waiting:
            pass
        with self.lock:
            self.owner = thread
            try:
                yield
            finally:
                self.owner = None

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Marks a change whose intermediate state no other call of this thread may see, such as a
        signal handler's call."""
        self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False
            while self.deferred:
                self.deferred.pop(0)()

    def require_open(self) -> None:
        """Raises EngineDeadError if the engine is closed, or belongs to another process."""
        if self.why_closed:
            raise EngineDeadError(self.why_closed)


def exclusive(when_busy: Literal["raise", "defer", "run"] = "raise") -> Callable[[Method], Method]:
    """Decorates a method of an object with a `lock`: the call waits until no other thread holds the
    lock, and runs before the thread that holds it can acquire it again.

    Args:
        when_busy: what happens to a call inside a change by the same thread. "raise": it raises;
            "defer": it returns None and runs after the change; "run": it runs; for read-only
            methods.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            lock = self.lock
            if lock.owner != threading.get_ident():
                with lock.waiting, lock.hold():
                    return wrapped(self, *args, **kwargs)
            if when_busy == "run":
                return method(self, *args, **kwargs)
            if lock.is_changing and when_busy == "defer":
                lock.deferred.append(functools.partial(wrapped, self, *args, **kwargs))
                return None
            if lock.is_changing:
                where = "inside a step or another call of this thread: call it afterwards"
                raise NanoEngineError(f"{method.__name__}() is not allowed {where}")
            with lock.change():
                return method(self, *args, **kwargs)

        return cast("Method", wrapped)

    return decorate


# --- calls ----------------------------------------------------------------------------------------


EngineT = TypeVar("EngineT", bound=Any)  # an `LLMEngine`, which imports this file


class Calls(Generic[EngineT]):
    """The calls on one engine, at most one of them active."""

    def __init__(self, engine: EngineT) -> None:
        self.latest: Call[EngineT] | None = None
        self.request_ids = map(str, itertools.count())
        self.lock = threading.RLock()  # held during an exclusive call
        self._engine: EngineT | None = engine

    @property
    def engine(self) -> EngineT:
        """The engine.

        Raises:
            NanoEngineError: it is closed.
            EngineDeadError: this process was forked from the engine's process.
        """
        engine = self._engine
        if engine is None:
            raise NanoEngineError("this LLM is closed: create a new one")
        engine.lock.require_open()
        return engine

    @contextlib.contextmanager
    def exclusive_call(self) -> Iterator[None]:
        """Waits until no other call is exclusive."""
        # Why first: in a forked child the lock may be held forever. It may also be held by a step
        # whose progress bar makes this call.
        self.engine.require_idle()
        with self.lock:
            yield

    def begin(self) -> Call[EngineT]:
        """Starts a new call, and aborts the requests that an abandoned stream has left."""
        engine = self.engine
        engine.require_idle()
        with self.lock:
            # Why first: a stream in another thread ends when it next takes the lock.
            call = self.latest = Call(self, engine)
            engine.abort_all()
        return call

    def close(self) -> None:
        """Closes the engine; a running call raises when it next acquires the lock."""
        engine, self._engine, self.latest = self._engine, None, None
        if engine is not None:
            engine.close()


class Call(Generic[EngineT]):
    """One call; leaving it as a context manager aborts its remaining requests.

    Attributes:
        engine: the engine on which it runs.
    """

    def __init__(self, calls: Calls[EngineT], engine: EngineT) -> None:
        self.engine, self._calls = engine, calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._calls.latest is self:  # Why: an older call need not wait for the newer one.
            with self.engine.lock.hold():
                if self._calls.latest is self:  # else the requests belong to a later call
                    self.engine.abort_all()

    @contextlib.contextmanager
    def locked_engine(self) -> Iterator[EngineT]:
        """The engine with its lock held, for one pass of the call's loop; raises like
        `require_latest`."""
        with self.engine.lock.hold():
            self.require_latest()
            yield self.engine

    def require_latest(self) -> None:
        """Raises NanoEngineError if another call has begun, or the LLM is closed."""
        _ = self._calls.engine  # Raises if the LLM is closed.
        if self._calls.latest is not self:
            raise NanoEngineError(
                "this stream was ended by another call on the same LLM: finish or close a stream"
                " before the next call"
            )

    def step(self, running: Collection[str]) -> list[str]:
        """Runs a step; returns which of the requests `running` have ended, in it or otherwise.

        Requests end otherwise when another caller aborts them, or ran the step in which they ended.
        """
        engine, ended = self.engine, []
        if engine.has_unfinished():
            ended = [r.request_id for r in engine.step() if r.request_id in running]
        if engine.num_unfinished != len(running) - len(ended):
            ended = [request_id for request_id in running if not engine.is_unfinished(request_id)]
        return ended
