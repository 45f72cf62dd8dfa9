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

import contextlib
import functools
import numbers
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import xxhash

from nanoengine.core.cache_stats import TierStats
from nanoengine.core.doors import Executor, Launched, Observer
from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import OutputFollower, Request, Sequence, TokenChooser
from nanoengine.errors import (
    CapacityError,
    EngineDeadError,
    NanoEngineError,
    PromptTooLongError,
    RequestError,
)
from nanoengine.sampling_params import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was discovered when the engine started; sizes in bytes, times in seconds.

    `max_model_len` is the effective one; `memory_plan` a text for people; `generation_defaults`
    the sampling values of the model's generation_config.json. `quantization` says how linear layers
    are held, and `weight_bits` in how many bits a weight; None: in floats of `dtype`.
    """

    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    dtype: str
    device: str
    attention_backend: str
    num_parameters: int
    weight_bytes: int
    num_kv_blocks: int
    block_size: int
    block_bytes: int
    load_s: float
    start_s: float
    memory_plan: str
    kv_cache_dtype: str = "auto"
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    weight_bits: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and block counts now.

    `cache_recent_hit_rate` looks back on 1,000 admissions; `cache_readmit_*` are sequences that
    came back from preemption; `cache_misses` counts reasons (see `CacheStats`); `waste_slots` are
    allocated to running sequences and hold no token (yet).
    """

    steps: int
    num_waiting: int
    num_running: int
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    recomputed_tokens: int
    preemptions: int
    finished_requests: int
    cache_queried_tokens: int
    cache_hit_tokens: int
    empty_blocks: int
    cached_blocks: int
    active_blocks: int
    cache_recent_hit_rate: float
    cache_readmit_queried_tokens: int
    cache_readmit_hit_tokens: int
    cache_misses: dict[str, int]
    evicted_blocks: int
    waste_slots: int
    tiers: tuple[TierStats, ...] = ()

    @property
    def cache_hit_rate(self) -> float:
        """Share of looked-up prompt tokens found in the prefix cache."""
        queried = self.cache_queried_tokens
        return self.cache_hit_tokens / queried if queried else 0.0

    @property
    def prefill_waste_frac(self) -> float:
        """Share of prefill work that preemptions made necessary again."""
        return self.recomputed_tokens / self.prefill_tokens if self.prefill_tokens else 0.0


class UnderWay(NamedTuple):
    """A step that is launched and not committed; `schedule_s` is what planning it took."""

    plan: StepPlan
    launched: Launched
    schedule_s: float


