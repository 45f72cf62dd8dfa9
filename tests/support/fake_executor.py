"""FakeExecutor: an Executor without a model that raises where a real one would compute garbage.

It only uses what plans contain. Each slot of its KV cache holds one integer that represents a
token, its position and the whole prefix before it. Before it "computes" a row's tokens, it checks
that every slot the row would read holds the integer of the row's own prefix. A stale, shared or
wrongly copied block, a read before the write and a read of the null block all raise. A recurrent
state is one slot, which must hold the integer of the token before the row's first new one.

Sampled tokens are a function of (prefix, seed) only, so all configurations must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.interfaces import Proposer
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.plan import StepPlan, StepResult, TokenLogprob
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.core.waiting import AdmissionPolicy
from nanoengine.engine import LLMEngine
from nanoengine.settings.params import SamplingParams

VOCAB_SIZE = 50
EOS = 0
ROOT = 0x5EED
STEP, FIRST = 1, 2  # Why ints: the hash of a string differs between processes


def chain(prefix: int, token_id: int) -> int:
    """Extends the integer of a prefix by one token."""
    return hash((prefix, token_id))


def prefix_hashes(token_ids: Iterable[int]) -> list[int]:
    """For each position the integer of the tokens up to and including it."""
    hashes, prefix = [], ROOT
    for token_id in token_ids:
        prefix = chain(prefix, token_id)
        hashes.append(prefix)
    return hashes


def next_token(prefix: int, seed: int) -> int:
    """The token that the fake model samples after a prefix."""
    return (hash((prefix, seed)) >> 7) % VOCAB_SIZE


def candidates(prefix: int, count: int) -> list[TokenLogprob]:
    """The `count` most likely next tokens after a prefix, with made-up log-probabilities."""
    step = 0.05 + (hash((prefix, STEP)) % 1000) / 2000
    first = hash((prefix, FIRST))
    return [
        TokenLogprob((first + 7 * rank) % VOCAB_SIZE, -step * (rank + 1), rank + 1)
        for rank in range(count)
    ]


@dataclass(slots=True)
class Row:
    """The executor's data of one running sequence."""

    seq_id: int
    token_ids: list[int]
    hashes: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    seed: int
    params: SamplingParams
    tables: list[list[int]]


class ExecutorFailure(RuntimeError):
    """Raised by a fake executor on request."""


