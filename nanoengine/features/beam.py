"""Beam search: the continuations of a prompt with the best scores, one token per step.

    step       each beam has its most likely next tokens in `SequenceOptions.choices`
    choose     all continuations of all beams, best first
                 EOS or maximum length ────────── a hypothesis, if among the first beam_width
                 the beam_width best others ───── append a token, fork or drop

A `BeamSearch` is the `TokenChooser` of one request, whose sequences are the beams. Beams share the
blocks of their common prefix, and the last block is copied on write. The Scheduler calls it; it
does not handle blocks, tensors or text. `beam_search` implements `LLM.beam_search`, which runs the
searches of many prompts concurrently.

Source: the settings have the same meaning as in transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.sequence import Request, Sequence, SequenceMoves
from nanoengine.engine import LLMEngine
from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, require_positive
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import NAMES, translate
from nanoengine.text.prompt_forms import Row, prompt_list
from nanoengine.text.prompts import CheckedPrompt
from nanoengine.text.tokenizer import Tokenizer

MAX_PENALTY = 30
"""Maximum length penalty. Why: a length to this power is a finite float for any context."""


@checked(
    RequestError,
    functools.partial(translate, table=NAMES["BeamSearchParams"], error=RequestError),
)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search. Fields may be given by position, in vLLM's order.

    Attributes:
        beam_width: beams kept in each step, and sequences returned.
        max_tokens: maximum number of tokens per sequence.
        length_penalty: a score is the log-probability over length ** length_penalty; above 0 it
            favours long sequences, 0 compares plain log-probabilities. From -30 to 30.
        early_stopping: when to stop with beam_width hypotheses. False: when the best beam, at its
            current length, scores no better than the worst of them; True: at once; "never": when
            no beam can become better any more, at any length.
        temperature: must be 0; a beam search does not sample.
        ignore_eos: continue after the model's EOS ids.

    Raises:
        RequestError: a value has the wrong type or is out of range; the message names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    _: KW_ONLY
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        require_positive(self, RequestError, "beam_width", "max_tokens")
        if abs(self.length_penalty) > MAX_PENALTY:
            raise RequestError(
                f"length_penalty must be from {-MAX_PENALTY} to {MAX_PENALTY}, got"
                f" {self.length_penalty!r}"
            )
        if self.temperature != 0:
            raise RequestError(
                f"temperature must be 0, got {self.temperature!r}: a beam search does not sample;"
                " use generate() with n > 1 to sample"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSequence:
    """One result of a search.

    Attributes:
        token_ids: the generated tokens, including a final EOS.
        text: without that EOS; "" without a tokenizer.
        cumulative_logprob: sum of the tokens' log-probabilities.
        score: cumulative_logprob over len(token_ids) ** length_penalty.
        finish_reason: "stop" for EOS, "length" for max_tokens or max_model_len.
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """One prompt with its best continuations.

    Attributes:
        index: index of the prompt in the call.
        prompt: the text, if it was given as text or chat; else None.
        sequences: the beam_width best ones, best score first; none if there is an error.
        error: why the search failed while it ran.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSequence]
    error: str | None = None


class Candidate(NamedTuple):
    """A beam with one more token."""

    logprob: float
    beam: Sequence
    token_id: int


@dataclass(eq=False)
class BeamSearch:
    """The search for one prompt; a `TokenChooser`.

    Attributes:
        max_tokens: maximum number of tokens per sequence, limited by the model's context.
        eos_token_ids: ids that end a sequence; empty to ignore them.
        vocab_size: the maximum number of continuations per beam.
        hypotheses: the finished sequences so far, at most beam_width, best first; without texts.
    """

    params: BeamSearchParams
    _: KW_ONLY
    max_tokens: int
    eos_token_ids: SequenceOf[int]
    vocab_size: int
    hypotheses: list[BeamSequence] = field(default_factory=list, init=False)

    @property
    def num_candidates(self) -> int:
        """Number of continuations considered per step.

        Why so many: if all beams can end, beam_width continuations that do not end are still among
        them.
        """
        return max(2, 1 + len(set(self.eos_token_ids))) * self.params.beam_width

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of its beams: greedy, with logprobs of their candidates."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=min(self.num_candidates, self.vocab_size),
            detokenize=False,
        )

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        """Keeps the best continuations: collects the ones that end, continues with the others."""
        beams = [seq for seq in request.sequences if not seq.is_finished]
        length = beams[0].num_output_tokens + 1
        candidates = self._candidates(beams)
        self._collect(candidates[: self.params.beam_width], length)
        continuing = [c for c in candidates if not self._ends(c, length)][: self.params.beam_width]
        if not continuing or self._is_decided(continuing[0].logprob, length):
            for beam in beams:
                moves.finish(beam, "stop")
            return
        continuations: dict[Sequence, list[int]] = {}
        for candidate in continuing:
            continuations.setdefault(candidate.beam, []).append(candidate.token_id)
        for beam in beams:  # Why first: a fork may use a dropped beam's row and blocks.
            if beam not in continuations:
                moves.drop(beam)
        for beam, (first, *others) in continuations.items():
            for token_id in others:
                moves.fork(beam, token_id)
            moves.append_token(beam, first)

    def _candidates(self, beams: list[Sequence]) -> list[Candidate]:
        """The most likely continuations of all beams; at equal scores, earlier beams first."""
        found = [
            Candidate(beam.extras.cumulative_logprob + entry.logprob, beam, entry.token_id)
            for beam in beams
            if beam.extras is not None
            for entry in beam.extras.choices or ()
        ]
        found.sort(key=lambda candidate: -candidate.logprob)
        return found[: self.num_candidates]

    def _ends(self, candidate: Candidate, length: int) -> bool:
        return candidate.token_id in self.eos_token_ids or length >= self.max_tokens

    def _collect(self, best: list[Candidate], length: int) -> None:
        """Adds candidates that end as hypotheses, and keeps the beam_width best of all."""
        for candidate in best:
            if self._ends(candidate, length):
                is_eos = candidate.token_id in self.eos_token_ids
                self.hypotheses.append(
                    BeamSequence(
                        token_ids=[*candidate.beam.output_token_ids, candidate.token_id],
                        text="",
                        cumulative_logprob=candidate.logprob,
                        score=self._score(candidate.logprob, length),
                        finish_reason="stop" if is_eos else "length",
                    )
                )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.beam_width :]

    def _is_decided(self, best_logprob: float, length: int) -> bool:
        """True if the search ends: there are enough hypotheses, and none will become better.

        A log-probability only decreases, so a score can increase only through the length. "never"
        assumes the maximum length for the best beam, False its current length.
        """
        params = self.params
        if len(self.hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self._score(best_logprob, length) <= self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.params.length_penalty)


# --- the searches of a call -----------------------------------------------------------------------


def make_search(params: BeamSearchParams, info: EngineInfo, num_prompt_tokens: int) -> BeamSearch:
    """The search for a prompt of this length."""
    return BeamSearch(
        params,
        max_tokens=min(params.max_tokens, info.max_model_len - num_prompt_tokens),
        eos_token_ids=() if params.ignore_eos else info.eos_token_ids,
        vocab_size=info.vocab_size,
    )


def beam_search(
    llm: Any,
    prompts: object,
    params: BeamSearchParams,
    bar: Callable[[LLMEngine, int], contextlib.AbstractContextManager[object]],
) -> list[BeamSearchOutput]:
    """Implements `LLM.beam_search`; no other call uses the engine at the same time.

    Args:
        bar: creates a progress bar for this many requests.
    """
    calls, config, tokenizer = llm._calls, llm.config, llm._tokenizer
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be BeamSearchParams, got {params!r}")
    max_searches = config.max_num_seqs // params.beam_width
    if not max_searches:
        raise RequestError(
            f"max_num_seqs={config.max_num_seqs} must be at least beam_width={params.beam_width},"
            " because all beams run together"
        )
    if config.logits_processors:
        raise RequestError(
            "a beam search ranks the model's own log-probabilities, so logits_processors are not"
            " supported: create an LLM without them"
        )
    parsed = prompt_list(prompts)
    if any(isinstance(one, Row) and one.sampling_params is not None for one in parsed):
        raise RequestError("a beam search does not sample: remove sampling_params from its Rows")
    shared = make_search(params, calls.engine.info, 0).sampling_params
    results = llm.require_reader().read_all(parsed, shared, None, "raise")
    waiting = [prompt for prompt in reversed(results) if isinstance(prompt, CheckedPrompt)]
    running: dict[str, tuple[CheckedPrompt, BeamSearch, Request]] = {}
    outputs: dict[int, BeamSearchOutput] = {}
    call = calls.begin()
    with bar(call.engine, len(results)), call:
        while waiting or running:
            with call.locked_engine() as engine:
                while waiting and len(running) < max_searches:  # Why: others would only wait.
                    prompt = waiting[-1]
                    search = make_search(params, engine.info, len(prompt.request.prompt_token_ids))
                    request = engine.queue(next(calls.request_ids), prompt.request, chooser=search)
                    running[request.request_id] = (waiting.pop(), search, request)
                for request_id in call.step(running):
                    prompt, search, request = running.pop(request_id)
                    outputs[prompt.index] = _output(prompt, search, request, tokenizer)
    return [outputs[index] for index in sorted(outputs)]


def _output(
    prompt: CheckedPrompt, search: BeamSearch, request: Request, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    error, token_ids = request.error, prompt.request.prompt_token_ids
    if any(seq.finish_reason == "abort" for seq in request.sequences):
        error = "the search was aborted"
    sequences = [] if error else search.hypotheses
    if tokenizer is not None:
        text_of = functools.partial(
            tokenizer.output_text,
            params=prompt.request.params,
            prompt_token_ids=token_ids,
            end_ids=search.eos_token_ids,
        )
        sequences = [replace(found, text=text_of(found.token_ids)) for found in sequences]
    return BeamSearchOutput(
        index=prompt.index,
        prompt=prompt.text,
        prompt_token_ids=token_ids,
        sequences=sequences,
        error=error,
    )