def one_at_a_time(
    method: Callable[Concatenate[LLMEngine, P], R],
) -> Callable[Concatenate[LLMEngine, P], R]:
    """A method that waits until no other thread's runs, and goes before that thread's next turn."""

    @functools.wraps(method)
    def wrapped(self: LLMEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        me = threading.get_ident()
        if self._owner == me:
            return method(self, *args, **kwargs)
        with self._door, self._lock:
            self._owner = me
            try:
                return method(self, *args, **kwargs)
            finally:
                self._owner = None

    return wrapped  # type: ignore[return-value]  # it is bound like any method


class LLMEngine:
    """Continuous batching over one executor.

    Args:
        executor: already started; runs the plans.
        scheduler: makes them.
        info: what was discovered at start.
        seed: seeds requests that bring no seed of their own.
        overlap: plan and launch a step while the one before runs.
        debug_checks: check all invariants after each step.
        observers: told of each step; they may abort requests.
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
        observers: Iterable[Observer] = (),
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.info = info
        self.observers = list(observers)
        self.overlap = overlap
        self._seed = seed
        self._debug_checks = debug_checks
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._under_way: UnderWay | None = None  # the overlapped loop's, between two calls
        self._finished: list[Request] = []  # not told yet
        self._stepping_thread: int | None = None
        self._why_dead = ""
        self._make_locks()
        _watch_forks()
        _engines.add(self)

    # --- threads ------------------------------------------------------------------------------

    def _make_locks(self) -> None:
        """`_lock` is held while something runs; who waits for it stands in the `_door`.

        Why two: a thread that steps in a loop takes a lock again before one that waits wakes up.
        Why plain `with`: an interrupt between taking a lock and noting it would leave it taken.
        """
        self._door, self._lock = threading.RLock(), threading.RLock()
        self._owner: int | None = None  # the thread that holds `_lock`

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keeps other threads out over several calls, once those that wait have had theirs."""
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        with self._door:
            pass
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that have finished since the last call.

        An exception, Ctrl-C included, aborts all requests: no caller would know which of them hold
        a half-done step. The engine itself stays usable, with an empty prefix cache.

        Raises:
            EngineDeadError, NanoEngineError: as `require_idle`.
        """
        with self.turn():
            return self._step()

    def _step(self) -> list[Request]:
        self.require_idle()
        self._stepping_thread = threading.get_ident()
        try:
            if self.overlap:
                self._overlapped_step()
            else:
                self._commit(self._launch())
        except BaseException as error:
            self._recover()
            if _hides_interrupt(error):
                raise KeyboardInterrupt from error
            raise
        finally:
            self._stepping_thread = None
        finished, self._finished = self._finished, []
        return finished

    def _overlapped_step(self) -> None:
        """Launches a step, and while it runs takes in the one before it."""
        if self._under_way is not None and self._next_plan_needs(self._under_way.plan):
            self._take_in()
        before, self._under_way = self._under_way, None
        if self._requests:
            self._under_way = self._launch()
        if before is not None:
            self._commit(before)
        if not self._requests:  # Why: what runs now is over-run; nothing may be left under way
            self._take_in()

    def _next_plan_needs(self, plan: StepPlan) -> bool:
        """True if the next plan waits for this one's tokens.

        Drafts: how many of them are right decides where the sequence goes on. Choosers: nothing of
        their sequences can be planned until they have seen the offers.
        """
        return bool(plan.draft_token_ids) or any(
            seq.request.chooser is not None for seq in self.scheduler.running
        )

    def _take_in(self) -> None:
        """Waits for the step under way, if there is one, and commits it."""
        before, self._under_way = self._under_way, None
        if before is not None:
            self._commit(before)

    @one_at_a_time
    def settle(self) -> None:
        """Takes in the step that the overlapped loop has under way, so that all tokens are seen.

        The plain loop leaves none under way. Requests that end by it are told by the next `step`.
        """
        try:
            self._take_in()
        except BaseException as error:
            self._recover()
            if _hides_interrupt(error):
                raise KeyboardInterrupt from error
            raise

    def _recover(self) -> None:
        """After an exception: forgets requests and steps; their results are never asked for."""
        self._under_way, self._finished = None, []
        self.scheduler.recover(self._requests.values())
        self._requests.clear()

    def _launch(self) -> UnderWay:
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        schedule_s = time.perf_counter() - started
        return UnderWay(plan, self.executor.launch(plan), schedule_s)

    def _commit(self, step: UnderWay) -> None:
        """Takes in what a step has sampled; requests that end by it are told by `step`."""
        result = step.launched.result()
        started = time.perf_counter()
        finished = self.scheduler.commit(step.plan, result)
        result.times.schedule_s = step.schedule_s
        result.times.commit_s = time.perf_counter() - started
        for request in finished:
            del self._requests[request.request_id]
        self._finished += finished
        for observer in list(self.observers):  # Why last: it may abort what has not finished.
            observer.on_step(step.plan, result, self.scheduler)
        if self._debug_checks:
            self.scheduler.check()

    # --- requests -----------------------------------------------------------------------------

    @one_at_a_time
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int | None = None,
        key: str | None = None,
        cache_salt: str | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        make_follower: Callable[[int], OutputFollower | None] | None = None,
        chooser: TokenChooser | None = None,
    ) -> Request:
        """Queues a request.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one id below the vocabulary size.
            priority: lower runs first, equal ones in order of arrival; None: that of `params`.
            key: without a seed in `params`, the random numbers follow from the engine's seed and
                this; None: from the engine's seed and the order of arrival.
            cache_salt: prefixes are shared only between requests of equal salt.
            bad_word_ids: token sequences of `params.bad_words`.
            make_follower: called with each sequence's index; what it returns follows that sequence.
            chooser: decides the tokens in place of the sampler, among the `params.logprobs` most
                likely ones.

        Raises:
            RequestError, PromptTooLongError, CapacityError: as `check_request`, before anything is
                queued; RequestError also for a request_id in use.
        """
        self.require_open()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        self.check_request(
            prompt_token_ids,
            params,
            priority=priority,
            key=key,
            cache_salt=cache_salt,
            bad_word_ids=bad_word_ids,
        )
        params = params.for_vocabulary(self.info.vocab_size)
        arrival = self._num_arrived
        self._num_arrived += 1
        request = Request(
            request_id,
            [int(token_id) for token_id in prompt_token_ids],
            params,
            arrival=arrival,
            arrival_time=time.perf_counter(),
            priority=params.priority if priority is None else int(priority),
            cache_salt=cache_salt,
            bad_word_ids=bad_word_ids,
            make_follower=make_follower,
            chooser=chooser,
        )
        eos = () if params.ignore_eos else self.info.eos_token_ids
        longest = self.info.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        self.scheduler.add(
            request,
            seed=self._draw_seed(arrival, key) if params.seed is None else params.seed % 2**63,
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids or ()),
            max_num_tokens=longest,
        )
        self._requests[request_id] = request
        return request

    def check_request(
        self,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int | None = None,
        key: str | None = None,
        cache_salt: str | None = None,
        bad_word_ids: SequenceOf[SequenceOf[int]] = (),
    ) -> None:
        """Raises what `add_request` would, and queues nothing."""
        info, manager = self.info, self.scheduler.block_manager
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        if priority is not None and not _is_int(priority):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        if key is not None and not isinstance(key, str):
            raise RequestError(f"key must be a string, got {key!r}")
        _check_salt(cache_salt)
        if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, SequenceOf):
            raise RequestError(
                f"prompt_token_ids must be a list of integers, got {prompt_token_ids!r}"
            )
        num_tokens = len(prompt_token_ids)
        if num_tokens == 0:
            raise RequestError("the prompt is empty: give at least one token")
        self._check_ids("prompt token ids", prompt_token_ids)
        for word in bad_word_ids:
            self._check_ids("bad_word_ids", word)
        if num_tokens >= info.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; max_model_len={info.max_model_len} leaves"
                f" room for {info.max_model_len - 1} and one generated: shorten it, or raise"
                " max_model_len"
            )
        if not manager.can_ever_allocate(num_tokens):
            kept = manager.num_watermark_blocks
            reserve = f", of which the watermark keeps {kept} free" if kept else ""
            raise CapacityError(
                f"the prompt of {num_tokens} tokens needs {manager.num_blocks_for(num_tokens)} KV"
                f" blocks of {info.block_size} tokens, the pool has {manager.pool.num_usable}"
                f"{reserve}: shorten it, or raise num_kv_blocks or kv_cache_gib"
                f"{' or lower watermark_frac' if kept else ''}"
            )
        self._check_params(params)

    def _check_ids(self, name: str, token_ids: SequenceOf[int]) -> None:
        for token_id in token_ids:
            if not _is_int(token_id):
                raise RequestError(f"{name} must be integers, got {token_id!r}")
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self.info.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"{name} must be in [0, {self.info.vocab_size}), got {bad}")

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < self.info.vocab_size:
                    raise RequestError(
                        f"{name} must be in [0, {self.info.vocab_size}), got {token_id}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.info.vocab_size:
                raise RequestError(f"{name} must be at most {self.info.vocab_size}, got {count}")

    @one_at_a_time
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
        self.require_open()
        if self._under_way is not None:
            raise RequestError(
                "a step is under way, so the sequence has a token more than can be seen: call"
                " settle(), look at the outputs, then fork"
            )
        request = self._requests.get(request_id)
        of_index = request.sequences if request is not None else []
        parent = next((s for s in of_index if s.index == index and not s.is_finished), None)
        if parent is None:
            raise RequestError(
                f"request {request_id!r} has no unfinished sequence of index {index} to fork"
            )
        if next_token_id is not None:
            self._check_next_token(parent, next_token_id)
            if next_token_id == parent.token_ids[-1]:
                next_token_id = None
        return self.scheduler.fork(parent, next_token_id)

    def _check_next_token(self, parent: Sequence, next_token_id: int) -> None:
        if not 0 <= next_token_id < self.info.vocab_size:
            raise RequestError(
                f"next_token_id must be in [0, {self.info.vocab_size}), got {next_token_id}"
            )
        if not parent.num_output_tokens:
            raise RequestError(
                "next_token_id replaces the last output token, and there is none yet: fork after"
                " the step that samples the first"
            )
        known = [entry.token_id for entry in parent.logprobs[-1]] if parent.logprobs else []
        if known and next_token_id not in known:
            raise RequestError(
                f"next_token_id={next_token_id} has no known log-probability: the request reports"
                f" those of {known} here; choose one of them, or ask for more logprobs or none"
            )

    @one_at_a_time
    def abort(self, request_id: str) -> Request | None:
        """Ends a request with finish_reason "abort"; None if it is unknown or finished already."""
        if self._why_dead:
            return None
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            if not self._requests:
                self.settle()
        return request

    @one_at_a_time
    def abort_all(self) -> None:
        """Forgets every request, so that after an exception nothing leaks into later work.

        Waits for a step under way: the copies of blocks between tiers end with it.
        """
        if self._why_dead:
            return
        for request in self._requests.values():
            self.scheduler.abort(request)
        self._requests.clear()
        self.settle()
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

    @one_at_a_time
    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; refuses (False) while blocks are in use."""
        return self.scheduler.block_manager.prefix_cache.reset()

    @one_at_a_time
    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the cached content of those given blocks that nobody uses; returns how many were.

        Raises:
            RequestError: an id is not one of the pool's blocks.
        """
        last = self.info.num_kv_blocks - 1
        if not isinstance(block_ids, Iterable):
            raise RequestError(f"block ids must be a list of integers, got {block_ids!r}")
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not _is_int(block_id) or not 1 <= block_id <= last:
                raise RequestError(f"block ids must be integers in [1, {last}], got {block_id!r}")
        return self.scheduler.block_manager.prefix_cache.evict(map(int, block_ids))

    # --- the rest -----------------------------------------------------------------------------

    @one_at_a_time
    def stats(self) -> EngineStats:
        """Counters since the start, and block counts now."""
        scheduler, cache = self.scheduler, self.scheduler.block_manager.prefix_cache.stats
        counts = scheduler.block_manager.pool.counts()
        return EngineStats(
            steps=scheduler.stats.steps,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            prefill_tokens=scheduler.stats.prefill_tokens,
            decode_tokens=scheduler.stats.decode_tokens,
            output_tokens=scheduler.stats.output_tokens,
            recomputed_tokens=scheduler.stats.recomputed_tokens,
            preemptions=scheduler.stats.preemptions,
            finished_requests=scheduler.stats.finished_requests,
            cache_queried_tokens=cache.queried_tokens,
            cache_hit_tokens=cache.hit_tokens,
            empty_blocks=counts["empty"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            cache_recent_hit_rate=cache.recent_hit_rate,
            cache_readmit_queried_tokens=cache.readmit_queried_tokens,
            cache_readmit_hit_tokens=cache.readmit_hit_tokens,
            cache_misses=dict(cache.misses),
            evicted_blocks=scheduler.block_manager.pool.num_evicted,
            waste_slots=scheduler.num_waste_slots(),
            tiers=scheduler.block_manager.prefix_cache.tier_stats(),
        )

    @one_at_a_time
    def close(self) -> None:
        """Gives all memory back; the engine can't be used afterwards. Closing twice is harmless."""
        if not self._why_dead:
            try:
                self.abort_all()  # waits for a step under way, which may fail
            finally:
                self._why_dead = "the engine is closed: build a new one"
                self.scheduler.block_manager.prefix_cache.close()
                self.executor.shutdown()

    def require_open(self) -> None:
        """Raises EngineDeadError if the engine is closed, or another process's."""
        if self._why_dead:
            raise EngineDeadError(self._why_dead)

    def require_idle(self) -> None:
        """As `require_open`; also raises NanoEngineError inside of a step, to its observers."""
        self.require_open()
        if self._stepping_thread == threading.get_ident():
            raise NanoEngineError(
                "a step is running: who watches it, such as a progress bar, can't run another;"
                " make the call when this one has returned"
            )

    def _draw_seed(self, arrival: int, key: str | None) -> int:
        """A seed for a request without one: of the engine's seed, and its key or its arrival."""
        name = f"{arrival}" if key is None else f"key/{key}"
        # Why surrogates pass: a key only needs to be told from others.
        digest = xxhash.xxh3_64_intdigest(f"{self._seed}/{name}".encode(errors="surrogatepass"))
        return digest >> 1


def _is_int(value: object) -> bool:
    # Perf: the abstract class is asked for NumPy's integers alone.
    return isinstance(value, int | numbers.Integral) and not isinstance(value, bool)


def _check_salt(cache_salt: object) -> None:
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, got {cache_salt!r}")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt can't be encoded as UTF-8: {error}") from error


def _hides_interrupt(error: BaseException) -> bool:
    """True for the SystemError that CPython makes of a Ctrl-C inside compiled code, a kernel, say:
    that code returned a result, and the interrupt was still to be raised."""
    behind = error.__cause__ or error.__context__
    return isinstance(error, SystemError) and isinstance(behind, KeyboardInterrupt)


# --- processes ------------------------------------------------------------------------------------

_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()
_why_no_engine = ""


def require_unforked() -> None:
    """Raises EngineDeadError in a process that was forked from one which has had an engine.

    Why: OpenMP ends a process that uses it on both sides of a fork, and CUDA can't start again.
    """
    if _why_no_engine:
        raise EngineDeadError(_why_no_engine)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    """In a child: the engines are its parent's, and another thread may have held their locks."""
    global _why_no_engine
    _why_no_engine = (
        "this process was forked from one that has had an engine, and neither its threads nor its"
        " GPU come along: start processes by multiprocessing.get_context('spawn'), or fork before"
        " the first engine is made"
    )
    for engine in _engines:
        engine._why_dead = _why_no_engine
        engine._make_locks()