class Ready:
    """A launched step whose result is available."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    """Runs plans on a simulated KV cache and verifies every read and write.

    Args:
        layout: blocks, block size and groups to simulate.
        max_num_seqs, max_num_batched_tokens: limits for plans.
        sample: (prefix integer, seed) -> token.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        sample: Callable[[int, int], int] = next_token,
    ) -> None:
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sample = sample
        self.rows: dict[int, Row] = {}
        self.slots: list[int | None] = [None] * (layout.num_blocks * layout.block_size)
        self.states: list[int | None] = [None] * layout.num_states
        self.num_kv_groups = len(layout.groups) - (layout.snapshot_every is not None)
        self.num_shared_states = 0  # read in the step in which another row writes them
        self.host: dict[int, list[int | None]] = {}  # blocks of the host tier
        self._stores: dict[int, list[tuple[int, list[int | None]]]] = {}  # by step, in flight
        self.plans: list[StepPlan] = []
        self.fail_at: str | None = None  # "start", "rows" or "end" of the next step
        self.row_errors: Callable[[Row], str | None] = lambda row: None
        self.num_computed_tokens = 0
        self.token_s = 0.0  # reported duration of a step, per token and loaded block
        self.num_copies = 0
        self.num_shared_reads = 0  # blocks that another row writes in the same step
        self._states_written: set[int] = set()  # in this step
        self._writer: dict[int, int] = {}  # slot -> row, in this step
        self.closed = False
        self.delayed = False  # plans run only when their result is awaited
        self.queue: list[StepPlan] = []  # launched and not yet run
        self.max_queued = 0
        self._results: dict[int, StepResult] = {}

    # --- the Executor interface ---------------------------------------------------------------

    def start(self) -> KVLayout:
        return self.layout

    def shutdown(self) -> None:
        assert not self.closed, "shut down twice"
        self.closed = True

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        assert not self.closed
        self.queue.append(plan)
        self.max_queued = max(self.max_queued, len(self.queue))
        if not self.delayed:
            self.advance()
        return SimpleNamespace(result=lambda: self.result(plan.step))

    def advance(self) -> None:
        """Runs the oldest launched plan.

        With `delayed`, the next plan exists already. This exposes a core that changes a plan after
        handing it out, or that expects its results too early.
        """
        self._run(self.queue.pop(0))

    def result(self, step: int) -> StepResult:
        """The sampled tokens of a launched step, available once."""
        while step not in self._results:
            self.advance()
        for host_id, slots in reversed(self._stores.pop(step, [])):
            self.host[host_id] = slots
        return self._results.pop(step)

    def _run(self, plan: StepPlan) -> None:
        """Runs a plan and stores its results until `result` is called."""
        self._fail("start")
        self.plans.append(plan)
        self._update_batch(plan)
        self._fail("rows")
        self._transfer(plan, "load")
        self._copy_blocks(plan)
        self._check_limits(plan)
        self._place_drafts(plan)
        self._write(plan)
        self._check_reads(plan)
        self._transfer(plan, "store")
        self._results[plan.step] = self._sample(plan)
        self._fail("end")

    def _fail(self, where: str) -> None:
        if self.fail_at == where:
            self.fail_at = None
            self._results.clear()
            self.queue.clear()
            raise ExecutorFailure(f"failed on request at {where}")

    # --- rows ---------------------------------------------------------------------------------

    def _update_batch(self, plan: StepPlan) -> None:
        assert len(set(plan.released)) == len(plan.released), f"released twice: {plan.released}"
        after_failure = plan.released == list(range(self.max_num_seqs))
        for row in plan.released:
            assert row in self.rows or after_failure, f"row {row} is released unused"
            self.rows.pop(row, None)
        for new in plan.admitted:
            self._require_free(new.row)
            assert 0 < new.num_prompt_tokens <= len(new.token_ids), new
            assert new.num_cached_tokens < len(new.token_ids), f"nothing to compute: {new}"
            self.rows[new.row] = Row(
                new.seq_id,
                list(new.token_ids),
                prefix_hashes(new.token_ids),
                new.num_prompt_tokens,
                new.num_cached_tokens,
                new.seed,
                new.params,
                [[] for _ in self.layout.groups],
            )
        for fork in plan.forks:
            self._require_free(fork.row)
            parent = self.rows[fork.parent_row]
            self.rows[fork.row] = replace(
                parent,
                seq_id=fork.seq_id,
                token_ids=list(parent.token_ids),
                hashes=list(parent.hashes),
                seed=fork.seed,
                tables=[[] for _ in self.layout.groups],
            )
        for row_id, position, token_id in plan.chosen_tokens:
            row = self.rows[row_id]
            assert position == len(row.token_ids) - 1, f"row {row_id}: not its last token"
            assert position >= row.num_computed_tokens, f"row {row_id}: its KV is computed"
            row.token_ids[position] = token_id
            row.hashes = prefix_hashes(row.token_ids)
        for row, group, start, block_ids in plan.table_updates:
            assert row in self.rows, f"table update for the unused row {row}"
            table = self.rows[row].tables[group]
            assert start <= len(table), f"row {row}, group {group}: a gap before entry {start}"
            blocks = range(self.layout.num_blocks)
            if group == self.num_kv_groups:
                blocks = range(len(blocks), len(blocks) + self.layout.num_states)
            assert all(b == 0 or b in blocks for b in block_ids), block_ids
            table[start : start + len(block_ids)] = block_ids

    def _require_free(self, row: int) -> None:
        assert 0 <= row < self.max_num_seqs, f"row {row} of {self.max_num_seqs}"
        assert row not in self.rows, f"row {row} is used by seq {self.rows[row].seq_id}"

    def _transfer(self, plan: StepPlan, kind: str) -> None:
        size = self.layout.block_size
        for transfer in plan.transfers:
            assert transfer.kind in ("load", "store") and transfer.tier == "host", transfer
            if transfer.kind != kind:
                continue
            targets = transfer.device_ids if kind == "load" else transfer.tier_ids
            assert len(set(targets)) == len(targets), f"a block is the target twice: {transfer}"
            assert 0 not in transfer.device_ids + transfer.tier_ids, "the null block is moved"
            for device_id, host_id in zip(transfer.device_ids, transfer.tier_ids, strict=True):
                memory, at = self._memory_of(device_id)
                if kind == "load":
                    assert len(self.host[host_id]) == at.stop - at.start, "of another size"
                    memory[at] = self.host[host_id]
                else:
                    # Why: a store runs concurrently with later work. Until its step is awaited, its
                    # target may contain anything.
                    self.host[host_id] = [-1] * size
                    self._stores.setdefault(plan.step, []).append((host_id, memory[at]))

    def _memory_of(self, block_id: int) -> tuple[list[int | None], slice]:
        """The memory of a block or of a state."""
        size, state = self.layout.block_size, block_id - self.layout.num_blocks
        if state >= 0:
            return self.states, slice(state, state + 1)
        return self.slots, slice(block_id * size, (block_id + 1) * size)

    def _copy_blocks(self, plan: StepPlan) -> None:
        written: set[int] = set()
        contents: list[list[int | None]] = []
        for src, dst in plan.block_copies:
            assert src not in written, "all sources are read before any target is written"
            assert dst not in written, "a block is copied to twice"
            assert src and dst, "the null block is copied"
            written.add(dst)
            memory, at = self._memory_of(src)
            contents.append(memory[at])
        for (_, dst), slots in zip(plan.block_copies, contents, strict=True):
            memory, at = self._memory_of(dst)
            memory[at] = slots
        self.num_copies += len(plan.block_copies)

    # --- the forward --------------------------------------------------------------------------

    def _entries(self, plan: StepPlan) -> Iterator[tuple[int, Row, int, int, int]]:
        """For each scheduled row: its number, its data, start, tokens, logits."""
        numbers = plan.starts, plan.num_scheduled_tokens, plan.num_logits
        for row_id, start, count, num_logits in zip(plan.rows, *numbers, strict=True):
            assert row_id in self.rows, f"row {row_id} is scheduled but not admitted"
            yield row_id, self.rows[row_id], start, count, num_logits

    def _check_limits(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows), f"a row runs twice: {plan.rows}"
        assert len(self.rows) <= self.max_num_seqs
        assert plan.num_tokens <= self.max_num_batched_tokens, f"over budget: {plan.num_tokens}"
        self.num_computed_tokens += plan.num_tokens
        ends = {row_id: start + count for row_id, _, start, count, _ in self._entries(plan)}
        parents = {fork.row: fork.parent_row for fork in plan.forks}
        for row_id, row, start, count, logits in self._entries(plan):
            if count == 0:
                assert start == ends[parents[row_id]], f"row {row_id} computes nothing"
            else:
                before = row.num_computed_tokens
                # Another sequence has computed skipped prompt tokens: `_check_reads` verifies it.
                assert start == before or start % self.layout.block_size == 0, (row_id, start)
                assert start >= before, f"row {row_id} starts at {start}"
                assert logits <= count, f"row {row_id}: {logits} logits of {count} tokens"

    def _place_drafts(self, plan: StepPlan) -> None:
        for row_id, drafts in plan.draft_token_ids.items():
            row = self.rows[row_id]
            row.token_ids += drafts
            row.hashes = prefix_hashes(row.token_ids)
            limit = row.params.max_tokens
            fits = limit is None or len(row.token_ids) < row.num_prompt_tokens + limit
            assert fits, f"row {row_id}: a draft exceeds the end of its sequence"

    def _write(self, plan: StepPlan) -> None:
        """All rows store their keys and values before any row reads."""
        size, written = self.layout.block_size, {}
        self._states_written.clear()
        for row_id, row, start, count, _ in self._entries(plan):
            assert start + count <= len(row.token_ids), f"row {row_id} computes unknown tokens"
            for group, table in enumerate(row.tables):
                if group == self.num_kv_groups:
                    if count:
                        num_drafts = len(plan.draft_token_ids.get(row_id, ()))
                        self._advance_state(row_id, row, start, start + count, num_drafts)
                    continue
                assert (start + count) <= len(table) * size, f"row {row_id}: table too short"
                for position in range(start, start + count):
                    block_id = table[position // size]
                    slot = block_id * size + position % size
                    assert block_id != 0, f"row {row_id} writes the null block"
                    assert slot not in written, f"rows {written[slot]}, {row_id} write slot {slot}"
                    written[slot] = row_id
                    self.slots[slot] = row.hashes[position] + group
            row.num_computed_tokens = max(row.num_computed_tokens, start + count)
        self._writer = written
        # Each user of a written block must find its own prefix in it. This is checked for all rows
        # that have computed these positions, scheduled or not.
        touched = {slot // size for slot in written}
        for row_id, row in self.rows.items():
            for group, table in enumerate(row.tables[: self.num_kv_groups]):
                for index, block_id in enumerate(table):
                    if block_id in touched:
                        self._check_block(row_id, row, group, index)

    def _advance_state(self, row_id: int, row: Row, start: int, end: int, num_drafts: int) -> None:
        """A row reads the state before its tokens and writes the states after its blocks, and after
        each draft. Rows run in plan order: a row may read what an earlier row writes in the same
        step."""
        size, table = self.layout.block_size, row.tables[-1]
        known = end - num_drafts
        first, last = start // size, (known - 1) // size
        base = self.layout.num_blocks
        if start:
            entries = [b for b in table[(start - 1) // size : last + 1] if b]
            assert self.states[entries[0] - base] == row.hashes[start - 1], (
                f"row {row_id} (seq {row.seq_id}): state {entries[0]} is not the state"
                f" after position {start - 1}"
            )
            self.num_shared_states += entries[0] - base in self._states_written
        assert table[last] != 0, f"row {row_id} writes the null block"
        written = [
            (table[index], min(known, (index + 1) * size)) for index in range(first, last + 1)
        ]
        written += [(table[last + n], known + n) for n in range(1, num_drafts + 1)]
        for state_id, count in written:
            if state_id:
                state = state_id - base
                assert state not in self._states_written, "two rows write one state"
                self._states_written.add(state)
                self.states[state] = row.hashes[count - 1]

    def _check_block(self, row_id: int, row: Row, group: int, index: int) -> None:
        size = self.layout.block_size
        first, last = index * size, min((index + 1) * size, row.num_computed_tokens)
        if last <= first:
            return
        slot = row.tables[group][index] * size
        content = self.slots[slot : slot + last - first]
        expected = [h + group for h in row.hashes[first:last]]
        assert content == expected, (
            f"row {row_id} (seq {row.seq_id}), group {group}: block {row.tables[group][index]}"
            f" does not contain positions {first}..{last - 1} of its prefix"
        )

    def _check_reads(self, plan: StepPlan) -> None:
        size = self.layout.block_size
        for row_id, row, start, count, _ in self._entries(plan):
            groups = zip(self.layout.groups, row.tables, strict=True)
            for group, (kind, table) in enumerate(groups):
                if kind.snapshot_every is not None:
                    continue
                window = kind.sliding_window
                begin = 0 if window is None else max(0, start - window + 1)
                if start + count <= begin:
                    continue
                for index in range(begin // size, (start + count - 1) // size + 1):
                    block_id = table[index]
                    assert block_id != 0, f"row {row_id}, group {group} reads the null block"
                    low, high = max(begin, index * size), min(start + count, (index + 1) * size)
                    slot = block_id * size + low % size
                    self.num_shared_reads += self._writer.get(slot, row_id) != row_id
                    expected = [h + group for h in row.hashes[low:high]]
                    assert self.slots[slot : slot + high - low] == expected, (
                        f"row {row_id} (seq {row.seq_id}), group {group}: wrong context at"
                        f" positions {low}..{high - 1}, block {block_id}"
                    )

    def _sample(self, plan: StepPlan) -> StepResult:
        result = StepResult(token_ids=[[] for _ in plan.rows])
        loaded = sum(len(move.tier_ids) for move in plan.transfers if move.kind == "load")
        result.times.forward_s = self.token_s * plan.num_tokens
        result.times.load_s = self.token_s * loaded
        for entry, (row_id, row, start, count, num_logits) in enumerate(self._entries(plan)):
            drafts = plan.draft_token_ids.get(row_id, ())
            end = start + count
            error = self.row_errors(row)
            if error is not None:
                result.errors[entry] = error
            if num_logits == 0:
                no_token = end < len(row.token_ids) or row.params.max_tokens == 0
                assert no_token, f"row {row_id}: no logits are requested at its end"
                continue
            assert end == len(row.token_ids), f"row {row_id}: logits before its end"
            assert num_logits == 1 + len(drafts), f"row {row_id}: {num_logits} logits"
            known = end - len(drafts)
            del row.token_ids[known:], row.hashes[known:]
            if row.params.logprobs is not None:
                found = candidates(row.hashes[-1], row.params.logprobs)
                result.logprobs[entry] = [[TokenLogprob(-1, -1.0, 1), *found]]
            for draft in (*drafts, None):
                token_id = self.sample(row.hashes[-1], row.seed)
                result.token_ids[entry].append(token_id)
                row.token_ids.append(token_id)
                row.hashes.append(chain(row.hashes[-1], token_id))
                if token_id != draft:
                    break
            row.num_computed_tokens = len(row.token_ids) - 1
        return result


# --- engines --------------------------------------------------------------------------------------


def make_layout(
    num_blocks: int,
    block_size: int,
    windows: Sequence[int | None] = (None,),
    *,
    num_states: int = 0,
    snapshot_every: int = 1,
) -> KVLayout:
    """A layout with one group per window, and a state group if there are states."""
    groups = [
        KVGroup(layers=(layer,), sliding_window=window) for layer, window in enumerate(windows)
    ]
    if num_states:
        layers = (len(groups),)
        groups.append(KVGroup(layers=layers, sliding_window=2, snapshot_every=snapshot_every))
    return KVLayout(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=1,
        groups=tuple(groups),
        num_states=num_states,
    )


def engine_info(**known: Any) -> EngineInfo:
    """The engine's report about itself; unknown names are "none" and unknown values 0."""
    names = dict.fromkeys(("model_name", "dtype", "device", "attention_backend"), "none")
    required = [name for name, one in EngineInfo.__dataclass_fields__.items()
                if one.default is one.default_factory]  # fmt: skip
    return EngineInfo(**dict.fromkeys(required, 0) | {"memory_plan": ""} | names | known)


def make_engine(
    num_blocks: int = 65,
    block_size: int = 4,
    *,
    windows: Sequence[int | None] = (None,),
    num_states: int = 0,
    snapshot_every: int = 1,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1024,
    enable_prefix_caching: bool = True,
    watermark_frac: float = 0.0,
    chunked_prefill: bool = True,
    long_prefill_threshold: int = 0,
    eos_token_ids: tuple[int, ...] = (EOS,),
    debug_checks: bool = True,
    observers: Iterable[object] = (),
    policy: AdmissionPolicy | None = None,
    make_tiers: Callable[[FakeExecutor], TieredPrefixCache] | None = None,
    overlap: bool = False,
    scheduler_class: type[Scheduler] = Scheduler,
    proposer: Proposer | None = None,
) -> LLMEngine:
    """An LLMEngine over a FakeExecutor, which samples tokens without a model. With `overlap` the
    executor is delayed."""
    layout = make_layout(
        num_blocks, block_size, windows, num_states=num_states, snapshot_every=snapshot_every
    )
    executor = FakeExecutor(
        layout, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    executor.delayed = overlap
    manager = make_block_manager(
        executor.start(),
        prefix_cache=make_tiers(executor) if make_tiers else None,
        enable_prefix_caching=enable_prefix_caching,
        watermark_frac=watermark_frac,
        max_chunk=max_num_batched_tokens,
        chunked=chunked_prefill,
    )
    scheduler = scheduler_class(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        chunked_prefill=chunked_prefill,
        long_prefill_threshold=long_prefill_threshold,
        policy=policy,
    )
    info = engine_info(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        block_bytes=layout.block_bytes,
    )
    engine = LLMEngine(executor, scheduler, info, overlap=overlap, debug_checks=debug_checks)
    engine.observers += observers
    engine.proposer = proposer
    return engine


def run(engine: LLMEngine, max_steps: int = 10_000) -> list[str]:
    """Steps until no request is left; returns request ids in the order of completion."""
    finished: list[str] = []
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return finished
        finished += [request.request_id for request in engine.step()]
    raise AssertionError(f"{engine.num_unfinished} requests are not done in {max_steps} steps")


def run_late(engine: LLMEngine, max_steps: int = 10_000) -> list[str]:
    """The same with the overlapped loop, on a device that is always a step late."""
    assert isinstance(engine.executor, FakeExecutor)
    engine.overlap = engine.executor.delayed = True
    return run(engine, max_steps)


def expected_output(
    prompt_token_ids: Sequence[int],
    seed: int,
    max_tokens: int,
    stop_ids: Iterable[int] = (EOS,),
    min_tokens: int = 0,
    given: Sequence[int] = (),
) -> list[int]:
    """The output of a sequence that runs alone, without an engine; `given` starts it."""
    prefix = prefix_hashes([*prompt_token_ids, *given])[-1]
    output, stop = list(given), set(stop_ids)
    if len(output) >= min_tokens and stop & set(output[-1:]):
        return output
    while len(output) < max_tokens:
        output.append(next_token(prefix, seed))
        prefix = chain(prefix, output[-1])
        if len(output) >= min_tokens and output[-1] in stop:
            break
    return output


def assert_outputs(*requests: Request) -> None:
    """Checks that every sequence has the tokens that it would have alone."""
    for request in requests:
        assert len(request.sequences) == request.params.n
        for seq in request.sequences:
            assert seq.finish_reason in ("stop", "length"), (seq, request.error)
            assert seq.output_token_ids == expected_output(
                request.prompt_token_ids,
                seq.seed,
                seq.max_num_tokens - seq.num_prompt_tokens,
                seq.stop_ids,
                request.params.min_tokens,
            ), seq
