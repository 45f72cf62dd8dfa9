"""Logits processors: they change logits before a token is sampled.

Called by the Sampler, in this order. A processor consists of two small classes: one shared by all
rows, and the state of one row. The Sampler keeps the states of the processors that a row uses, so a
processor costs nothing in a step where no row uses it.

    allowed_token_ids ─ bad_words ─ min_tokens ─ logit_bias ─ penalties ─┐
        ┌────────────────────────────────────────────────────────────────┘
        └─ custom (features/custom_processors.py) ─ grammars (features/structured.py) ─ a token

A processor is called once per step. An exception ends the rows of that call only.

Legend: L lines of logits, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence
from nanoengine.errors import NanoEngineError
from nanoengine.runner.transfers import ship
from nanoengine.settings.checks import describe_error

logger = logging.getLogger(__name__)


class RowState(Protocol):
    """State of one processor for one row.

    Optional members: `forced_tokens() -> list[int]` returns the next tokens if no others are
    allowed; `error: Exception | None` ends only this row if it is set after the processor has run.
    """

    def accept(self, token_id: int) -> None:
        """Updates the state with the row's next token."""

    def fork(self) -> RowState:
        """A copy that is independent of this state; may be `self` if the state never changes."""


class LogitsProcessor(Protocol):
    """The part of a processor that all rows share.

    If the attribute `one_by_one` is True, the processor is called with a single line at a time, so
    that an exception ends one row. A processor that only bans tokens may also have
    `masks(states) -> [L, ceil(V / 32)] int32`, one bit per token, set for allowed tokens. Greedy
    rows then don't need all of their logits.
    """

    def admit(self, sequence: AdmittedSequence) -> RowState | None:
        """State of a sequence with all its known tokens accepted; None if it does not use this
        processor.

        A sequence that resumes after preemption brings its output tokens, and its new state must
        equal the lost one.
        """

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[RowState]) -> None:
        """Changes `logits[lines]` ([L, V], float32 or float64) in place, with one state per line.

        The tensor contains the lines that any processor changes; `lines` are indices into it.
        """


@dataclass(slots=True, kw_only=True)
class ProcessorStates:
    """The states of all processors for one row.

    Attributes:
        processors: all processors, of all rows.
        sequence: the row's sequence, as it was admitted.
        states: processor index -> state, for the processors that change this row's logits.
        error: the message of an exception that a processor raised for this row, which ends it.
    """

    processors: Sequence[LogitsProcessor]
    sequence: AdmittedSequence
    states: dict[int, RowState] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def admit(
        cls, processors: Sequence[LogitsProcessor], sequence: AdmittedSequence
    ) -> ProcessorStates | None:
        """The states of a sequence with all its known tokens accepted; None if no processor changes
        its logits."""
        row = cls(processors=processors, sequence=sequence)
        for index, processor in enumerate(processors):
            row._guard(index, processor.admit, sequence)
        return row if row.states or row.error else None

    @property
    def only_bans(self) -> bool:
        """Whether all processors of this row only ban tokens, and have bit masks of them."""
        have_masks = all(hasattr(self.processors[index], "masks") for index in self.states)
        return have_masks and self.error is None

    def accept(self, token_ids: Iterable[int]) -> None:
        """Updates the states with the row's next tokens."""
        for token_id in token_ids:
            for index, state in self.states.items():
                self._guard(index, state.accept, token_id)

    def fork(self) -> ProcessorStates:
        """A copy that is independent of this one."""
        copy = ProcessorStates(processors=self.processors, sequence=self.sequence, error=self.error)
        for index, state in self.states.items():
            copy._guard(index, state.fork)
        return copy

    def forced_tokens(self) -> list[int]:
        """The next tokens, if one of the states allows no others; else []."""
        for index, state in self.states.items():
            if forced := getattr(state, "forced_tokens", None):
                try:
                    return forced()
                except Exception as error:
                    self.fail(index, error)
        return []

    def _guard(self, index: int, call: Callable[..., RowState | None], *args: object) -> None:
        """Calls a processor or its state; keeps the returned state, or the exception's message."""
        if self.error is None:
            try:
                state = call(*args)
            except Exception as error:
                self.fail(index, error)
            else:
                if state is not None:
                    self.states[index] = state

    def fail(self, index: int, error: Exception) -> None:
        """Ends the row with the exception that the processor at this index has raised."""
        self.error, where = str(error), error.__cause__
        if not isinstance(error, NanoEngineError):
            name = type(self.processors[index]).__name__
            self.error = f"logits processor {name} raised {describe_error(error)}"
            where = where or error
        logger.warning("sequence %d: %s", self.sequence.seq_id, self.error, exc_info=where)


