"""ForcedTokens: what a grammar forces next are the best of drafts, because they are always right.

    {"name": " ...     the grammar knows each token of  ", "age":  before the model has said one

A `Drafter` before another one, which is asked where nothing is forced.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Sequence
from nanoengine.features.drafting import Drafter, Guess


class ForcedTokens:
    """Drafts what must come next, and where that is not known what another drafter guesses.

    Args:
        forced: row -> the tokens that must come next; none it knows of: empty.
        other: asked where nothing is forced.
    """

    def __init__(self, forced: Callable[[int], list[int]], other: Drafter) -> None:
        self.forced, self.other = forced, other
        self.priors = (*other.priors, 1.0)
        self.always = other.always
        self._found: dict[int, tuple[int, ...]] = {}  # by row

    def look(self, sequences: SequenceOf[Sequence]) -> list[Guess]:
        """What is forced on each sequence, else the other drafter's guess."""
        self._found = {seq.row: tuple(self.forced(seq.row)) for seq in sequences}
        forced = [len(self._found[seq.row]) for seq in sequences]
        others = [seq for seq, count in zip(sequences, forced, strict=True) if not count]
        guesses = iter(self.other.look(others))
        return [Guess(n, len(self.priors) - 1) if n else next(guesses) for n in forced]

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """The first of what is forced, else what the other drafter drafts."""
        asked = list(zip(sequences, counts, strict=True))
        others = [(seq, count) for seq, count in asked if not self._found[seq.row]]
        drafts = iter(self.other.draft([seq for seq, _ in others], [n for _, n in others]))
        return [
            self._found[seq.row][:count] if self._found[seq.row] else next(drafts)
            for seq, count in asked
        ]

    def forget_ended(self) -> None:
        """Nothing is held here."""
        self.other.forget_ended()
