"""Sequence: a stream of tokens with block tables and counters. Request: the sequences of a prompt.

    token_ids   [ p p p p p p p p | o o o ]        prompt, then committed output
                  ^ num_computed_tokens             KV is present, or computed by a step under way
                        num_pending_tokens          sampled by steps that have not been committed

The scheduler knows one formula for all of it: compute
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. Prefill, chunk, decode and
verification are words for its values, never flags.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoengine.core.doors import OutputFollower, TokenChooser
from nanoengine.core.plan import TokenLogprob
from nanoengine.core.prefixes import Prefix
from nanoengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoengine.core.tiers.disk import Fetch

NO_ROW = -1


class Status(enum.Enum):
    """Where a sequence is: in the queue, on a row, outside both until its next token is chosen, or
    at its end."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


class Sequence:
    """One stream of tokens: what the scheduler counts, what the block manager tables.

    Attributes:
        seq_id: unique in the engine; index: 0 <= index < n within the request.
        token_ids: prompt and committed output tokens.
        num_pending_tokens: tokens that steps under way will sample; their values are not known yet.
        num_computed_tokens: tokens whose KV is in the cache, or is being computed by a step.
        num_cached_tokens: of them, found in the prefix cache at the last admission.
        draft_token_ids: proposed tokens that the next step verifies.
        offer: the most likely next tokens, while the sequence rests until one of them is chosen.
        block_tables: for each KV group the block ids in order, append-only; 0 where dropped.
        prefixes: what each full block holds, found out once and kept.
        fetch: blocks that the disk tier reads for it before its next admission; None: not asked.
        num_registered_blocks: how many of these are in the prefix-cache index.
        max_chunk: most tokens that one step computes of it, so that its windows fit the pool.
        slots_ready_until: a decode that starts before this position writes into a slot that it has
            already: no block, no copy, no indexing.
        max_num_tokens: prompt and output together end here.
        min_num_tokens: stop ids and strings don't count before this many tokens.
        stop_ids: EOS ids (unless ignored) and stop_token_ids.
        row: its place in the executor's buffers while running, else NO_ROW.
    """

    __slots__ = (
        "block_tables",
        "choices",
        "cumulative_logprob",
        "draft_token_ids",
        "fetch",
        "finish_reason",
        "finish_time",
        "first_scheduled_time",
        "first_token_time",
        "follower",
        "index",
        "last_token_time",
        "logprobs",
        "max_chunk",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_pending_tokens",
        "num_preempted_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_windowed_blocks",
        "order",
        "params",
        "prefixes",
        "request",
        "row",
        "seed",
        "seq_id",
        "slots_ready_until",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        seq_id: int,
        index: int,
        token_ids: list[int],
        seed: int,
        stop_ids: frozenset[int],
        max_num_tokens: int,
    ) -> None:
        params = request.params
        self.request = request
        self.seq_id = seq_id
        self.index = index
        self.params = params
        self.seed = seed
        self.order = (request.priority, request.arrival, index)
        self.token_ids = token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_pending_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preempted_tokens = 0
        self.num_overtaken = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.choices: list[TokenLogprob] | None = None
        self.block_tables: list[list[int]] = []
        self.num_windowed_blocks: list[int] = []
        self.prefixes: list[Prefix] = []
        self.num_registered_blocks = 0
        self.max_chunk = 0
        self.slots_ready_until = 0
        self.fetch: Fetch | None = None
        self.stop_ids = stop_ids
        self.max_num_tokens = max_num_tokens
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.row = NO_ROW
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[list[TokenLogprob]] | None = [] if params.logprobs is not None else None
        self.follower: OutputFollower | None = (
            request.make_follower(index) if request.make_follower else None
        )
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens, drafts not counted."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The committed output tokens, the one that ended the sequence included."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def awaits_choice(self) -> bool:
        """True if all tokens are computed and the next one is to be chosen: see `TokenChooser`."""
        return self.num_computed_tokens == self.num_tokens

    def fork(self, *, seq_id: int, index: int, seed: int) -> Sequence:
        """A copy with its own id, index and seed, that has no row and no blocks yet."""
        child = Sequence(
            self.request,
            seq_id=seq_id,
            index=index,
            token_ids=list(self.token_ids),
            seed=seed,
            stop_ids=self.stop_ids,
            max_num_tokens=self.max_num_tokens,
        )
        child.choices = self.choices
        child.cumulative_logprob = self.cumulative_logprob
        child.logprobs = None if self.logprobs is None else list(self.logprobs)
        child.first_scheduled_time = self.first_scheduled_time
        child.first_token_time, child.last_token_time = self.first_token_time, self.last_token_time
        return child

    @property
    def is_finished(self) -> bool:
        """True once the sequence has a finish reason."""
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, {self.num_prompt_tokens} prompt"
            f" + {self.num_output_tokens} output tokens, {self.num_computed_tokens} computed,"
            f" {sum(map(len, self.block_tables))} blocks)"
        )


class Request:
    """One prompt with its sampling parameters, and the n sequences that answer it.

    `sequences` starts with one; the others, `num_forks_due` of them, are forked from it when its
    prompt has been computed, and more may be forked later: their indices go on from `next_index`.
    `chooser` decides the tokens in place of the sampler. `seed` is the first sequence's, from which
    the others' are derived. `arrival` numbers requests in the order they came; `arrival_time` is in
    seconds of `time.perf_counter`. `error` says why a request failed while running.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "bad_word_ids",
        "cache_salt",
        "chooser",
        "error",
        "make_follower",
        "next_index",
        "num_cached_tokens",
        "num_forks_due",
        "params",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "seed",
        "sequences",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: int = 0,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        make_follower: Callable[[int], OutputFollower | None] | None = None,
        chooser: TokenChooser | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival = arrival
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.bad_word_ids = bad_word_ids
        self.make_follower = make_follower
        self.chooser = chooser
        self.seed = 0
        self.sequences: list[Sequence] = []
        self.next_index = params.n
        self.num_forks_due = params.n - 1
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[list[TokenLogprob]] | None = (
            [] if params.prompt_logprobs is not None else None
        )
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        """True once all sequences have finished, or the one before the fork has failed."""
        forked = self.num_forks_due == 0 or self.error is not None
        return forked and all(seq.is_finished for seq in self.sequences)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {len(self.prompt_token_ids)} tokens, n={self.params.n})"
        )
