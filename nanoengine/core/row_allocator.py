"""RowAllocator: assigns rows to running sequences, and reports changes of rows in the next plan.

    free ──allocate, fork──► used by a running sequence ──release──► free

The executor keeps each row's tokens across steps, so a plan contains only what has changed since
the previous one. The changes are collected here, and `write_changes` adds them to the next plan.
Used by the Scheduler and its `Forks`; does not depend on blocks.
"""

from __future__ import annotations

from nanoengine.core.plan import AdmittedSequence, ChosenToken, Fork, StepPlan
from nanoengine.core.sequence import NO_ROW, Sequence


class RowAllocator:
    """`num_rows` rows, each of them free or assigned to one running sequence."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.free = list(range(num_rows - 1, -1, -1))
        self.has_changes = False  # the next plan contains changes of rows
        self._released: list[int] = []
        # Since the last plan: parent (None if it has lost its row), child, its computed tokens.
        self._forked: list[tuple[Sequence | None, Sequence, int]] = []
        self._chosen: list[ChosenToken] = []

    def allocate(self, seq: Sequence) -> None:
        """Assigns a row to a sequence, in a plan that admits it."""
        seq.row = self.free.pop()

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Assigns a row to a child; in the next plan it starts as a copy of its parent's row."""
        self.allocate(child)
        self.has_changes = True
        self._forked.append((parent, child, parent.num_computed_tokens))
        # Why: the executor copies the parent's row in its state after the last plan.
        self._chosen += [c._replace(row=child.row) for c in self._chosen if c.row == parent.row]

    def replace_token(self, seq: Sequence, token_id: int) -> None:
        """Replaces the sequence's last token, which was not sampled, in the next plan."""
        self.has_changes = True
        self._chosen.append(ChosenToken(seq.row, len(seq.token_ids), token_id))

    def release(self, seq: Sequence) -> None:
        """Frees a sequence's row, and removes its changes from the next plan."""
        self.free.append(seq.row)
        # Why: the executor does not know a child that was forked since the last plan.
        if all(child is not seq for _, child, _ in self._forked):
            self._released.append(seq.row)
            self.has_changes = True
        self._forked = [
            (None if parent is seq else parent, child, num_computed_tokens)
            for parent, child, num_computed_tokens in self._forked
            if child is not seq
        ]
        self._chosen = [chosen for chosen in self._chosen if chosen.row != seq.row]
        seq.row = NO_ROW

    def release_all(self) -> None:
        """Makes the next plan release all rows, also free ones."""
        self._released, self.has_changes = list(range(self.num_rows)), True

    def write_changes(self, plan: StepPlan) -> None:
        """Writes the changes since the last plan into this one, forks in their order.

        A child whose parent has lost its row in the meantime becomes an admitted sequence, because
        its KV is in the blocks that it shares.
        """
        plan.released, self._released = self._released, []
        plan.chosen_tokens, self._chosen = self._chosen, []
        for parent, child, num_computed_tokens in self._forked:
            if parent is None:
                plan.admitted.append(admitted_sequence(child, num_computed_tokens))
            else:
                plan.forks.append(Fork(child.row, parent.row, child.seq_id, child.seed))
        self._forked, self.has_changes = [], False


def admitted_sequence(seq: Sequence, num_cached_tokens: int) -> AdmittedSequence:
    """The plan entry of a sequence that gets a row."""
    return AdmittedSequence(
        seq.row,
        seq.seq_id,
        list(seq.token_ids),
        seq.num_prompt_tokens,
        num_cached_tokens,
        seq.params,
        seq.seed,
        seq.request.bad_word_ids,
    )
