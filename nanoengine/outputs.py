"""What a call returns: RequestOutput, CompletionOutput, Logprob, RequestMetrics.

Frozen values with the names and meanings of vLLM's offline API, so that a script moves over
unchanged. Built by `llm.py` from the engine's requests; they hold no reference to the engine.

    RequestOutput  one prompt
    └─ outputs     CompletionOutput, n of them
       └─ logprobs one dict a token: token id -> Logprob
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nanoengine.core.plan import TokenLogprob
    from nanoengine.core.sequence import Request

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: EOS, a stop id or a stop string; length: max_tokens or max_model_len; abort: the caller's
wish; error: see `CompletionOutput.error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One candidate of one position.

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
        text: without EOS and stop string, unless asked for; "" without a tokenizer.
        token_ids: all that were generated, with the one that ended it.
        cumulative_logprob: sum over the generated tokens; None if logprobs were not asked for.
        logprobs: one dict a token: the sampled token first, then the most likely ones.
        finish_reason: None while it grows.
        stop_reason: the stop string or stop id that ended it; None for EOS and length.
        error: why there is no answer, if `finish_reason` is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True if it grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Wall times of one request in seconds; None for what did not happen.

    Attributes:
        queued_s: from arrival to the first step that computed a token of it.
        prefill_s: from there to the first generated token.
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
        index: place of the prompt in the call's list, for streams, which yield as things finish.
        prompt: as text, if it was given as text or chat; else None.
        prompt_logprobs: one entry a prompt token, the first None: nothing predicts it.
        outputs: the completions, by index.
        num_cached_tokens: prompt tokens that the prefix cache spared.
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

    @property
    def error(self) -> str | None:
        """The message of the first completion that failed; None if all is well."""
        return next((output.error for output in self.outputs if output.error), None)


def error_output(
    request_id: str, index: int, prompt: str | None, prompt_token_ids: list[int], message: str
) -> RequestOutput:
    """The output of a prompt that could not run: order and count of a batch are kept."""
    failed = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", error=message)
    return RequestOutput(
        request_id=request_id,
        index=index,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[failed],
        finished=True,
    )


def logprob_dicts(
    positions: Iterable[list[TokenLogprob]], token_text: Callable[[int], str] | None
) -> list[dict[int, Logprob]]:
    """One dict a position, in the order of the candidates (the sampled token first)."""
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
    """Times of a request from the marks that its sequences carry."""
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
