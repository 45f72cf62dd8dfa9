"""SamplingParams: the sampling parameters of one request.

Frozen and validated when created, so an invalid value raises where it is written. Any file may
import this one. Names, defaults and validity rules are those in vLLM's offline API;
docs/moving_from_vllm.md lists the differences.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, quoted
from nanoengine.settings.structured import StructuredOutputs

SURROGATE = re.compile("[\ud800-\udfff]")

MAX_COMPLETIONS = 16_384
"""Maximum `n`: each completion is a sequence in memory, and a file may request any number."""

MAX_STRINGS = {"stop": (1024, 1 << 16), "bad_words": (1 << 14, 1 << 18)}
"""Maximum number of strings per request, and of their characters together. Each stop string is
searched after every token; bad words are encoded at the start. OpenAI's API allows 4 stop
strings."""

MAX_TOKENS_RULE = "at least 1, or None; or 0 with prompt_logprobs and n=1"

EDITS = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words"),
    *("logit_bias", "allowed_token_ids", "structured_outputs", "logits_processors"),
)
"""Fields that change logits by a logits processor, so also the tokens of greedy requests."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, because dividing by them overflows.

Source: vLLM `_SAMPLING_EPS`.
"""


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    from nanoengine.settings.vllm_names import SAMPLING_PARAMS, translate

    return translate(options, SAMPLING_PARAMS, RequestError)


@checked(RequestError, _translate)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    The vLLM names in `vllm_names.SAMPLING_PARAMS` are also accepted, with the meaning given there.
    The fields up to `prompt_logprobs` may be given by position, in vLLM's order.

    Attributes:
        n: completions per prompt; the prompt is prefilled once and shared.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: drop tokens less likely than `min_p` times the most likely one, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (divides positive logits);
            in [1e-9, 1e9].
        presence_penalty: subtracted once for each token of the output so far, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output so far, in [-2, 2].
        seed: in [0, 2**63); makes the result a function of (seed, position, logits) alone. None
            derives one from the engine's seed and the key of the prompt's Row, or its order of
            arrival.
        max_tokens: maximum number of tokens to generate; None means up to `max_model_len`. 0 is
            allowed with `prompt_logprobs` only: the prompt is scored, and nothing is decoded.
        min_tokens: EOS and stop ids can't be sampled before this many tokens, except an EOS id
            after a complete structured output.
        stop: strings that end the generation; the text is cut before the match. At most 1,024, of
            65,536 characters together.
        stop_token_ids: further ids that end the generation.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: continue after the model's EOS ids.
        bad_words: strings never generated. At most 16,384, of 262,144 characters together.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: only these ids may be sampled.
        structured_outputs: the format of the output: JSON of a schema, a regex, a choice, a
            grammar. May be a dict of the fields of StructuredOutputs.
        logits_processors: functions that edit the logits, in order: called with the output's
            token ids and the logits [V], or with the prompt's, the output's and the logits, they
            return the edited logits. V is the vocabulary size; -inf bans a token.
        extra_args: any values, for logits processors to read.
        logprobs: report this many top log-probabilities per generated token (0: only the sampled
            token's; -1: the whole vocabulary's).
        prompt_logprobs: the same for prompt tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False skips text altogether (stop strings then can't be used).
        prompt_logprobs_start: first prompt token that is scored; earlier ones have None. These
            may come from the prefix cache, because they are not scored.
        priority: lower runs first; `generate(priority=...)` overrides it.

    Raises:
        RequestError: a value is out of range, NaN or infinite; the message names the field.

    >>> SamplingParams(temperature=0).is_greedy
    True
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    nanoengine.errors.RequestError: top_p must be in (0, 1], got 0
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    _: KW_ONLY
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    structured_outputs: StructuredOutputs | dict[str, Any] | None = None
    logits_processors: tuple[Callable[..., Any], ...] | list[Callable[..., Any]] | None = None
    extra_args: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    # vLLM has no fields from here on (`as_vllm.params.NATIVE`).
    prompt_logprobs_start: int = 0
    priority: int = 0

    # Why not a field: only `settings.pooling.PooledParams` has one; then nothing is sampled.
    pooling = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.seed == -1:  # as in vLLM
            object.__setattr__(self, "seed", None)
        if isinstance(self.structured_outputs, dict):
            structured = StructuredOutputs(**self.structured_outputs)
            object.__setattr__(self, "structured_outputs", structured)
        self._check_ranges()
        self._check_texts_and_ids()

    def clone(self) -> SamplingParams:
        """A copy, which vLLM scripts make because vLLM's parameters are mutable."""
        return dataclasses.replace(self)

    def for_vocabulary(self, vocab_size: int) -> SamplingParams:
        """The same parameters, with counts of log-probabilities of -1 replaced by `vocab_size`."""
        if -1 not in (self.logprobs, self.prompt_logprobs):
            return self
        counted = (vocab_size if n == -1 else n for n in (self.logprobs, self.prompt_logprobs))
        return dataclasses.replace(self, logprobs=next(counted), prompt_logprobs=next(counted))

    @property
    def first_scored_position(self) -> int:
        """The first prompt position whose logits are scored.

        It is the one before `prompt_logprobs_start`, because logits predict the next token.
        """
        return max(self.prompt_logprobs_start - 1, 0)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is selected without randomness."""
        return self.temperature < GREEDY_BELOW

    def _check_ranges(self) -> None:
        lowest = 0 if self.prompt_logprobs is not None and self.n == 1 else 1
        rules = (
            ("n", 1 <= self.n <= MAX_COMPLETIONS, f"from 1 to {MAX_COMPLETIONS:,}"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= -1, "-1 or 0 (all tokens), or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 1e-9 <= self.repetition_penalty <= 1e9, "in [1e-9, 1e9]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63), or None"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= lowest, MAX_TOKENS_RULE),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("logprobs", (self.logprobs or 0) >= -1, "-1 (all), at least 0, or None"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= -1, "-1 (all), at least 0, or None"),
            ("prompt_logprobs_start", 0 <= self.prompt_logprobs_start < 2**31, "in [0, 2**31)"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise RequestError(f"{name} must be {allowed}, got {quoted(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(f"n must be 1 when sampling is greedy (temperature 0), got {self.n}")

    def _check_texts_and_ids(self) -> None:
        for name, (max_texts, max_chars) in MAX_STRINGS.items():
            texts = getattr(self, name) or ()
            num_chars = sum(map(len, texts))
            if len(texts) > max_texts or num_chars > max_chars:
                limits = f"{max_texts:,} strings and {max_chars:,} characters in total"
                got = f"{len(texts):,} strings and {num_chars:,} characters"
                raise RequestError(f"{name} must have at most {limits}, got {got}")
            for text in texts:
                if not text or SURROGATE.search(text):
                    raise RequestError(
                        f"{name} must contain non-empty strings without lone surrogates, which no"
                        f" output contains, got {quoted(text)}"
                    )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id < 0:
                    raise RequestError(f"{name} must contain ids of at least 0, got {token_id}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty: no token could be sampled")
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError("ignore_eos must be False with structured_outputs: EOS ends them")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; or use stop_token_ids")
        for token_id, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias values must be in [-100, 100], got {bias!r} for token {token_id}"
                )


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
