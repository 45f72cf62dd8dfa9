"""Narrative: describes what a run, a request or a step did, in sentences.

    plans, sequences, pools ──► Narrative ── run_lines()            the five main facts of the run
                                          ├─ request_lines(id)      from arrival to end
                                          └─ step_lines()           what one step did, and why

A sentence on the run ends with the setting that would change it, if there is one.
It is a `StepObserver` of a replay; `nanoengine explain` and the viewer use it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.plan import AdmittedSequence, StepPlan
from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import TraceError
from nanoengine.observe.metrics import times_of
from nanoengine.observe.steps import Step, StepObserver
from nanoengine.observe.trace_reader import Recording, Replay

MORE_BLOCKS = "more blocks (num_kv_blocks, kv_cache_gib)"
LARGER_BUDGET = "a larger budget (max_num_batched_tokens)"


class WaitReason(NamedTuple):
    """Why a sequence waits, and what would shorten the wait; both as text for the user."""

    why: str
    remedy: str


REASONS = {
    "row": WaitReason("because max_num_seqs sequences were running", "a larger max_num_seqs"),
    "blocks": WaitReason("because too few blocks were free", MORE_BLOCKS),
    "read": WaitReason("while blocks were read from disk",
                 "more host memory (kv_host_gib), or DiskTier(policy='recompute')"),
    "policy": WaitReason("because of the admission policy",
                   f"{MORE_BLOCKS}, or admission='watermark', at the risk of preemptions"),
    "budget": WaitReason("because the prompt exceeded the budget of the step", LARGER_BUDGET),
    "token": WaitReason("because the last token was still being computed",
                  "nothing: it waits for the device"),
    "preempted": WaitReason("in which a preemption stopped all admissions", MORE_BLOCKS),
    "spent": WaitReason("in which other requests used the whole budget", LARGER_BUDGET),
}  # fmt: skip
"""Reasons why the first request of the queue waits; the last two apply to all waiting requests."""
QUEUE_WIDE = ("preempted", "spent")
ENDS = {
    "length": "finished with {tokens}, its maximum",
    "stop": "finished with {tokens}, by {stop}",
    "abort": "aborted with {tokens}",
    "error": "failed with {tokens}: {error}",
    "drop": "dropped by its beam search with {tokens}",
}
"""Sentences per finish reason."""


@dataclass(slots=True)
class Waiting:
    """A sequence in the queue: the step and the time at which its wait began, its own reasons for
    waiting, and how many later sequences were admitted first, in total and by priority."""

    since: int
    time_s: float
    reasons: Counter[str] = field(default_factory=Counter)
    num_overtaken: int = 0
    num_by_priority: int = 0


Wait = tuple[int, float, str, str]
"""The wait of a request before its first admission: steps, seconds, why, and the main reason."""


def explain_recording(recording: Recording, *, step: int | None = None) -> Narrative:
    """The narrative of a recorded run.

    Raises:
        TraceError: it can't be replayed.
    """
    replay = recording.replay()
    narrative = Narrative(replay, step=step)
    replay.run(narrative)
    narrative.conclude(is_torn=recording.is_torn)
    return narrative


class Narrative(StepObserver):
    """Follows a run; `conclude` must be called at its end.

    Args:
        step: the step that `step_lines` describes.

    Attributes:
        requests: id -> list of step and sentence.
    """

    def __init__(self, replay: Replay, *, step: int | None = None) -> None:
        super().__init__(replay)
        self.requests: dict[str, list[tuple[int, str]]] = {}
        self.counts: Counter[str] = Counter()
        # Request -> number of tokens that it recomputed after evictions.
        self.recomputed: Counter[str] = Counter()
        self._manager = self.scheduler.block_manager
        self._steps: list[int] = []  # numbers of the steps so far
        self._last_s = 0.0
        self._is_torn = False
        self._waiting: dict[int, Waiting] = {}
        self._waited: dict[str, Wait] = {}  # per request
        # Why the first request of the queue waited, summed over the first n steps; and over the
        # steps after which requests waited.
        self._head_reasons = [Counter[str]()]
        self._queue_reasons = Counter[str]()
        # Per digest of a block's content: the sequence and the step that computed it, and the step
        # in which it was evicted.
        self._computed_by: dict[bytes, tuple[int, int]] = {}
        self._evicted: dict[bytes, int] = {}
        self._lost: dict[int, int] = {}  # preempted sequence -> computed tokens that it lost
        self._prefill: dict[int, tuple[int, list[int]]] = {}  # sequence -> known tokens, chunks
        self._step, self._step_lines = step, list[str]()
        self._blocks: Counter[str] = Counter()  # block events since the previous plan
        self._manager.pool.observers.append(self)

    # --- observing ----------------------------------------------------------------------------

    def inspect_plan(self, plan: StepPlan, rows: dict[int, Sequence]) -> dict[str, int]:
        """Counts the block events of the step to describe."""
        events, counts = self._blocks.copy(), dict[str, int]()
        self._blocks.clear()
        if plan.step == self._step:
            blocks = self._manager.pool.blocks
            refs = [blocks[i].ref_count for update in plan.table_updates for i in update.block_ids]
            reused, shared = events["reused"], sum(count > 1 for count in refs)
            counts = {
                "allocated": len(refs) - refs.count(0) - shared - reused, "reused": reused,
                "shared": shared, "indexed": events["stored"], "freed": events["freed"],
                "evicted": events["removed"],
            }  # fmt: skip
        return counts

    def on_block(self, event: str, block: Block) -> None:
        """Notes when content of a device block is evicted."""
        self._blocks[event] += 1
        if event == "removed" and block.prefix is not None:
            self._evicted[block.prefix.digest] = self.scheduler.stats.steps - 1
            self.counts["evicted"] += 1

    def step(self, step: Step) -> None:
        """Adds the events of one step."""
        plan = step.plan
        self._steps.append(plan.step)
        self._last_s = step.time_s
        for request in step.arrived:
            self._arrive(request)
        for preempted in plan.preempted:
            self._preempt(*preempted)
        for fork in plan.forks:
            parent = self.name(step.rows[fork.parent_row].seq_id)
            text = f"forked from {parent}; both share all blocks until one of them writes."
            self._add_line(fork.seq_id, text)
        again = self._compute(step)
        for new in plan.admitted:
            self._admit(step, new)
        for seq_id, evicted in again.items():
            self._note_evicted(seq_id, evicted)
        for seq, start, count, _ in step.computed() if self._prefill else ():
            if seq.seq_id in self._prefill:
                self._note_chunk(seq.seq_id, start, count)
        self._count(plan)
        for seq in step.ended:
            self._end(seq)
        if plan.step == self._step:
            self._step_lines = list(self._describe(step))

    def _arrive(self, request: Request) -> None:
        seq, name = request.sequences[0], request.request_id
        arrived_s, prompt = request.arrival_time, seq.num_prompt_tokens
        several = f", {request.params.n} times" if request.params.n > 1 else ""
        priority = f", with priority {request.priority}" if request.priority else ""
        text = (
            f"Request {name} arrived at {_time(arrived_s)} with {_tokens(prompt)}, to generate at"
            f" most {seq.max_num_tokens - prompt}{several}{priority}."
        )
        self.requests[name] = [(self._steps[-1], text)]
        self._waited.pop(name, None)
        self._waiting[seq.seq_id] = Waiting(len(self._steps) - 1, arrived_s)

    def _preempt(self, seq_id: int, num_computed: int, reason: str) -> None:
        why = self._with_names(reason)
        if why.startswith(f"{self.name(seq_id)} needs"):
            why = "it needed a block, none was free, and it was the last in the order"
        self._add_line(seq_id, f"preempted with {_tokens(num_computed)} computed: {why}.")
        self._lost[seq_id] = num_computed
        self.counts["lost tokens"] += num_computed
        self._waiting[seq_id] = Waiting(len(self._steps), self._last_s)

    def _compute(self, step: Step) -> dict[int, list[int]]:
        """Notes which sequence computes which content. Returns, per sequence, the steps of the
        evictions that make it recompute tokens."""
        size, number, again = self._manager.block_size, step.plan.step, dict[int, list[int]]()
        for seq, start, count, _ in step.computed():
            for prefix in seq.prefixes[start // size : (start + count) // size]:
                self._computed_by[prefix.digest] = seq.seq_id, number
                if self._evicted.get(prefix.digest, number) < number:
                    again.setdefault(seq.seq_id, []).append(self._evicted.pop(prefix.digest))
        return again

    def _admit(self, step: Step, new: AdmittedSequence) -> None:
        """A sequence was admitted: how long it waited, and how many of its tokens were cached."""
        index, seq_id, num_cached = len(self._steps) - 1, new.seq_id, new.num_cached_tokens
        waiting = self._waiting.pop(seq_id, None)
        if seq_id not in self._lost:
            self._overtake(seq_id)
        text, tier = f"admitted to row {new.row} at once", ""
        if waiting is not None and index > waiting.since:
            waited_s = max(0.0, step.start_s - waiting.time_s)
            why = self._note_wait(seq_id, waiting, index, waited_s)
            waited = f"{_num(index - waiting.since, 'step')} of waiting ({_time(waited_s)})"
            text = f"admitted to row {new.row} after {waited}: {why}"
            tier = "disk" if waiting.reasons["read"] else ""
        text += f"; {self._cache_sources(step, new, tier)}"
        if seq_id in self._lost:
            again = max(self._lost[seq_id] - num_cached, 0)
            text += f"; {again} had to be recomputed" if again else "; nothing was recomputed"
        self._prefill[seq_id] = len(new.token_ids), []
        self._add_line(seq_id, f"{text}.")

    def _overtake(self, seq_id: int) -> None:
        """Counts this admission for the sequences that have waited longer."""
        priority = self.labels[seq_id].priority
        for other, waiting in self._waiting.items():
            if other > seq_id:  # Why: the queue is in the order of arrival.
                break
            waiting.num_overtaken += 1
            waiting.num_by_priority += priority < self.labels[other].priority

    def _cache_sources(self, step: Step, new: AdmittedSequence, tier: str) -> str:
        """Which sequences computed the cached tokens, and how many blocks came from a tier."""
        size, num_cached = self._manager.block_size, new.num_cached_tokens
        num_known = _tokens(len(new.token_ids))
        if not num_cached:
            return f"none of its {num_known} was cached"
        table = next(u.block_ids for u in step.plan.table_updates if u[:3] == (new.row, 0, 0))
        loads, sources, tiers = step.loads(), Counter[str](), Counter[str]()
        prefixes = step.rows[new.row].prefixes
        for block_id, prefix in zip(table[: num_cached // size], prefixes, strict=False):
            if block_id in loads:
                tiers[tier or loads[block_id]] += 1
            if block_id != NULL_BLOCK and prefix.digest in self._computed_by:
                by, number = self._computed_by[prefix.digest]
                name = "itself" if by == new.seq_id else self.name(by)
                sources[f"{name} in step {number}"] += size
        text = f"{num_cached} of its {num_known} were cached"
        if sources:
            shown = [f"{name} ({n})" if len(sources) > 1 else name
                     for name, n in sources.most_common(3)]  # fmt: skip
            more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
            text += f", computed by {', '.join(shown)}{more}"
        return text + "".join(f"; {_num(n, 'block')} loaded from {t}" for t, n in tiers.items())

    def _note_evicted(self, seq_id: int, evicted: list[int]) -> None:
        num_tokens = self._manager.block_size * len(evicted)
        first, last = min(evicted), max(evicted)
        if seq_id not in self._lost:  # else it counts as waste of the preemption
            self.recomputed[self._request_of(seq_id)] += num_tokens
        until = f"{last}" if first == last else f"{first} to {last}"
        self._add_line(seq_id, f"computes {_tokens(num_tokens)} that had been cached until step"
                           f" {until}, when their blocks were evicted.")  # fmt: skip

    def _note_chunk(self, seq_id: int, start: int, count: int) -> None:
        num_known, chunks = self._prefill[seq_id]
        chunks.append(count)
        if start + count >= num_known:
            del self._prefill[seq_id]
            if len(chunks) > 1:
                sizes = ", ".join(map(str, chunks[:6])) + (", ..." if len(chunks) > 6 else "")
                limit = self.scheduler.long_prefill_threshold
                why = f"long_prefill_threshold is {limit}"
                if limit != max(chunks):
                    limit = self.scheduler.max_num_batched_tokens
                    why = f"a step computes at most {limit} tokens, decodes first"
                text = f"computed to its end in {len(chunks)} chunks of {sizes} tokens: {why}."
                self._add_line(seq_id, text)

    def _count(self, plan: StepPlan) -> None:
        """Adds to the run's totals, and counts why the first request of the queue waits."""
        head = [reason for _, reason in plan.waits[:1]]
        if self.scheduler.num_waiting:
            head = head or ["preempted" if plan.preempted else "spent"]
            self._queue_reasons.update(head)
            self.counts["tokens with a queue"] += plan.num_tokens
        self._head_reasons.append(self._head_reasons[-1] + Counter(head))
        for seq_id, reason in plan.waits:
            if seq_id in self._waiting:
                self._waiting[seq_id].reasons[reason] += 1
        for move in plan.transfers:
            self.counts[f"{move.kind} {move.tier}"] += len(move.device_ids)

    def _end(self, seq: Sequence) -> None:
        reason, detail = str(seq.finish_reason), seq.stop_reason
        stop = "an EOS id" if detail is None else f"stop {detail!r}"
        tokens = _tokens(seq.num_output_tokens)
        text = ENDS.get(reason, "{reason}").format(
            reason=reason, stop=stop, tokens=tokens, error=seq.request.error
        )
        waiting = self._waiting.pop(seq.seq_id, None)
        never = "; it was never admitted" if waiting and seq.seq_id not in self._lost else ""
        self._add_line(seq.seq_id, f"{text}{never}.")

    def conclude(self, *, is_torn: bool = False) -> None:
        """Adds sequences that ended after the last step, and waiting sequences."""
        self._is_torn = is_torn
        self._add_labels(self.scheduler.newly_ended_seqs)
        for seq in self.scheduler.newly_ended_seqs:
            self._end(seq)
        num_steps = len(self._steps)
        for seq_id, waiting in self._waiting.items():
            why = self._note_wait(seq_id, waiting, num_steps, self._last_s - waiting.time_s)
            waited = _num(num_steps - waiting.since, "step")
            self._add_line(seq_id, f"still waiting at the end of the trace, for {waited}: {why}.")

    def _note_wait(self, seq_id: int, waiting: Waiting, until: int, waited_s: float) -> str:
        """Describes why a sequence waited, in how many steps, and how many requests overtook it.
        The wait before its first admission is kept for `run_lines`."""
        heads, own = self._head_reasons[until] - self._head_reasons[waiting.since], waiting.reasons
        parts = [
            f"{count:,} {REASONS[reason].why}"
            for reason, count in (own + Counter({k: heads[k] for k in QUEUE_WIDE})).most_common()
        ]
        earlier = heads - own - Counter(dict.fromkeys(QUEUE_WIDE, until))
        if earlier:
            why = REASONS[_main_reason(earlier)].why
            parts.append(f"{earlier.total():,} after requests that waited {why}")
        text = ", ".join(parts)
        if waiting.num_overtaken:
            text += f"; {_num(waiting.num_overtaken, 'later request')} went first"
            if waiting.num_by_priority:
                text += f", {waiting.num_by_priority} of them with higher priority"
        if (name := self._request_of(seq_id)) in self.requests and seq_id not in self._lost:
            self._waited[name] = until - waiting.since, max(waited_s, 0), text, _main_reason(heads)
        return text

    # --- names --------------------------------------------------------------------------------

    def _with_names(self, reason: str) -> str:
        """A reason given by the scheduler, with names of requests instead of sequence numbers."""
        return re.sub(r"\bseq (\d+)", lambda match: self.name(int(match[1])), reason)

    def _request_of(self, seq_id: int) -> str:
        return self.labels[seq_id].request_id

    def _add_line(self, seq_id: int, sentence: str) -> None:
        if (name := self._request_of(seq_id)) in self.requests:
            fork = f"its sequence {seq_id}: " if self.labels[seq_id].index else ""
            step = self._steps[-1] if self._steps else 0
            self.requests[name].append((step, f"step {step}: {fork}{sentence}"))

    # --- results ------------------------------------------------------------------------------

    def request_lines(self, request_id: str) -> list[str]:
        """The history of one request, from its arrival to its end.

        Raises:
            TraceError: the trace has no such request.
        """
        if request_id not in self.requests:
            known = [*map(repr, list(self.requests)[:8]), *["..."] * (len(self.requests) > 8)]
            raise TraceError(
                f"the trace has no request {request_id!r}; it has {', '.join(known) or 'none'}"
            )
        return [line for _, line in self.requests[request_id]]

    def step_lines(self) -> list[str]:
        """The description of the step given as `step`.

        Raises:
            TraceError: the trace has no such step.
        """
        if not self._step_lines:
            steps = self._steps
            has = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise TraceError(f"the trace has no step {self._step}: it has {has}")
        return self._step_lines

    def run_lines(self) -> list[str]:
        """The five main facts of the run, each with the setting that would change it."""
        manager, sums = self._manager, Counter(asdict(self.scheduler.stats))
        sums["computed_tokens"] = sums["prefill_tokens"] + sums["decode_tokens"]
        title = (
            f"{_num(len(self._steps), 'step')} in {_time(self._last_s)}:"
            f" {_num(len(self.requests), 'request')}, {sums['computed_tokens']:,} computed tokens,"
            f" {sums['output_tokens']:,} output tokens;"
            f" {_num(manager.pool.num_usable, 'block')} of {manager.block_size} tokens,"
            f" max_num_seqs={self.scheduler.max_num_seqs}."
        )
        if drafts := sums["drafted_tokens"]:
            title += f" {sums['accepted_tokens']:,} of {drafts:,} draft tokens were accepted."
        if self._is_torn:
            title += " The file is incomplete: the run was killed, or has not ended."
        facts = (self._waits(), self._waste(sums), self._evictions(sums), self._budget(),
                 self._tiers())  # fmt: skip
        return [title, *(f"{i}. {line}" for i, line in enumerate(facts, 1))]

    def _waits(self) -> str:
        waited = [name for name in self.requests if name in self._waited]
        if not waited:
            return "Waiting: every request was admitted in the first step after its arrival."
        name = max(waited, key=lambda name: self._waited[name][0])
        num_steps, seconds, why, reason = self._waited[name]
        return (
            f"Waiting: {len(waited)} of {len(self.requests)} requests waited. Request {name} waited"
            f" longest, {_num(num_steps, 'step')} ({_time(seconds)}): {why}."
            f" What would shorten it: {REASONS[reason].remedy}."
        )

    def _waste(self, sums: Counter[str]) -> str:
        count, again = sums["preemptions"], sums["recomputed_tokens"]
        if not count:
            return "Waste: there were no preemptions, so no token was computed twice."
        remedy = MORE_BLOCKS
        if self.scheduler.policy is None:
            remedy += ", or admission='predictive', which admits fewer at a time"
        return (
            f"Waste: {_num(count, 'preemption')} dropped {_tokens(self.counts['lost tokens'])};"
            f" {again:,} of them were recomputed,"
            f" {again / max(sums['computed_tokens'], 1):.1%} of all computed tokens."
            f" What would avoid it: {remedy}."
        )

    def _evictions(self, sums: Counter[str]) -> str:
        if not self.counts["evicted"]:
            return "Evictions: there were none."
        text = f"Evictions: {_num(self.counts['evicted'], 'block')} lost their content"
        if not self.recomputed:
            users = "only preempted requests" if sums["preemptions"] else "no request"
            return f"{text}, and {users} needed it again."
        name, most = self.recomputed.most_common(1)[0]
        return (
            f"{text}, and {self.recomputed.total():,} of their tokens were recomputed, most for"
            f" request {name} ({most:,}). What would keep them: {MORE_BLOCKS}, or a tier"
            " (kv_host_gib, kv_tiers)."
        )

    def _budget(self) -> str:
        reasons, budget = self._queue_reasons, self.scheduler.max_num_batched_tokens
        steps, main = reasons.total(), _main_reason(reasons)
        if not steps:
            return "Budget: no request waited after a step, so no step left budget unused."
        used, why = self.counts["tokens with a queue"] / (steps * budget), REASONS[main].why
        why = why.removeprefix("in which ") if main in QUEUE_WIDE else f"the first waited {why}"
        return (
            f"Budget: requests waited after {_num(steps, 'step')}, which computed {used:.0%} of"
            f" max_num_batched_tokens={budget}. In {reasons[main]:,} of these steps {why}."
            f" What would change it: {REASONS[main].remedy}."
        )

    def _tiers(self) -> str:
        below = self._manager.prefix_cache.tiers
        tiers = below.tier_stats() if below is not None else ()
        if not tiers:
            return "Tiers: there is no host or disk tier (kv_host_gib, kv_disk)."
        name = tiers[0].name
        loads, stores = self.counts[f"load {name}"], self.counts[f"store {name}"]
        text = f"Tiers: {_num(stores, 'block')} were stored to {name}, {loads:,} were loaded"
        if not loads and stores:
            return f"{text}: the copies saved nothing; without kv_host_gib there are none."
        return f"{text}, so {_tokens(loads * self._manager.block_size)} were not recomputed."

    # --- one step -----------------------------------------------------------------------------

    def _describe(self, step: Step) -> Iterator[str]:
        plan, times = step.plan, times_of(step.result)
        split = ", ".join(f"{name} {1e3 * took:.3g}" for name, took in times.items() if took)
        took = f", took {1e3 * sum(times.values()):.3g} ms ({split})" if split else ""
        yield f"Step {plan.step} was committed at {_time(step.time_s)}{took}."
        num_decodes, prompts = 0, []
        for seq, start, count, num_logits in step.computed():
            if count == num_logits == 1 and start >= seq.num_prompt_tokens:
                num_decodes += 1
            elif count:
                prompts.append(f"{self.name(seq.seq_id)} (tokens {start} to {start + count - 1})")
        yield (
            f"It computed {_tokens(plan.num_tokens)}: {_num(num_decodes, 'decode')}"
            + (f"; prefill of {', '.join(prompts)}." if prompts else ".")
        )
        for new in plan.admitted:
            history = self.requests.get(self._request_of(new.seq_id), ())
            lines = [line for _, line in history if "admitted" in line] or [": admitted."]
            yield f"{self.name(new.seq_id).capitalize()}: {lines[-1].partition(': ')[2]}"
        for fork in plan.forks:
            yield f"Forked: {self.name(fork.seq_id)}."
        for seq_id, num_computed, reason in plan.preempted:
            yield (
                f"Preempted: {self.name(seq_id)} with {_tokens(num_computed)} computed, because"
                f" {self._with_names(reason)}."
            )
        for row, drafts in plan.draft_token_ids.items():
            accepted = max(len(step.result.token_ids[plan.rows.index(row)]) - 1, 0)
            name = self.name(step.rows[row].seq_id)
            yield f"Draft tokens: {accepted} of {len(drafts)} were accepted for {name}."
        yield from self._block_lines(plan, step.inspected[-1])
        num_waiting = self.scheduler.num_waiting
        if plan.waits:
            shown = [f"{self.name(i)} {REASONS[reason].why}" for i, reason in plan.waits[:4]]
            yield f"Waiting, {num_waiting} in total: {', '.join(shown)}."
        elif num_waiting:
            yield f"Waiting: {num_waiting}."
        yield from (f"Scheduler: {self._with_names(reason)}." for reason in plan.reasons)
        for seq in step.ended:
            tokens = _tokens(seq.num_output_tokens)
            yield f"Finished: {self.name(seq.seq_id)} with {tokens} ({seq.finish_reason})."

    def _block_lines(self, plan: StepPlan, counts: dict[str, int]) -> Iterator[str]:
        if parts := [f"{count} {event}" for event, count in counts.items() if count]:
            yield f"Blocks: {', '.join(parts)}."
        for src, dst in plan.block_copies:
            yield f"Copy-on-write: block {src} to {dst}."
        for move in plan.transfers:
            verb = "Loaded {} from" if move.kind == "load" else "Stored {} to"
            yield f"{verb.format(_num(len(move.device_ids), 'block'))} {move.tier}."


def _main_reason(reasons: Counter[str]) -> str:
    """The most frequent reason."""
    return max(REASONS, key=reasons.__getitem__)


def _num(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _tokens(count: int) -> str:
    return _num(count, "token")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
