"""Sequence: tokens with block tables and counters. Request: a prompt and its sequences.

    token_ids   [ p p p p p p p p | o o o ]        prompt, then committed output
                  ^ num_computed_tokens             KV is present, or computed by a step in flight
                        num_pending_tokens          sampled by steps that have not been committed

The scheduler uses one formula: compute
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. Prefill, chunked prefill, decode
and verification are names for its values; there are no flags for them.

State that few sequences need is in `SequenceOptions`, which speculation.py and forks.py use.
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
from nanoengine.core.prefix_tree import Prefix
from nanoengine.settings.params import SamplingParams

NO_ROW = -1


class Status(enum.Enum):
    """The state of a sequence. WAITING: it is queued. RUNNING: it holds a row and blocks. PARKED:
    neither, until its next token is chosen. FINISHED: it has a finish reason."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


class Ending(NamedTuple):
    """How a sequence ends; `stop_reason` is the requested stop id or stop string."""

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class SequenceOptions:
    """State of sequences with log-probabilities, drafts, forks or a `TokenChooser`.

    Attributes:
        logprobs: per output token, its own first; None if not requested.
        cumulative_logprob: sum of the output tokens' own log-probabilities.
        draft_token_ids: proposed tokens that the next step verifies.
        choices: the most likely next tokens, until its `TokenChooser` has chosen one of them.
    """

    logprobs: TokenLogprobs | None = None
    cumulative_logprob: float = 0.0
    draft_token_ids: tuple[int, ...] = ()
    choices: list[TokenLogprob] | None = None


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """One stream of tokens, with the scheduler's counters and the block manager's tables.

    Attributes:
        seq_id: unique in the engine; index: 0 <= index < n within the request.
        token_ids: prompt and committed output tokens.
        num_pending_tokens: tokens that steps in flight will sample; their values are unknown.
        num_computed_tokens: tokens whose KV is in the cache, or is being computed by a step.
        num_cached_tokens: how many of these the prefix cache had at the last admission.
        block_tables: per KV group the block ids in order, append-only; 0 where dropped.
        prefixes: the content of each full block, hashed once and kept.
        num_registered_blocks: how many of these are in the prefix-cache index.
        max_chunk: maximum number of its tokens that one step computes.
        slots_ready_until: a decode that starts before this position writes into an existing slot:
            it needs no block, no copy and no indexing.
        max_num_tokens: maximum length of prompt and output together.
        min_num_tokens: stop ids and stop strings have no effect before this many tokens.
        stop_ids: ids that end it -> the stop reason: None for EOS ids.
        row: in the executor's buffers while running, else NO_ROW.
        extras: None for most sequences.
        num_dropped_blocks, num_shared_blocks: for windows and recurrent states (groups/).
        num_pending_reads: for tiers (tiers/disk.py).
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
    extras: SequenceOptions | None = field(init=False)
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
        # Why 0: before min_tokens, only a grammar allows an EOS id, after a complete text.
        min_tokens = 0 if params.structured_outputs is not None else params.min_tokens
        self.min_num_tokens = self.num_prompt_tokens + min_tokens
        logprobs: TokenLogprobs | None = None if params.logprobs is None else []
        self.extras = SequenceOptions(logprobs=logprobs) if request.needs_extras else None
        self.follower = request.make_follower(self.index) if request.make_follower else None

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens, without drafts."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The committed output tokens, including the one that ended the sequence."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> Ending | None:
        """Appends a sampled token; returns how the sequence ends with it, or None."""
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if num_tokens >= self.min_num_tokens and token_id in self.stop_ids:
            return Ending("stop", self.stop_ids[token_id])
        stop_string = None if self.follower is None else self.follower.append(token_id)
        if stop_string is not None:
            return Ending("stop", stop_string)
        return Ending("length") if num_tokens >= self.max_num_tokens else None

    @property
    def is_score_only(self) -> bool:
        """True if no token follows the prompt: `max_tokens` is 0."""
        return self.max_num_tokens == self.num_prompt_tokens

    @property
    def awaits_choice(self) -> bool:
        """True if all tokens are computed and a `TokenChooser` has yet to choose the next one."""
        return self.num_computed_tokens == self.num_tokens

    def reset_computed(self) -> None:
        """Marks all tokens as not computed, because the blocks are freed, and drops drafts."""
        if self.extras is not None:
            self.extras.draft_token_ids = ()
        self.num_preempted_tokens = max(self.num_preempted_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Sets the finish reason; the Scheduler frees blocks and row."""
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
    """One prompt with its sampling parameters, and its n sequences.

    `sequences` starts with one. The others are forked from it when the prompt has been computed;
    until then `num_pending_forks` counts them. More may be forked later, with indices from
    `next_index` on.
    `chooser` selects the tokens instead of the sampler. `seed` is the first sequence's seed, from
    which the others are derived; without a seed in `params` it is derived from `key`, if there is
    one. `arrival` numbers requests in the order of arrival; `arrival_time` is in seconds of
    `time.perf_counter`. `stop_ids` and `max_num_tokens` are copied to the sequences. `error` is the
    reason if the request failed while running. `pooled` is the vector [hidden_size] of a pooled
    prompt.
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
    num_pending_forks: int = field(init=False)
    num_cached_tokens: int = 0
    prompt_logprobs: TokenLogprobs | None = field(init=False)
    error: str | None = None
    pooled: Any = None

    def __post_init__(self) -> None:
        self.next_index = self.params.n
        self.num_pending_forks = self.params.n - 1
        self.prompt_logprobs = [] if self.params.prompt_logprobs is not None else None

    @property
    def needs_extras(self) -> bool:
        """True if its sequences need `SequenceOptions` from the start."""
        params = self.params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        return has_logprobs or params.n > 1 or self.chooser is not None

    @property
    def finished(self) -> bool:
        """True once all sequences have finished, or the first has failed before the forks."""
        forked = self.num_pending_forks == 0 or self.error is not None
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
    """Follows one sequence's output token by token, and finds its text and stop strings."""

    @property
    def text(self) -> str:
        """The part of the text that later tokens can't change."""

    def append(self, token_id: int) -> str | None:
        """Adds the next output token; a returned string ends the sequence as its stop reason."""

    def finish(self, token_ids: SequenceOf[int]) -> str:
        """The whole text of a finished sequence with these output tokens."""


class TokenChooser(Protocol):
    """Selects the next tokens of one request's sequences instead of the sampler."""

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        """Called by a commit once each unfinished sequence of the request awaits a choice: all its
        tokens are computed, and its `choices` are the most likely next ones.

        Each sequence must get a token (`moves.append_token`, optionally after `fork`), be dropped
        (`drop`) or be ended (`finish`).
        """


class SequenceMoves(Protocol):
    """The operations that a `TokenChooser` may apply to its sequences."""

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Appends the next token to a sequence that awaits a choice, which may end it."""

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """Creates a sequence of the same request: the parent's tokens, then `next_token_id`."""

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; the request continues with the others."""

    def drop(self, seq: Sequence) -> None:
        """Ends one of several sequences and removes it from the request's outputs."""
