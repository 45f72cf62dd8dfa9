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
    """Drafts forced tokens, and uses another drafter if nothing is forced.

    Args:
        sampler: returns the tokens that a row's logits processors force.
        other: used if nothing is forced.
    """

    def __init__(self, sampler: Sampler, other: Drafter) -> None:
        self.sampler, self.other = sampler, other
        self.priors = (*other.priors, 0.95)
        self.always = other.always
        self.only_for = None if other.only_for is None else sampler.forcing

    def look(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """The forced tokens of each sequence, else the other drafter's guess."""
        rows = self.sampler.forcing & {seq.row for seq in sequences}
        forced = {row: tuple(self.sampler.forced_tokens(row)) for row in rows}
        others = [seq for seq in sequences if not forced.get(seq.row)] if forced else sequences
        guesses, kind = iter(self.other.look(others)), len(self.priors) - 1
        return [
            DraftProposal(len(tokens), kind, tokens)
            if (tokens := forced.get(seq.row))
            else next(guesses)
            for seq in sequences
        ]

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """The drafts of the other drafter."""
        return self.other.draft(sequences, counts)

    def forget_ended(self) -> None:
        """Forwards to the other drafter; this one keeps nothing."""
        self.other.forget_ended()
