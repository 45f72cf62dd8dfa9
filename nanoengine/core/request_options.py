"""What is checked of a request that names token ids or counts, of a fork, and of an eviction.

Called by the RequestChecker and by LLMEngine, before anything is queued or changed.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable

from nanoengine.core.sequence import Request, Sequence
from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams


def check_options(
    params: SamplingParams, size: int, further: Callable[[SamplingParams], None] | None
) -> SamplingParams:
    """The parameters, their counts being numbers of tokens where -1 asked for all.

    Args:
        size: of the vocabulary.
        further: raises RequestError for grammars and stages that can't be had.

    Raises:
        RequestError: an id or a count passes the vocabulary, or as `further`.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < size:
                raise RequestError(f"{name} must be in [0, {size}), got {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > size:
            raise RequestError(f"{name} must be at most {size}, got {count}")
    if further is not None and (
        params.structured_outputs is not None or params.logits_processors or params.extra_args
    ):
        further(params)
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
    if next_token_id is not None:
        check_fork(parent, next_token_id, vocab_size)
    return parent


def check_fork(parent: Sequence, next_token_id: int, vocab_size: int) -> None:
    """Raises RequestError unless a fork of `parent` may have this token as its last one."""
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
