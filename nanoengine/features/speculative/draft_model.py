"""DraftModel: drafts by a smaller model, whose KV cache uses the same block tables.

    plan ─► target.launch ─► the step
       └──► draft.launch     rows, tables, copies, and prompts; decodes only if a block becomes full
    propose ─► draft.launch, k times: the missing tokens of each sequence, then one draft at a time

Each model has its own cache with the same number of blocks, and both use one set of block tables.
So prefix hits, copy-on-write and preemptions apply to both and need no code here.

Wrong keys and values of the draft model could only make drafts wrong, never tokens, because the
target verifies each draft. The draft model's steps are chosen such that each block in the prefix
cache is correct in both caches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import AdmittedSequence, StepPlan
from nanoengine.core.sequence import Sequence
from nanoengine.errors import ConfigError
from nanoengine.features.speculative.drafting import Drafter, DraftProposal
from nanoengine.runner import kv_cache
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.runner.step import LaunchedStep
from nanoengine.settings.params import SamplingParams


@dataclass(slots=True)
class DraftRow:
    """The progress of the draft model in one batch slot (row).

    Attributes:
        num_computed: number of the row's known tokens that it has computed.
        num_admitted: number of tokens at the row's admission.
        cached_drafts: drafts that it has computed after the known tokens.
    """

    num_computed: int
    num_admitted: int
    cached_drafts: tuple[int, ...] = ()


class DraftModelRunner(ModelRunner):
    """A ModelRunner with a second one for the draft model, which follows its plans.

    Args:
        draft: the draft model's runner, not started; gets the same number and size of blocks.
        options: as for a ModelRunner.

    Attributes:
        draft: the draft model's runner.
        draft_rows: the progress of the draft model, by row.
    """

    def __init__(self, options: RunnerOptions, *, draft: ModelRunner) -> None:
        super().__init__(options)
        self.draft = draft
        self.draft_rows: dict[int, DraftRow] = {}

    def start(self) -> KVLayout:
        """Starts both; the memory plan includes the draft model's weights and blocks.

        Raises:
            ConfigError: the two models can't be combined.
        """
        if len(self.groups) > 1 or self.groups[0].sliding_window is not None:
            raise ConfigError(
                "speculative: a draft model needs a model whose layers all have full attention;"
                " use 'ngram'"
            )
        require_same_vocabulary(self, self.draft)
        draft, model = self.draft, self.draft.model_config
        # Why one group: the block tables are the target's, which keep all blocks.
        draft.groups = (KVGroup(layers=tuple(range(model.num_hidden_layers))),)
        draft.load()
        self.extra_block_bytes = kv_cache.block_bytes(
            block_size=self.block_size, num_layers=model.num_hidden_layers, **draft.kv_sizes
        )
        layout, memory = super().start(), self.memory
        if model.max_position_embeddings < memory.max_model_len:
            raise ConfigError(
                f"speculative: the draft model's context of {model.max_position_embeddings} tokens"
                f" is shorter than max_model_len={memory.max_model_len}: lower max_model_len"
            )
        draft.config = replace(
            draft.config, num_kv_blocks=layout.num_blocks, max_model_len=memory.max_model_len
        )
        draft.start()
        draft.input_batch.token_ids = self.input_batch.token_ids  # the same sampled tokens
        self.memory = replace(memory, weight_bytes=self.weight_bytes + draft.weight_bytes)
        return layout

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Runs a plan, and makes the draft model follow it."""
        step = super().launch(plan)
        self.draft.input_batch.pool_positions[:] = -1  # drafts may be wrong
        self.draft.launch(self._plan_for_draft_model(plan))
        return step

    def _plan_for_draft_model(self, plan: StepPlan) -> StepPlan:
        """The plan of the draft model for this plan: prompts, and decodes that fill a block.

        Other decodes wait until drafts are requested, which may never happen. A full block can't
        wait, because other sequences may find it in the prefix cache from now on.
        """
        draft_plan = StepPlan(
            step=plan.step,
            released=plan.released,
            admitted=[_for_draft_model(new) for new in plan.admitted],
            forks=plan.forks,
            chosen_tokens=plan.chosen_tokens,
            table_updates=plan.table_updates,
            block_copies=plan.block_copies,
        )
        draft_rows = self.draft_rows
        for new in plan.admitted:
            draft_rows[new.row] = DraftRow(new.num_cached_tokens, len(new.token_ids))
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        for fork in plan.forks:
            parent = draft_rows[fork.parent_row]
            # Why the minimum: the parent's drafts may be after the shared tokens.
            num_shared = min(parent.num_computed, starts.get(fork.row, 0))
            draft_rows[fork.row] = DraftRow(num_shared, parent.num_admitted)
        for row, start, count in zip(
            plan.rows, plan.starts, plan.num_scheduled_tokens, strict=True
        ):
            end = start + count - len(plan.draft_token_ids.get(row, ()))
            is_prompt = start < draft_rows[row].num_admitted
            begin = start if is_prompt else self.count_computed(row, end)
            if count and (is_prompt or end // self.block_size > begin // self.block_size):
                draft_plan.add(row, begin, end - begin, num_logits=0)
                draft_rows[row].num_computed = end
        for fork in plan.forks:  # forks of this step share what it computes
            if fork.row in plan.rows and not plan.num_scheduled_tokens[plan.rows.index(fork.row)]:
                draft_rows[fork.row].num_computed = draft_rows[fork.parent_row].num_computed
        return draft_plan

    def count_computed(self, row: int, num_known: int) -> int:
        """How many known tokens of a row the draft model has computed, also as drafts."""
        draft_row, known = self.draft_rows[row], self.input_batch.token_ids[row]
        if draft_row.num_computed < num_known:
            cached_drafts, draft_row.cached_drafts = draft_row.cached_drafts, ()
            for token_id in cached_drafts[: num_known - draft_row.num_computed]:
                if known[draft_row.num_computed] != token_id:
                    break
                draft_row.num_computed += 1
        return draft_row.num_computed

    def propose(self, requested: dict[int, tuple[int, int]]) -> dict[int, tuple[int, ...]]:
        """Drafts of the draft model, whose blocks are already allocated.

        Args:
            requested: row -> (number of known tokens, number of drafts).
        """
        steps: list[tuple[list[int], LaunchedStep]] = []
        for position in range(max(count for _, count in requested.values())):
            plan = StepPlan(step=0)
            for row, (num_known, count) in requested.items():
                if position < count:
                    end = num_known + position
                    start = end - 1 if position else min(self.count_computed(row, end), end - 1)
                    plan.add(row, start, end - start, num_logits=1)
            steps.append((plan.rows, self.draft.launch(plan)))
        found: dict[int, list[int]] = {row: [] for row in requested}
        for rows, step in steps:
            for row, tokens in zip(rows, step.result().token_ids, strict=True):
                found[row] += tokens
        for row, (num_known, _) in requested.items():
            draft_row = self.draft_rows[row]
            draft_row.num_computed, draft_row.cached_drafts = num_known, tuple(found[row][:-1])
        return {row: tuple(tokens) for row, tokens in found.items()}

    def shutdown(self) -> None:
        """Frees the memory of both models."""
        self.draft.shutdown()
        super().shutdown()


def _for_draft_model(new: AdmittedSequence) -> AdmittedSequence:
    """The draft model samples with the same filters and random numbers as the target, so that it
    samples the same token more often; only the target applies penalties and other processors."""
    p = new.params
    filters = SamplingParams(
        temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, max_tokens=1
    )
    return new._replace(params=filters, bad_word_ids=())


def require_same_vocabulary(target: ModelRunner, draft: ModelRunner) -> None:
    """Raises ConfigError if the models' vocabularies differ, as far as their files show."""
    sizes = target.model_config.vocab_size, draft.model_config.vocab_size
    ours, drafts = _vocabulary(target.options.directory), _vocabulary(draft.options.directory)
    if sizes[0] != sizes[1] or (ours and drafts and ours != drafts):
        raise ConfigError(
            f"speculative: the draft model {draft.config.model!r} has another vocabulary"
            f" ({sizes[1]:,} tokens) than {target.config.model!r} ({sizes[0]:,} tokens): use a"
            " smaller model of the same family, or 'ngram'"
        )


def _vocabulary(directory: Path) -> object:
    """The vocabulary in a tokenizer.json; None if there is no such file."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")


class DraftModel(Drafter):
    """The drafter over a DraftModelRunner.

    Args:
        runner: the runner, already started.
        manager: allocates the blocks for drafts.
        k: maximum number of drafts per sequence and step.
    """

    priors = (0.6,)
    needs_every_step = True  # Why: it follows each plan, whose tokens it must know.
    eligible_rows = None

    def __init__(self, runner: DraftModelRunner, manager: BlockManager, k: int) -> None:
        self.runner, self.manager, self.k = runner, manager, k

    def find_candidates(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """A draft model can always draft."""
        return [DraftProposal(self.k, 0)] * len(sequences)

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """Drafts for the sequences that have a row in the runner, and blocks."""
        requested = {
            seq.row: (seq.num_tokens, count)
            for seq, count in zip(sequences, counts, strict=True)
            if count and self._try_allocate(seq, count)
        }
        drafts = self.runner.propose(requested) if requested else {}
        return [drafts.get(seq.row, ()) for seq in sequences]

    def _try_allocate(self, seq: Sequence, count: int) -> bool:
        """Allocates the blocks that the step with these drafts needs, before its plan."""
        rows, num_copies = self.runner.draft.input_batch, len(self.manager.copies)
        if rows.seq_ids[seq.row] != seq.seq_id:
            return False  # a fork that only the next plan contains
        if not self.manager.may_append(seq, count + 1) or len(self.manager.copies) > num_copies:
            return False  # Why: copy-on-write runs with the plan, after the drafts
        (table,) = seq.block_tables
        first = max(seq.num_computed_tokens // rows.block_size - 1, 0)
        rows.block_tables[0, seq.row, first : len(table)] = table[first:]
        return True
