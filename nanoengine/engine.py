"""LLMEngine: runs requests in a loop of `schedule`, `launch` and `commit`.

    plain        schedule 1  launch 1  result 1  commit 1 │ schedule 2  launch 2  result 2 ...
    overlapped   schedule 2  launch 2  result 1  commit 1 │ schedule 3  launch 3  result 2 ...
                                       └ 2 runs meanwhile                         └ 3 runs

Read the plain loop first. The overlapped loop gives the same tokens, and a GPU never waits for
Python: see docs/overlap.md.

Any thread may call any method; calls run one at a time. A process that was forked after an engine
was created can't use the engine.

Built by `build.build_engine`, driven by `LLM`. Imports the core only: plans run in an `Executor`,
and an `Observer` observes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import xxhash

from nanoengine.core.engine_stats import EngineInfo, EngineStats
from nanoengine.core.interfaces import Executor, Launched, Observer, Proposer
from nanoengine.core.plan import StepPlan
from nanoengine.core.requests import RequestChecker
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import OutputFollower, Request, Sequence, TokenChooser
from nanoengine.errors import NanoEngineError, RequestError
from nanoengine.locking import EngineLock, exclusive
from nanoengine.settings.params import SamplingParams


class InFlightStep(NamedTuple):
    """A step that is launched and not committed; `schedule_s` is the time to plan it."""

    plan: StepPlan
    launched: Launched
    schedule_s: float


class LLMEngine:
    """Continuous batching over one executor.

    Args:
        executor: runs the plans; already started.
        scheduler: creates the plans.
        info: what was determined at start.
        seed: seeds requests without a seed of their own.
        overlap: plan and launch a step while the previous one runs.
        debug_checks: check all invariants after each step.
        make_proposer: creates the proposer when `enable_drafts` is called.
        processors: the logits processors, which check a request's options; see `RequestChecker`.

    Attributes:
        observers: called after each step; they may abort requests. Closing the engine calls their
            `close`, if they have one.
        proposer: drafts tokens; None before `enable_drafts`, or if none is configured.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        info: EngineInfo,
        *,
        seed: int = 0,
        overlap: bool = False,
        debug_checks: bool = False,
        make_proposer: Callable[[], Proposer | None] | None = None,
        processors: Any = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.info = info
        self.observers: list[Observer] = []
        self.proposer: Proposer | None = None
        self._make_proposer = make_proposer
        self.overlap = overlap
        self.checker = RequestChecker(info, scheduler.block_manager, processors)
        self.lock = EngineLock()
        self._seed = seed
        self._debug_checks = debug_checks
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._in_flight: InFlightStep | None = None  # overlapped: between calls of `step`
        self._finished: list[Request] = []  # not returned by `step` yet
        self._stepping_thread: int | None = None

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that have finished since the last call.

        An exception, including KeyboardInterrupt, aborts all requests, because any of them may be
        in an incomplete state. The engine stays usable, with an empty prefix cache.

        Raises:
            EngineDeadError, NanoEngineError: like `require_idle`.
        """
        with self.lock.hold():
            if self._stepping_thread is not None or self.lock.why_closed:
                self.require_idle()
            with self.lock.change():
                return self._step()

    def _step(self) -> list[Request]:
        self._stepping_thread = threading.get_ident()
        try:
            if self.overlap:
                self._overlapped_step()
            else:
                self._commit(self._launch())
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            self._stepping_thread = None
        finished, self._finished = self._finished, []
        return finished

    def _overlapped_step(self) -> None:
        """Launches a step, and commits the previous step while the new one runs."""
        if self._in_flight is not None and self._next_plan_needs_tokens(self._in_flight.plan):
            self._commit_in_flight()
        previous, self._in_flight = self._in_flight, None
        if self._requests:
            self._in_flight = self._launch()
        if previous is not None:
            self._commit(previous)
        if not self._requests:  # Why: without requests, `step` may not be called again
            self._commit_in_flight()

    def _next_plan_needs_tokens(self, plan: StepPlan) -> bool:
        """True if the next step can't be planned before this step's tokens are known.

        With drafts, the number of accepted drafts decides where the sequence continues, and new
        drafts may be proposed. With a chooser, sequences continue only after it has chosen.
        """
        if plan.draft_token_ids or (self.proposer is not None and self.proposer.needs_tokens()):
            return True
        if self.scheduler.extras_scheduling is None:
            return False
        return any(seq.request.chooser is not None for seq in self.scheduler.running)

    def _commit_in_flight(self) -> None:
        """Waits for the step in flight, if there is one, and commits it."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._commit(step)

    @exclusive()
    def finish_in_flight(self) -> None:
        """Commits the overlapped loop's step in flight, so that all tokens are known.

        The plain loop has no such step. The next `step` returns the requests that finish in it.
        """
        self._commit_or_recover()

    def _commit_or_recover(self) -> None:
        try:
            self._commit_in_flight()
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """Drops all requests and steps; the steps' results are never read.

        If Ctrl-C arrives inside compiled code, such as a kernel, CPython may raise a SystemError
        from the KeyboardInterrupt. Then this raises a KeyboardInterrupt instead.
        """
        self._in_flight, self._finished = None, []
        self.scheduler.recover(self._requests.values())
        self._requests.clear()
        cause = error.__cause__ or error.__context__
        if isinstance(error, SystemError) and isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def _launch(self) -> InFlightStep:
        started = time.perf_counter()
        if self.proposer is not None and self.proposer.needs_tokens():
            from nanoengine.core.speculation import propose_drafts

            propose_drafts(self.scheduler, self.proposer)
        plan = self.scheduler.schedule()
        schedule_s = time.perf_counter() - started
        return InFlightStep(plan, self.executor.launch(plan), schedule_s)

    def _commit(self, step: InFlightStep) -> None:
        """Commits a step's sampled tokens; `step` returns the requests that finish in it."""
        result = step.launched.result()
        started = time.perf_counter()
        finished = self.scheduler.commit(step.plan, result)
        result.times.schedule_s = step.schedule_s
        result.times.commit_s = time.perf_counter() - started
        for request in finished:
            del self._requests[request.request_id]
        self._finished += finished
        self.lock.is_changing = False
        for observer in list(self.observers):  # Why last: it may abort requests.
            observer.on_step(step.plan, result, self.scheduler)
        self.lock.is_changing = True
        if self._debug_checks:
            from nanoengine.core.checks import check

            check(self.scheduler)

    def enable_drafts(self) -> None:
        """Enables drafts from now on, if a proposer is configured."""
        if self._make_proposer is not None and self.proposer is None:
            self.proposer, self._make_proposer = self._make_proposer(), None
            if isinstance(self.proposer, Observer):
                self.observers.append(self.proposer)

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        /,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        make_follower: Callable[[int], OutputFollower | None] | None = None,
        chooser: TokenChooser | None = None,
        **options: Any,
    ) -> Request:
        """Queues a request.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one id below the vocabulary size.
            make_follower: called with each sequence's index; returns the sequence's follower.
            chooser: replaces the sampler: it selects each token from the `params.logprobs` most
                likely ones.
            options: priority, key, cache_salt and bad_word_ids of `RequestChecker.check`.

        Raises:
            RequestError, PromptTooLongError, CapacityError: like `RequestChecker.check`, before
                anything is queued; RequestError also if the request_id is in use.
        """
        self.lock.require_open()
        request = self.checker.check(prompt_token_ids, params, **options)
        return self.queue(request_id, request, make_follower=make_follower, chooser=chooser)

    @exclusive()
    def queue(
        self,
        request_id: str,
        request: Request,
        *,
        make_follower: Callable[[int], OutputFollower | None] | None = None,
        chooser: TokenChooser | None = None,
    ) -> Request:
        """Queues a Request from this engine's `checker`; otherwise like `add_request`."""
        self.lock.require_open()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        request.request_id = request_id
        request.make_follower, request.chooser = make_follower, chooser
        request.arrival, request.arrival_time = self._num_arrived, time.perf_counter()
        self._num_arrived += 1
        seed = request.params.seed
        request.seed = self._derive_seed(request) if seed is None else seed
        if request.params.structured_outputs is not None:
            self.enable_drafts()  # Why: tokens that a grammar forces are drafted.
        if request.needs_extras:
            from nanoengine.core.speculation import enable_extras

            enable_extras(self.scheduler)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    @exclusive()
    def fork(
        self, request_id: str, *, index: int = 0, next_token_id: int | None = None
    ) -> Sequence:
        """Adds a copy of a sequence to its request, between two steps.

        The two share all their blocks until one of them writes. If no row is free, the copy waits
        like a preempted sequence.

        Args:
            index: index of the sequence to copy, which may run or wait.
            next_token_id: replaces the last output token in the copy. None keeps the token: then a
                greedy copy stays equal, and a sampled one diverges.

        Returns:
            The new sequence, already in `request.sequences`; its output is part of the request's.

        Raises:
            RequestError: no such unfinished sequence, an invalid next_token_id, or a step is in
                flight (call `finish_in_flight` first).
        """
        self.lock.require_open()
        if self._in_flight is not None:
            raise RequestError(
                "a step is in flight, so the sequence will have one token more than its output"
                " shows: call finish_in_flight(), read the output, then fork"
            )
        from nanoengine.core.request_options import parent_of_fork
        from nanoengine.core.speculation import enable_extras

        request, size = self._requests.get(request_id), self.info.vocab_size
        parent = parent_of_fork(request_id, request, index, next_token_id, size)
        is_same = next_token_id == parent.token_ids[-1]
        return enable_extras(self.scheduler).fork(parent, None if is_same else next_token_id)

    @exclusive("defer")
    def abort(self, request_id: str) -> Request | None:
        """Ends a request with finish_reason "abort"; None if it is unknown or already finished.

        Inside a step, for example in a signal handler, it returns None, and ends the request after
        the step.
        """
        if self.lock.why_closed:
            return None
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            if not self._requests:
                self._commit_or_recover()
        return request

    @exclusive("defer")
    def abort_all(self) -> None:
        """Aborts all requests, for example after an exception.

        Waits for a step in flight, because its block copies between tiers end with it.
        """
        if not self.lock.why_closed:
            self._abort_all()

    def _abort_all(self) -> None:
        for request in self._requests.values():
            self.scheduler.abort(request)
        self._requests.clear()
        self._commit_or_recover()
        self._finished = []

    def is_unfinished(self, request_id: str) -> bool:
        """True while a request with this id is queued or runs."""
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        """Number of queued and running requests."""
        return len(self._requests)

    def has_unfinished(self) -> bool:
        """True while there is a step to run or a finished request to return."""
        return bool(self._requests or self._finished)

    @exclusive()
    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; returns False and keeps them while blocks are in use."""
        return self.scheduler.block_manager.prefix_cache.reset()

    # --- counters and close -------------------------------------------------------------------

    @exclusive("run")
    def stats(self) -> EngineStats:
        """Counters since the start, and current block counts."""
        return EngineStats.of(self.scheduler)

    @exclusive("defer")
    def close(self) -> None:
        """Frees all memory; the engine can't be used afterwards. Closing twice has no effect.

        A call inside a step closes after the step."""
        if not self.lock.why_closed:
            try:
                self._abort_all()  # waits for a step in flight, which may fail
            finally:
                self.lock.why_closed = "the engine is closed: create a new one"
                tiers = self.scheduler.block_manager.prefix_cache.tiers
                if tiers is not None:
                    tiers.close()
                self.executor.shutdown()
                for observer in self.observers:
                    getattr(observer, "close", lambda: None)()

    def require_idle(self) -> None:
        """Raises EngineDeadError if the engine is closed or belongs to another process, and
        NanoEngineError if an observer calls this inside a step."""
        self.lock.require_open()
        if self._stepping_thread == threading.get_ident():
            raise NanoEngineError(
                "an observer of a step, such as a progress bar, can't make this call: make it after"
                " the step has returned"
            )

    def _derive_seed(self, request: Request) -> int:
        """Derives a seed from the engine's seed and the request's key, or else its arrival."""
        name = f"{request.arrival}" if request.key is None else f"key/{request.key}"
        # Why surrogates are allowed: keys only need to be distinct.
        digest = xxhash.xxh3_64_intdigest(f"{self._seed}/{name}".encode(errors="surrogatepass"))
        return digest >> 1
