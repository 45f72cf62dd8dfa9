"""page_data: converts a run to columns, from which the viewer's page computes block tables.

    plans and tables ──► events: a block is allocated, dropped, indexed, evicted
    steps, sequences ──► numbers per frame, spans per lane, tokens

The page can show any step, but the states of all steps would be too large: gigabytes for 10,000
steps and a pool of 100,000 blocks. So the data contains changes, and the page keeps a state at
intervals. A frame is one step, or several in a run that is too long for a screen.

Blocks are compared after planning, because the commit frees the blocks of requests that end. Events
are differences of the tables before and after a plan, so a page that starts in the middle of a run
starts with the blocks in use at that step.
"""

from __future__ import annotations

import array
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.engine_stats import num_waste_slots
from nanoengine.core.plan import StepPlan
from nanoengine.core.prefix_tree import Prefix
from nanoengine.core.sequence import Request
from nanoengine.core.sequence import Sequence as CoreSequence
from nanoengine.core.tiers.stats import TierStats
from nanoengine.errors import TraceError
from nanoengine.observe.explain import Narrative
from nanoengine.observe.metrics import TIMES, times_of
from nanoengine.observe.steps import Step, StepObserver, is_decode
from nanoengine.observe.trace_reader import Recording, Replay

MAX_FRAMES = 20_000
"""With more steps, a frame has several steps."""
MAX_LANES = 20_000
"""With more sequences, the last ones are omitted."""
MAX_TOKENS = 4_000_000
"""With more tokens in all sequences, token ids are omitted."""
MAX_NOTES = 50_000
"""Maximum number of the scheduler's notes."""

TAKE, DROP, INDEX, EVICT = range(4)
"""Kinds of events: a table starts to reference a block, or stops; its content enters the prefix
cache, or is evicted."""
WAITING, PREFILL, DECODE, PREEMPTED, IDLE = range(5)
"""What a sequence does in a span of frames; IDLE: it has a row and computes nothing."""
KIND_SHIFT = 27
"""Bits of the block id in the first number of an event; the kind is above them."""
BLOCK = (1 << KIND_SHIFT) - 1

FIGURES = ("step", "t", "waiting", "running", "active", "cached", "empty", "hit", "queried")
"""Columns with the values of a frame's last step; `empty` counts slots."""
INCREMENTS = ("prefill", "decode", "recomputed", "sampled", *TIMES)
"""Columns with the increments of a frame."""

NONE = -1

TokenText = Callable[[int], str] | None
"""Returns the text of a token id; None: the page shows ids."""
_Event = tuple[int, int, int]
"""Kind and block, index of a lane, and an argument."""


@dataclass(slots=True)
class PageData:
    """The data of the page: `meta` as JSON, and name -> column of 32-bit integers."""

    meta: dict[str, Any]
    columns: dict[str, array.array[int]]


