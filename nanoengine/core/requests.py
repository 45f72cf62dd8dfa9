"""RequestChecker: validates a request once, before anything is queued.

    prompt ids, SamplingParams, priority, ... ── check ── Request ── LLMEngine.queue
                                                   └ RequestError, PromptTooLongError, CapacityError

`LLMEngine` owns one, and `LLM` calls it. The returned Request holds plain integers within the
engine's limits, so later code does not check again. It queues nothing and does not handle text.
See also request_options.py (ids and counts in parameters; forks).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence as SequenceOf
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.sequence import Request
from nanoengine.errors import CapacityError, PromptTooLongError, RequestError
from nanoengine.settings.checks import check_value
from nanoengine.settings.params import SamplingParams

CHECKED_FIELDS = (
    "stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs", "prompt_logprobs",
    "structured_outputs", "logits_processors", "extra_args",
)  # fmt: skip
"""Fields of SamplingParams with token ids, counts of token ids, or changes of logits."""


class RequestChecker:
    """Checks requests against the limits of one engine.

    Args:
        info: vocabulary, EOS ids, max_model_len.
        manager: provides the capacity of the KV pool.
        processors: the logits processors. Their `check` raises RequestError for unsupported
            parameters, and `is_ready` returns whether it need not wait. None skips these checks.
    """

    def __init__(self, info: EngineInfo, manager: BlockManager, processors: Any = None) -> None:
        self.info = info
        self._manager = manager
        self._processors = processors

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether `check` need not wait; if False, it will become True soon."""
        return self._processors is None or bool(self._processors.is_ready(params))

    def check(
        self,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int | None = None,
        key: str | None = None,
        cache_salt: str | None = None,
        bad_word_ids: SequenceOf[SequenceOf[int]] = (),
        ends: dict[int, str | None] | None = None,
    ) -> Request:
        """Validates a request and returns it without a name.

        In its `params`, counts of log-probabilities are numbers of tokens; -1 is replaced.

        Args:
            prompt_token_ids: at least one id below the vocabulary size.
            priority: lower runs first, equal ones in order of arrival; None: `params.priority`.
            key: without a seed in `params`, the random numbers derive from the engine's seed and
                this key; None: from the engine's seed and the order of arrival.
            cache_salt: prefixes are shared only between requests with equal salt.
            bad_word_ids: token sequences of `params.bad_words`.
            ends: further ids that end an answer -> the stop reason.

        Raises:
            RequestError: a value has the wrong type or is out of range.
            PromptTooLongError: the prompt leaves no space for a generated token.
            CapacityError: the prompt needs more blocks than the pool has.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        if priority is not None and not is_int(priority):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        if key is not None and not isinstance(key, str):
            raise RequestError(f"key must be a string, got {key!r}")
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, SequenceOf):
            raise RequestError(
                f"prompt_token_ids must be a list of integers, got {prompt_token_ids!r}"
            )
        if not len(prompt_token_ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        token_ids = self._plain_ids("prompt token ids", prompt_token_ids)
        words = tuple(tuple(self._plain_ids("bad_word_ids", word)) for word in bad_word_ids)
        num_generated = 0 if params.pooling else 1
        self.check_length(len(token_ids), num_generated=num_generated)
        if any(getattr(params, name) not in (None, (), {}) for name in CHECKED_FIELDS):
            from nanoengine.core.request_options import check_options

            params = check_options(params, self.info.vocab_size, self._processors)
        max_num_tokens = self.info.max_model_len + 1 - num_generated
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(token_ids) + params.max_tokens)
        stop_ids = dict.fromkeys(() if params.ignore_eos else self.info.eos_token_ids)
        return Request(
            "",
            token_ids,
            params,
            priority=params.priority if priority is None else int(priority),
            key=key,
            cache_salt=cache_salt,
            bad_word_ids=words,
            stop_ids=stop_ids | {i: i for i in params.stop_token_ids or ()} | (ends or {}),
            max_num_tokens=max_num_tokens,
        )

    def _plain_ids(self, name: str, token_ids: SequenceOf[int]) -> list[int]:
        """The ids as Python's integers, each below the vocabulary size."""
        if not set(map(type, token_ids)) <= {int}:  # Perf: 15 times as fast as checking each id.
            for token_id in token_ids:
                if not is_int(token_id):
                    raise RequestError(f"{name} must be integers, got {token_id!r}")
        plain = list(map(int, token_ids))
        low, high = min(plain, default=0), max(plain, default=0)
        if low < 0 or high >= self.info.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"{name} must be in [0, {self.info.vocab_size}), got {bad}")
        return plain

    def check_length(self, num_tokens: int, at_least: str = "", *, num_generated: int = 1) -> None:
        """Raises PromptTooLongError or CapacityError if a prompt of this length can't run.

        Args:
            at_least: "at least " if the prompt may have more tokens, for the message.
            num_generated: number of tokens that must fit after the prompt: 1, or 0.
        """
        info, manager = self.info, self._manager
        if num_tokens + num_generated > info.max_model_len:
            plus = " plus one generated token" if num_generated else ""
            raise PromptTooLongError(
                f"the prompt has {at_least}{num_tokens} tokens; max_model_len={info.max_model_len}"
                f" allows {info.max_model_len - num_generated}{plus}: shorten it, or raise"
                " max_model_len"
            )
        if not manager.can_ever_allocate(num_tokens):
            from nanoengine.core.request_options import too_large_message

            what = f"the prompt of {at_least}{num_tokens} tokens"
            raise CapacityError(too_large_message(what, num_tokens, manager))


def is_int(value: object) -> bool:
    """True for integers, including NumPy's; False for bools."""
    # Perf: the abstract class is only checked for NumPy's integers.
    return isinstance(value, int | numbers.Integral) and not isinstance(value, bool)


def check_text(name: str, value: object) -> None:
    """Raises RequestError unless the value is None or a string that UTF-8 can encode."""
    try:
        (check_value(value, str | None, name, RequestError) or "").encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} can't be encoded as UTF-8: {error}") from error
