"""Sampler: from logits to tokens, for all rows of a step at once. Called by SpecialRows.

    raw logits ─┬─ processors ─┬─ greedy rows: argmax                    (sampling_ops.py)
                │  (logits.py) └─ others: temperature ─ min_p ─ top_k ─ top_p ─ draw
                └─ log-probabilities, if asked for

Steps of `only_masked` rows skip the Sampler where the model finds their `most_likely` tokens
without computing all logits.

On a CPU, the Sampler groups rows by their filters, and each filter looks at values to stop early.
On a GPU a look at values would make the host wait, so all rows go through `device_sampling.py`,
which gives the same tokens.

It knows rows and sampling parameters, but no scheduler, no model and no text. Rows live across
steps: `admit`, `fork` and `release` follow the plan, and `RowEdits.accept` tells their processors
which sampled tokens became part of the sequence.

Legend: L lines of logits, V vocabulary, N top log-probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, Fork
from nanoengine.runner.device_sampling import SamplingKind, sample_on_device
from nanoengine.runner.greedy import check_vocabulary, pack_tokens
from nanoengine.runner.logits import LogitsProcessor, RowEdits, stages_of, standard_processors
from nanoengine.runner.sampled import SampledTokens
from nanoengine.runner.sampling_ops import (
    DrawParams,
    argmax,
    draw,
    draw_top_k,
    draw_widening,
    line_chunks,
    mix,
    pad_to_blocks,
    uniforms,
    widen,
)
from nanoengine.runner.scores import token_logprobs
from nanoengine.runner.transfers import ship


class Sampler:
    """Samples one token for each line of logits by its row's parameters.

    Args:
        vocab_size: V, at most 2**19.
        max_num_seqs: rows are 0 ... max_num_seqs - 1.
        eos_token_ids: the model's, masked until min_tokens.
        processors: further stages, run after those of SamplingParams.

    Attributes:
        seeds: as `uniforms` takes them.
        drawers: how each row's tokens are drawn on a CPU, by place in DRAWERS.
        params: temperature (0: greedy), top_k (V where it is off), top_p and min_p of each row.
        edited: which rows have an entry in `edits`.
        num_logprobs: -1 where none are asked for.
        forcing: rows with a processor that may know what must come next.
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
        standard = standard_processors(eos_token_ids)
        self.processors, self.num_standard = (*standard, *processors), len(standard)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.drawers = np.zeros(max_num_seqs, dtype=np.int64)
        self.params = np.tile([[0.0], [vocab_size], [1.0], [0.0]], max_num_seqs)
        self.edited = np.zeros(max_num_seqs, dtype=bool)
        self.num_logprobs = np.full(max_num_seqs, -1)
        self.edits: dict[int, RowEdits] = {}
        self.forcing: set[int] = set()
        self.changed: set[int] = set()

    def admit(self, sequence: AdmittedSequence) -> None:
        """Starts a row, for a new sequence or one that comes back with its output tokens.

        The engine has checked every id that the parameters name against the vocabulary.
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
        self._set_edits(row, RowEdits.admit(self.processors, sequence))

    def _seed(self, row: int, seed: int) -> None:
        self.seeds[row : row + 1] = mix(np.array([seed], dtype=np.int64))
        self.changed.add(row)

    def _set_edits(self, row: int, edits: RowEdits | None) -> None:
        self.edited[row] = edits is not None
        self.edits.pop(row, None)
        self.forcing.discard(row)
        if edits is not None:
            self.edits[row] = edits
            if edits.may_force:
                self.forcing.add(row)

    def rewrite(self, row: int, token_ids: np.ndarray) -> None:
        """Tells that the row's tokens are these: one was chosen in place of the sampled one."""
        if self.edited[row]:
            sequence = self.edits[row].sequence._replace(token_ids=token_ids.tolist())
            self._set_edits(row, RowEdits.admit(self.processors, sequence))

    def fork(self, fork: Fork) -> None:
        """Makes a row a copy of its parent, with its own seed."""
        row, parent = fork.row, fork.parent_row
        self.params[:, row] = self.params[:, parent]
        self.drawers[row], self.num_logprobs[row] = self.drawers[parent], self.num_logprobs[parent]
        self._seed(row, fork.seed)
        self._set_edits(row, self.edits[parent].fork() if self.edited[parent] else None)

    def release(self, row: int) -> None:
        """Forgets a row's tokens; its parameters are overwritten by the next `admit`."""
        self._set_edits(row, None)

    def edits_of(self, rows: Sequence[int]) -> dict[int, RowEdits]:
        """What must see the tokens that these rows are about to sample, by their place in `rows`.
        `RowEdits.accept` tells it.

        Why not the rows: by the time the tokens are known, a row may have passed on.
        """
        edited = np.flatnonzero(self.edited[np.asarray(rows, dtype=np.int64)])
        return {int(i): self.edits[rows[i]] for i in edited}

    def forced_tokens(self, row: int) -> list[int]:
        """The tokens that a processor forces on a row next, whatever the logits; none it knows of:
        empty. They follow the tokens of steps whose result has been asked for."""
        return self.edits[row].forced_tokens() if row in self.forcing else []

    def looks_at_logits(self, rows: np.ndarray) -> bool:
        """Whether more is done with the logits of these rows than to sample their tokens:
        processors edit them, or log-probabilities are reported."""
        return bool(self.edited[rows].any() or (self.num_logprobs[rows] >= 0).any())

    def only_masked(self, rows: np.ndarray) -> bool:
        """Whether these rows ask for the largest of the model's own logits, but for bans alone."""
        return (
            not self.drawers[rows].any()
            and not (self.num_logprobs[rows] >= 0).any()
            and all(self.edits[row].only_bans for row in rows[self.edited[rows]].tolist())
        )

    def masks(self, rows: np.ndarray, drafts: Mapping[int, Sequence[int]]) -> np.ndarray | None:
        """The tokens that may come in each line, a bit each, [L, ceil(V / 32)] int32.

        Args: as of `sample`, of rows that are `only_masked`.

        Returns:
            None: a processor has raised, which `sample` sorts out.
        """
        edits = self._edits(rows, np.arange(len(rows)), drafts)
        masks = np.full((len(rows), -(-self.vocab_size // 32)), -1, np.int32)
        for _, processor, lines, states in stages_of(self.processors, edits):
            try:
                masks[lines] &= processor.masks(states)
            except Exception:
                return None
        return masks

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> SampledTokens:
        """Samples one token a line; changes no logits and remembers nothing.

        Args:
            logits: [L, V], any float dtype, on any device.
            rows: the row of each line. A row that verifies drafts has several lines, one after the
                other; the line after k of its drafts is sampled as if these had been accepted.
            positions: the position that the sampled token would take in its sequence.
            drafts: row -> its draft tokens.
        """
        rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        device = logits.device
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=device)
        valid = torch.ones(len(rows), dtype=torch.bool, device=device)
        errors: dict[int, str] = {}
        for lines, sample in self._groups(rows, positions, device):
            edits = self._edits(rows, lines, drafts or {})
            as_they_are = sample is _sample_greedy or device.type != "cpu"
            if not edits and as_they_are and len(lines) == len(rows):
                token_ids, valid = sample(logits, slice(None))
                break
            for start, stop in line_chunks(len(lines), logits):
                (chunk,) = ship(device, lines[start:stop])
                inside = {i - start: row for i, row in edits.items() if start <= i < stop}
                work = self._edited_lines(logits, lines[start:stop], inside)
                token_ids[chunk], valid[chunk] = sample(work, slice(start, stop))
                errors |= {
                    int(lines[start + i]): row.error for i, row in inside.items() if row.error
                }
        token_ids = torch.where(valid, token_ids, 0)
        asked = self.num_logprobs[rows]
        reported = np.flatnonzero(asked >= 0)
        logprobs = None
        if len(reported):
            (index,) = ship(device, reported)
            logprobs = token_logprobs(logits[index], token_ids[index], int(asked.max()))
        return SampledTokens(
            packed=pack_tokens(token_ids, valid),
            logprob_lines=[(int(line), int(asked[line])) for line in reported],
            logprobs=logprobs,
            errors=errors,
        )

    def _edited_lines(
        self, logits: torch.Tensor, lines: np.ndarray, edits: dict[int, RowEdits]
    ) -> torch.Tensor:
        """Some lines as the processors make them; nothing but -inf in those of rows with errors.

        Args:
            edits: of the edited lines, counted within `lines`.
        """
        work = _take(logits, lines, copy=bool(edits))
        for place, processor, own, _ in stages_of(self.processors, edits):
            one_by_one = getattr(processor, "one_by_one", False)
            for some in [[line] for line in own] if one_by_one else [own]:
                self._apply(work[:, : self.vocab_size], place, some, edits)
        for i, row in edits.items():
            if row.error is not None:
                work[i] = -torch.inf
        return work

    def _apply(
        self, work: torch.Tensor, place: int, lines: list[int], edits: Mapping[int, RowEdits]
    ) -> None:
        """Has the processor at a place edit some lines in place; a row that it raises for fails.

        If it raises for several lines, it is called again for each alone, to find whose error it
        is. If none of these calls raises, it is the error of all of these rows.
        """
        processor, states = self.processors[place], [edits[line].states[place] for line in lines]
        # Why only then: the standard ones don't raise, and tokens may be banned twice.
        may_undo = place >= self.num_standard and not hasattr(processor, "masks")
        before = work[lines] if may_undo and len(lines) > 1 else None
        try:
            processor.apply(work, lines, states)
        except Exception as error:
            if before is not None:
                work[lines] = before
            for line in lines if len(lines) > 1 else ():
                self._apply(work, place, [line], edits)
            if not any(edits[line].error for line in lines):
                for line in lines:
                    edits[line].fail(place, error)

    def _groups(
        self, rows: np.ndarray, positions: np.ndarray, device: torch.device
    ) -> Iterator[tuple[np.ndarray, LineSampler]]:
        """Groups the lines by how they are sampled: each filter stops early in its own way."""
        if device.type != "cpu":
            kind, params = self.kind(rows), self._draw_params(rows, positions, device)
            yield np.arange(len(rows)), lambda lines, at: sample_on_device(lines, params[at], kind)
            return
        drawers = self.drawers[rows]
        for number in sorted(set(drawers.tolist())):
            lines, sample = np.flatnonzero(drawers == number), _sample_greedy
            if drawer := DRAWERS[number]:
                params = self._draw_params(rows[lines], positions[lines], device)
                sample = functools.partial(_sample_drawn, drawer, params)
            yield lines, sample

    def _draw_params(
        self, rows: np.ndarray, positions: np.ndarray, device: torch.device
    ) -> DrawParams:
        return DrawParams.pack(self.params[:, rows], uniforms(self.seeds[rows], positions), device)

    def kind(self, rows: np.ndarray) -> SamplingKind:
        """How `sample_on_device` takes these rows together."""
        most = int(self.drawers[rows].max(initial=0))
        return (SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.FILTERED)[min(most, 2)]

    def _edits(
        self, rows: np.ndarray, lines: np.ndarray, drafts: Mapping[int, Sequence[int]]
    ) -> dict[int, RowEdits]:
        """What edits these lines: index in `lines` -> the row's own, or behind drafts a fork."""
        found: dict[int, RowEdits] = {}
        latest: dict[int, tuple[int, RowEdits]] = {}  # row -> drafts accepted so far
        for i in np.flatnonzero(self.edited[rows[lines]]).tolist():
            row = int(rows[lines[i]])
            if row not in latest:
                latest[row] = 0, self.edits[row]
            else:
                num_before, edits = latest[row]
                edits = edits.fork()
                edits.accept(drafts[row][num_before : num_before + 1])
                latest[row] = num_before + 1, edits
            found[i] = latest[row][1]
        return found


LineSampler = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""From the edited logits of some lines of a group to their tokens, and which of these are valid."""


DRAWERS = (None, draw, draw_top_k, draw_widening, draw_widening)
"""How lines are drawn: greedy ones not at all, those without filters from all tokens; else by the
first filter that they have, of top_k, min_p and top_p, each of which stops early in its own way."""


def _sample_greedy(logits: torch.Tensor, lines: slice) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, largest = argmax(logits)
    return token_ids, largest.isfinite()


def _sample_drawn(
    draw_lines: Callable[..., torch.Tensor], params: DrawParams, logits: torch.Tensor, lines: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    largest = logits.amax(-1, keepdim=True)
    return draw_lines(logits, largest, params[lines]), largest[:, 0].isfinite()


def _take(logits: torch.Tensor, lines: np.ndarray, copy: bool) -> torch.Tensor:
    """Some lines of the logits, widened and padded; unless `copy`, in place where that can be."""
    first, last = int(lines[0]), int(lines[-1])
    if not copy and last - first == len(lines) - 1:
        return pad_to_blocks(widen(logits[first : last + 1]))
    return pad_to_blocks(widen(logits[ship(logits.device, lines)[0]]))
