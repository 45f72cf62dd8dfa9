"""Story: what a trace says of a run, in sentences: of the run, of a request, of a step.

    Recording ── Fold, step by step ──► Story ── run_lines()            five things worth knowing
                                              ├─ request_lines(id)      from arrival to end
                                              └─ step_lines(number)     what one step did, and why

Every sentence follows from the trace alone. Where a setting would change what a sentence of the run
tells, the sentence ends with that setting. Used by `nanoengine explain` and by the viewer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoengine.core.plan import StepTimes
from nanoengine.errors import TraceError
from nanoengine.observe.metrics import step_seconds
from nanoengine.observe.trace_fold import BlockEvents, Fold
from nanoengine.observe.trace_reader import Admitted, Recording, TracedStep

LACKS = {
    "row": "for want of a row",
    "blocks": "for want of blocks",
    "read": "while blocks were read from disk for it",
    "policy": "because the admission policy held it back",
    "budget": "because its prompt did not fit the budget of the step",
    "token": "for its last token, which was under way",
    "preempted": "in which somebody was preempted, so that nobody was admitted",
    "spent": "in which others used the whole budget",
}
"""What the first of the queue lacked; the last two are so for everyone who waits."""
FOR_ALL = ("preempted", "spent")

MORE_BLOCKS = "more blocks (num_kv_blocks, kv_cache_gib)"
LARGER_BUDGET = "a larger budget (max_num_batched_tokens)"
REMEDIES = {
    "row": "more rows (max_num_seqs)",
    "blocks": MORE_BLOCKS,
    "read": "more host memory (kv_host_gib), or DiskTier(policy='recompute')",
    "policy": f"{MORE_BLOCKS}, or admission='watermark', at the risk of preemptions",
    "budget": LARGER_BUDGET,
    "token": "nothing: it waits for the device",
    "preempted": MORE_BLOCKS,
    "spent": LARGER_BUDGET,
}
"""What would shorten a wait, by what was lacking."""


@dataclass(slots=True)
class Waiting:
    """A sequence in the queue: since which step of the trace and when, what it lacked itself, and
    how many that came later went first, because of their priority or not."""

    since: int
    time_s: float
    lacked: Counter[str] = field(default_factory=Counter)
    num_overtaken: int = 0
    num_by_priority: int = 0


@dataclass(slots=True)
class RequestStory:
    """What is told of one request: (step, sentence), and how it waited before its first row."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    waited_s: float = 0.0
    waited_steps: int = 0
    waited: str = ""
    lacked: str = ""


