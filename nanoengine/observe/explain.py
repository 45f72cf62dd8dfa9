"""Story: what a run does, in sentences: of the run, of a request, of a step.

    plans, sequences, pools ──► Story ── run_lines()            five things worth knowing
                                      ├─ request_lines(id)      from arrival to end
                                      └─ step_lines()           what one step did, and why

Where a setting would change what a sentence of the run tells, the sentence ends with that setting.
A `StepObserver`, of a replay or of an engine that runs. Used by `nanoengine explain` and by the
viewer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.plan import AdmittedSequence, StepPlan, StepTimes
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence
from nanoengine.errors import TraceError
from nanoengine.observe.metrics import step_seconds
from nanoengine.observe.steps import Step, StepObserver
from nanoengine.observe.trace_reader import Recording

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
    """A sequence in the queue: since which step that was seen and when, what it lacked itself, and
    how many that came later went first, because of their priority or not."""

    since: int
    time_s: float
    priority: int
    lacked: Counter[str] = field(default_factory=Counter)
    num_overtaken: int = 0
    num_by_priority: int = 0


@dataclass(slots=True)
class RequestStory:
    """What is told of one request: (step, sentence), and how it waited before its first row."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    wait: tuple[int, float, str, str] | None = None  # steps, seconds, why, what lacked most


def explained(recording: Recording, *, step: int | None = None) -> Story:
    """The story of a recorded run.

    Raises:
        TraceError: it can't be replayed.
    """
    replay = recording.replay()
    story = Story(replay.scheduler, replay.clock, step=step)
    replay.run(story)
    story.conclude(is_torn=recording.is_torn)
    return story


