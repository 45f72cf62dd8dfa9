"""Calls: one call runs at a time on an LLM, and leaves nothing behind however it ends.

    generate, chat, beam_search   are `alone` from beginning to end: a second thread waits
    stream                        holds nothing between two outputs: the next call cuts it off
    each turn of their loops      holds the engine's turn, and sees that its call is the latest

`LLM` has one `Calls`, which holds the engine; a `Call` knows the engine's requests by their ids
alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from types import TracebackType

from nanoengine.engine import LLMEngine
from nanoengine.errors import NanoEngineError


class Calls:
    """The calls on one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.latest: Call | None = None
        self.lock = threading.RLock()  # held by a call that is alone
        self._engine: LLMEngine | None = engine

    @property
    def engine(self) -> LLMEngine:
        """The engine.

        Raises:
            NanoEngineError: it is closed.
            EngineDeadError: this process was forked from the engine's.
        """
        engine = self._engine
        if engine is None:
            raise NanoEngineError("this LLM is closed: its memory is given back; make a new one")
        engine.turns.require_open()
        return engine

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other call is alone."""
        # Why first: a forked child may find the lock taken for ever, and so may a progress bar that
        # makes a call, whose step everybody waits for.
        self.engine.require_idle()
        with self.lock:
            yield

    def begin(self) -> Call:
        """A new call, which cuts off what an abandoned stream has left running."""
        engine = self.engine
        engine.require_idle()
        with self.lock:
            # Why first: a stream in another thread sees it at its next turn, and lets go.
            call = self.latest = Call(self, engine)
            engine.abort_all()
        return call

    def close(self) -> None:
        """Closes the engine; a call that runs raises at its next turn."""
        engine, self._engine, self.latest = self._engine, None, None
        if engine is not None:
            engine.close()


class Call:
    """One call; as a context manager it ends, and none of its requests stays.

    Attributes:
        engine: the one that it runs on.
    """

    def __init__(self, calls: Calls, engine: LLMEngine) -> None:
        self.engine = engine
        self._calls = calls

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._calls.latest is self:  # Why: what is cut off need not wait for who cut it off.
            with self.engine.turns.turn():
                if self._calls.latest is self:  # the requests of a later call are left alone
                    self.engine.abort_all()

    @contextlib.contextmanager
    def turn(self) -> Iterator[LLMEngine]:
        """The engine, for a turn of the call's loop; raises as `require_latest`."""
        with self.engine.turns.turn():
            self.require_latest()
            yield self.engine

    def require_latest(self) -> None:
        """Raises NanoEngineError if another call has begun, or the LLM is closed."""
        _ = self._calls.engine  # A closed LLM says so.
        if self._calls.latest is not self:
            raise NanoEngineError(
                "this stream was cut off: another call ran on the same LLM; finish or close a"
                " stream before the next call"
            )

    def step(self, running: Collection[str]) -> list[str]:
        """Runs a step; which of the requests `running` have ended, by it or otherwise.

        Requests vanish otherwise when somebody aborts them, or has taken the step that ended them.
        """
        engine, ended = self.engine, []
        if engine.has_unfinished():
            ended = [r.request_id for r in engine.step() if r.request_id in running]
        if engine.num_unfinished != len(running) - len(ended):
            ended = [request_id for request_id in running if not engine.is_unfinished(request_id)]
        return ended
