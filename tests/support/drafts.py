"""Drafting without timings: production code measures whether drafts pay, and tests must not."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.core.sequence import Sequence as CoreSequence
from nanoengine.engine import LLMEngine
from nanoengine.features.speculative.drafting import Drafting, DraftProposal


class EagerDrafting(Drafting):
    """Drafts whenever a proposer has a draft."""

    __slots__ = ()

    def needs_tokens(self) -> bool:
        return True

    def _num_drafts(
        self, sequences: Sequence[CoreSequence], proposals: Sequence[DraftProposal]
    ) -> list[int]:
        for seq, proposal in zip(sequences, proposals, strict=True):
            self._proposed[seq.row] = self._history(seq)
            self._proposed[seq.row].kind = proposal.kind
        return [proposal.count for proposal in proposals]


def draft_always(engine: LLMEngine) -> LLMEngine:
    """Makes an engine with `speculative` draft in each step that allows it."""
    before = engine.proposer
    assert isinstance(before, Drafting)
    engine.proposer = EagerDrafting(drafter=before.drafter)
    engine.observers[engine.observers.index(before)] = engine.proposer
    return engine
