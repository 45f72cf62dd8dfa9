"""Fold: follows a trace step by step and has what the engine had, tables, counts and outputs.

    Recording.steps ── step ──► Fold ── sequences (tokens, tables), refs, content
                          └──► BlockEvents: what happened to blocks in this step

A trace has only what a plan changes. The rest is counted here: a block's references are the entries
of all tables that name it, so that taken, shared, freed and revived blocks need no line of their
own. After a step the fold has what the scheduler had when it had planned that step, and the tokens
that the step sampled besides. Shared by `explain`, the export for Perfetto and the viewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.core.block_pool import NULL_BLOCK
from nanoengine.core.plan import BlockCopy, Transfer
from nanoengine.errors import TraceError
from nanoengine.observe.trace_reader import (
    Arrival,
    ContentEvent,
    EndedSequence,
    HeldState,
    Output,
    Recording,
    TracedStep,
    TraceHeader,
)


@dataclass(slots=True, kw_only=True)
class TracedSequence:
    """One sequence as far as the steps so far have told.

    Attributes:
        request_id: "" where the trace does not tell it.
        token_ids: prompt and output; of one that still waits for its first row none are known.
        row: while it runs, else None.
        block_tables: one for each KV group while it runs; 0 where a window has dropped the block.
        finish_reason: None while it goes on.
    """

    seq_id: int
    request_id: str = ""
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    row: int | None = None
    num_computed_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    detail: int | str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """What it has sampled, or was given, so far."""
        return self.token_ids[self.num_prompt_tokens :]


class HeldContent(NamedTuple):
    """What a block holds, by a name that equal contents share; of which KV group."""

    name: int
    group: int


class Computed(NamedTuple):
    """Who computed a content, and in which step."""

    seq_id: int
    step: int


@dataclass(slots=True, kw_only=True)
class BlockEvents:
    """What happened to blocks of the device in one step; (block, sequence) where one is named.

    Attributes:
        taken: handed out, with nothing in them.
        revived: cached blocks that a hit made active again.
        shared: active blocks that one more sequence refers to.
        freed: nobody refers to them any more; the last one who did.
        hashed: their content can be hit from now on; who computed it, None: it was loaded.
        evicted: (block, name of the content that it has lost).
        copied, moved: as in the plan.
    """

    taken: list[tuple[int, int]] = field(default_factory=list)
    revived: list[tuple[int, int]] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    freed: list[tuple[int, int]] = field(default_factory=list)
    hashed: list[tuple[int, int | None]] = field(default_factory=list)
    evicted: list[tuple[int, int]] = field(default_factory=list)
    copied: list[BlockCopy] = field(default_factory=list)
    moved: list[Transfer] = field(default_factory=list)


class Fold:
    """The state of a traced run after the steps given so far.

    Attributes:
        header: of the trace.
        requests: id -> its arrival.
        sequences: id -> each sequence that was told of, ended ones too.
        running: row -> the sequence that holds it.
        refs: references of each block of the device, and of each state behind these.
        content: pool -> block -> what it holds.
        computed_by: name of a content -> who computed it last.
    """

    def __init__(self, header: TraceHeader, state: HeldState | None = None) -> None:
        self.header = header
        self.requests: dict[str, Arrival] = {}
        self.sequences: dict[int, TracedSequence] = {}
        self.running: dict[int, TracedSequence] = {}
        self.refs = [0] * (header.num_blocks + header.num_states)
        self.content: dict[str, dict[int, HeldContent]] = {"device": {}}
        self.computed_by: dict[int, Computed] = {}
        self._planned = -1
        self._events = BlockEvents()
        if state is not None:
            self._begin_with(state)

    @classmethod
    def follow(cls, recording: Recording) -> Iterator[tuple[TracedStep, Fold, BlockEvents]]:
        """Each step of a recording with the state after it, which the next step changes."""
        fold = cls(recording.header, recording.state)
        for step in recording.steps:
            yield step, fold, fold.step(step)
        if recording.end is not None:
            fold._arrive(recording.end.arrived)
            fold._end(recording.end.ended, recording.end.outputs)

    def step(self, step: TracedStep) -> BlockEvents:
        """Follows one step.

        Raises:
            TraceError: the step names a row or a block that there is not.
        """
        self._events = events = BlockEvents(copied=step.copied, moved=step.moved)
        try:
            self._arrive(step.arrived)
            if step.step > self._planned:
                self._follow_plan(step)
            self._follow_content(step)
            self._follow_result(step)
            self._end(step.ended, step.outputs)
        except (KeyError, IndexError) as error:
            raise TraceError(
                f"step {step.step} names a row, group or block that there is not: {error!r}"
            ) from error
        return events

    # --- what a plan does ---------------------------------------------------------------------

    def _follow_plan(self, step: TracedStep) -> None:
        for row in step.released:
            self._release(row)
        siblings = dict(step.siblings)
        for new in step.admitted:
            seq = self._sequence(new.seq_id, siblings.get(new.seq_id, ""))
            seq.token_ids = list(new.token_ids)
            seq.num_computed_tokens = new.num_cached_tokens
            self._take_row(seq, new.row)
        for fork in step.forked:
            parent = self.running[fork.parent_row]
            child = self._sequence(fork.seq_id, parent.request_id)
            child.token_ids = list(parent.token_ids)
            child.num_computed_tokens = parent.num_computed_tokens
            self._take_row(child, fork.row)
        for row, position, token_id in step.chosen:
            self.running[row].token_ids[position:] = [token_id]
        for row, group, start, block_ids in step.tables:
            seq = self.running[row]
            table = seq.block_tables[group]
            replaced = table[start : start + len(block_ids)]
            # Why first: a block that stays is not freed in between.
            self._take(block_ids, seq)
            self._drop(replaced, seq)
            table[start : start + len(block_ids)] = block_ids

    def _take_row(self, seq: TracedSequence, row: int) -> None:
        self._release(row)  # Why: a trace may begin before it has been told that the row is free.
        seq.row = row
        seq.block_tables = [[] for _ in self.header.groups]
        self.running[row] = seq

    def _release(self, row: int) -> None:
        """Frees a row; one that nobody holds stays free, as after a failed step."""
        seq = self.running.pop(row, None)
        if seq is not None:
            for table in seq.block_tables:
                self._drop(reversed(table), seq)
            seq.row, seq.block_tables, seq.num_computed_tokens = None, [], 0

    def _take(self, block_ids: Iterable[int], seq: TracedSequence) -> None:
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                count = self.refs[block_id]
                self.refs[block_id] = count + 1
                kind = self._events.shared if count else self._events.taken
                kind.append((block_id, seq.seq_id))

    def _drop(self, block_ids: Iterable[int], seq: TracedSequence) -> None:
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                self.refs[block_id] -= 1
                if not self.refs[block_id]:
                    self._events.freed.append((block_id, seq.seq_id))

    # --- what blocks hold ---------------------------------------------------------------------

    def _follow_content(self, step: TracedStep) -> None:
        before = self.content["device"].keys()
        held = {block_id for block_id, _ in self._events.taken if block_id in before}
        filled = self._filled(step) if step.content else {}
        for event in step.content:
            lost = self._note(event)
            if event.pool != "device":
                continue
            if event.content is None:
                self._events.evicted += lost
                held.difference_update(block_id for block_id, _ in lost)
                continue
            seq_id = filled.get(event.block_id)
            self._events.hashed.append((event.block_id, seq_id))
            if seq_id is not None:
                self.computed_by[event.content] = Computed(seq_id, step.step)
        if held:
            taken, self._events.taken = self._events.taken, []
            for entry in taken:
                kind = self._events.revived if entry[0] in held else self._events.taken
                kind.append(entry)

    def _filled(self, step: TracedStep) -> dict[int, int]:
        """Block -> the sequence that computes tokens of it in this step."""
        size, filled = self.header.block_size, dict[int, int]()
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            seq = self.running.get(row)
            if seq is not None and count:
                for table in seq.block_tables:
                    for block_id in table[start // size : (start + count - 1) // size + 1]:
                        filled[block_id] = seq.seq_id
        return filled

    def _note(self, event: ContentEvent) -> list[tuple[int, int]]:
        """Follows one event; returns the blocks that have lost their content, and its name."""
        held = self.content.setdefault(event.pool, {})
        if event.content is not None:
            held[event.block_id] = HeldContent(event.content, event.group)
            return []
        is_all = event.block_id == NULL_BLOCK
        lost = list(held) if is_all else [event.block_id] if event.block_id in held else []
        return [(block_id, held.pop(block_id).name) for block_id in lost]

    # --- what a result does -------------------------------------------------------------------

    def _follow_result(self, step: TracedStep) -> None:
        for row, start, count, tokens in zip(
            step.rows, step.starts, step.counts, step.sampled, strict=True
        ):
            seq = self.running.get(row)
            if seq is not None:
                seq.num_computed_tokens = start + count
                if seq.finish_reason is None:  # Why: a step may be planned before its end is known.
                    seq.token_ids += tokens

    def _end(self, ended: Iterable[EndedSequence], outputs: Iterable[Output]) -> None:
        for seq_id, request_id, token_ids in outputs:
            seq = self._sequence(seq_id, request_id)
            if not seq.token_ids and request_id in self.requests:  # one that never had a row
                first = self.sequences[self.requests[request_id].seq_id]
                seq.token_ids = first.token_ids[: first.num_prompt_tokens]
            seq.num_prompt_tokens = min(seq.num_prompt_tokens, len(seq.token_ids))
            seq.token_ids[seq.num_prompt_tokens :] = token_ids
        for seq_id, reason, num_output_tokens, detail in ended:
            seq = self._sequence(seq_id)
            seq.finish_reason, seq.detail = reason, detail
            del seq.token_ids[seq.num_prompt_tokens + num_output_tokens :]

    # --- who there is -------------------------------------------------------------------------

    def _arrive(self, arrived: Iterable[Arrival]) -> None:
        for request in arrived:
            self.requests[request.request_id] = request
            self._sequence(request.seq_id, request.request_id)

    def _sequence(self, seq_id: int, request_id: str = "") -> TracedSequence:
        """The sequence of this id; a new one, if it has not been told of."""
        seq = self.sequences.get(seq_id)
        if seq is None:
            seq = self.sequences[seq_id] = TracedSequence(seq_id=seq_id)
        if request_id and not seq.request_id:
            seq.request_id = request_id
            request = self.requests.get(request_id)
            seq.num_prompt_tokens = request.num_prompt_tokens if request else 0
        return seq

    def _begin_with(self, state: HeldState) -> None:
        self._planned = state.planned
        self._arrive(state.requests)
        for held in state.rows:
            seq = self._sequence(held.seq_id, held.request_id)
            seq.token_ids = list(held.token_ids)
            self._take_row(seq, held.row)
            seq.num_computed_tokens = held.num_computed_tokens
            seq.block_tables = [list(table) for table in held.block_tables]
            for table in seq.block_tables:
                self._take(table, seq)
        for event in state.content:
            self._note(event)