def run_processors(
    processors: Sequence[LogitsProcessor],
    rows: Mapping[int, ProcessorStates],
    call: Callable[[Any, list[int], list[Any]], object],
) -> None:
    """Calls `call` with each processor in order, the lines that it changes, and their states.

    An exception ends the rows of that call; later processors skip them.

    Args:
        rows: line -> its processor states.
    """
    for index, processor in enumerate(processors):
        lines = [i for i, row in rows.items() if index in row.states and row.error is None]
        one_by_one = getattr(processor, "one_by_one", False)
        for group in [[i] for i in lines] if one_by_one else [lines] if lines else []:
            states = [rows[i].states[index] for i in group]
            try:
                call(processor, group, states)
                errors = [getattr(state, "error", None) for state in states]
            except Exception as error:
                errors = [error] * len(group)
            for i, error in zip(group, errors, strict=True):
                if error is not None:
                    rows[i].fail(index, error)


def standard_processors(eos_token_ids: Sequence[int]) -> tuple[LogitsProcessor, ...]:
    """The processors that implement SamplingParams, in the order of vLLM's sampler."""
    return (
        AllowedTokens(), BadWords(), MinTokens(eos_token_ids), LogitBias(), Penalties(),
    )  # fmt: skip


class AllowedTokens:
    """allowed_token_ids: all other tokens become -inf."""

    def admit(self, sequence: AdmittedSequence) -> TokenValues | None:
        allowed = sequence.params.allowed_token_ids
        return None if allowed is None else TokenValues(dict.fromkeys(allowed, 0.0))

    def apply(self, logits: torch.Tensor, lines: list[int], states: list[TokenValues]) -> None:
        line, token = _indices(lines, [state.ids for state in states], logits.device)
        kept = logits[line, token]
        logits[ship(logits.device, np.array(lines, np.int64))[0]] = -torch.inf
        logits[line, token] = kept


class LogitBias:
    """logit_bias: adds a value to some tokens' logits."""

    def admit(self, sequence: AdmittedSequence) -> TokenValues | None:
        bias = sequence.params.logit_bias
        return TokenValues(bias) if bias else None

    def apply(self, logits: torch.Tensor, lines: list[int], states: list[TokenValues]) -> None:
        line, token = _indices(lines, [state.ids for state in states], logits.device)
        logits[line, token] += _upload(np.concatenate([state.values for state in states]), logits)


class Constant:
    """The value of an option, if tokens of the row don't change what it does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def accept(self, token_id: int) -> None:
        """Nothing changes."""

    def fork(self) -> Self:
        return self


class TokenValues(Constant):
    """Token ids with one value each."""

    def __init__(self, values: dict[int, float]) -> None:
        self.ids = np.fromiter(values, dtype=np.int64)
        self.values = np.fromiter(values.values(), dtype=np.float64)


class Bans:
    """A processor whose states return the `banned()` tokens, which become -inf."""

    def apply(self, logits: torch.Tensor, lines: list[int], states: list[Any]) -> None:
        line, token = _indices(lines, [state.banned() for state in states], logits.device)
        logits[line, token] = -torch.inf


class BadWords(Bans):
    """bad_words: -inf for the last token of a banned sequence if its other tokens come just
    before."""

    def admit(self, sequence: AdmittedSequence) -> BadWordsState | None:
        words = sequence.bad_word_ids
        return BadWordsState(words, sequence.token_ids) if words else None


class BadWordsState:
    """The banned sequences, and the row's last tokens, as many as the longest of them needs."""

    def __init__(self, words: tuple[tuple[int, ...], ...], token_ids: Iterable[int]) -> None:
        self.words = words
        self.num_kept = max(len(word) for word in words) - 1
        tokens = tuple(token_ids)
        self.tail = tokens[len(tokens) - min(self.num_kept, len(tokens)) :]

    def accept(self, token_id: int) -> None:
        if self.num_kept:
            self.tail = (*self.tail, token_id)[-self.num_kept :]

    def fork(self) -> BadWordsState:
        return BadWordsState(self.words, self.tail)

    def banned(self) -> np.ndarray:
        """Tokens that would complete a banned sequence now."""
        return np.array(
            [w[-1] for w in self.words if len(w) == 1 or self.tail[1 - len(w) :] == w[:-1]],
            dtype=np.int64,
        )


