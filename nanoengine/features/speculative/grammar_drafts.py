"""GrammarDrafter: tokens that a grammar forces are drafted, because they are mostly accepted.

    {"name": " ...     the grammar knows the text  ", "age":  before the model samples it

The draft uses the tokenizer's own segmentation of that text; a model may choose another one. If
nothing is forced, another drafter is used.
Source: jump-forward decoding of SGLang; here the model verifies the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Sequence
from nanoengine.features.speculative.drafting import Drafter, DraftProposal
from nanoengine.runner.sampling.sampler import Sampler


class GrammarDrafter(Drafter):
    """Drafts forced tokens; uses another drafter if no token is forced.

    Args:
        sampler: returns the tokens that a row's logits processors force.
        fallback: used if nothing is forced.
    """

    def __init__(self, sampler: Sampler, fallback: Drafter) -> None:
        self.sampler, self.fallback = sampler, fallback
        self.priors = (*fallback.priors, 0.95)
        self.needs_every_step = fallback.needs_every_step
        self.eligible_rows = None if fallback.eligible_rows is None else sampler.jump_forward_rows

    def find_candidates(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """The forced tokens of each sequence, else the fallback's proposal."""
        rows = self.sampler.jump_forward_rows & {seq.row for seq in sequences}
        forced = {row: tuple(self.sampler.forced_tokens(row)) for row in rows}
        unforced = [seq for seq in sequences if not forced.get(seq.row)] if forced else sequences
        proposals, kind = iter(self.fallback.find_candidates(unforced)), len(self.priors) - 1
        return [
            DraftProposal(len(tokens), kind, tokens)
            if (tokens := forced.get(seq.row))
            else next(proposals)
            for seq in sequences
        ]

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """The drafts of the fallback."""
        return self.fallback.draft(sequences, counts)

    def drop_finished(self) -> None:
        """Forwards to the fallback; this drafter keeps nothing."""
        self.fallback.drop_finished()
