"""Sampler: from logits to tokens, for all rows of a step at once. Called by the StepSampler.

    raw logits ─┬─ processors ─┬─ greedy rows: argmax                               (draw.py)
                │              └─ other rows: temperature ─ min_p ─ top_k ─ top_p ─ draw
                └─ log-probabilities, if requested

If all rows of a step satisfy `needs_only_argmax`, and the model can find their most likely tokens
without computing all logits, the step skips the Sampler.

Rows persist across steps: `admit`, `fork` and `release` follow the plan, and
`ProcessorStates.accept` passes the tokens that became part of the sequence to the processors.

Legend: L lines of logits, V vocabulary, N top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, Fork, TokenLogprob
from nanoengine.runner.sampling.draw import (
    Drawer,
    DrawParams,
    SamplingKind,
    draw,
    draw_top_k,
    draw_top_p,
    mix,
    sample_lines,
    sample_on_device,
    uniforms,
    upcast,
)
from nanoengine.runner.sampling.greedy import NO_TOKEN, check_vocabulary, pack_tokens
from nanoengine.runner.sampling.logits_processors import (
    LogitsProcessor,
    ProcessorStates,
    run_processors,
    standard_processors,
)
from nanoengine.runner.sampling.logprobs import to_records, token_logprobs
from nanoengine.runner.transfers import ship


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedTokens:
    """The sampled tokens of a step, as Python values. An index is the number of a line of logits.

    Attributes:
        token_ids: one per line; 0 for lines in `errors`.
        logprobs: index -> the sampled token, then the top ones (which may include it again).
        errors: index -> why this line has no valid token.
    """

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprob]]
    errors: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The sampled tokens of a step, still on the device.

    Attributes:
        packed: [2, L] int64, per line the token, and whether it is valid; else the token is 0.
        logprob_lines: the lines with log-probabilities, and the number of top ones of each.
        logprobs: [len(logprob_lines), 1 + N, 3], as `token_logprobs` returns them; None if
            there are no such lines.
        errors: messages of processors that failed, for some of the invalid lines.
    """

    packed: torch.Tensor
    logprob_lines: list[tuple[int, int]] = field(default_factory=list)
    logprobs: torch.Tensor | None = None
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> torch.Tensor:
        """[L] int64; 0 where there is no valid token."""
        return self.packed[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors for the host: `packed`, then log-probabilities if any."""
        return [self.packed] if self.logprobs is None else [self.packed, self.logprobs]

    def fetch(self, tensors: Sequence[torch.Tensor] | None = None) -> FetchedTokens:
        """Converts to Python values: `tensors`, if they have been copied to the host, or else the
        device's, for which it waits."""
        tensors = self.tensors if tensors is None else tensors
        token_ids, valid = tensors[0].tolist()
        logprobs = {}
        if self.logprobs is not None:
            entries = tensors[1].tolist()
            for (line, num_top), found in zip(self.logprob_lines, entries, strict=True):
                logprobs[line] = to_records(found[: 1 + num_top])
        invalid = [line for line, is_valid in enumerate(valid) if not is_valid]
        errors = {line: self.errors.get(line, NO_TOKEN) for line in invalid}
        return FetchedTokens(token_ids=token_ids, logprobs=logprobs, errors=errors)


class Sampler:
    """Samples one token for each line of logits with its row's parameters.

    Args:
        vocab_size: V, at most 2**19.
        max_num_seqs: rows are 0 ... max_num_seqs - 1.
        eos_token_ids: the model's, masked before min_tokens.
        processors: further logits processors, run after those for SamplingParams.

    Attributes:
        seeds: of each row, as `mix` returns them.
        drawers: how each row's tokens are drawn on a CPU, as an index into DRAWERS.
        params: temperature (0: greedy), top_k (V if off), top_p and min_p of each row.
        has_processors: which rows have an entry in `processor_states`.
        num_logprobs: of each row; -1: no log-probabilities.
        jump_forward_rows: rows with a processor that may have `forced_tokens`.
        changed: rows with new parameters; the decode step empties it.

    Raises:
        ValueError: a size or an EOS id is out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: Sequence[int] = (),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        check_vocabulary(vocab_size)
        self.vocab_size = vocab_size
        self.processors = (*standard_processors(eos_token_ids), *processors)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.drawers = np.zeros(max_num_seqs, dtype=np.int64)
        self.params = np.tile([[0.0], [vocab_size], [1.0], [0.0]], max_num_seqs)
        self.has_processors = np.zeros(max_num_seqs, dtype=bool)
        self.num_logprobs = np.full(max_num_seqs, -1)
        self.processor_states: dict[int, ProcessorStates] = {}
        self.jump_forward_rows: set[int] = set()
        self.changed: set[int] = set()

    def admit(self, sequence: AdmittedSequence) -> None:
        """Starts a row, for a new sequence or for one that resumes with its output tokens.

        The engine has checked every id in the parameters against the vocabulary.
        """
        params, row = sequence.params, sequence.row
        # Why the bound: above it float32 has only inf, and -inf / inf would be NaN.
        temperature = min(params.temperature, float(np.finfo(np.float32).max))
        filters = 0 < params.top_k < self.vocab_size, params.min_p > 0, params.top_p < 1
        top_k = params.top_k if filters[0] else self.vocab_size
        if params.is_greedy:
            self.drawers[row], temperature = 0, 0.0
        else:
            self.drawers[row] = 2 + filters.index(True) if any(filters) else 1
        self.params[:, row] = temperature, top_k, params.top_p, params.min_p
        self._seed(row, sequence.seed)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._set_states(row, ProcessorStates.admit(self.processors, sequence))

    def _seed(self, row: int, seed: int) -> None:
        self.seeds[row : row + 1] = mix(np.array([seed], dtype=np.int64))
        self.changed.add(row)

    def _set_states(self, row: int, processor_states: ProcessorStates | None) -> None:
        self.has_processors[row] = processor_states is not None
        self.processor_states.pop(row, None)
        self.jump_forward_rows.discard(row)
        if processor_states is not None:
            self.processor_states[row] = processor_states
            if any(hasattr(state, "forced_tokens") for state in processor_states.states.values()):
                self.jump_forward_rows.add(row)

    def rewrite(self, row: int, token_ids: np.ndarray) -> None:
        """Replaces the row's tokens, because the sampled one was replaced by another."""
        if self.has_processors[row]:
            sequence = self.processor_states[row].sequence._replace(token_ids=token_ids.tolist())
            self._set_states(row, ProcessorStates.admit(self.processors, sequence))

    def fork(self, fork: Fork) -> None:
        """Makes a row a copy of its parent, with its own seed."""
        row, parent = fork.row, fork.parent_row
        self.params[:, row] = self.params[:, parent]
        self.drawers[row], self.num_logprobs[row] = self.drawers[parent], self.num_logprobs[parent]
        self._seed(row, fork.seed)
        states = self.processor_states.get(parent)
        self._set_states(row, states and states.fork())

    def release(self, row: int) -> None:
        """Drops the processor states of a row; the next `admit` overwrites its parameters."""
        self._set_states(row, None)

    def states_of(self, rows: Sequence[int]) -> dict[int, ProcessorStates]:
        """Processor states that must accept the tokens that these rows are about to sample, by
        index in `rows`.

        Why not by row: when the tokens are known, a row may belong to another sequence.
        """
        indices = np.flatnonzero(self.has_processors[np.asarray(rows, dtype=np.int64)])
        return {int(i): self.processor_states[rows[i]] for i in indices}

    def forced_tokens(self, row: int) -> list[int]:
        """The next tokens of a row, if a processor allows no others; else []. They follow the
        tokens of the steps whose result has been requested."""
        return self.processor_states[row].forced_tokens() if row in self.jump_forward_rows else []

    def needs_all_logits(self, rows: np.ndarray) -> bool:
        """Whether the logits of these rows are not only sampled: processors change them, or
        log-probabilities are reported."""
        return bool(self.has_processors[rows].any() or (self.num_logprobs[rows] >= 0).any())

    def needs_only_argmax(self, rows: np.ndarray) -> bool:
        """Whether all these rows are greedy, without log-probabilities, and their logits processors
        only ban tokens."""
        if self.drawers[rows].any() or (self.num_logprobs[rows] >= 0).any():
            return False
        processed = rows[self.has_processors[rows]].tolist()
        return all(self.processor_states[row].only_bans for row in processed)

    def masks(
        self, rows: np.ndarray, drafts: Mapping[int, Sequence[int]]
    ) -> tuple[np.ndarray, dict[int, str]]:
        """The allowed tokens of each line as bits, [L, ceil(V / 32)] int32; and the errors of lines
        whose processor has failed, which allow no token. Arguments as for `sample`; the rows must
        satisfy `needs_only_argmax`.
        """
        processor_states = self._line_states(rows, drafts)
        masks = np.full((len(rows), -(-self.vocab_size // 32)), -1, np.int32)

        def ban(processor: Any, lines: list[int], states: list[Any]) -> None:
            masks[lines] &= processor.masks(states)

        run_processors(self.processors, processor_states, ban)
        errors = _errors(processor_states)
        masks[list(errors)] = 0
        return masks, errors

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> SampledTokens:
        """Samples one token per line. Doesn't change the logits or the state of a row.

        Args:
            logits: [L, V], any float dtype, on any device.
            rows: the row of each line. A row that verifies drafts has several consecutive lines:
                line k is sampled as if its first k drafts had been accepted.
            positions: the position of each sampled token in its sequence.
            drafts: row -> its draft tokens.
        """
        rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        processor_states = self._line_states(rows, drafts or {})
        processed = self._process(logits, processor_states) if processor_states else logits[:0]
        token_ids, valid = self._sample_lines(logits, processed, rows, positions)
        num_top = self.num_logprobs[rows]
        reported, logprobs = np.flatnonzero(num_top >= 0), None
        if len(reported):
            (index,) = ship(logits.device, reported)
            logprobs = token_logprobs(logits[index], token_ids[index], int(num_top.max()))
        return SampledTokens(
            packed=pack_tokens(token_ids, valid),
            logprob_lines=[(int(line), int(num_top[line])) for line in reported],
            logprobs=logprobs,
            errors=_errors(processor_states),
        )

    def _process(
        self, logits: torch.Tensor, processor_states: Mapping[int, ProcessorStates]
    ) -> torch.Tensor:
        """Runs the processors on copies of the lines that have any; returns these lines, [E, V]. A
        line whose processor fails becomes -inf."""
        (index,) = ship(logits.device, np.fromiter(processor_states, dtype=np.int64))
        copy, states = upcast(logits[index]), dict(enumerate(processor_states.values()))
        run_processors(
            self.processors, states, lambda one, lines, states: one.apply(copy, lines, states)
        )
        for line in _errors(states):
            copy[line] = -torch.inf
        return copy

    def _sample_lines(
        self, logits: torch.Tensor, processed: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples one token per line: ids [L] int64, and whether each is valid, [L] bool.

        Args:
            processed: [E, V], replaces the logits of the rows with processors.
        """
        device, is_processed = logits.device, self.has_processors[rows]
        if device.type != "cpu":
            logits = processed if is_processed.all() else logits
            params = self._draw_params(rows, positions, device)
            token_ids, valid = sample_on_device(logits, params, self.kind(rows))
            if is_processed.any() and logits is not processed:
                lines = np.flatnonzero(is_processed)
                params = self._draw_params(rows[lines], positions[lines], device)
                (index,) = ship(device, lines)
                sampled = sample_on_device(processed, params, self.kind(rows[lines]))
                token_ids[index], valid[index] = sampled
            return token_ids, valid
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        valid = torch.empty(len(rows), dtype=torch.bool)
        in_processed, drawers = np.cumsum(is_processed) - 1, self.drawers[rows]
        for drawer, use in set(zip(drawers.tolist(), is_processed.tolist(), strict=True)):
            lines = np.flatnonzero((drawers == drawer) & (is_processed == use))
            source, selected = (processed, in_processed[lines]) if use else (logits, lines)
            index = None if len(lines) == len(source) else torch.from_numpy(selected)
            params = self._draw_params(rows[lines], positions[lines], device) if drawer else None
            sampled = sample_lines(source, params, DRAWERS[drawer], index)
            (index,) = ship(device, lines)
            token_ids[index], valid[index] = sampled
        return token_ids, valid

    def _draw_params(
        self, rows: np.ndarray, positions: np.ndarray, device: torch.device
    ) -> DrawParams:
        return DrawParams.pack(self.params[:, rows], uniforms(self.seeds[rows], positions), device)

    def kind(self, rows: np.ndarray) -> SamplingKind:
        """How `sample_on_device` samples these rows together."""
        return [*SamplingKind][min(int(self.drawers[rows].max(initial=0)), 2)]

    def _line_states(
        self, rows: np.ndarray, drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, ProcessorStates]:
        """Processor states per line: the row's own, or a fork that has accepted the drafts before
        this line."""
        states: dict[int, ProcessorStates] = {}
        latest: dict[int, tuple[int, ProcessorStates]] = {}  # row -> drafts accepted so far
        for line in np.flatnonzero(self.has_processors[rows]).tolist():
            row = int(rows[line])
            if row not in latest:
                latest[row] = 0, self.processor_states[row]
            else:
                num_before, processor_states = latest[row]
                processor_states = processor_states.fork()
                processor_states.accept(drafts[row][num_before : num_before + 1])
                latest[row] = num_before + 1, processor_states
            states[line] = latest[row][1]
        return states


DRAWERS: tuple[Drawer | None, ...] = (None, draw, draw_top_k, draw_top_p, draw_top_p)
"""How lines are drawn on a CPU: None for greedy lines; from all tokens for lines without filters;
else by the first of the filters top_k, min_p and top_p that is set, since each stops early
differently."""


def _errors(processor_states: Mapping[int, ProcessorStates]) -> dict[int, str]:
    return {line: row.error for line, row in processor_states.items() if row.error is not None}
