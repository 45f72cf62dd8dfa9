"""page_data: a recording as the columns that the viewer's page folds into block tables itself.

    Fold ── rows and contents that changed ──► events: a block is taken, dropped, indexed, evicted
         ── plans and results ──► a line of figures a frame, spans of a lane, tokens

The page steps to any place of a run, so it can't be sent each state: 10,000 of a pool of 100,000
blocks would be gigabytes. It is sent what changes, and keeps a state every so often. A frame is a
step, or several of them where a run is so long that no screen could show them apart.

An event is found by comparing tables before and after a frame rather than by reading the plan. So a
frame of several steps has the net of them, and a trace that is shown from its middle begins with
what is held by then.
"""

from __future__ import annotations

import array
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.block_pool import NULL_BLOCK
from nanoengine.errors import TraceError
from nanoengine.observe.explain import Story
from nanoengine.observe.trace import TIMES
from nanoengine.observe.trace_fold import Fold, HeldContent, TracedSequence
from nanoengine.observe.trace_reader import Recording, TracedStep

MAX_FRAMES = 20_000
"""More steps than that are shown several to a frame."""
MAX_LANES = 20_000
"""More sequences than that are left out: the last to come."""
MAX_TOKENS = 4_000_000
"""If all sequences together have more tokens, their ids are left out."""
MAX_NOTES = 50_000
"""The scheduler's words are kept up to that many."""

TAKE, DROP, INDEX, EVICT = range(4)
"""What an event says of a block: one more table names it, one less; its content can be hit from now
on; it has lost its content."""
WAITING, PREFILL, DECODE, PREEMPTED, IDLE = range(5)
"""What a sequence does in a span of frames; IDLE: it has a row and computes nothing."""
KIND_SHIFT = 27
"""An event's first number is its kind above this many bits, and a block below."""

NONE = -1


@dataclass(slots=True)
class PageData:
    """What the page gets: `meta` as JSON, and columns of 32-bit integers by name."""

    meta: dict[str, Any]
    columns: dict[str, array.array[int]]


@dataclass(slots=True)
class _Lane:
    """A sequence as the page draws it."""

    index: int
    seq: TracedSequence
    arrived: int
    spans: list[list[int]] = field(default_factory=list)  # first frame, last, kind, computed
    token_frames: list[int] = field(default_factory=list)  # when each token was known
    num_prefill: int = 0  # tokens known when it got its row: up to there it prefills
    num_computed_ever: int = 0
    ended: int = NONE