class Story:
    """Follows a whole recording, once.

    Attributes:
        requests: id -> its story.
    """

    def __init__(self, recording: Recording, *, step: int | None = None) -> None:
        self.recording = recording
        self.requests: dict[str, RequestStory] = {}
        self.counts: Counter[str] = Counter()
        self.hurt: Counter[str] = Counter()  # request -> tokens it computed after an eviction
        self._fold = Fold(recording.header, recording.state)
        self._waiting: dict[int, Waiting] = {}
        self._heads: dict[str, list[int]] = {lack: [0] for lack in LACKS}
        self._evicted: dict[int, int] = {}  # content -> the step in which its last block lost it
        self._lost: dict[int, int] = {}  # preempted sequence -> computed tokens that it gave up
        self._storing: set[int] = set()  # host blocks
        self._from_disk: set[int] = set()  # host blocks
        self._again: set[int] = set()  # sequences back from preemption
        self._prefill: dict[int, int] = {}  # sequence -> tokens it had to compute at its admission
        self._chunks: dict[int, list[int]] = {}
        self._step = step
        self._step_lines: list[str] = []
        for index, (one, fold, events) in enumerate(Fold.follow(recording)):
            self._fold = fold
            self._follow(index, one, events)
        self._finish()

    # --- following ----------------------------------------------------------------------------

    def _follow(self, index: int, step: TracedStep, events: BlockEvents) -> None:
        for arrival in step.arrived:
            self.requests[arrival.request_id] = story = RequestStory()
            several = f", {arrival.n} times" if arrival.n > 1 else ""
            priority = f", of priority {arrival.priority}" if arrival.priority else ""
            story.lines.append(
                (step.step, f"Request {arrival.request_id} arrived at {_s(arrival.time_s)} with"
                            f" {_tokens(arrival.num_prompt_tokens)}, to sample at most"
                            f" {arrival.max_tokens}{several}{priority}.")
            )  # fmt: skip
            self._waiting[arrival.seq_id] = Waiting(index, arrival.time_s)
        self._note_preemptions(index, step)
        for fork in step.forked:
            parent = self._fold.running.get(fork.parent_row)
            of = f" from {self.name(parent.seq_id)}" if parent else ""
            self._tell(fork.seq_id, step.step, f"forked{of}: the two share all blocks until one of"
                                               " them writes.")  # fmt: skip
        self._note_tiers(step)
        for new in step.admitted:
            self._admit(index, step, new)
        self._note_content(step, events)
        self._note_rows(step)
        self._count(index, step, events)
        for seq_id, reason, num_tokens, detail in step.ended:
            self._end(seq_id, step.step, reason, num_tokens, detail)
        if step.step == self._step:
            self._step_lines = list(self._describe(index, step, events))

    def _note_preemptions(self, index: int, step: TracedStep) -> None:
        for seq_id, num_computed, reason in step.preempted:
            why = self._named(reason)
            if why.startswith(f"{self.name(seq_id)} needs"):
                why = "it needed a block, none was free, and it is the last in the order"
            self._tell(
                seq_id, step.step, f"preempted with {_tokens(num_computed)} computed: {why}."
            )
            self._lost[seq_id] = num_computed
            self.counts["preemptions"] += 1
            self.counts["lost tokens"] += num_computed
            self._waiting[seq_id] = Waiting(index + 1, step.time_s)

    def _note_tiers(self, step: TracedStep) -> None:
        """Which host blocks hold what came from disk: what no store from the device explains."""
        for move in step.moved:
            if move.kind == "store":
                self._storing.update(move.tier_ids)
        for event in step.content:
            if event.pool == "host":
                self._from_disk.discard(event.block_id)
                if event.content is not None and event.block_id not in self._storing:
                    self._from_disk.add(event.block_id)
                self._storing.discard(event.block_id)

    def _admit(self, index: int, step: TracedStep, new: Admitted) -> None:
        """A sequence has got a row: how long it waited, and what of it was cached."""
        waiting = self._waiting.pop(new.seq_id, None)
        if new.seq_id not in self._lost:
            self._overtake(new.seq_id)
        start_s = step.time_s - step_seconds(step.times)
        parts = []
        if waiting is not None and index > waiting.since:
            waited_s = max(0.0, start_s - waiting.time_s)
            waited = self._why_waited(waiting, index)
            parts.append(
                f"admitted to row {new.row} after {_n(index - waiting.since, 'step')} of waiting"
                f" ({_s(waited_s)}): {waited}"
            )
            story = self._story(new.seq_id)
            if new.seq_id not in self._lost and story is not None:
                story.waited_s, story.waited_steps = waited_s, index - waiting.since
                story.waited, story.lacked = waited, self._main_lack(waiting, index)
        else:
            parts.append(f"admitted to row {new.row} at once")
        num_known = len(new.token_ids)
        loaded = {
            device_id: "disk" if tier_id in self._from_disk else move.tier
            for move in step.moved
            if move.kind == "load"
            for device_id, tier_id in zip(move.device_ids, move.tier_ids, strict=True)
        }
        if new.num_cached_tokens:
            parts.append(self._whence(new, num_known, loaded))
        else:
            parts.append(f"none of its {_tokens(num_known)} was cached")
        lost = self._lost.pop(new.seq_id, 0)
        if lost:
            again = max(lost - new.num_cached_tokens, 0)
            self._again.add(new.seq_id)
            self.counts["recomputed tokens"] += again
            parts.append(f"{again} had to be computed again" if again else "nothing was lost")
        self._prefill[new.seq_id] = num_known
        self._chunks[new.seq_id] = []
        self._tell(new.seq_id, step.step, "; ".join(parts) + ".")

    def _overtake(self, seq_id: int) -> None:
        """Counts, for those that have waited for longer, that this one goes first."""
        priority = self._priority(seq_id)
        for other, waiting in self._waiting.items():
            if other > seq_id:  # Why: they wait in the order of their arrival.
                break
            waiting.num_overtaken += 1
            waiting.num_by_priority += priority < self._priority(other)

    def _priority(self, seq_id: int) -> int:
        request = self._fold.requests.get(self._request_of(seq_id))
        return request.priority if request else 0

    def _whence(self, new: Admitted, num_known: int, loaded: dict[int, str]) -> str:
        """Who had computed what was cached, and which of it a tier held."""
        size, sources, tiers = self.recording.header.block_size, Counter[str](), Counter[str]()
        table = self._fold.running[new.row].block_tables[0] if new.row in self._fold.running else []
        for block_id in table[: new.num_cached_tokens // size]:
            if block_id in loaded:
                tiers[loaded[block_id]] += 1
            held = self._fold.content["device"].get(block_id)
            by = self._fold.computed_by.get(held.name) if held else None
            if by is not None:
                name = "itself" if by.seq_id == new.seq_id else self.name(by.seq_id)
                sources[f"{name} in step {by.step}"] += size
        told = f"{new.num_cached_tokens} of its {_tokens(num_known)} were cached"
        if sources:
            most = [f"{name} ({n})" if len(sources) > 1 else name for name, n in
                    sources.most_common(3)]  # fmt: skip
            more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
            told += f", computed by {', '.join(most)}{more}"
        for tier, count in tiers.items():
            told += f"; {_n(count, 'block')} came back from {tier}"
        return told

    def _note_content(self, step: TracedStep, events: BlockEvents) -> None:
        """Content that is computed although it was cached before: its eviction has hurt."""
        size = self.recording.header.block_size
        when: dict[int, list[int]] = {}  # sequence -> for each block the step of its eviction
        computed = {block_id: seq_id for block_id, seq_id in events.hashed if seq_id is not None}
        for event in step.content:
            if event.pool == "device" and event.content is not None:
                evicted = self._evicted.pop(event.content, None)
                if evicted is not None and event.block_id in computed:
                    when.setdefault(computed[event.block_id], []).append(evicted)
        for seq_id, steps in when.items():
            if seq_id not in self._again:  # else it is waste of the preemption
                self.hurt[self._request_of(seq_id)] += size * len(steps)
            until = f"{min(steps)}" if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
            self._tell(
                seq_id,
                step.step,
                f"computes {_tokens(size * len(steps))} that had been cached until step {until},"
                " when their blocks were evicted.",
            )
        for _, content in events.evicted:
            self._evicted[content] = step.step
        self.counts["evicted"] += len(events.evicted)

    def _note_rows(self, step: TracedStep) -> None:
        """How a prompt is computed: whole, or in chunks."""
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            seq = self._fold.running.get(row)
            if seq is None or seq.seq_id not in self._prefill:
                continue
            known = self._prefill[seq.seq_id]
            chunks = self._chunks[seq.seq_id]
            chunks.append(count)
            if start + count < known:
                continue
            del self._prefill[seq.seq_id], self._chunks[seq.seq_id]
            if len(chunks) > 1:
                sizes = ", ".join(map(str, chunks[:6])) + (", ..." if len(chunks) > 6 else "")
                self._tell(
                    seq.seq_id,
                    step.step,
                    f"computed to its end in {len(chunks)} chunks of {sizes} tokens:"
                    f" {self._why_chunks(chunks)}.",
                )

    def _why_chunks(self, chunks: list[int]) -> str:
        limits = self.recording.header.scheduler
        threshold = limits.get("long_prefill_threshold", 0)
        if threshold and max(chunks) == threshold:
            return f"long_prefill_threshold is {threshold}"
        return f"a step computes at most {limits['max_num_batched_tokens']} tokens, decodes first"

    def _count(self, index: int, step: TracedStep, events: BlockEvents) -> None:
        """Sums over the run, and what the head of the queue lacks in this step."""
        head = ""
        if step.waits:
            head = step.waits[0][1]
        elif step.num_waiting:
            head = "preempted" if step.preempted else "spent"
        for lack, sums in self._heads.items():
            sums.append(sums[-1] + (lack == head))
        for seq_id, lack in step.waits:
            if seq_id in self._waiting:
                self._waiting[seq_id].lacked[lack] += 1
        num_tokens = sum(step.counts)
        self.counts["tokens"] += num_tokens
        self.counts["sampled"] += sum(map(len, step.sampled))
        if step.num_waiting:
            self.counts["steps with a queue"] += 1
            self.counts["tokens with a queue"] += num_tokens
            self.counts[f"queue lacks {head}"] += 1
        for row in step.drafts:
            self.counts["drafts"] += len(step.drafts[row])
            tokens = step.sampled[step.rows.index(row)]
            self.counts["right drafts"] += max(len(tokens) - 1, 0)
        for move in step.moved:
            self.counts[f"{move.kind} {move.tier}"] += len(move.device_ids)
        self.counts["copies"] += len(step.copied)

    def _end(
        self, seq_id: int, step: int, reason: str, num_tokens: int, detail: int | str | None
    ) -> None:
        words = {
            "length": f"ended by its length, with {_tokens(num_tokens)}",
            "stop": "ended by a stop"
                    + (f" ({detail!r})" if detail is not None else " of the model's own")
                    + f", with {_tokens(num_tokens)}",
            "abort": f"aborted with {_tokens(num_tokens)}",
            "error": f"failed with {_tokens(num_tokens)}: {detail}",
            "drop": f"dropped with {_tokens(num_tokens)}: the search goes on without it",
        }  # fmt: skip
        waiting = self._waiting.pop(seq_id, None)
        never = "; it never had a row" if waiting and seq_id not in self._lost else ""
        self._tell(seq_id, step, f"{words.get(reason, reason)}{never}.")

    def _finish(self) -> None:
        """What the last line tells, and who still waits."""
        last = self.recording.steps[-1].step if self.recording.steps else 0
        end = self.recording.end
        for seq_id, reason, num_tokens, detail in end.ended if end else ():
            self._end(seq_id, last, reason, num_tokens, detail)
        for seq_id, waiting in self._waiting.items():
            num_steps = len(self.recording.steps) - waiting.since
            why = self._why_waited(waiting, len(self.recording.steps))
            self._tell(
                seq_id,
                last,
                f"still waits where the trace ends, for {_n(num_steps, 'step')}: {why}.",
            )
            story = self._story(seq_id)
            if story is not None and seq_id not in self._lost:
                story.waited_s = max(0.0, self._last_s() - waiting.time_s)
                story.waited_steps, story.waited = num_steps, why
                story.lacked = self._main_lack(waiting, len(self.recording.steps))

    # --- waits --------------------------------------------------------------------------------

    def _why_waited(self, waiting: Waiting, until: int) -> str:
        """What it lacked, in how many of the steps, and who went first."""
        heads, own = self._heads_between(waiting, until), waiting.lacked
        parts = [
            f"{count:,} {LACKS[lack]}"
            for lack, count in (own + Counter({k: heads[k] for k in FOR_ALL})).most_common()
        ]
        behind = heads - own - Counter(dict.fromkeys(FOR_ALL, until))
        if behind:
            main = max(behind, key=lambda lack: behind[lack])
            parts.append(
                f"{behind.total():,} behind others that waited"
                f" {LACKS[main].replace(' it ', ' them ').replace(' its ', ' their ')}"
            )
        told = ", ".join(parts)
        if waiting.num_overtaken:
            told += f"; {_n(waiting.num_overtaken, 'request')} that came later went first"
            if waiting.num_by_priority:
                told += f", {waiting.num_by_priority} of them of higher priority"
        return told

    def _main_lack(self, waiting: Waiting, until: int) -> str:
        lacks = self._heads_between(waiting, until)
        return max(lacks, key=lambda lack: lacks[lack])

    def _heads_between(self, waiting: Waiting, until: int) -> Counter[str]:
        """What the head of the queue lacked, in how many of these steps."""
        return Counter(
            {lack: sums[min(until, len(sums) - 1)] - sums[min(waiting.since, len(sums) - 1)]
             for lack, sums in self._heads.items()}
        )  # fmt: skip

    # --- names --------------------------------------------------------------------------------

    def name(self, seq_id: int) -> str:
        """ "request 7", or "sequence 12 of request 7" if that has several."""
        seq = self._fold.sequences.get(seq_id)
        request_id = seq.request_id if seq else ""
        request = self._fold.requests.get(request_id)
        if request is None:
            return f"sequence {seq_id}"
        if request.seq_id == seq_id:
            return f"request {request_id}"
        return f"sequence {seq_id} of request {request_id}"

    def _named(self, reason: str) -> str:
        """The scheduler's words, with requests in place of its numbers."""
        return re.sub(r"\bseq (\d+)", lambda match: self.name(int(match[1])), reason)

    def _request_of(self, seq_id: int) -> str:
        seq = self._fold.sequences.get(seq_id)
        return seq.request_id if seq else ""

    def _story(self, seq_id: int) -> RequestStory | None:
        return self.requests.get(self._request_of(seq_id))

    def _tell(self, seq_id: int, step: int, what: str) -> None:
        story = self._story(seq_id)
        if story is not None:
            request = self._fold.requests[self._request_of(seq_id)]
            who = "" if request.seq_id == seq_id else f"its sequence {seq_id}: "
            story.lines.append((step, f"step {step}: {who}{what}"))

    def _last_s(self) -> float:
        return self.recording.steps[-1].time_s if self.recording.steps else 0.0

    # --- what is asked ------------------------------------------------------------------------

    def request_lines(self, request_id: str) -> list[str]:
        """One request from its arrival to its end.

        Raises:
            TraceError: the trace tells of no such request.
        """
        story = self.requests.get(request_id)
        if story is None:
            known = [*map(repr, list(self.requests)[:8]), *["..."] * (len(self.requests) > 8)]
            raise TraceError(
                f"the trace tells of no request {request_id!r}; of {', '.join(known) or 'none'}"
            )
        return [line for _, line in story.lines]

    def step_lines(self) -> list[str]:
        """The step that the story was made for.

        Raises:
            TraceError: the trace has no such step.
        """
        if not self._step_lines:
            steps = self.recording.steps
            has = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no step"
            raise TraceError(f"the trace has no step {self._step}: it has {has}")
        return self._step_lines

    def run_lines(self) -> list[str]:
        """The five things worth knowing of the run, each with the setting that would change it."""
        header, steps = self.recording.header, self.recording.steps
        title = (
            f"{_n(len(steps), 'step')} in {_s(self._last_s())}:"
            f" {_n(len(self.requests), 'request')}, {self.counts['tokens']:,} tokens computed,"
            f" {self.counts['sampled']:,} sampled;"
            f" {_n(header.num_blocks - 1, 'block')} of {header.block_size} tokens,"
            f" {_n(header.scheduler['max_num_seqs'], 'row')}."
        )
        if self.counts["drafts"]:
            right, drafts = self.counts["right drafts"], self.counts["drafts"]
            title += f" {right:,} of {drafts:,} drafts were right."
        if self.recording.is_torn:
            title += " The file breaks off: the run was killed, or goes on."
        told = (self._waits(), self._waste(), self._evictions(), self._budget(), self._tiers())
        return [title, *(f"{i}. {line}" for i, line in enumerate(told, 1))]

    def _waits(self) -> str:
        waited = [(story.waited_steps, i) for i, story in self.requests.items() if story.waited]
        if not waited:
            return "Waiting: every request was admitted in the step that followed its arrival."
        longest = self.requests[max(waited, key=lambda one: one[0])[1]]
        name = max(waited, key=lambda one: one[0])[1]
        return (
            f"Waiting: {len(waited)} of {len(self.requests)} requests waited. Request {name} waited"
            f" longest, {_n(longest.waited_steps, 'step')} ({_s(longest.waited_s)}):"
            f" {longest.waited}."
            f" What would shorten it: {REMEDIES[longest.lacked]}."
        )

    def _waste(self) -> str:
        count = self.counts["preemptions"]
        if not count:
            return "Waste: nobody was preempted, so nothing was computed twice for want of blocks."
        again = self.counts["recomputed tokens"]
        told = (
            f"Waste: {_n(count, 'preemption')} gave up {_tokens(self.counts['lost tokens'])};"
            f" {again:,} of them were computed again,"
            f" {again / max(self.counts['tokens'], 1):.1%} of all that was computed."
        )
        remedy = MORE_BLOCKS
        if self.recording.header.scheduler.get("admission") == "WatermarkOnly":
            remedy += ", or admission='predictive', which admits fewer at a time"
        return f"{told} What would avoid it: {remedy}."

    def _evictions(self) -> str:
        evicted = self.counts["evicted"]
        if not evicted:
            return "Evictions: no block lost its content."
        told = f"Evictions: {_n(evicted, 'block')} lost their content"
        if not self.hurt:
            but = " but those that were preempted" if self.counts["preemptions"] else ""
            return f"{told}, and nobody{but} asked for it again."
        name, most = self.hurt.most_common(1)[0]
        return (
            f"{told}, and {_tokens(sum(self.hurt.values()))} were computed again for it, most for"
            f" request {name} ({most:,}). What would keep them: {MORE_BLOCKS}, or a tier"
            " (kv_host_gib, kv_tiers)."
        )

    def _budget(self) -> str:
        steps, limits = self.counts["steps with a queue"], self.recording.header.scheduler
        budget = limits["max_num_batched_tokens"]
        if not steps:
            return "Budget: no step left anybody waiting, so no budget was left unused."
        used = self.counts["tokens with a queue"] / (steps * budget)
        lacks = {lack: self.counts[f"queue lacks {lack}"] for lack in LACKS}
        main = max(lacks, key=lambda lack: lacks[lack])
        why = LACKS[main].removeprefix("in which ")
        why = why if main in FOR_ALL else f"the first waited {why}"
        return (
            f"Budget: while somebody waited, in {_n(steps, 'step')}, {used:.0%} of the {budget:,}"
            f" tokens that a step may compute were used. In {lacks[main]:,} of them {why}."
            f" What would change it: {REMEDIES[main]}."
        )

    def _tiers(self) -> str:
        tiers = self.recording.header.tiers
        if not tiers:
            return "Tiers: there are none below the device (kv_host_gib, kv_disk)."
        name = next(iter(tiers))
        loads, stores = self.counts[f"load {name}"], self.counts[f"store {name}"]
        told = f"Tiers: {_n(stores, 'block')} went to {name}, {loads:,} came back"
        if not loads and stores:
            return f"{told}: it cost copies and saved nothing; without kv_host_gib there are none."
        size = self.recording.header.block_size
        return (
            f"{told}, which spared {_tokens(loads * size)} of computing. Stores only when blocks"
            " are soon evicted: HostTier(store='lazy')."
        )

    # --- one step -----------------------------------------------------------------------------

    def _describe(self, index: int, step: TracedStep, events: BlockEvents) -> Iterable[str]:
        seconds = step_seconds(step.times)
        took = f", took {1e3 * seconds:.3g} ms{_split(step.times)}" if seconds else ""
        yield f"Step {step.step} was committed at {_s(step.time_s)}{took}."
        decodes, prompts = [], []
        for i, (row, start, count) in enumerate(
            zip(step.rows, step.starts, step.counts, strict=True)
        ):
            seq = self._fold.running.get(row)
            if seq is None:
                continue
            if count == 1 and step.num_logits[i] == 1 and start >= seq.num_prompt_tokens:
                decodes.append(seq)
            elif count:
                prompts.append(f"{self.name(seq.seq_id)} (tokens {start} to {start + count - 1})")
        yield (
            f"It computed {_tokens(sum(step.counts))}: {_n(len(decodes), 'sequence')} decoded one"
            f" token each" + (f", the others are from {', '.join(prompts)}." if prompts else ".")
        )
        for new in step.admitted:
            yield f"{self._last_line(new.seq_id, 'admitted')}"
        for fork in step.forked:
            yield f"Forked: {self.name(fork.seq_id)}."
        for seq_id, num_computed, reason in step.preempted:
            yield (
                f"Preempted: {self.name(seq_id)} with {_tokens(num_computed)} computed, because"
                f" {self._named(reason)}."
            )
        for row, tokens in step.drafts.items():
            right = len(step.sampled[step.rows.index(row)]) - 1
            seq = self._fold.running[row]
            yield f"Drafts: {right} of {len(tokens)} were right for {self.name(seq.seq_id)}."
        yield from self._block_lines(events)
        if step.waits:
            who = [f"{self.name(seq_id)} {LACKS[lack]}" for seq_id, lack in step.waits[:4]]
            yield f"Waiting, {step.num_waiting} in all: {', '.join(who)}."
        elif step.num_waiting:
            yield f"Waiting: {step.num_waiting}."
        yield from (f"The scheduler says: {self._named(reason)}." for reason in step.reasons)
        for seq_id, reason, num_tokens, _ in step.ended:
            yield f"Ended: {self.name(seq_id)}, by {reason}, with {_tokens(num_tokens)}."

    def _last_line(self, seq_id: int, word: str) -> str:
        story = self._story(seq_id)
        told = next((t for _, t in reversed(story.lines) if word in t), "") if story else ""
        return f"{self.name(seq_id).capitalize()}: {told.partition(': ')[2] or 'admitted.'}"

    def _block_lines(self, events: BlockEvents) -> Iterable[str]:
        parts = [
            f"{len(entries)} {word}"
            for word, entries in (
                ("taken", events.taken), ("revived", events.revived), ("shared", events.shared),
                ("hashed", events.hashed), ("freed", events.freed), ("evicted", events.evicted),
            )
            if entries
        ]  # fmt: skip
        if parts:
            yield f"Blocks: {', '.join(parts)}."
        for src, dst in events.copied:
            yield f"Copied: block {src} to {dst}, because two share it and one of them writes."
        for move in events.moved:
            way = "from" if move.kind == "load" else "to"
            yield f"Moved: {_n(len(move.device_ids), 'block')} {way} {move.tier}."


def _split(times: StepTimes) -> str:
    parts = [
        f"{name.removesuffix('_s')} {1e3 * getattr(times, name):.3g}"
        for name in StepTimes.__dataclass_fields__
        if getattr(times, name)
    ]
    return f" ({', '.join(parts)})"


def _n(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _tokens(count: int) -> str:
    return _n(count, "token")


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
