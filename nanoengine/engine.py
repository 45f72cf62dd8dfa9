"""LLMEngine: the loop. `schedule`, `launch`, `commit`; requests in, finished requests out.

    plain        schedule 1  launch 1  result 1  commit 1 │ schedule 2  launch 2  result 2 ...
    overlapped   schedule 2  launch 2  result 1  commit 1 │ schedule 3  launch 3  result 2 ...
                                       └ 2 runs meanwhile                         └ 3 runs

The plain loop is the one to read. The overlapped loop gives the same tokens and never lets a GPU
wait for Python: see docs/overlap.md.

Any thread may call; each method waits until no other runs. A process that was forked from one with
an engine can't use it.

Built by `build.build_engine`, driven by `LLM`. Imports the core only: what runs the plans is behind
the `Executor` door, what watches them behind `Observer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
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


class UnderWay(NamedTuple):
    """A step that is launched and not committed; `schedule_s` is what planning it took."""

    plan: StepPlan
    launched: Launched
    schedule_s: float


class LLMEngine:
    """Continuous batching over one executor.

    Args:
        executor: already started; runs the plans.
        scheduler: makes them.
        info: what was discovered at start.
        seed: seeds requests that bring no seed of their own.
        overlap: plan and launch a step while the one before runs.
        debug_checks: check all invariants after each step.
        make_proposer: makes the proposer that `draft` puts in.
        stages: of logits: checks what requests ask of them; see `RequestChecker`.

    Attributes:
        observers: told of each step; they may abort requests. One with a `close` is closed with
            the engine.
        proposer: drafts tokens; None: nothing does, until `draft` is called.
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
        stages: Any = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.info = info
        self.observers: list[Observer] = []
        self.proposer: Proposer | None = None
        self._make_proposer = make_proposer
        self.overlap = overlap
        self.checker = RequestChecker(info, scheduler.block_manager, stages)
        self.lock = EngineLock()
        self._seed = seed
        self._debug_checks = debug_checks
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._under_way: UnderWay | None = None  # the overlapped loop's, between two calls
        self._finished: list[Request] = []  # not returned by `step` yet
        self._stepping_thread: int | None = None

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that have finished since the last call.

        An exception, Ctrl-C included, aborts all requests: no caller would know which of them hold
        a half-done step. The engine itself stays usable, with an empty prefix cache.

        Raises:
            EngineDeadError, NanoEngineError: as `require_idle`.
        """
        with self.lock.held():
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
        """Launches a step, and commits the one before it while that step runs."""
        if self._under_way is not None and self._next_plan_needs(self._under_way.plan):
            self._take_in()
        before, self._under_way = self._under_way, None
        if self._requests:
            self._under_way = self._launch()
        if before is not None:
            self._commit(before)
        if not self._requests:  # Why: nobody needs the step that runs now, nor would commit it
            self._take_in()

    def _next_plan_needs(self, plan: StepPlan) -> bool:
        """True if the next step can't be planned before the tokens of this one are known.

        With drafts, because the number of right ones decides where the sequence goes on; and where
        more are to be proposed. With a chooser, because its sequences go on when it has seen what
        this step offers.
        """
        if plan.draft_token_ids or (self.proposer is not None and self.proposer.needs_tokens()):
            return True
        if self.scheduler.special is None:
            return False
        return any(seq.request.chooser is not None for seq in self.scheduler.running)

    def _take_in(self) -> None:
        """Waits for the step under way, if there is one, and commits it."""
        before, self._under_way = self._under_way, None
        if before is not None:
            self._commit(before)

    @exclusive()
    def settle(self) -> None:
        """Commits the step that the overlapped loop has under way, so that all tokens are known.

        The plain loop leaves none under way. The next `step` returns the requests that end by it.
        """
        self._settle()

    def _settle(self) -> None:
        try:
            self._take_in()
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """Forgets requests and steps, whose results are never asked for.

        CPython makes a SystemError of a Ctrl-C inside compiled code, a kernel, say: that code has
        returned a result, and the interrupt was still to be raised. It is raised here.
        """
        self._under_way, self._finished = None, []
        self.scheduler.recover(self._requests.values())
        self._requests.clear()
        behind = error.__cause__ or error.__context__
        if isinstance(error, SystemError) and isinstance(behind, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def _launch(self) -> UnderWay:
        started = time.perf_counter()
        if self.proposer is not None and self.proposer.needs_tokens():
            from nanoengine.core.speculation import propose_drafts

            propose_drafts(self.scheduler, self.proposer)
        plan = self.scheduler.schedule()
        schedule_s = time.perf_counter() - started
        return UnderWay(plan, self.executor.launch(plan), schedule_s)

    def _commit(self, step: UnderWay) -> None:
        """Commits what a step has sampled; `step` returns the requests that end by it."""
        result = step.launched.result()
        started = time.perf_counter()
        finished = self.scheduler.commit(step.plan, result)
        result.times.schedule_s = step.schedule_s
        result.times.commit_s = time.perf_counter() - started
        for request in finished:
            del self._requests[request.request_id]
        self._finished += finished
        self.lock.is_changing = False
        for observer in list(self.observers):  # Why last: it may abort what has not finished.
            observer.on_step(step.plan, result, self.scheduler)
        self.lock.is_changing = True
        if self._debug_checks:
            from nanoengine.core.checks import check

            check(self.scheduler)

    def draft(self) -> None:
        """Has tokens drafted from now on, where anything can draft them."""
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
            make_follower: called with each sequence's index; what it returns follows that sequence.
            chooser: decides the tokens in place of the sampler, among the `params.logprobs` most
                likely ones.
            options: priority, key, cache_salt and bad_word_ids, as `RequestChecker.check` has them.

        Raises:
            RequestError, PromptTooLongError, CapacityError: as `RequestChecker.check`, before
                anything is queued; RequestError also for a request_id in use.
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
        """Queues, once, what this engine's `checker` has returned; else as `add_request`."""
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
        request.seed = self._draw_seed(request) if seed is None else seed
        if request.params.structured_outputs is not None:
            self.draft()  # Why: what a grammar forces is worth a draft.
        if request.is_special:
            from nanoengine.core.speculation import enlist

            enlist(self.scheduler)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    @exclusive()
    def fork(
        self, request_id: str, *, index: int = 0, next_token_id: int | None = None
    ) -> Sequence:
        """Adds a sequence to a request, between steps: a copy of one of its sequences.

        The two share all their blocks until one of them writes. Without a free row the new one
        waits, as after a preemption.

        Args:
            index: of the sequence to copy, which may run or wait.
            next_token_id: stands in the copy where the original has its last output token; None:
                the same token, so a greedy copy stays equal and one that samples goes its own way.

        Returns:
            The new sequence, already in `request.sequences`; its output comes with the request's.

        Raises:
            RequestError: no such unfinished sequence, or a next_token_id that can't stand there;
                a step is under way: see `settle`.
        """
        self.lock.require_open()
        if self._under_way is not None:
            raise RequestError(
                "a step is under way, so the sequence has a token more than can be seen: call"
                " settle(), look at the outputs, then fork"
            )
        from nanoengine.core.request_options import parent_of_fork
        from nanoengine.core.speculation import enlist

        request, size = self._requests.get(request_id), self.info.vocab_size
        parent = parent_of_fork(request_id, request, index, next_token_id, size)
        is_same = next_token_id == parent.token_ids[-1]
        return enlist(self.scheduler).fork(parent, None if is_same else next_token_id)

    @exclusive("later")
    def abort(self, request_id: str) -> Request | None:
        """Ends a request with finish_reason "abort"; None if it is unknown or finished already.

        Inside of a step, where a signal handler may call it, it returns None, and ends the request
        when the step has ended.
        """
        if self.lock.why_closed:
            return None
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            if not self._requests:
                self._settle()
        return request

    @exclusive("later")
    def abort_all(self) -> None:
        """Forgets every request, so that after an exception nothing leaks into later work.

        Waits for a step under way: the copies of blocks between tiers end with it.
        """
        if not self.lock.why_closed:
            self._abort_all()

    def _abort_all(self) -> None:
        for request in self._requests.values():
            self.scheduler.abort(request)
        self._requests.clear()
        self._settle()
        self._finished = []

    def is_unfinished(self, request_id: str) -> bool:
        """True while a request of this id is queued or runs."""
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return len(self._requests)

    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._requests or self._finished)

    @exclusive()
    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; refuses (False) while blocks are in use."""
        return self.scheduler.block_manager.prefix_cache.reset()

    @exclusive()
    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the cached content of those given blocks that nobody uses; returns how many were.

        Raises:
            RequestError: an id is not one of the pool's blocks.
        """
        from nanoengine.core.request_options import check_block_ids

        found = check_block_ids(block_ids, self.info.num_kv_blocks)
        return self.scheduler.block_manager.prefix_cache.evict(found)

    # --- the rest -----------------------------------------------------------------------------

    @exclusive("now")
    def stats(self) -> EngineStats:
        """Counters since the start, and block counts now."""
        return EngineStats.of(self.scheduler)

    @exclusive("later")
    def close(self) -> None:
        """Gives all memory back; the engine can't be used afterwards. Closing twice is harmless.

        Inside of a step it happens when the step has ended."""
        if not self.lock.why_closed:
            try:
                self._abort_all()  # waits for a step under way, which may fail
            finally:
                self.lock.why_closed = "the engine is closed: build a new one"
                tiers = self.scheduler.block_manager.prefix_cache.tiers
                if tiers is not None:
                    tiers.close()
                self.executor.shutdown()
                for observer in self.observers:
                    getattr(observer, "close", lambda: None)()

    def require_idle(self) -> None:
        """Raises EngineDeadError if the engine is closed or another process's, and NanoEngineError
        inside of a step, to those who watch it."""
        self.lock.require_open()
        if self._stepping_thread == threading.get_ident():
            raise NanoEngineError(
                "a step is running: who watches it, such as a progress bar, can't run another;"
                " make the call when this one has returned"
            )

    def _draw_seed(self, request: Request) -> int:
        """A seed for a request without one: of the engine's seed, and its key or its arrival."""
        name = f"{request.arrival}" if request.key is None else f"key/{request.key}"
        # Why surrogates pass: a key only needs to be told from others.
        digest = xxhash.xxh3_64_intdigest(f"{self._seed}/{name}".encode(errors="surrogatepass"))
        return digest >> 1
