"""PooledParams: a request for hidden states. PoolingParams: the user's pooling options.

Only loaded for embeddings, scores, classes and rewards.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, quoted, require_positive
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import NAMES, translate

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states are used: the last token's, the mean of all, or the first token's."""

States = Pooling | Literal["all"]
"""The same, or all tokens' hidden states, one by one."""

TASKS = ("embed", "classify", "token_embed", "token_classify")
"""Tasks of `encode`. Source: vLLM, `PoolingTask`."""

NO_POSITION = 2**31 - 1

POOLING_PARAMS = NAMES["PoolingParams"]


@checked(RequestError, functools.partial(translate, table=POOLING_PARAMS, error=RequestError))
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt's hidden states are pooled.

    Attributes:
        dimensions: keep this many first elements of an embedding, for models with Matryoshka
            embeddings; None: all.
        use_activation: scale an embedding to length 1, or convert scores to probabilities; None:
            as the checkpoint says. vLLM's `normalize`, `softmax` and `activation` are the same.
        pooling: which hidden states are used; None: as the checkpoint says, else the last token's.
        truncate_prompt_tokens: keep at most this many tokens of a prompt; -1: max_model_len;
            None: a longer prompt raises.

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, RequestError, "dimensions")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            raise RequestError(f"truncate_prompt_tokens must be -1 or >= 1, got {quoted(cut)}")


@dataclass(frozen=True, slots=True)
class PooledParams(SamplingParams):
    """A request that samples nothing and ends with its prompt's last token.

    To the core it is a prompt with scored positions, which must be computed: all of them, or only
    the last one if only the last token's hidden state is used. Only then may its beginning come
    from the prefix cache.
    """

    temperature: float = 0.0
    max_tokens: int | None = 1
    prompt_logprobs: int | None = 0
    _: KW_ONLY
    pooling: States = "last"

    @property
    def first_scored_position(self) -> int:
        """The first position that must be computed, in addition to the last one."""
        return NO_POSITION if self.pooling == "last" else 0
