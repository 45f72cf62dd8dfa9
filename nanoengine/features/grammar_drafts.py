"""GrammarDrafter: tokens that a grammar forces are drafted, because they are mostly right.

    {"name": " ...     the grammar knows the text  ", "age":  before the model says a token of it

The draft uses the tokenizer's own segmentation of that text; a model may choose another one. Where
nothing is forced, another drafter is asked.
Source: jump-forward decoding of SGLang; here the model verifies the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Sequence
from nanoengine.features.drafting import Drafter, Guess
from nanoengine.runner.sampling.sampler import Sampler


class GrammarDrafter(Drafter):
    """Drafts what must come next, and where that is not known what another drafter guesses.

    Args:
        sampler: knows what the logits processors of a row force.
        other: asked where nothing is forced.
    """

    def __init__(self, sampler: Sampler, other: Drafter) -> None:
        self.sampler, self.other = sampler, other
        self.priors = (*other.priors, 0.95)
        self.always = other.always
        self.only_for = None if other.only_for is None else sampler.forcing

    def look(self, sequences: SequenceOf[Sequence]) -> list[Guess]:
        """What is forced on each sequence, else the other drafter's guess."""
        rows = self.sampler.forcing & {seq.row for seq in sequences}
        forced = {row: tuple(self.sampler.forced_tokens(row)) for row in rows}
        others = [seq for seq in sequences if not forced.get(seq.row)] if forced else sequences
        guesses, kind = iter(self.other.look(others)), len(self.priors) - 1
        return [
            Guess(len(tokens), kind, tokens) if (tokens := forced.get(seq.row)) else next(guesses)
            for seq in sequences
        ]

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """What the other drafter computes."""
        return self.other.draft(sequences, counts)

    def forget_ended(self) -> None:
        """Nothing is kept here."""
        self.other.forget_ended()
