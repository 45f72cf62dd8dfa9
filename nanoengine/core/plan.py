"""StepPlan and StepResult: the interface between scheduling (core) and execution (runner).

A plan holds plain ints only. It contains everything that an executor needs, in the order in which
it is carried out, and nothing more. Tensor parallelism broadcasts it, a trace stores its digest,
and the simulator and the tests' fake executor read it.

    released, admitted, forks, chosen_tokens,     the executor updates its rows
        table_updates
    transfers, block_copies                       bytes are copied
    rows, starts, num_scheduled_tokens            the forward pass
    num_logits                                    sampling

A *row* is the slot of one running sequence, 0 <= row < max_num_seqs. The executor keeps each row's
token ids and block table across steps, so a plan contains only what has changed. Built by the
Scheduler; read by executors and observers.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanoengine.settings.params import SamplingParams


class AdmittedSequence(NamedTuple):
    """A sequence that gets a row: a new one, or one that was preempted.

    `token_ids` are all tokens known so far (prompt and output); the first `num_prompt_tokens` are
    the prompt. The KV of the first `num_cached_tokens` is already in the blocks that
    `table_updates` lists. `seed` is the resolved seed of its random numbers, 0 <= seed < 2**63;
    `bad_word_ids` are the token sequences of `params.bad_words`.
    """

    row: int
    seq_id: int
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class Fork(NamedTuple):
    """`row` becomes a copy of `parent_row` (token ids, sampling parameters) with its own seed.

    Its block tables come as table updates. A fork made in the step that computes the parent's last
    token schedules no token itself: it samples from the parent's logits. A fork made between steps
    is scheduled like any sequence, or not at all.
    """

    row: int
    parent_row: int
    seq_id: int
    seed: int


class ChosenToken(NamedTuple):
    """Replaces the row's last token, at `position`, by one that was not sampled."""

    row: int
    position: int
    token_id: int


class TableUpdate(NamedTuple):
    """From entry `start` on, a row's block table (of one KV group) contains `block_ids`."""

    row: int
    group: int
    start: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy one block in all layers, before the forward pass (copy-on-write).

    All sources of a step are read before any target is written: a source whose last other user is
    preempted in this step may be the target of a later copy.
    """

    src: int
    dst: int


class Transfer(NamedTuple):
    """Move blocks between tiers; then `device_ids[i]` and `tier_ids[i]` hold the same content.

    `kind` is "load" (tier to device, before the forward pass) or "store" (device to tier, after).
    """

    kind: str
    tier: str
    device_ids: tuple[int, ...]
    tier_ids: tuple[int, ...]


class Preemption(NamedTuple):
    """A running sequence lost its row and blocks so that others could continue; it waits again."""

    seq_id: int
    num_computed_tokens: int
    reason: str


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. The lists `rows`, `starts`, `num_scheduled_tokens` and `num_logits` are parallel.

    Attributes:
        step: counts up from 0.
        released: rows whose sequence finished, was aborted or preempted since the last plan; freed
            before `admitted`. After a failed step: all rows, also free ones.
        rows: the rows scheduled in this step, each at most once.
        starts: position of the first token that the row computes (its num_computed_tokens before
            the step).
        num_scheduled_tokens: number of tokens that the row computes; 0 only for a row in `forks`.
        num_logits: how many of its last positions need logits: 0 for a chunk that does not reach
            the end of the known tokens, 1 for a normal step, 1 + number of drafts when drafts are
            verified.
        draft_token_ids: row -> proposed tokens, which follow the row's known tokens.
        preempted, reasons: for users and traces; an executor ignores them.
        waits: for users and traces: the first waiting sequences that were tried and not admitted,
            with the reason of each, a word of `waiting.LookAhead.pass_over`.
    """

    step: int
    released: list[int] = field(default_factory=list)
    admitted: list[AdmittedSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    chosen_tokens: list[ChosenToken] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)
    draft_token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    preempted: list[Preemption] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    waits: list[tuple[int, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward pass of this step computes."""
        return sum(self.num_scheduled_tokens)

    def add(self, row: int, start: int, num_scheduled_tokens: int, *, num_logits: int) -> None:
        """Schedules a row's next tokens."""
        self.rows.append(row)
        self.starts.append(start)
        self.num_scheduled_tokens.append(num_scheduled_tokens)
        self.num_logits.append(num_logits)

    def __str__(self) -> str:
        """A description of the step, with the reasons for unusual events."""
        from nanoengine.core.format_plan import format_plan

        return format_plan(self)


class TokenLogprob(NamedTuple):
    """A candidate token: natural-log probability under the raw logits, rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


TokenLogprobs = list[list[TokenLogprob]]
"""Per token: its own log-probability first, then the top candidates'."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Wall times of the parts of one step [s]; `forward_s` includes attention and logits.

    `load_s` is the time to load blocks from a tier.
    """

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    load_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The result of one step. Indices are positions in `plan.rows`.

    Attributes:
        token_ids: per scheduled row, the tokens that it sampled, in order: none if `num_logits`
            was 0, one normally, up to 1 + number of drafts when drafts were accepted.
        logprobs: index -> per sampled token: the sampled token first, then the top candidates.
        prompt_logprobs: index -> the same for the prompt tokens whose predecessor was computed in
            this step, in order.
        pooled: index -> the vector [hidden_size] of a pooled prompt that is fully computed.
        errors: index -> why this row has no valid token (for example, NaN logits); only this
            request ends.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    pooled: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