class Story(StepObserver):
    """Follows a run; `conclude` ends it.

    Args:
        step: the number of the step of which `step_lines` tells.

    Attributes:
        requests: id -> its story.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.perf_counter,
        *,
        step: int | None = None,
    ) -> None:
        super().__init__(scheduler, clock)
        self.requests: dict[str, RequestStory] = {}
        self.counts: Counter[str] = Counter()
        self.hurt: Counter[str] = Counter()  # request -> tokens it computed after an eviction
        self._manager = manager = scheduler.block_manager
        self._before = replace(scheduler.stats)
        self._numbers: list[int] = []  # of the steps so far
        self._last_s = 0.0
        self._is_torn = False
        self._waiting: dict[int, Waiting] = {}
        self._heads: dict[str, list[int]] = {lack: [0] for lack in LACKS}
        # By digest of a content: the sequence and the step that have computed it, and the step in
        # which it was evicted.
        self._computed_by: dict[bytes, tuple[int, int]] = {}
        self._evicted: dict[bytes, int] = {}
        self._lost: dict[int, int] = {}  # preempted sequence -> computed tokens that it gave up
        self._again: set[int] = set()  # sequences back from preemption
        self._prefill: dict[int, tuple[int, list[int]]] = {}  # sequence -> known tokens, chunks
        self._step = step
        self._step_lines: list[str] = []
        self._blocks: Counter[str] = Counter()  # what has happened to them since the plan before
        self._told_blocks: dict[str, int] = {}
        manager.pool.observers.append(self)

    # --- following ----------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> None:
        """Looks at the blocks of the step that is asked for."""
        super().on_plan(plan)
        if plan.step == self._step:
            blocks, happened = self._manager.pool.blocks, self._blocks
            refs = [blocks[i].ref_count for update in plan.table_updates for i in update.block_ids]
            revived, shared = happened["reused"], sum(count > 1 for count in refs)
            self._told_blocks = {
                "taken": len(refs) - refs.count(0) - shared - revived, "revived": revived,
                "shared": shared, "hashed": happened["stored"], "freed": happened["freed"],
                "evicted": happened["removed"],
            }  # fmt: skip
        self._blocks.clear()

    def on_block(self, event: str, block: Block) -> None:
        """Notes when content of the device is evicted."""
        self._blocks[event] += 1
        if event == "removed" and block.prefix is not None:
            self._evicted[block.prefix.digest] = self.scheduler.stats.steps - 1
            self.counts["evicted"] += 1

    def step(self, step: Step) -> None:
        """Tells of one step."""
        plan, index = step.plan, len(self._numbers)
        self._numbers.append(plan.step)
        self._last_s = step.time_s
        for request in step.arrived:
            seq, story = request.sequences[0], RequestStory()
            self.requests[request.request_id] = story
            arrived_s = request.arrival_time - self.start_s
            several = f", {request.params.n} times" if request.params.n > 1 else ""
            priority = f", of priority {request.priority}" if request.priority else ""
            told = (
                f"Request {request.request_id} arrived at {_s(arrived_s)} with"
                f" {_tokens(seq.num_prompt_tokens)}, to sample at most"
                f" {seq.max_num_tokens - seq.num_prompt_tokens}{several}{priority}."
            )
            story.lines.append((plan.step, told))
            self._waiting[seq.seq_id] = Waiting(index, arrived_s, request.priority)
        for seq_id, num_computed, reason in plan.preempted:
            self._preempt(seq_id, num_computed, reason)
        for fork in plan.forks:
            parent = self.name(step.rows[fork.parent_row].seq_id)
            told = f"forked from {parent}: the two share all blocks until one of them writes."
            self._tell(fork.seq_id, told)
        again = self._compute(step)
        for new in plan.admitted:
            self._admit(step, new)
        for seq_id, evicted in again.items():
            self._note_evicted(seq_id, evicted)
        for seq, start, count, _ in step.computed() if self._prefill else ():
            self._note_chunk(seq.seq_id, start, count)
        self._count(step)
        for seq in step.ended:
            self._end(seq)
        if plan.step == self._step:
            self._step_lines = list(self._describe(step))

    def _preempt(self, seq_id: int, num_computed: int, reason: str) -> None:
        why = self._named(reason)
        if why.startswith(f"{self.name(seq_id)} needs"):
            why = "it needed a block, none was free, and it is the last in the order"
        self._tell(seq_id, f"preempted with {_tokens(num_computed)} computed: {why}.")
        self._lost[seq_id] = num_computed
        self.counts["lost tokens"] += num_computed
        waiting = Waiting(len(self._numbers), self._last_s, self.who[seq_id].priority)
        self._waiting[seq_id] = waiting

    def _admit(self, step: Step, new: AdmittedSequence) -> None:
        """A sequence has got a row: how long it waited, and what of it was cached."""
        index, seq_id, num_known = len(self._numbers) - 1, new.seq_id, len(new.token_ids)
        waiting = self._waiting.pop(seq_id, None)
        if seq_id not in self._lost:
            self._overtake(seq_id)
        told = f"admitted to row {new.row} at once"
        if waiting is not None and index > waiting.since:
            waited_s = max(0.0, step.start_s - waiting.time_s)
            why = self._note_wait(seq_id, waiting, index, waited_s)
            told = (
                f"admitted to row {new.row} after {_n(index - waiting.since, 'step')} of waiting"
                f" ({_s(waited_s)}): {why}"
            )
        was_read = waiting is not None and waiting.lacked["read"] > 0
        told += f"; {self._whence(step, new, 'disk' if was_read else '')}"
        lost = self._lost.pop(seq_id, 0)
        if lost:
            again = max(lost - new.num_cached_tokens, 0)
            self._again.add(seq_id)
            told += f"; {again} had to be computed again" if again else "; nothing was lost"
        self._prefill[seq_id] = num_known, []
        self._tell(seq_id, f"{told}.")

    def _overtake(self, seq_id: int) -> None:
        """Counts, for those that have waited for longer, that this one goes first."""
        for other, waiting in self._waiting.items():
            if other > seq_id:  # Why: they wait in the order of their arrival.
                break
            waiting.num_overtaken += 1
            waiting.num_by_priority += self.who[seq_id].priority < waiting.priority

    def _whence(self, step: Step, new: AdmittedSequence, tier: str) -> str:
        """Who had computed what was cached, and how much of it a tier held."""
        plan, size, seq = step.plan, self._manager.block_size, step.rows[new.row]
        num_known, num_cached = _tokens(len(new.token_ids)), new.num_cached_tokens
        if not num_cached:
            return f"none of its {num_known} was cached"
        loads = {i: move.tier for move in plan.transfers if move.kind == "load"
                 for i in move.device_ids}  # fmt: skip
        table = next(u.block_ids for u in plan.table_updates if u[:3] == (new.row, 0, 0))
        sources, tiers = Counter[str](), Counter[str]()
        for block_id, prefix in zip(table[: num_cached // size], seq.prefixes, strict=False):
            if block_id in loads:
                tiers[tier or loads[block_id]] += 1
            if block_id != NULL_BLOCK and prefix.digest in self._computed_by:
                by, number = self._computed_by[prefix.digest]
                name = "itself" if by == seq.seq_id else self.name(by)
                sources[f"{name} in step {number}"] += size
        told = f"{num_cached} of its {num_known} were cached"
        if sources:
            most = [f"{name} ({n})" if len(sources) > 1 else name
                    for name, n in sources.most_common(3)]  # fmt: skip
            more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
            told += f", computed by {', '.join(most)}{more}"
        return told + "".join(f"; {_n(n, 'block')} came back from {t}" for t, n in tiers.items())

    def _compute(self, step: Step) -> dict[int, list[int]]:
        """Who computes which content; by sequence, when what was cached before was evicted."""
        size, number, again = self._manager.block_size, step.plan.step, dict[int, list[int]]()
        for seq, start, count, _ in step.computed():
            for prefix in seq.prefixes[start // size : (start + count) // size]:
                self._computed_by[prefix.digest] = seq.seq_id, number
                if self._evicted.get(prefix.digest, number) < number:
                    again.setdefault(seq.seq_id, []).append(self._evicted.pop(prefix.digest))
        return again

    def _note_evicted(self, seq_id: int, evicted: list[int]) -> None:
        num_tokens, last = self._manager.block_size * len(evicted), max(evicted)
        if seq_id not in self._again:  # else it is waste of the preemption
            self.hurt[self.who[seq_id].request_id] += num_tokens
        until = f"{last}" if min(evicted) == last else f"{min(evicted)} to {last}"
        self._tell(seq_id, f"computes {_tokens(num_tokens)} that had been cached until step"
                           f" {until}, when their blocks were evicted.")  # fmt: skip

    def _note_chunk(self, seq_id: int, start: int, count: int) -> None:
        num_known, chunks = self._prefill.get(seq_id, (0, []))
        chunks.append(count)
        if start + count >= num_known and self._prefill.pop(seq_id, None) and len(chunks) > 1:
            sizes = ", ".join(map(str, chunks[:6])) + (", ..." if len(chunks) > 6 else "")
            limit = self.scheduler.long_prefill_threshold
            why = f"long_prefill_threshold is {limit}"
            if not limit or max(chunks) != limit:
                limit = self.scheduler.max_num_batched_tokens
                why = f"a step computes at most {limit} tokens, decodes first"
            told = f"computed to its end in {len(chunks)} chunks of {sizes} tokens: {why}."
            self._tell(seq_id, told)

    def _count(self, step: Step) -> None:
        """Sums over the run, and what the head of the queue lacks in this step."""
        plan, counts, head = step.plan, self.counts, ""
        num_waiting = self.scheduler.num_waiting
        if plan.waits:
            head = plan.waits[0][1]
        elif num_waiting:
            head = "preempted" if plan.preempted else "spent"
        for lack, sums in self._heads.items():
            sums.append(sums[-1] + (lack == head))
        for seq_id, lack in plan.waits:
            if seq_id in self._waiting:
                self._waiting[seq_id].lacked[lack] += 1
        if num_waiting:
            counts["steps with a queue"] += 1
            counts["tokens with a queue"] += plan.num_tokens
            counts[f"queue lacks {head}"] += 1
        for move in plan.transfers:
            counts[f"{move.kind} {move.tier}"] += len(move.device_ids)

    def _end(self, seq: Sequence) -> None:
        tokens, detail = _tokens(seq.num_output_tokens), seq.stop_reason
        by = " of the model's own" if detail is None else f" ({detail!r})"
        words = {
            "length": f"ended by its length, with {tokens}",
            "stop": f"ended by a stop{by}, with {tokens}",
            "abort": f"aborted with {tokens}",
            "error": f"failed with {tokens}: {seq.request.error}",
            "drop": f"dropped with {tokens}: the search goes on without it",
        }
        waiting = self._waiting.pop(seq.seq_id, None)
        never = "; it never had a row" if waiting and seq.seq_id not in self._lost else ""
        reason = str(seq.finish_reason)
        self._tell(seq.seq_id, f"{words.get(reason, reason)}{never}.")

    def conclude(self, *, is_torn: bool = False) -> None:
        """Tells who has ended without a step, and who still waits."""
        self._is_torn = is_torn
        self._know(self.scheduler.newly_ended)
        for seq in self.scheduler.newly_ended:
            self._end(seq)
        num_steps = len(self._numbers)
        for seq_id, waiting in self._waiting.items():
            why = self._note_wait(seq_id, waiting, num_steps, self._last_s - waiting.time_s)
            waited = _n(num_steps - waiting.since, "step")
            self._tell(seq_id, f"still waits where the trace ends, for {waited}: {why}.")

    # --- waits --------------------------------------------------------------------------------

    def _note_wait(self, seq_id: int, waiting: Waiting, until: int, waited_s: float) -> str:
        """What a sequence lacked, in how many of the steps, and who went first; its story keeps
        the wait before its first row."""
        heads, own = self._heads_between(waiting, until), waiting.lacked
        parts = [
            f"{count:,} {LACKS[lack]}"
            for lack, count in (own + Counter({k: heads[k] for k in FOR_ALL})).most_common()
        ]
        behind = heads - own - Counter(dict.fromkeys(FOR_ALL, until))
        if behind:
            main = max(behind, key=lambda lack: behind[lack])
            them = LACKS[main].replace(" it ", " them ").replace(" its ", " their ")
            parts.append(f"{behind.total():,} behind others that waited {them}")
        told = ", ".join(parts)
        if waiting.num_overtaken:
            told += f"; {_n(waiting.num_overtaken, 'request')} that came later went first"
            if waiting.num_by_priority:
                told += f", {waiting.num_by_priority} of them of higher priority"
        story = self._story(seq_id)
        if story is not None and seq_id not in self._lost:
            lack = max(heads, key=lambda lack: heads[lack])
            story.wait = until - waiting.since, max(waited_s, 0.0), told, lack
        return told

    def _heads_between(self, waiting: Waiting, until: int) -> Counter[str]:
        """What the head of the queue lacked, in how many of these steps."""
        spans = self._heads.items()
        return Counter({
            lack: sums[min(until, len(sums) - 1)] - sums[min(waiting.since, len(sums) - 1)]
            for lack, sums in spans
        })  # fmt: skip

    # --- names --------------------------------------------------------------------------------

    def _named(self, reason: str) -> str:
        """The scheduler's words, with requests in place of its numbers."""
        return re.sub(r"\bseq (\d+)", lambda match: self.name(int(match[1])), reason)

    def _story(self, seq_id: int) -> RequestStory | None:
        return self.requests.get(self.who[seq_id].request_id) if seq_id in self.who else None

    def _tell(self, seq_id: int, what: str) -> None:
        story = self._story(seq_id)
        if story is not None:
            fork, step = self.who[seq_id].fork, self._numbers[-1] if self._numbers else 0
            story.lines.append((step, f"step {step}: {f'its {fork}: ' if fork else ''}{what}"))

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
            steps = self._numbers
            has = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise TraceError(f"the trace has no step {self._step}: it has {has}")
        return self._step_lines

    def run_lines(self) -> list[str]:
        """The five things worth knowing of the run, each with the setting that would change it."""
        manager, drafts = self._manager, self._since("drafted_tokens")
        title = (
            f"{_n(len(self._numbers), 'step')} in {_s(self._last_s)}:"
            f" {_n(len(self.requests), 'request')}, {self._num_computed():,} tokens computed,"
            f" {self._since('output_tokens'):,} sampled;"
            f" {_n(manager.pool.num_usable, 'block')} of {manager.block_size} tokens,"
            f" {_n(self.scheduler.max_num_seqs, 'row')}."
        )
        if drafts:
            title += f" {self._since('accepted_tokens'):,} of {drafts:,} drafts were right."
        if self._is_torn:
            title += " The file breaks off: the run was killed, or goes on."
        told = (self._waits(), self._waste(), self._evictions(), self._budget(), self._tiers())
        return [title, *(f"{i}. {line}" for i, line in enumerate(told, 1))]

    def _since(self, name: str) -> int:
        """How far one of the scheduler's counters has come since the story began."""
        count: int = getattr(self.scheduler.stats, name) - getattr(self._before, name)
        return count

    def _num_computed(self) -> int:
        return self._since("prefill_tokens") + self._since("decode_tokens")

    def _waits(self) -> str:
        waited = [(story.wait, i) for i, story in self.requests.items() if story.wait]
        if not waited:
            return "Waiting: every request was admitted in the step that followed its arrival."
        (num_steps, seconds, why, lack), name = max(waited, key=lambda one: one[0][0])
        return (
            f"Waiting: {len(waited)} of {len(self.requests)} requests waited. Request {name} waited"
            f" longest, {_n(num_steps, 'step')} ({_s(seconds)}): {why}."
            f" What would shorten it: {REMEDIES[lack]}."
        )

    def _waste(self) -> str:
        count, again = self._since("preemptions"), self._since("recomputed_tokens")
        if not count:
            return "Waste: nobody was preempted, so nothing was computed twice for want of blocks."
        remedy = MORE_BLOCKS
        if self.scheduler.policy is None:
            remedy += ", or admission='predictive', which admits fewer at a time"
        return (
            f"Waste: {_n(count, 'preemption')} gave up {_tokens(self.counts['lost tokens'])};"
            f" {again:,} of them were computed again,"
            f" {again / max(self._num_computed(), 1):.1%} of all that was computed."
            f" What would avoid it: {remedy}."
        )

    def _evictions(self) -> str:
        if not self.counts["evicted"]:
            return "Evictions: no block lost its content."
        told = f"Evictions: {_n(self.counts['evicted'], 'block')} lost their content"
        if not self.hurt:
            but = " but those that were preempted" if self._since("preemptions") else ""
            return f"{told}, and nobody{but} asked for it again."
        name, most = self.hurt.most_common(1)[0]
        return (
            f"{told}, and {_tokens(self.hurt.total())} were computed again for it, most for"
            f" request {name} ({most:,}). What would keep them: {MORE_BLOCKS}, or a tier"
            " (kv_host_gib, kv_tiers)."
        )

    def _budget(self) -> str:
        steps, budget = self.counts["steps with a queue"], self.scheduler.max_num_batched_tokens
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
        below = self._manager.prefix_cache.tiers
        tiers = below.tier_stats() if below is not None else ()
        if not tiers:
            return "Tiers: there are none below the device (kv_host_gib, kv_disk)."
        name = tiers[0].name
        loads, stores = self.counts[f"load {name}"], self.counts[f"store {name}"]
        told = f"Tiers: {_n(stores, 'block')} went to {name}, {loads:,} came back"
        if not loads and stores:
            return f"{told}: it cost copies and saved nothing; without kv_host_gib there are none."
        return (
            f"{told}, which spared {_tokens(loads * self._manager.block_size)} of computing. Stores"
            " only when blocks are soon evicted: HostTier(store='lazy')."
        )

    # --- one step -----------------------------------------------------------------------------

    def _describe(self, step: Step) -> Iterator[str]:
        plan, seconds = step.plan, step_seconds(step.result.times)
        took = f", took {1e3 * seconds:.3g} ms{_split(step.result.times)}" if seconds else ""
        yield f"Step {plan.step} was committed at {_s(step.time_s)}{took}."
        num_decodes, prompts = 0, []
        for seq, start, count, num_logits in step.computed():
            if count == num_logits == 1 and start >= seq.num_prompt_tokens:
                num_decodes += 1
            elif count:
                prompts.append(f"{self.name(seq.seq_id)} (tokens {start} to {start + count - 1})")
        yield (
            f"It computed {_tokens(plan.num_tokens)}: {_n(num_decodes, 'sequence')} decoded one"
            f" token each" + (f", the others are from {', '.join(prompts)}." if prompts else ".")
        )
        for new in plan.admitted:
            story, name = self._story(new.seq_id), self.name(new.seq_id).capitalize()
            lines = [line for _, line in story.lines if "admitted" in line] if story else []
            yield f"{name}: {lines[-1].partition(': ')[2] if lines else 'admitted.'}"
        for fork in plan.forks:
            yield f"Forked: {self.name(fork.seq_id)}."
        for seq_id, num_computed, reason in plan.preempted:
            yield (
                f"Preempted: {self.name(seq_id)} with {_tokens(num_computed)} computed, because"
                f" {self._named(reason)}."
            )
        for row, drafts in plan.draft_token_ids.items():
            right = max(len(step.result.token_ids[plan.rows.index(row)]) - 1, 0)
            name = self.name(step.rows[row].seq_id)
            yield f"Drafts: {right} of {len(drafts)} were right for {name}."
        yield from self._block_lines(plan)
        num_waiting = self.scheduler.num_waiting
        if plan.waits:
            who = [f"{self.name(seq_id)} {LACKS[lack]}" for seq_id, lack in plan.waits[:4]]
            yield f"Waiting, {num_waiting} in all: {', '.join(who)}."
        elif num_waiting:
            yield f"Waiting: {num_waiting}."
        yield from (f"The scheduler says: {self._named(reason)}." for reason in plan.reasons)
        for seq in step.ended:
            tokens = _tokens(seq.num_output_tokens)
            yield f"Ended: {self.name(seq.seq_id)}, by {seq.finish_reason}, with {tokens}."

    def _block_lines(self, plan: StepPlan) -> Iterator[str]:
        parts = [f"{count} {word}" for word, count in self._told_blocks.items() if count]
        if parts:
            yield f"Blocks: {', '.join(parts)}."
        for src, dst in plan.block_copies:
            yield f"Copied: block {src} to {dst}, because two share it and one of them writes."
        for move in plan.transfers:
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