def page_data(
    recording: Recording,
    *,
    steps: tuple[int, int | None] = (0, None),
    text_of: Callable[[int], str] | None = None,
    title: str = "",
) -> PageData:
    """Follows a recording and gathers what the page needs.

    Args:
        steps: the first step to show, and the one to stop before; None: no end.
        text_of: a token id in words; None: the page shows ids.
        title: of the page: the file's name.

    Raises:
        TraceError: none of the steps is in the trace, or its steps contradict each other.
    """
    first, end = steps
    shown = [s.step for s in recording.steps if s.step >= first and (end is None or s.step < end)]
    if not shown:
        known = [step.step for step in recording.steps]
        has = f"it has steps {known[0]} to {known[-1]}" if known else "it has none: nothing has run"
        raise TraceError(f"there is no step to show of {title or 'this trace'}; {has}")
    gathering = _Gathering(recording, shown[0], -(-len(shown) // MAX_FRAMES))
    for step, fold, _ in Fold.follow(recording):
        if shown[0] <= step.step <= shown[-1]:
            gathering.follow(step, fold)
        elif step.step < shown[0]:
            gathering.pass_by(step, fold)
    # Why after the loop: the trace's last line tells of what ended without a step.
    gathering.finish()
    return gathering.data(text_of, title)


class _Gathering:
    """Columns as they grow, frame by frame."""

    def __init__(self, recording: Recording, first_step: int, steps_per_frame: int) -> None:
        header = recording.header
        self._recording = recording
        self._fold = Fold(header)
        self._first_step = first_step
        self._steps_per_frame = steps_per_frame
        self._size = header.block_size
        self._tiers = sorted(header.tiers)
        self._num_steps = 0
        self._frame = 0
        self._is_open = False  # a frame that has steps and is not written yet
        self._lanes: dict[int, _Lane] = {}
        # Tables by row, and contents of the device's blocks, as the page has been told of them.
        self._tables: dict[int, tuple[_Lane | None, list[list[int]]]] = {}
        self._contents: dict[int, HeldContent] = {}
        self._takers: dict[int, tuple[int, int]] = {}  # block -> last lane, its table's first block
        self._dirty_rows: set[int] = set()
        self._dirty_blocks: set[int] = set()
        self._status = bytearray(header.num_blocks)  # 0 empty, 1 cached, 2 active
        self._num_of = [header.num_blocks - 1, 0, 0]
        self._names: dict[int, int] = {}  # name of a content -> its number in the page
        self._root_of: dict[int, int] = {}  # name of a content -> number of its prefix's first one
        self._hit_tokens = self._queried_tokens = 0
        self._sums: dict[str, int] = {}
        names = [
            "step", "t", "prefill", "decode", "waiting", "running", "active", "cached", "empty",
            "recomputed", "hit", "queried", "sampled", *TIMES, *(f"tier:{t}" for t in self._tiers),
        ]  # fmt: skip
        self._frames = {name: array.array("i") for name in names}
        self._events = array.array("i")  # kind and block, lane, argument
        self._events_of = array.array("i", [0])
        self._copies = array.array("i")  # frame, source, target
        self._moves = array.array("i")  # frame, tier, 1 if loaded, device block, tier's block
        self._marks: list[list[Any]] = []  # frame, what, lane, number, words
        self._notes: list[list[Any]] = []  # frame, words
        self._waits: list[list[Any]] = []  # frame, [lane, what it lacks]
        self._told_waits: list[tuple[int, str]] = []
        self._num_untold = 0

    # --- step by step -------------------------------------------------------------------------

    def pass_by(self, step: TracedStep, fold: Fold) -> None:
        """A step before the first that is shown: who came, and what was looked up, counts."""
        self._fold = fold
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            if row in fold.running:
                lane = self._lane(fold.running[row])
                lane.num_computed_ever = max(lane.num_computed_ever, start + count)
        for arrival in step.arrived:
            self._lane(fold.sequences[arrival.seq_id])
        for new in step.admitted:
            self._lane(fold.sequences[new.seq_id]).num_prefill = len(new.token_ids)

    def follow(self, step: TracedStep, fold: Fold) -> None:
        """One more step; the frame is written once it has all of its steps."""
        self._fold = fold
        if not self._num_steps:
            self._begin()
        self._is_open = True
        self._note_lanes(step)
        self._note_changes(step)
        self._note_rows(step)
        self._note_ends(step)
        self._note_words(step)
        self._num_steps += 1
        if self._num_steps % self._steps_per_frame == 0:
            self._write_frame(step)

    def finish(self) -> None:
        """Writes a last frame that is not full."""
        if self._is_open:
            self._write_frame(None)

    def _begin(self) -> None:
        """What is held when the page begins counts as taken in its first frame."""
        held = self._fold.content.get("device", {})
        self._dirty_rows.update(self._fold.running)
        self._dirty_blocks.update(held)
        for seq in self._fold.running.values():
            lane = self._lane(seq)
            lane.num_prefill = lane.num_prefill or len(seq.token_ids)

    def _lane(self, seq: TracedSequence) -> _Lane:
        lane = self._lanes.get(seq.seq_id)
        if lane is None:
            arrived = self._frame if self._num_steps else NONE
            lane = self._lanes[seq.seq_id] = _Lane(len(self._lanes), seq, arrived)
        return lane

    def _note_lanes(self, step: TracedStep) -> None:
        """Who comes, gets a row and loses it."""
        fold, frame = self._fold, self._frame
        for arrival in step.arrived:
            lane = self._lane(fold.sequences[arrival.seq_id])
            lane.arrived = frame
            self._span(lane, WAITING, 0)
        for gone in step.preempted:
            lane = self._lane(fold.sequences[gone.seq_id])
            self._span(lane, PREEMPTED, 0)
            self._mark("preempted", lane, gone.num_computed_tokens, gone.reason)
        loaded = {block for move in step.moved if move.kind == "load" for block in move.device_ids}
        for new in step.admitted:
            seq = fold.sequences[new.seq_id]
            lane = self._lane(seq)
            lane.num_prefill = len(new.token_ids)
            self._mark("admitted", lane, new.num_cached_tokens)
            if loaded and (n := len(loaded.intersection(*_as_sets(seq.block_tables)))):
                self._mark("loaded", lane, n)
            if not lane.num_computed_ever:  # Why: one that comes back finds what it had itself.
                self._hit_tokens += new.num_cached_tokens
                self._queried_tokens += len(new.token_ids)
        for fork in step.forked:
            lane = self._lane(fold.sequences[fork.seq_id])
            parent = fold.running.get(fork.parent_row)
            self._mark("forked", lane, self._lane(parent).index if parent else NONE)

    def _note_changes(self, step: TracedStep) -> None:
        """Which rows and blocks the frame has to be compared in."""
        self._dirty_rows.update(step.released)
        self._dirty_rows.update(new.row for new in step.admitted)
        self._dirty_rows.update(fork.row for fork in step.forked)
        self._dirty_rows.update(update.row for update in step.tables)
        for event in step.content:
            if event.pool == "device":
                cleared = event.block_id == NULL_BLOCK
                self._dirty_blocks.update(self._contents if cleared else (event.block_id,))
        for src, dst in step.copied:
            self._copies.extend((self._frame, src, dst))
        for move in step.moved:
            if move.tier in self._tiers:
                tier, is_load = self._tiers.index(move.tier), int(move.kind == "load")
                for device, below in zip(move.device_ids, move.tier_ids, strict=True):
                    self._moves.extend((self._frame, tier, is_load, device, below))

    def _note_rows(self, step: TracedStep) -> None:
        """What the rows compute, and what they sample."""
        running = self._fold.running
        prefill = decode = recomputed = sampled = 0
        for row, start, count, tokens in zip(
            step.rows, step.starts, step.counts, step.sampled, strict=True
        ):
            seq = running.get(row)
            if seq is None:
                continue
            lane, stop = self._lane(seq), start + count
            is_prefill = start < lane.num_prefill and count > 0
            self._span(lane, PREFILL if is_prefill else DECODE, stop)
            if is_prefill:
                prefill += count
            else:
                decode += count
            recomputed += max(min(stop, lane.num_computed_ever) - start, 0)
            lane.num_computed_ever = max(lane.num_computed_ever, stop)
            sampled += len(tokens)
        if len(running) > len(step.rows):
            scheduled = set(step.rows)
            for row, seq in running.items():
                if row not in scheduled and seq.finish_reason is None:
                    self._span(self._lane(seq), IDLE, seq.num_computed_tokens)
        for seq in running.values():
            self._note_tokens(self._lane(seq))
        self._sum(prefill=prefill, decode=decode, recomputed=recomputed, sampled=sampled)
        self._sum(**{
            name: round(1e6 * getattr(step.times, f"{name}_s")) for name in TIMES
        })  # fmt: skip

    def _note_tokens(self, lane: _Lane) -> None:
        frames, length = lane.token_frames, len(lane.seq.token_ids)
        if len(frames) < length:
            frames.extend(itertools.repeat(self._frame, length - len(frames)))
        elif len(frames) > length:
            del frames[length:]

    def _note_ends(self, step: TracedStep) -> None:
        for index, error in step.errors.items():
            seq = self._fold.running.get(step.rows[index])
            if seq is not None:
                self._mark("error", self._lane(seq), 0, error)
        for seq_id, reason, num_output_tokens, _ in step.ended:
            lane = self._lane(self._fold.sequences[seq_id])
            self._note_tokens(lane)
            if lane.ended == NONE:
                lane.ended = self._frame
                self._close_span(lane)
                self._mark("ended", lane, num_output_tokens, reason)

    def _note_words(self, step: TracedStep) -> None:
        """The scheduler's own words, and who waits for what."""
        for words in step.reasons:
            if len(self._notes) < MAX_NOTES:
                self._notes.append([self._frame, words])
            else:
                self._num_untold += 1
        if step.waits != self._told_waits:
            self._told_waits = step.waits
            sequences = self._fold.sequences
            waits = [
                [self._lane(sequences[seq_id]).index, lacks]
                for seq_id, lacks in step.waits
                if seq_id in sequences
            ]
            if self._waits and self._waits[-1][0] == self._frame:
                self._waits.pop()
            self._waits.append([self._frame, waits])

    # --- spans, marks and sums ----------------------------------------------------------------

    def _span(self, lane: _Lane, kind: int, computed: int) -> None:
        """The lane does this in the current frame: its last span grows, or a new one begins."""
        if lane.ended != NONE:
            return
        frame, spans = self._frame, lane.spans
        if spans:
            last = spans[-1]
            grows = last[2] == kind != PREFILL and last[1] in (NONE, frame - 1, frame)
            if grows or last[0] == frame:
                last[1], last[2], last[3] = self._until(kind), kind, computed
                return
            self._close_span(lane)
        spans.append([frame, self._until(kind), kind, computed])

    def _until(self, kind: int) -> int:
        """Why NONE: nothing tells of those that go on waiting."""
        return NONE if kind in (WAITING, PREEMPTED) else self._frame

    def _close_span(self, lane: _Lane) -> None:
        if lane.spans and lane.spans[-1][1] == NONE:
            lane.spans[-1][1] = max(self._frame - 1, lane.spans[-1][0])

    def _mark(self, what: str, lane: _Lane, number: int, words: str | None = None) -> None:
        self._marks.append([self._frame, what, lane.index, number, *([words] if words else [])])

    def _sum(self, **values: int) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value

    # --- a frame ------------------------------------------------------------------------------

    def _write_frame(self, step: TracedStep | None) -> None:
        """What the frame's steps have changed in all, and its figures."""
        fold = self._fold
        changed: set[int] = set()
        self._compare_rows(changed)
        self._compare_contents(changed)
        for block in changed:
            status = 2 if fold.refs[block] else int(block in self._contents)
            self._num_of[self._status[block]] -= 1
            self._num_of[status] += 1
            self._status[block] = status
        self._events_of.append(len(self._events) // 3)
        self._dirty_rows.clear()
        self._dirty_blocks.clear()
        last = step or self._last_step()
        values = self._sums | {
            "step": last.step,
            "t": round(last.time_s * 1e4),
            "waiting": last.num_waiting,
            "running": last.num_running,
            "active": self._num_of[2],
            "cached": self._num_of[1],
            "empty": sum(
                max(len(table) * self._size - seq.num_computed_tokens, 0)
                for seq in fold.running.values()
                for table in seq.block_tables
            ),
            "hit": self._hit_tokens,
            "queried": self._queried_tokens,
        }
        for tier in self._tiers:
            values[f"tier:{tier}"] = len(fold.content.get(tier, ()))
        for name, column in self._frames.items():
            column.append(min(values[name], 2**31 - 1))
        self._sums = {}
        self._frame += 1
        self._is_open = False

    def _last_step(self) -> TracedStep:
        steps = self._recording.steps
        index = next(i for i, step in enumerate(steps) if step.step == self._first_step)
        return steps[index + self._num_steps - 1]

    def _compare_rows(self, changed: set[int]) -> None:
        """Events of the blocks that a row's table names before the frame, or after it, and not
        both times. Those that go come first: blocks change hands, and sequences change rows."""
        gone: list[_Entry] = []
        come: list[_Entry] = []
        for row in sorted(self._dirty_rows):
            seq = self._fold.running.get(row)
            lane = self._lane(seq) if seq is not None else None
            after = [list(table) for table in seq.block_tables] if seq is not None else []
            was, before = self._tables.pop(row, (lane, []))
            stays = was is lane and before
            for group, table in enumerate(before):
                gone += _only_in(table, after[group] if stays else [], was, group)
            for group, table in enumerate(after):
                assert lane is not None
                taken = list(_only_in(table, before[group] if stays else [], lane, group))
                come += taken
                self._takers.update((block, (lane.index, table[0])) for block, *_ in taken)
            if lane is not None:
                self._tables[row] = (lane, after)
        for kind, entries in ((DROP, gone), (TAKE, come)):
            for block, lane_index, place in entries:
                self._events.extend((kind << KIND_SHIFT | block, lane_index, place))
                changed.add(block)

    def _compare_contents(self, changed: set[int]) -> None:
        held, told = self._fold.content.get("device", {}), self._contents
        for block in sorted(self._dirty_blocks):
            now = held.get(block)
            if now == told.get(block):
                continue
            changed.add(block)
            if block in told:
                del told[block]
                self._events.extend((EVICT << KIND_SHIFT | block, NONE, 0))
            if now is not None:
                told[block] = now
                is_held = self._fold.refs[block] and block in self._takers
                lane, first = self._takers[block] if is_held else (NONE, NULL_BLOCK)
                number = self._names.setdefault(now.name, len(self._names))
                root = held.get(first, now).name if lane != NONE else now.name
                self._root_of.setdefault(now.name, self._names.setdefault(root, len(self._names)))
                self._events.extend((INDEX << KIND_SHIFT | block, lane, number))

    # --- the whole ----------------------------------------------------------------------------

    def data(self, text_of: Callable[[int], str] | None, title: str) -> PageData:
        """All of it, as it is written into the page."""
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.index)
        for lane in lanes:
            self._note_tokens(lane)
            if lane.spans and lane.spans[-1][1] == NONE:
                lane.spans[-1][1] = lane.ended if lane.ended != NONE else self._frame - 1
        left_out = len(lanes) - MAX_LANES
        notes = self._thinned(left_out, lanes)
        lanes = lanes[:MAX_LANES]
        num_tokens = sum(len(lane.seq.token_ids) for lane in lanes)
        has_tokens = num_tokens <= MAX_TOKENS
        if not has_tokens:
            notes.append(f"{num_tokens:,} tokens are too many: their ids and words are left out")
        tokens = [lane.seq.token_ids if has_tokens else [] for lane in lanes]
        columns = dict(self._frames)
        columns["events"], columns["eventsOf"] = self._events, self._events_of
        columns["copies"], columns["moves"] = self._copies, self._moves
        columns["rootOf"] = array.array("i", [NONE]) * len(self._names)
        for name, root in self._root_of.items():
            columns["rootOf"][self._names[name]] = root
        columns |= _ragged("spans", [_flat(lane.spans) for lane in lanes])
        columns |= _ragged("tokens", tokens)
        frames = [_differences(lane.token_frames) if has_tokens else [] for lane in lanes]
        story = Story(self._recording)
        columns["tokenFrames"] = _ragged("", frames)[""]
        used = set(itertools.chain.from_iterable(tokens)) if text_of else ()
        meta = self._meta(lanes) | {
            "title": title,
            "thinned": notes,
            "stories": _stories(story, {lane.seq.request_id for lane in lanes}),
            "worthKnowing": story.run_lines(),
            "words": {str(one): text_of(one) for one in sorted(used)} if text_of else None,
        }
        return PageData(meta, columns)

    def _thinned(self, left_out: int, lanes: Sequence[_Lane]) -> list[str]:
        """What the page says of things that it does not show."""
        notes = []
        if self._steps_per_frame > 1:
            notes.append(
                f"{self._num_steps:,} steps are shown {self._steps_per_frame} at a time; what comes"
                " and goes between is not seen"
            )
        if left_out > 0:
            notes.append(f"of {len(lanes):,} sequences the last {left_out:,} have no lane")
        if self._num_untold:
            notes.append(f"{self._num_untold:,} of the scheduler's remarks are left out")
        if self._recording.is_torn:
            notes.append("the file breaks off: the run was killed, or still goes on")
        return notes

    def _meta(self, lanes: Sequence[_Lane]) -> dict[str, Any]:
        header, requests = self._recording.header, self._fold.requests
        told = []
        for lane in lanes:
            seq = lane.seq
            request = requests.get(seq.request_id)
            entry = {
                "id": seq.request_id or f"sequence {seq.seq_id}",
                "seq": seq.seq_id,
                "prompt": seq.num_prompt_tokens,
                "arrived": lane.arrived,
                "ended": lane.ended,
                "reason": seq.finish_reason,
                "detail": seq.detail,
            }
            if request is not None:
                first = request.seq_id == seq.seq_id
                entry |= {
                    "max": request.max_tokens, "t": request.time_s, "priority": request.priority,
                    "first": first,
                }  # fmt: skip
            told.append(entry)
        return {
            "header": {
                "engine": header.engine,
                "date": header.date,
                "numBlocks": header.num_blocks,
                "blockSize": header.block_size,
                "groups": [[len(group.layers), group.window] for group in header.groups],
                "scheduler": header.scheduler,
                "tiers": [[name, header.tiers[name]] for name in self._tiers],
                "model": header.model,
            },
            "frames": self._frame,
            "stepsPerFrame": self._steps_per_frame,
            "lanes": told,
            "marks": self._marks,
            "notes": self._notes,
            "waits": self._waits,
        }


def _stories(story: Story, request_ids: set[str]) -> list[list[Any]]:
    """Of each request what `nanoengine explain` tells: its id, and [step, sentence] in order."""
    return [
        [request_id, [[step, line.removeprefix(f"step {step}: ")] for step, line in told.lines]]
        for request_id, told in story.requests.items()
        if request_id in request_ids
    ]


_Entry = tuple[int, int, int]
"""Of a block table: the block, the lane's index, and the group above the place in the table."""


def _only_in(
    table: list[int], other: list[int], lane: _Lane | None, group: int
) -> Iterator[_Entry]:
    """The blocks of a table that another one has not at the same place."""
    if lane is None or other[: len(table)] == table:
        return
    same = len(other) if table[: len(other)] == other else 0
    for index in range(same, len(table)):
        block = table[index]
        if block != NULL_BLOCK and (index >= len(other) or other[index] != block):
            yield block, lane.index, group << 24 | index


def _as_sets(tables: Iterable[Sequence[int]]) -> list[set[int]]:
    return [set(itertools.chain.from_iterable(tables))]


def _flat(entries: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(entries))


def _differences(values: Sequence[int]) -> list[int]:
    """Each value less the one before, which packs well."""
    return [now - was for was, now in zip([0, *values], values, strict=False)]


def _ragged(name: str, lists: Sequence[Sequence[int]]) -> dict[str, array.array[int]]:
    """Lists of several lengths as one column, and where each of them begins."""
    starts = array.array("i", itertools.accumulate(map(len, lists), initial=0))
    return {name: array.array("i", itertools.chain.from_iterable(lists)), f"{name}Of": starts}


assert array.array("i").itemsize == 4 and sys.byteorder == "little", "columns are of 32 bits"