class MinTokens(Bans):
    """min_tokens: EOS and stop ids become -inf until the output has that many tokens."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def admit(self, sequence: AdmittedSequence) -> MinTokensState | None:
        params = sequence.params
        # Why: with ignore_eos an EOS id ends nothing, so it is an ordinary token.
        eos = () if params.ignore_eos else self.eos_token_ids
        ids = sorted({*eos, *(params.stop_token_ids or ())})
        if not params.min_tokens or not ids:
            return None
        num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        return MinTokensState(np.array(ids), params.min_tokens - num_output_tokens)


@dataclass(eq=False)
class MinTokensState:
    """The ids that would end the row, and the number of tokens before they may be sampled."""

    ids: np.ndarray
    missing: int

    def accept(self, token_id: int) -> None:
        self.missing -= 1

    def fork(self) -> MinTokensState:
        return MinTokensState(self.ids, self.missing)

    def banned(self) -> np.ndarray:
        """All ids while tokens are missing, then none."""
        return self.ids if self.missing > 0 else self.ids[:0]


class Penalties:
    """repetition, frequency and presence penalties, on the tokens that a row has seen.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and
    output. For output tokens, frequency is subtracted per occurrence and presence once. A row
    has few distinct tokens, so they are kept in a list, without counts over the whole vocabulary.

    Source: Keskar et al., CTRL, section 4.1 (repetition); the OpenAI API (presence, frequency).
    """

    def admit(self, sequence: AdmittedSequence) -> PenaltyState | None:
        params = sequence.params
        repetition = params.repetition_penalty
        if repetition == 1 and not params.presence_penalty and not params.frequency_penalty:
            return None
        state = PenaltyState(repetition, params.frequency_penalty, params.presence_penalty)
        state.see(sequence.token_ids[: sequence.num_prompt_tokens])
        for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
            state.accept(token_id)
        return state

    def apply(self, logits: torch.Tensor, lines: list[int], states: list[PenaltyState]) -> None:
        line, token = _indices(lines, [s.ids[: s.num_ids] for s in states], logits.device)
        if not len(line):
            return
        factors = np.repeat([s.repetition for s in states], [s.num_ids for s in states])
        subtracted = np.concatenate([s.subtracted() for s in states])
        seen = logits[line, token]
        repetition = _upload(factors, logits)
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        logits[line, token] = seen - _upload(subtracted, logits)


@dataclass(eq=False)
class PenaltyState:
    """The distinct tokens that a row has seen, and how often each occurs in its output.

    Attributes:
        index: token id -> its index in the arrays, which are valid up to `num_ids`.
    """

    repetition: float
    frequency: float
    presence: float
    index: dict[int, int] = field(default_factory=dict)
    ids: np.ndarray = field(default_factory=lambda: np.empty(64, dtype=np.int64))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(64, dtype=np.int64))

    @property
    def num_ids(self) -> int:
        return len(self.index)

    def see(self, token_ids: Iterable[int]) -> None:
        """Lists prompt tokens, with a count of zero in the output."""
        for token_id in token_ids:
            if token_id not in self.index:
                if self.num_ids == len(self.ids):
                    self.ids = np.concatenate((self.ids, np.empty_like(self.ids)))
                    self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
                self.ids[self.num_ids] = token_id
                self.index[token_id] = self.num_ids

    def accept(self, token_id: int) -> None:
        self.see((token_id,))
        self.counts[self.index[token_id]] += 1

    def fork(self) -> PenaltyState:
        ids, counts = self.ids.copy(), self.counts.copy()
        return replace(self, index=self.index.copy(), ids=ids, counts=counts)

    def subtracted(self) -> np.ndarray:
        """The presence and frequency penalty of each listed token."""
        counts = self.counts[: self.num_ids]
        return self.frequency * counts + self.presence * (counts > 0)


def _indices(
    lines: Sequence[int], ids: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (line, token id) as two index tensors, in one copy to the device."""
    line = np.repeat(np.asarray(lines, dtype=np.int64), [len(line_ids) for line_ids in ids])
    (pairs,) = ship(device, np.stack((line, np.concatenate(ids))))
    return pairs[0], pairs[1]


def _upload(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return ship(logits.device, values)[0].to(logits.dtype)
