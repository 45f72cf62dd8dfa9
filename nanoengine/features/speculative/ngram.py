"""NgramDrafter: drafts the tokens that followed an earlier match of the last tokens.

    prompt  ... d e f g h i ...      output  ... d e f          the last 3 occur in the prompt
                      └ drafts: g h i ...

Edits, extractions and answers with quotes repeat their prompt; most other text does not. The index
maps each n-gram to the continuation of its latest occurrence. A new token costs a few entries, and
a lookup as many reads. All sequences of a request share the prompt's index. Each has an index for
its own output, so a fork copies nothing of the prompt.

A `Drafter` of `drafting.py`, which decides how many tokens are worth a step's rows.
Source: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.speculative.drafting import NO_PROPOSAL, Drafter, DraftProposal
from nanoengine.settings.speculative import NgramDrafts

TOKEN_BITS = 20
"""Bits per token id in a key: the sampler supports vocabularies up to 2**19."""
MAX_COMPARED = 16
"""Maximum number of tokens that are compared to determine the length of a match."""
MAX_TOKENS = 2**20
"""Maximum number of tokens in all indices: about 0.3 GB with three lengths of n-grams."""


class NgramIndex:
    """The position after the latest occurrence of each n-gram of a growing text.

    Args:
        shortest, longest: lengths n of the n-grams.
        before: the index of the text before this one; not changed by this one.
    """

    __slots__ = ("_before", "_mask", "_tables", "_window", "num_tokens")

    def __init__(self, shortest: int, longest: int, before: NgramIndex | None = None) -> None:
        # Longest first, as in a lookup. A key packs n tokens, so equal keys are equal n-grams.
        self._tables: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << TOKEN_BITS * n) - 1, {}) for n in range(longest, shortest - 1, -1)
        ]
        self._mask = self._tables[0][1]
        self._before = before
        self._window = 0 if before is None else before._window  # the last `longest` tokens
        self.num_tokens = 0 if before is None else before.num_tokens

    def extend(self, token_ids: SequenceOf[int]) -> int:
        """Adds the new tokens of the text, which is given whole; returns their number."""
        start, window, mask = self.num_tokens, self._window, self._mask
        for position in range(start, len(token_ids)):
            for n, bits, table in self._tables:
                if position >= n:
                    table[window & bits] = position
            window = (window << TOKEN_BITS | token_ids[position]) & mask
        self.num_tokens, self._window = len(token_ids), window
        return self.num_tokens - start

    def find(self) -> tuple[int, int] | None:
        """(n, position): the length of the longest n-gram at the end that occurred before, and the
        position after its latest occurrence; None if there is none."""
        before = self._tables if self._before is None else self._before._tables
        window = self._window
        for (n, bits, table), (_, _, table_before) in zip(self._tables, before, strict=True):
            key = window & bits
            position = table.get(key) or table_before.get(key)  # never 0: n tokens precede it
            if position and n <= self.num_tokens:
                return n, position
        return None


class NgramDrafter(Drafter):
    """Drafts from each sequence's own prompt and output.

    Args:
        options: n-grams and drafts.
        max_tokens: maximum number of tokens in all indices; a sequence above the limit gets no
            drafts until others have ended.
    """

    eligible_rows = None
    priors = (0.1, 0.3, 0.55, 0.75, 0.9)
    """Initial acceptance, by kind: matches of 1, 2, 4, 8, 16 or more tokens."""

    def __init__(self, options: NgramDrafts, max_tokens: int = MAX_TOKENS) -> None:
        self.options = options
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._prompts: dict[Request, NgramIndex] = {}
        self._outputs: dict[Sequence, NgramIndex] = {}

    def find_candidates(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """Looks up each sequence's last tokens in its earlier tokens."""
        return [self._find_candidates(seq) for seq in sequences]

    def _find_candidates(self, seq: Sequence) -> DraftProposal:
        index = self._outputs.get(seq) or self._make_index(seq)
        if index is None:
            return NO_PROPOSAL
        self.num_tokens += index.extend(seq.token_ids)
        found = index.find()
        if found is None:
            return NO_PROPOSAL
        length, position = found
        if length == self.options.max:
            length = match_length(seq.token_ids, position, length)
        drafts = continuation(seq.token_ids, position, self.options.k)
        return DraftProposal(self.options.k, length.bit_length() - 1, drafts)

    def _make_index(self, seq: Sequence) -> NgramIndex | None:
        """A sequence's index on top of its prompt's index; None if the limit is reached."""
        if self.num_tokens + len(seq.token_ids) > self.max_tokens:
            self.drop_finished()
            if self.num_tokens + len(seq.token_ids) > self.max_tokens:
                return None
        prompt = self._prompts.get(seq.request)
        if prompt is None:
            prompt = self._prompts[seq.request] = NgramIndex(self.options.min, self.options.max)
            self.num_tokens += prompt.extend(seq.request.prompt_token_ids)
        index = self._outputs[seq] = NgramIndex(self.options.min, self.options.max, prompt)
        return index

    def drop_finished(self) -> None:
        """Frees the indices of sequences that have ended."""
        live = {seq: index for seq, index in self._outputs.items() if not seq.is_finished}
        requests = {seq.request for seq in live}
        self._outputs = live
        self._prompts = {r: index for r, index in self._prompts.items() if r in requests}
        own = sum(index.num_tokens - seq.num_prompt_tokens for seq, index in live.items())
        self.num_tokens = own + sum(index.num_tokens for index in self._prompts.values())


def match_length(token_ids: SequenceOf[int], position: int, length: int) -> int:
    """How many tokens before `position` equal the last ones; `length` of them are known to.

    >>> match_length([1, 2, 3, 4, 9, 2, 3, 4], 4, 2)
    3
    """
    end = len(token_ids)
    max_length = min(position, MAX_COMPARED)
    while length < max_length and token_ids[position - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length


def continuation(token_ids: SequenceOf[int], position: int, count: int) -> tuple[int, ...]:
    """The `count` tokens from `position` on; after the last one the text is assumed to repeat.

    >>> continuation([7, 8, 7, 8, 7], 3, 4)
    (8, 7, 8, 7)
    """
    found = list(token_ids[position : position + count])
    period = len(token_ids) - position
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
