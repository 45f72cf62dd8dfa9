"""The results of a call: RequestOutput, CompletionOutput, Logprob, RequestMetrics.

Frozen values with the names and meanings of vLLM's offline API, so that scripts run unchanged.
`OutputBuilder` creates them for `llm.py` from the engine's requests; the values hold no reference
to the engine.

    RequestOutput  one prompt
    └─ outputs     CompletionOutput, n of them
       └─ logprobs one dict per token: token id -> Logprob
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from nanoengine.core.plan import TokenLogprob
    from nanoengine.core.sequence import Request, Sequence
    from nanoengine.text.prompts import CheckedPrompt
    from nanoengine.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: EOS, a stop id or a stop string; length: max_tokens or max_model_len; abort: ended by the
caller; error: see `CompletionOutput.error`."""

OutputKind = Literal["final", "cumulative", "delta"]
"""final: once, when finished; cumulative: all text at each change; delta: only the new part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One candidate token at one position.

    Attributes:
        logprob: natural logarithm of its probability, before temperature and filters.
        rank: 1 is the most likely token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: 0 <= index < n.
        text: without EOS and stop string, unless requested; "" without a tokenizer.
        token_ids: all generated tokens, including the last one.
        cumulative_logprob: sum over the generated tokens; None if logprobs were not requested.
        logprobs: one dict per token: the sampled token first, then the most likely ones.
        finish_reason: None while it is unfinished.
        stop_reason: the stop string or stop id that ended it; None for EOS and length.
        error: why there is no answer, if `finish_reason` is "error".
        reasoning_content: the reasoning before the answer, if a reasoning parser was requested.
        tool_calls: its tool calls, in the format of OpenAI's API; `text` is the rest.
        parse_error: why text that looks like a tool call was not parsed.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    parse_error: str | None = None

    @property
    def finished(self) -> bool:
        """True if it is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Wall times of one request in seconds; None for events that did not occur.

    Attributes:
        queued_s: from arrival to the first step that computed one of its tokens.
        prefill_s: from that step to the first generated token.
        ttft_s: time to first token, the sum of both.
        itl_s: inter-token latency, the mean over all its completions.
        e2e_s: from arrival to the end.
    """

    queued_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt with its completions.

    Attributes:
        request_id: unique within its LLM.
        index: index of the prompt in the call; streams yield outputs in another order.
        key: the key of the prompt's Row; None if it has none.
        prompt: the text, if it was given as text or chat; else None.
        prompt_logprobs: one entry per prompt token; None for the first token, which has no
            prediction, and for tokens before `SamplingParams.prompt_logprobs_start`.
        outputs: the completions, by index.
        num_cached_tokens: prompt tokens found in the prefix cache, which were not computed.
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    key: str | None = None
    pooled: Any = None

    @property
    def error(self) -> str | None:
        """The message of the first completion that failed; None if none failed."""
        return next((output.error for output in self.outputs if output.error), None)


def logprob_dicts(
    positions: Iterable[list[TokenLogprob]], token_text: Callable[[int], str] | None
) -> list[dict[int, Logprob]]:
    """One dict per position, in the order of the candidates (the sampled token first)."""
    return [
        {
            token_id: Logprob(
                logprob=logprob,
                rank=rank,
                decoded_token=token_text(token_id) if token_text else None,
            )
            for token_id, logprob, rank in candidates
        }
        for candidates in positions
    ]


def request_metrics(request: Request) -> RequestMetrics:
    """The times of a request, from the timestamps of its sequences."""
    sequences = request.sequences

    def since_arrival(marks: Iterable[float | None], pick: Callable[..., float]) -> float | None:
        known = [mark for mark in marks if mark is not None]
        return pick(known) - request.arrival_time if known else None

    queued_s = since_arrival((s.first_scheduled_time for s in sequences), min)
    ttft_s = since_arrival((s.first_token_time for s in sequences), min)
    gaps, num_gaps = 0.0, 0
    for s in sequences:
        if s.first_token_time is not None and s.last_token_time is not None:
            gaps += s.last_token_time - s.first_token_time
            num_gaps += len(s.output_token_ids) - 1
    return RequestMetrics(
        queued_s=queued_s,
        prefill_s=ttft_s - queued_s if ttft_s is not None and queued_s is not None else None,
        ttft_s=ttft_s,
        itl_s=gaps / num_gaps if num_gaps > 0 else None,
        e2e_s=since_arrival((s.finish_time for s in sequences), max) if request.finished else None,
    )


@dataclass(slots=True)
class _Emitted:
    """How much of a completion earlier outputs contained, and its logprobs converted so far."""

    num_tokens: int = 0
    num_chars: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class OutputBuilder:
    """Converts one request to RequestOutputs: once at its end, or each time it has grown.

    Args:
        prompt: the checked prompt of the request.
        tokenizer: None leaves all texts empty.
        kind: "delta" returns every token, character and logprob once; else all so far.
    """

    def __init__(
        self,
        request: Request,
        prompt: CheckedPrompt,
        tokenizer: Tokenizer | None,
        kind: OutputKind,
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._token_text = tokenizer.token_text if tokenizer else None
        self._kind = kind
        self._emitted: defaultdict[int, _Emitted] = defaultdict(_Emitted)  # index -> its output
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def has_grown(self) -> bool:
        """True if a sequence has tokens that no output has contained."""
        return any(
            seq.num_output_tokens > self._emitted[seq.index].num_tokens
            for seq in self.request.sequences
        )

    def build(self) -> RequestOutput:
        """The current output."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            index=self._prompt.index,
            prompt=self._prompt.text,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=self._convert_prompt_logprobs(),
            outputs=[self._completion(seq) for seq in request.sequences],
            finished=request.finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request_metrics(request),
            key=self._prompt.request.key,
            pooled=request.pooled,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        emitted = self._emitted[seq.index]
        tokens, text = seq.output_token_ids, self._text(seq)
        logprobs = None if seq.extras is None else seq.extras.logprobs
        if logprobs is not None:
            emitted.logprobs += logprob_dicts(logprobs[len(emitted.logprobs) :], self._token_text)
        first, start = (emitted.num_tokens, emitted.num_chars) if self._kind == "delta" else (0, 0)
        emitted.num_tokens, emitted.num_chars = len(tokens), len(text)
        return CompletionOutput(
            index=seq.index,
            text=text[start:],
            token_ids=tokens[first:],
            cumulative_logprob=seq.extras.cumulative_logprob if logprobs is not None else None,
            logprobs=None if logprobs is None else emitted.logprobs[first:],
            finish_reason=cast("FinishReason | None", seq.finish_reason),
            stop_reason=seq.stop_reason,
            error=self.request.error if seq.finish_reason == "error" else None,
        )

    def _text(self, seq: Sequence) -> str:
        if self._tokenizer is None or not seq.params.detokenize:
            return ""
        if seq.follower is None:
            return self._tokenizer.output_text(
                seq.output_token_ids,
                seq.params,
                prompt_token_ids=self.request.prompt_token_ids,
                end_ids=self._prompt.request.stop_ids,
            )
        follower = seq.follower
        return follower.finish(seq.output_token_ids) if seq.is_finished else follower.text

    def _convert_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """None until all of them are known; converted once."""
        known, num_tokens = self.request.prompt_logprobs, len(self.request.prompt_token_ids)
        if known is None:
            return None
        num_before = min(self.request.params.first_scored_position + 1, num_tokens)
        if num_before + len(known) < num_tokens:
            return None
        if self._prompt_logprobs is None:
            found = logprob_dicts(known, self._token_text)
            self._prompt_logprobs = [*[None] * num_before, *found]
        return self._prompt_logprobs
