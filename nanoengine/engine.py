"""LLMEngine: the loop. `schedule`, `launch`, `commit`; requests in, finished requests out.

    plain        schedule 1  launch 1  result 1  commit 1 │ schedule 2  launch 2  result 2 ...
    overlapped   schedule 2  launch 2  result 1  commit 1 │ schedule 3  launch 3  result 2 ...
                                       └ 2 runs meanwhile                         └ 3 runs

The plain loop is the one to read. The overlapped loop gives the same tokens and never lets a GPU
wait for Python: see docs/overlap.md.

Built by `build.build_engine`, driven by `LLM`. Imports the core only: what runs the plans is behind
the `Executor` door, what watches them behind `Observer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from nanoengine.core.cache_stats import TierStats
from nanoengine.core.plan import StepPlan
from nanoengine.core.protocols import Executor, Launched, Observer, TokenChooser, TokenSink
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import (
    CapacityError,
    EngineDeadError,
    PromptTooLongError,
    RequestError,
)
from nanoengine.sampling_params import SamplingParams


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


class LLMEngine:
    """Continuous batching over one executor.

    Args:
        executor: already started; runs the plans.
        scheduler: makes them.
        info: what was discovered at start.
        seed: seeds requests that bring no seed of their own.
        overlap: plan and launch a step while the one before runs.
        debug_checks: check all invariants after each step.
        observers: told of each step.
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
        self._closed = False

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that have finished since the last call.

        An exception, Ctrl-C included, aborts all requests: no caller would know which of them hold
        a half-done step. The engine itself stays usable, with an empty prefix cache.
        """
        self._require_open()
        try:
            if self.overlap:
                self._overlapped_step()
            else:
                self._commit(self._launch())
        except BaseException:
            self._recover()
            raise
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
        """True if the next plan waits for this one's tokens, or for its moves of blocks.

        Drafts: how many of them are right decides where the sequence goes on. Choosers: nothing of
        their sequences can be planned until they have seen the offers. Transfers: a tier's
        bookkeeping takes them as done when they are committed, in order.
        """
        return bool(plan.draft_token_ids or plan.transfers) or any(
            seq.request.chooser is not None for seq in self.scheduler.running
        )

    def _take_in(self) -> None:
        """Waits for the step under way, if there is one, and commits it."""
        before, self._under_way = self._under_way, None
        if before is not None:
            self._commit(before)

    def settle(self) -> None:
        """Takes in the step that the overlapped loop has under way, so that all tokens are seen.

        The plain loop leaves none under way. Requests that end by it are told by the next `step`.
        """
        try:
            self._take_in()
        except BaseException:
            self._recover()
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
        for observer in self.observers:
            observer.on_step(step.plan, result, self.scheduler)
        if self._debug_checks:
            self.scheduler.check()
        for request in finished:
            del self._requests[request.request_id]
        self._finished += finished

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        make_sink: Callable[[int], TokenSink | None] | None = None,
        chooser: TokenChooser | None = None,
    ) -> Request:
        """Queues a request.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one id below the vocabulary size.
            priority: lower runs first, equal ones in order of arrival; None: that of `params`.
            cache_salt: prefixes are shared only between requests of equal salt.
            bad_word_ids: token sequences of `params.bad_words`.
            make_sink: called with each sequence's index; what it returns follows that sequence.
            chooser: decides the tokens in place of the sampler, among the `params.logprobs` most
                likely ones.

        Raises:
            RequestError, PromptTooLongError, CapacityError: as `check_request`, before anything is
                queued; RequestError also for a request_id in use.
        """
        self._require_open()
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        self.check_request(prompt_token_ids, params)
        arrival = self._num_arrived
        self._num_arrived += 1
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            arrival=arrival,
            arrival_time=time.perf_counter(),
            priority=params.priority if priority is None else priority,
            cache_salt=cache_salt,
            bad_word_ids=bad_word_ids,
            make_sink=make_sink,
            chooser=chooser,
        )
        eos = () if params.ignore_eos else self.info.eos_token_ids
        longest = self.info.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        self.scheduler.add(
            request,
            seed=params.seed % 2**63 if params.seed is not None else self._draw_seed(arrival),
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids or ()),
            max_num_tokens=longest,
        )
        self._requests[request_id] = request
        return request

    def check_request(self, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> None:
        """Raises what `add_request` would, and queues nothing."""
        info, manager = self.info, self.scheduler.block_manager
        num_tokens = len(prompt_token_ids)
        if num_tokens == 0:
            raise RequestError("the prompt is empty: give at least one token")
        for token_id in prompt_token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"prompt token ids must be integers, got {token_id!r}")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= info.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"prompt token ids must be in [0, {info.vocab_size}), got {bad}")
        if num_tokens >= info.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; max_model_len={info.max_model_len} leaves"
                f" room for {info.max_model_len - 1} and one generated: shorten it, or raise"
                " max_model_len"
            )
        if not manager.can_ever_allocate(num_tokens):
            raise CapacityError(
                f"the prompt of {num_tokens} tokens needs {manager.num_blocks_for(num_tokens)} KV"
                f" blocks of {info.block_size} tokens, the pool has {manager.pool.num_usable}:"
                " shorten it, or raise num_kv_blocks or kv_cache_gib"
            )
        self._check_params(params)

    def _check_params(self, params: SamplingParams) -> None:
        if params.n > self.scheduler.max_num_seqs:
            raise RequestError(
                f"n={params.n} sequences run together: max_num_seqs={self.scheduler.max_num_seqs}"
                " must be at least that"
            )
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
        self._require_open()
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

    def abort(self, request_id: str) -> Request | None:
        """Ends a request with finish_reason "abort"; None if it is unknown or finished already."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            if not self._requests:
                self.settle()
        return request

    def abort_all(self) -> None:
        """Forgets every request, so that after an exception nothing leaks into later work.

        Waits for a step under way: the copies of blocks between tiers end with it.
        """
        for request in self._requests.values():
            self.scheduler.abort(request)
        self._requests.clear()
        self.settle()
        self._finished = []

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return len(self._requests)

    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._requests or self._finished)

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes; refuses (False) while blocks are in use."""
        return self.scheduler.block_manager.reset_prefix_cache()

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the cached content of those given blocks that nobody uses; returns how many were.

        Raises:
            RequestError: an id is not one of the pool's blocks.
        """
        block_ids, last = list(block_ids), self.info.num_kv_blocks - 1
        for block_id in block_ids:
            if not 1 <= block_id <= last:
                raise RequestError(f"block ids must be in [1, {last}], got {block_id}")
        return self.scheduler.block_manager.evict(block_ids)

    # --- the rest -----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start, and block counts now."""
        scheduler, cache = self.scheduler, self.scheduler.block_manager.stats
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
            tiers=scheduler.block_manager.tiers.stats(),
        )

    def close(self) -> None:
        """Gives all memory back; the engine can't be used afterwards. Closing twice is harmless."""
        if not self._closed:
            try:
                self.abort_all()  # waits for a step under way, which may fail
            finally:
                self._closed = True
                self.scheduler.block_manager.tiers.close()
                self.executor.shutdown()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is closed: build a new one")

    def _draw_seed(self, arrival: int) -> int:
        """A seed for a request without one: a function of the engine's seed and the arrival."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{arrival}".encode()) >> 1
