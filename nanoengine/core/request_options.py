"""What is checked of a request that names token ids or counts, of a fork, and of an eviction.

And what is said of one that the pool can't hold. Called by the RequestChecker and by LLMEngine,
before anything is queued or changed.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams


def check_options(params: SamplingParams, size: int, stages: Any) -> SamplingParams:
    """The parameters, their counts being numbers of tokens where -1 asked for all.

    Args:
        size: of the vocabulary.
        stages: as `RequestChecker` has them.

    Raises:
        RequestError: an id or a count passes the vocabulary, or as the check of the stages.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < size:
                raise RequestError(f"{name} must be in [0, {size}), got {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > size:
            raise RequestError(f"{name} must be at most {size}, got {count}")
    if stages is not None:
        stages.check(params)
    return params.for_vocabulary(size)


def parent_of_fork(
    name: str, request: Request | None, index: int, next_token_id: int | None, vocab_size: int
) -> Sequence:
    """The sequence of the request of this name that a fork starts from.

    Raises:
        RequestError: there is none, or its fork can't have `next_token_id` as its last token.
    """
    sequences = [] if request is None else request.sequences
    parent = next((s for s in sequences if s.index == index and not s.is_finished), None)
    if parent is None:
        raise RequestError(f"request {name!r} has no unfinished sequence of index {index} to fork")
    if next_token_id is None:
        return parent
    if not 0 <= next_token_id < vocab_size:
        raise RequestError(f"next_token_id must be in [0, {vocab_size}), got {next_token_id}")
    if not parent.num_output_tokens:
        raise RequestError(
            "next_token_id replaces the last output token, and there is none yet: fork after"
            " the step that samples the first"
        )
    logprobs = None if parent.extras is None else parent.extras.logprobs
    known = [entry.token_id for entry in logprobs[-1]] if logprobs else []
    if known and next_token_id not in known:
        raise RequestError(
            f"next_token_id={next_token_id} has no known log-probability: the request reports"
            f" those of {known} here; choose one of them, or ask for more logprobs or none"
        )
    return parent


def check_block_ids(block_ids: Iterable[int], num_blocks: int) -> list[int]:
    """The ids as Python's integers; RequestError unless each is one of the pool's blocks."""
    last = num_blocks - 1
    if not isinstance(block_ids, Iterable):
        raise RequestError(f"block ids must be a list of integers, got {block_ids!r}")
    block_ids = list(block_ids)
    for block_id in block_ids:
        is_int = isinstance(block_id, numbers.Integral) and not isinstance(block_id, bool)
        if not is_int or not 1 <= block_id <= last:
            raise RequestError(f"block ids must be integers in [1, {last}], got {block_id!r}")
    return list(map(int, block_ids))


def check_salt(cache_salt: object) -> None:
    """Raises RequestError unless a cache salt is a string that UTF-8 can hold."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, got {cache_salt!r}")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt can't be encoded as UTF-8: {error}") from error


def too_large(num_tokens: int, at_least: str, manager: BlockManager) -> str:
    """The message for a prompt that the pool can never hold; `at_least`: it may have more."""
    kept = manager.num_watermark_blocks
    reserve = f", of which the watermark keeps {kept} free" if kept else ""
    return (
        f"the prompt of {at_least}{num_tokens} tokens needs {manager.num_blocks_for(num_tokens)} KV"
        f" blocks of {manager.block_size} tokens, the pool has {manager.pool.num_usable}{reserve}:"
        f" shorten it, or raise num_kv_blocks or kv_cache_gib"
        f"{' or lower watermark_frac' if kept else ''}"
    )


def pool_too_small(num_tokens: int, manager: BlockManager) -> str:
    """The message for a sequence that has grown, or is to come back, and that no pool can hold."""
    return (
        f"{num_tokens} tokens need {manager.num_blocks_for(num_tokens)} KV blocks of"
        f" {manager.block_size} tokens, the pool has {manager.pool.num_usable}"
        f" ({manager.num_watermark_blocks} kept as watermark): raise num_kv_blocks or"
        f" kv_cache_gib, or ask for fewer tokens"
    )
