"""Sequence: a stream of tokens with block tables and counters. Request: the sequences of a prompt.

    token_ids   [ p p p p p p p p | o o o ]        prompt, then committed output
                  ^ num_computed_tokens             KV is present, or computed by a step under way
                        num_pending_tokens          sampled by steps that have not been committed

The scheduler knows one formula for all of it: compute
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. Prefill, chunk, decode and
verification are words for its values, never flags.

Special: what few sequences have besides is in `Extras`, which speculation.py and forks.py read.
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

from nanoengine.core.plan import TokenLogprob, TokenLogprobs
from nanoengine.core.prefixes import Prefix
from nanoengine.settings.params import SamplingParams

NO_ROW = -1


class Status(enum.Enum):
    """Where a sequence is. WAITING: in the queue. RUNNING: it holds a row and blocks. PARKED:
    it does neither, until its next token is chosen. FINISHED: it has a finish reason."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


class Ending(NamedTuple):
    """How a sequence ends; `stop_reason` is the stop id or stop string that was asked for."""

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Extras:
    """What few sequences have: they report log-probabilities, draft, part, or are chosen for.

    Attributes:
        logprobs: of each output token, its own first; None: they were not asked for.
        cumulative_logprob: the sum of the tokens' own.
        draft_token_ids: proposed tokens that the next step verifies.
        choices: the most likely next tokens, until its `TokenChooser` has chosen one of them.
    """

    logprobs: TokenLogprobs | None = None
    cumulative_logprob: float = 0.0
    draft_token_ids: tuple[int, ...] = ()
    choices: list[TokenLogprob] | None = None


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """One stream of tokens: what the scheduler counts, what the block manager tables.

    Attributes:
        seq_id: unique in the engine; index: 0 <= index < n within the request.
        token_ids: prompt and committed output tokens.
        num_pending_tokens: tokens that steps under way will sample; their values are not known yet.
        num_computed_tokens: tokens whose KV is in the cache, or is being computed by a step.
        num_cached_tokens: of them, found in the prefix cache at the last admission.
        block_tables: for each KV group the block ids in order, append-only; 0 where dropped.
        prefixes: the content of each full block, hashed once and kept.
        num_registered_blocks: how many of these are in the prefix-cache index.
        max_chunk: most tokens that one step computes of it.
        slots_ready_until: a decode that starts before this position writes into a slot that it has
            already: no block, no copy, no indexing.
        max_num_tokens: prompt and output together end here.
        min_num_tokens: stop ids and strings don't count before this many tokens.
        stop_ids: ids that end it -> the stop reason: None for EOS ids.
        row: in the executor's buffers while running, else NO_ROW.
        extras: None for most sequences.
        num_dropped_blocks, num_shared_blocks: of windows and states (groups/).
        num_pending_reads: of tiers (tiers/disk.py).
    """

    request: Request
    _: KW_ONLY
    seq_id: int
    index: int
    token_ids: list[int]
    seed: int = field(init=False)
    stop_ids: Mapping[int, int | str | None] = field(init=False)
    max_num_tokens: int = field(init=False)
    params: SamplingParams = field(init=False)
    order: tuple[int, int, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    min_num_tokens: int = field(init=False)
    extras: Extras | None = field(init=False)
    follower: OutputFollower | None = field(init=False)
    status: Status = Status.WAITING
    row: int = NO_ROW
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted_tokens: int = 0
    num_overtaken: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    num_dropped_blocks: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    num_pending_reads: int | None = None
    num_registered_blocks: int = 0
    num_shared_blocks: int = 0
    max_chunk: int = 0
    slots_ready_until: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.params = params
        self.seed = fork_seed(request.seed, self.index)
        self.stop_ids, self.max_num_tokens = request.stop_ids, request.max_num_tokens
        self.order = (request.priority, request.arrival, self.index)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # Why 0: before min_tokens only a grammar lets an EOS id be sampled, behind a complete text.
        min_tokens = 0 if params.structured_outputs is not None else params.min_tokens
        self.min_num_tokens = self.num_prompt_tokens + min_tokens
        logprobs: TokenLogprobs | None = None if params.logprobs is None else []
        self.extras = Extras(logprobs=logprobs) if request.is_special else None
        self.follower = request.make_follower(self.index) if request.make_follower else None

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

    def append(self, token_id: int) -> Ending | None:
        """Takes the next token, known from now on; returns how the sequence ends by it, if so."""
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if num_tokens >= self.min_num_tokens and token_id in self.stop_ids:
            return Ending("stop", self.stop_ids[token_id])
        stop_string = None if self.follower is None else self.follower.append(token_id)
        if stop_string is not None:
            return Ending("stop", stop_string)
        return Ending("length") if num_tokens >= self.max_num_tokens else None

    @property
    def is_scored_alone(self) -> bool:
        """True if no token follows the prompt: `max_tokens` is 0."""
        return self.max_num_tokens == self.num_prompt_tokens

    @property
    def awaits_choice(self) -> bool:
        """True if all tokens are computed and a `TokenChooser` has yet to choose the next one."""
        return self.num_computed_tokens == self.num_tokens

    def forget_computed(self) -> None:
        """Counts all tokens as not computed, because the blocks are gone, and gives up drafts."""
        if self.extras is not None:
            self.extras.draft_token_ids = ()
        self.num_preempted_tokens = max(self.num_preempted_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends the sequence for this reason; blocks and row are the Scheduler's business."""
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finish_time = time.perf_counter()

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


@dataclass(eq=False, repr=False, slots=True)
class Request:
    """One prompt with its sampling parameters, and the n sequences that answer it.

    `sequences` starts with one; the others, `num_forks_due` of them, are forked from it when its
    prompt has been computed, and more may be forked later: their indices go on from `next_index`.
    `chooser` decides the tokens in place of the sampler. `seed` is the first sequence's, from which
    the others' are derived; it is drawn by `key`, if there is one and `params` have none. `arrival`
    numbers requests in the order they came; `arrival_time` is in seconds of `time.perf_counter`.
    `stop_ids` and `max_num_tokens` are those of its sequences. `error` says why a request failed
    while running. `pooled` is the vector [hidden_size] of a pooled prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    arrival: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    key: str | None = None
    cache_salt: str | None = None
    stop_ids: Mapping[int, int | str | None] = field(default_factory=dict)
    max_num_tokens: int = sys.maxsize
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    make_follower: Callable[[int], OutputFollower | None] | None = None
    chooser: TokenChooser | None = None
    seed: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    next_index: int = field(init=False)
    num_forks_due: int = field(init=False)
    num_cached_tokens: int = 0
    prompt_logprobs: TokenLogprobs | None = field(init=False)
    error: str | None = None
    pooled: Any = None

    def __post_init__(self) -> None:
        self.next_index = self.params.n
        self.num_forks_due = self.params.n - 1
        self.prompt_logprobs = [] if self.params.prompt_logprobs is not None else None

    @property
    def is_special(self) -> bool:
        """True if its sequences need `Extras` from the start."""
        params = self.params
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        return asks or params.n > 1 or self.chooser is not None

    @property
    def finished(self) -> bool:
        """True once all sequences have finished, or the one before the fork has failed."""
        forked = self.num_forks_due == 0 or self.error is not None
        return forked and all(seq.is_finished for seq in self.sequences)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {len(self.prompt_token_ids)} tokens, n={self.params.n})"
        )


def fork_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sequence. Source: SplitMix64's increment.

    >>> fork_seed(7, 0)
    7
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


class OutputFollower(Protocol):
    """Follows one sequence's output, token by token: its text as it grows, and stop strings."""

    @property
    def text(self) -> str:
        """The text so far that is sure to stay."""

    def append(self, token_id: int) -> str | None:
        """Takes the next output token; a returned string ends the sequence: its stop reason."""

    def finish(self, token_ids: SequenceOf[int]) -> str:
        """The whole text of a finished sequence, whose output tokens are given."""


class TokenChooser(Protocol):
    """Decides the next tokens of one request's sequences in place of the sampler."""

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        """Called by a commit once each unfinished sequence of the request awaits a choice: all its
        tokens are computed, and its `choices` are the most likely next ones.

        Each must be given a token (`moves.append_token`), be forked as well (`fork`), be dropped
        (`drop`) or be ended (`finish`).
        """


class SequenceMoves(Protocol):
    """What a `TokenChooser` may do to its sequences."""

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Gives a sequence that awaits a choice its next token; it may end by it."""

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """A new sequence of the same request: the parent's tokens, then `next_token_id`."""

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; its request goes on with the others."""

    def drop(self, seq: Sequence) -> None:
        """Ends one sequence of several and forgets it: its request has no output of it."""
