"""RequestChecker: what is checked of a request, once, before anything is queued.

    prompt ids, SamplingParams, priority, ... ── check ── Request ── LLMEngine.queue
                                                   └ RequestError, PromptTooLongError, CapacityError

`LLMEngine` has one, and `LLM` asks it. A Request that it makes holds plain integers within the
engine's limits, so nobody behind it checks again. It queues nothing and knows no text.
Special: request_options.py (ids and counts that parameters name; forks; evictions).
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

OPTIONS = (
    "stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs", "prompt_logprobs",
    "structured_outputs", "logits_processors", "extra_args",
)  # fmt: skip
"""Fields of SamplingParams that name token ids, counts of them, or what edits logits."""


class RequestChecker:
    """Checks requests against the limits of one engine.

    Args:
        info: vocabulary, EOS ids, max_model_len.
        manager: knows what the KV pool can hold.
        stages: of logits: their `check` raises RequestError for what can't be had, and `is_ready`
            says whether it need not wait. None: nobody checks.
    """

    def __init__(self, info: EngineInfo, manager: BlockManager, stages: Any = None) -> None:
        self.info = info
        self._manager = manager
        self._stages = stages

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether `check` need not wait; if not, it soon will not have to."""
        return self._stages is None or bool(self._stages.is_ready(params))

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
        """The request, which has no name yet.

        Its `params` count log-probabilities in tokens, where -1 asked for all.

        Args:
            prompt_token_ids: at least one id below the vocabulary size.
            priority: lower runs first, equal ones in order of arrival; None: that of `params`.
            key: without a seed in `params`, the random numbers follow from the engine's seed and
                this; None: from the engine's seed and the order of arrival.
            cache_salt: prefixes are shared only between requests of equal salt.
            bad_word_ids: token sequences of `params.bad_words`.
            ends: further ids that end an answer -> the stop reason.

        Raises:
            RequestError: a value of another type or out of range.
            PromptTooLongError: the prompt leaves no room for a generated token.
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
            raise RequestError("the prompt is empty: give at least one token")
        token_ids = self._plain_ids("prompt token ids", prompt_token_ids)
        words = tuple(tuple(self._plain_ids("bad_word_ids", word)) for word in bad_word_ids)
        num_generated = 0 if params.pooling else 1
        self.check_length(len(token_ids), num_generated=num_generated)
        if any(getattr(params, name) not in (None, (), {}) for name in OPTIONS):
            from nanoengine.core.request_options import check_options

            params = check_options(params, self.info.vocab_size, self._stages)
        longest = self.info.max_model_len + 1 - num_generated
        if params.max_tokens is not None:
            longest = min(longest, len(token_ids) + params.max_tokens)
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
            max_num_tokens=longest,
        )

    def _plain_ids(self, name: str, token_ids: SequenceOf[int]) -> list[int]:
        """The ids as Python's integers, each below the vocabulary size."""
        if not set(map(type, token_ids)) <= {int}:  # Perf: 15 times as fast as asking one by one.
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
        """Raises PromptTooLongError or CapacityError if a prompt of so many tokens can't run.

        Args:
            at_least: these words, for a prompt that may have more.
            num_generated: tokens that there must be room for behind it: 1, or 0.
        """
        info, manager = self.info, self._manager
        if num_tokens + num_generated > info.max_model_len:
            room = f"leaves room for {info.max_model_len - 1} and one generated"
            raise PromptTooLongError(
                f"the prompt has {at_least}{num_tokens} tokens; max_model_len={info.max_model_len}"
                f" {room if num_generated else 'is the most'}: shorten it, or raise max_model_len"
            )
        if not manager.can_ever_allocate(num_tokens):
            from nanoengine.core.request_options import too_large

            what = f"the prompt of {at_least}{num_tokens} tokens"
            raise CapacityError(too_large(what, num_tokens, manager))


def is_int(value: object) -> bool:
    """True for integers, numpy's too; not for True."""
    # Perf: the abstract class is asked for NumPy's integers alone.
    return isinstance(value, int | numbers.Integral) and not isinstance(value, bool)


def check_text(name: str, value: object) -> None:
    """Raises RequestError unless the value is None or a string that UTF-8 can hold."""
    try:
        (check_value(value, str | None, name, RequestError) or "").encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} can't be encoded as UTF-8: {error}") from error