def page_data(
    recording: Recording,
    *,
    steps: tuple[int, int | None] = (0, None),
    text_of: TokenText = None,
    title: str = "",
) -> PageData:
    """Replays a recording and collects the data of the page.

    Args:
        steps: the first step to show, and the one to stop before; None: no end.
        text_of: returns the text of a token id; None: not available.
        title: title of the page: the name of the file.

    Raises:
        TraceError: the trace has none of the steps, or can't be replayed.
    """
    first, end = steps
    known = recording.steps
    shown = [step for step in known if step >= first and (end is None or step < end)]
    if not shown:
        has = f"it has steps {known[0]} to {known[-1]}" if known else "it has no steps"
        raise TraceError(f"{title or 'this trace'} has none of the steps to show; {has}")
    replay = recording.replay()
    narrative = Narrative(replay)
    collector = _PageColumns(replay, range(shown[0], shown[-1] + 1), -(-len(shown) // MAX_FRAMES))
    replay.run(narrative, collector)
    narrative.conclude(is_torn=recording.is_torn)
    return collector.data(recording, narrative, text_of, title)


@dataclass(slots=True)
class _Lane:
    """A sequence as the page draws it."""

    index: int
    seq: CoreSequence
    arrived: int = NONE
    spans: list[list[int]] = field(default_factory=list)  # first frame, last, kind, computed
    token_frames: list[int] = field(default_factory=list)  # when each token was known
    ended: int = NONE


class _PageColumns(StepObserver):
    """Collects the columns, frame by frame."""

    def __init__(self, replay: Replay, shown: range, steps_per_frame: int) -> None:
        super().__init__(replay)
        self._pool = self.scheduler.block_manager.pool
        self._cache = self.scheduler.block_manager.prefix_cache
        self._shown, self._steps_per_frame = shown, steps_per_frame
        self._is_shown = False
        self._num_steps = self._num_dropped_notes = 0
        self._lanes: dict[int, _Lane] = {}
        # Row -> index of its lane and its table, and contents of blocks, as the page knows them.
        self._tables: dict[int, tuple[int, dict[int, int]]] = {}
        self._contents: dict[int, Prefix] = {}
        self._last_lanes: dict[int, int] = {}  # block -> the last lane that referenced it
        self._changed: set[int] = set()  # blocks whose content was stored or removed
        self._numbers: dict[bytes, int] = {}  # digest -> number of a content
        self._roots = array.array("i")  # number of a content -> number of its prompt's first block
        self._times = Counter[str]()  # so far [us]
        self._frames: list[dict[str, int]] = []
        self._now: dict[str, int] = {}  # figures of the last step, and of the previous frame
        self._before: dict[str, int] = {}
        self._events = array.array("i")  # kind and block, lane, argument
        self._events_of = array.array("i", [0])
        self._copies = array.array("i")  # frame, source, target
        self._moves = array.array("i")  # frame, tier, 1 if loaded, device block, tier's block
        self._marks: list[list[Any]] = []  # frame, kind, lane, number, text
        self._notes: list[list[Any]] = []  # frame, text
        self._waits: list[list[Any]] = []  # frame, [lane, reason]
        self._last_waits: list[tuple[int, str]] = []
        self._pool.observers.append(self)

    @property
    def _frame(self) -> int:
        return len(self._frames)

    # --- blocks after planning ----------------------------------------------------------------

    def on_block(self, event: str, block: Block) -> None:
        """Notes blocks whose content was stored or removed."""
        if event == "cleared":
            self._changed |= self._contents.keys()
        elif event in ("stored", "removed"):
            self._changed.add(block.block_id)

    def inspect_plan(
        self, plan: StepPlan, rows: dict[int, CoreSequence]
    ) -> tuple[dict[str, int], list[_Event]]:
        """The figures, and the events since the previous plan; at first, the blocks in use."""
        stats, cached = self.scheduler.stats, self._cache.stats
        figures = self._pool.counts() | {
            "step": plan.step, "empty": num_waste_slots(self.scheduler),
            "hit": cached.hit_tokens, "queried": cached.queried_tokens,
            "prefill": stats.prefill_tokens, "decode": stats.decode_tokens,
            "recomputed": stats.recomputed_tokens,
        }  # fmt: skip
        if plan.step not in self._shown:
            return figures, []
        changed: set[Any] = {one[0] for one in (*plan.admitted, *plan.forks, *plan.table_updates)}
        changed.update(plan.released)
        if plan.step == self._shown.start:
            changed.update(rows)
            self._changed.update(b.block_id for b in self._pool.blocks if b.prefix is not None)
        return figures, [*self._compare_rows(changed, rows), *self._compare_contents()]

    def _compare_rows(self, changed: set[int], rows: dict[int, CoreSequence]) -> list[_Event]:
        """Events of the blocks that a row's table references only before or only after the plan.
        Their argument combines the group and the position in the table. Drops come first, because
        blocks move to other sequences, and sequences to other rows."""
        drops: list[_Event] = []
        takes: list[_Event] = []
        for row in sorted(changed):
            old_lane, before = self._tables.pop(row, (NONE, {}))
            lane, after = NONE, dict[int, int]()
            if row in rows:
                lane = self._lane(rows[row]).index
                after = {group << 24 | entry: block
                         for group, table in enumerate(rows[row].block_tables)
                         for entry, block in enumerate(table) if block != NULL_BLOCK}  # fmt: skip
                self._tables[row] = lane, after
            kept = before.items() & after.items() if old_lane == lane else set()
            drops += ((DROP << KIND_SHIFT | block, old_lane, entry)
                      for entry, block in sorted(before.items() - kept))  # fmt: skip
            takes += ((TAKE << KIND_SHIFT | block, lane, entry)
                      for entry, block in sorted(after.items() - kept))  # fmt: skip
        self._last_lanes |= {event & BLOCK: lane for event, lane, _ in takes}
        return drops + takes

    def _compare_contents(self) -> Iterator[_Event]:
        for block_id in sorted(self._changed):
            block, old = self._pool.blocks[block_id], self._contents.pop(block_id, None)
            if block.prefix is not old and old is not None:
                yield EVICT << KIND_SHIFT | block_id, NONE, 0
            if block.prefix is not None:
                self._contents[block_id] = block.prefix
                if block.prefix is not old:
                    lane = self._last_lanes.get(block_id, NONE) if block.ref_count else NONE
                    yield INDEX << KIND_SHIFT | block_id, lane, self._number(block.prefix)
        self._changed.clear()

    def _number(self, prefix: Prefix) -> int:
        """The number of a content in the page; its prompt's first block determines the colour."""
        number = self._numbers.setdefault(prefix.digest, len(self._numbers))
        if number == len(self._roots):
            self._roots.append(number)
            ancestor = prefix
            while ancestor.parent is not None and ancestor.parent.parent is not None:
                ancestor = ancestor.parent
                if ancestor.digest in self._numbers:
                    break
            self._roots[number] = self._roots[self._number(ancestor)]
        return number

    def _tiers(self) -> list[TierStats]:
        tiers = () if self._cache.tiers is None else self._cache.tiers.tier_stats()
        return sorted(tiers, key=lambda tier: tier.name)

    # --- per step -----------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        """Creates lanes in the order of arrival."""
        super().on_request(request)
        if self.scheduler.stats.steps < self._shown.stop:
            self._lane(request.sequences[0])

    def step(self, step: Step) -> None:
        """Adds a step. A step that is not shown only adds arrivals and counters."""
        plan = step.plan
        self._is_shown = plan.step in self._shown
        if plan.step >= self._shown.stop:
            return
        for _, events in step.inspected:  # Why failed steps too: blocks moved.
            self._events.extend(_flat(events))
        self._times.update({name: round(1e6 * s) for name, s in times_of(step.result).items()})
        self._now = step.inspected[-1][0] | {
            "t": round(step.time_s * 1e4),
            "waiting": self.scheduler.num_waiting,
            "running": self.scheduler.num_running,
            **{f"tier:{t.name}": t.cached_blocks + t.active_blocks for t in self._tiers()},
            "sampled": self.scheduler.stats.output_tokens,
            **self._times,
        }
        for request in step.arrived:
            self._begin(request.sequences[0], WAITING)
        self._note_plan(step)
        self._note_rows(step)
        if not self._is_shown:
            self._before = self._now
            return
        self._note_ends(step)
        self._note_reasons(plan)
        self._num_steps += 1
        if self._num_steps % self._steps_per_frame == 0:
            self._write_frame()

    def _write_frame(self) -> None:
        sums = {name: self._now[name] - self._before.get(name, 0) for name in INCREMENTS}
        self._frames.append({n: min(v, 2**31 - 1) for n, v in (self._now | sums).items()})
        self._events_of.append(len(self._events) // 3)
        self._before = self._now

    def _note_plan(self, step: Step) -> None:
        """Notes admissions and preemptions, and which blocks are copied and moved."""
        plan, loads = step.plan, step.loads()
        for gone in plan.preempted:
            if gone.seq_id in self._lanes:
                lane = self._lanes[gone.seq_id]
                self._span(lane, PREEMPTED, 0)
                self._mark("preempted", lane, gone.num_computed_tokens, gone.reason)
        for new in plan.admitted:
            lane = self._lane(step.rows[new.row])
            self._mark("admitted", lane, new.num_cached_tokens)
            tables = (u.block_ids for u in plan.table_updates if u.row == new.row)
            if n := sum(len(loads.keys() & table) for table in tables):
                self._mark("loaded", lane, n)
        for fork in plan.forks:
            parent = self._lane(step.rows[fork.parent_row]).index
            self._mark("forked", self._begin(step.rows[fork.row], DECODE), parent)
        if self._is_shown:
            tiers = [tier.name for tier in self._tiers()]
            for copy in plan.block_copies:
                self._copies.extend((self._frame, *copy))
            for kind, tier, *blocks in plan.transfers:
                where = self._frame, tiers.index(tier), int(kind == "load")
                for device, below in zip(*blocks, strict=True):
                    self._moves.extend((*where, device, below))

    def _note_rows(self, step: Step) -> None:
        """Notes what the rows compute, and which tokens are known."""
        for computed in step.computed():
            seq, start, num_tokens, _ = computed
            kind = DECODE if is_decode(*computed) else PREFILL
            self._span(self._lane(seq), kind, start + num_tokens)
        for row in step.rows.keys() - set(step.plan.rows):
            seq = step.rows[row]
            if not seq.is_finished:
                self._span(self._lane(seq), IDLE, seq.num_computed_tokens)
        for seq in step.rows.values():
            self._note_tokens(self._lane(seq))

    def _note_tokens(self, lane: _Lane) -> None:
        frames, length = lane.token_frames, len(lane.seq.token_ids)
        frames += [self._frame] * (length - len(frames))
        del frames[length:]

    def _note_ends(self, step: Step) -> None:
        for index, error in step.result.errors.items():
            self._mark("error", self._lane(step.rows[step.plan.rows[index]]), 0, error)
        for seq in step.ended:
            lane = self._lane(seq)
            self._note_tokens(lane)
            self._close_span(lane)
            self._mark("ended", lane, seq.num_output_tokens, seq.finish_reason)
            lane.ended = self._frame

    def _note_reasons(self, plan: StepPlan) -> None:
        """Notes the scheduler's reasons, and why each waiting request waits."""
        num_left = MAX_NOTES - len(self._notes)
        self._notes += [[self._frame, text] for text in plan.reasons[:num_left]]
        self._num_dropped_notes += len(plan.reasons[num_left:])
        if plan.waits != self._last_waits:
            self._last_waits = plan.waits
            if self._waits and self._waits[-1][0] == self._frame:
                self._waits.pop()
            known = [[self._lanes[seq_id].index, reason] for seq_id, reason in plan.waits
                     if seq_id in self._lanes]  # fmt: skip
            self._waits.append([self._frame, known])

    # --- lanes, spans and marks ---------------------------------------------------------------

    def _lane(self, seq: CoreSequence) -> _Lane:
        if seq.seq_id not in self._lanes:
            self._lanes[seq.seq_id] = _Lane(len(self._lanes), seq)
        return self._lanes[seq.seq_id]

    def _begin(self, seq: CoreSequence, kind: int) -> _Lane:
        """A sequence starts in this frame."""
        lane = self._lane(seq)
        if self._is_shown:
            lane.arrived = self._frame
            self._span(lane, kind, 0)
        return lane

    def _span(self, lane: _Lane, kind: int, computed: int) -> None:
        """Extends the last span of a lane to the current frame, or starts a new one."""
        if lane.ended != NONE or not self._is_shown:
            return
        frame, spans = self._frame, lane.spans
        # Why NONE: there is no event while a sequence keeps waiting.
        until = NONE if kind in (WAITING, PREEMPTED) else frame
        if spans:
            last = spans[-1]
            grows = last[2] == kind != PREFILL and last[1] in (NONE, frame - 1, frame)
            if grows or last[0] == frame:
                last[1], last[2], last[3] = until, kind, computed
                return
            self._close_span(lane)
        spans.append([frame, until, kind, computed])

    def _close_span(self, lane: _Lane) -> None:
        if lane.spans and lane.spans[-1][1] == NONE:
            lane.spans[-1][1] = max(self._frame - 1, lane.spans[-1][0])

    def _mark(self, kind: str, lane: _Lane, number: int, text: str | None = None) -> None:
        if self._is_shown:
            optional = [text] if text else []
            self._marks.append([self._frame, kind, lane.index, number, *optional])

    # --- all of it ----------------------------------------------------------------------------

    def data(
        self, recording: Recording, narrative: Narrative, text_of: TokenText, title: str
    ) -> PageData:
        """The complete data of the page."""
        if self._num_steps % self._steps_per_frame:  # a last, incomplete frame
            self._write_frame()
        all_lanes = list(self._lanes.values())
        for lane in all_lanes:
            self._note_tokens(lane)
            self._close_span(lane)
        lanes = all_lanes[:MAX_LANES]
        num_tokens = sum(len(lane.seq.token_ids) for lane in lanes)
        has_tokens = num_tokens <= MAX_TOKENS
        tokens = [lane.seq.token_ids if has_tokens else [] for lane in lanes]
        frames = [_differences(lane.token_frames) if has_tokens else [] for lane in lanes]
        names = (*FIGURES, *(f"tier:{tier.name}" for tier in self._tiers()), *INCREMENTS)
        columns = {name: array.array("i", (frame[name] for frame in self._frames))
                   for name in names}  # fmt: skip
        columns |= {
            "events": self._events,
            "eventsOf": self._events_of,
            "copies": self._copies,
            "moves": self._moves,
            "rootOf": self._roots,
            "tokenFrames": _ragged("", frames)[""],
            **_ragged("spans", [_flat(lane.spans) for lane in lanes]),
            **_ragged("tokens", tokens),
        }
        notes = [
            (self._steps_per_frame > 1,
             f"{self._num_steps:,} steps are shown in groups of {self._steps_per_frame}; changes"
             " inside a group are not visible"),
            (len(all_lanes) > MAX_LANES,
             f"the last {len(all_lanes) - MAX_LANES:,} of {len(all_lanes):,} sequences have no"
             " lane"),
            (self._num_dropped_notes > 0,
             f"{self._num_dropped_notes:,} of the scheduler's notes are omitted"),
            (recording.is_torn, "the file is incomplete: the run was killed, or has not ended"),
            (not has_tokens,
             f"{num_tokens:,} tokens are too many: their ids and text are omitted"),
        ]  # fmt: skip
        ids = {lane.seq.request.request_id for lane in lanes}
        header, layout = recording.header, self.scheduler.block_manager.layout
        used = sorted(set(_flat(tokens))) if text_of else ()
        meta = {
            "title": title,
            "thinned": [note for holds, note in notes if holds],
            # Per request the lines of `nanoengine explain`: its id, and [step, sentence].
            "requestLines": [
                [name, [[n, line.removeprefix(f"step {n}: ")] for n, line in lines]]
                for name, lines in narrative.requests.items()
                if name in ids
            ],
            "runLines": narrative.run_lines(),
            "words": {str(one): text_of(one) for one in used} if text_of else None,
            "header": {
                "engine": header["engine"],
                "date": header["date"],
                "numBlocks": layout.num_blocks,
                "blockSize": layout.block_size,
                "groups": [[len(group.layers), group.sliding_window] for group in layout.groups],
                "scheduler": header["scheduler"],
                "tiers": [[tier.name, header["tiers"][tier.name]] for tier in self._tiers()],
                "model": header["model"],
            },
            "frames": self._frame,
            "stepsPerFrame": self._steps_per_frame,
            "lanes": [self._lane_meta(lane) for lane in lanes],
            "marks": self._marks,
            "notes": self._notes,
            "waits": self._waits,
        }
        return PageData(meta, columns)

    def _lane_meta(self, lane: _Lane) -> dict[str, Any]:
        seq, request = lane.seq, lane.seq.request
        return {
            "id": request.request_id,
            "seq": seq.seq_id,
            "prompt": seq.num_prompt_tokens,
            "arrived": lane.arrived,
            "ended": lane.ended,
            "reason": seq.finish_reason,
            "detail": request.error if seq.finish_reason == "error" else seq.stop_reason,
            "max": seq.max_num_tokens - seq.num_prompt_tokens,
            "t": request.arrival_time,
            "priority": request.priority,
            "first": seq.index == 0,
        }


def _flat(entries: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(entries))


def _differences(values: Sequence[int]) -> list[int]:
    """The differences between consecutive values, which compress well."""
    return [now - was for was, now in zip([0, *values], values, strict=False)]


def _ragged(name: str, lists: Sequence[Sequence[int]]) -> dict[str, array.array[int]]:
    """Lists of different lengths as one column, and the offset of each."""
    starts = array.array("i", itertools.accumulate(map(len, lists), initial=0))
    return {name: array.array("i", itertools.chain.from_iterable(lists)), f"{name}Of": starts}


assert array.array("i").itemsize == 4 and sys.byteorder == "little", "columns are of 32 bits"
