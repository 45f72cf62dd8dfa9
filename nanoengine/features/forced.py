"""ForcedTokens: what a grammar forces next are the best of drafts, because they are mostly right.

    {"name": " ...     the grammar knows the text  ", "age":  before the model says a token of it

Drafted is the tokenizer's own way to spell that text; a model may choose another one. A `Drafter`
by itself, or before another one, which is asked where nothing is forced.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Sequence
from nanoengine.features.drafting import Drafter, Guess
from nanoengine.runner.sampling.sampler import Sampler


class ForcedTokens(Drafter):
    """Drafts what must come next, and where that is not known what another drafter guesses.

    Args:
        sampler: knows what a row's processors force.
        other: asked where nothing is forced.
    """

    def __init__(self, sampler: Sampler, other: Drafter) -> None:
        self.sampler, self.other = sampler, other
        self.priors = (*other.priors, 0.95)
        self.always = other.always
        self.only_for = None if other.only_for is None else sampler.forcing
        self._found: dict[int, tuple[int, ...]] = {}  # by row

    def look(self, sequences: SequenceOf[Sequence]) -> list[Guess]:
        """What is forced on each sequence, else the other drafter's guess."""
        rows = self.sampler.forcing & {seq.row for seq in sequences}
        found = ((row, tuple(self.sampler.forced_tokens(row))) for row in rows)
        self._found = {row: forced for row, forced in found if forced}
        guesses = iter(self.other.look(self._others(sequences)))
        kind = len(self.priors) - 1
        return [
            Guess(len(self._found[seq.row]), kind) if seq.row in self._found else next(guesses)
            for seq in sequences
        ]

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """The first of what is forced, else what the other drafter drafts."""
        asked = zip(sequences, counts, strict=True)
        of_others = [count for seq, count in asked if seq.row not in self._found]
        drafts = iter(self.other.draft(self._others(sequences), of_others))
        return [
            self._found[seq.row][:count] if seq.row in self._found else next(drafts)
            for seq, count in zip(sequences, counts, strict=True)
        ]

    def _others(self, sequences: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Those on which nothing is forced."""
        if not self._found:
            return sequences
        return [seq for seq in sequences if seq.row not in self._found]

    def forget_ended(self) -> None:
        """Nothing is held here."""
        self.other.forget_ended()
