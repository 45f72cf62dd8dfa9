"""Checks of token ids and counts in a request, and of forks.

Also the message for a request that does not fit the pool. Called by the RequestChecker and by
LLMEngine, before anything is queued or changed.
"""

from __future__ import annotations

from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams


def check_options(params: SamplingParams, vocab_size: int, processors: Any) -> SamplingParams:
    """Checks token ids and counts; returns the parameters with -1 replaced by the vocabulary size.

    Args:
        processors: the logits processors, as in `RequestChecker`.

    Raises:
        RequestError: an id or a count exceeds the vocabulary, or a logits processor rejects one.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"{name} must be in [0, {vocab_size}), got {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise RequestError(f"{name} must be at most {vocab_size}, got {count}")
    if processors is not None:
        processors.check(params)
    return params.for_vocabulary(vocab_size)


def parent_of_fork(
    name: str, request: Request | None, index: int, next_token_id: int | None, vocab_size: int
) -> Sequence:
    """The sequence that a fork of the request `name` starts from.

    Raises:
        RequestError: there is none, or `next_token_id` can't be the last token of its fork.
    """
    sequences = [] if request is None else request.sequences
    parent = next((s for s in sequences if s.index == index and not s.is_finished), None)
    if parent is None:
        raise RequestError(f"request {name!r} has no unfinished sequence with index={index}")
    if next_token_id is None:
        return parent
    if not 0 <= next_token_id < vocab_size:
        raise RequestError(f"next_token_id must be in [0, {vocab_size}), got {next_token_id}")
    if not parent.num_output_tokens:
        raise RequestError(
            "next_token_id replaces the last output token, and the sequence has no output yet: fork"
            " after the step that samples the first token"
        )
    logprobs = None if parent.extras is None else parent.extras.logprobs
    known = [entry.token_id for entry in logprobs[-1]] if logprobs else []
    if known and next_token_id not in known:
        raise RequestError(
            f"next_token_id={next_token_id} has no log-probability: the logprobs at this position"
            f" are for {known}; choose one of these tokens, or request more logprobs or none"
        )
    return parent


def too_large_message(what: str, num_tokens: int, manager: BlockManager) -> str:
    """The message for a prompt or a sequence that is too long for the whole pool."""
    reserved = manager.num_watermark_blocks
    reserve = f" and keeps {reserved} of them free (watermark_frac)" if reserved else ""
    return (
        f"{what} needs {manager.num_blocks_for(num_tokens)} KV blocks of {manager.block_size}"
        f" tokens, but the pool has {manager.pool.num_usable}{reserve}: shorten it, or raise"
        f" num_kv_blocks or kv_cache_gib{' or lower watermark_frac' if reserved else ''}"
    )
