"""PooledParams: a prompt that is computed for its hidden states; PoolingParams: what users ask for.

Loaded by whoever asks for vectors, scores or classes, and by nobody else.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, require_positive, shown
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import NAMES, translate

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states count: the last token's, the mean of all, the first token's."""

States = Pooling | Literal["all"]
"""The same, or those of all tokens, one by one."""

TASKS = ("embed", "classify", "token_embed", "token_classify")
"""What `encode` gives. Source: vLLM, `PoolingTask`."""

NO_POSITION = 2**31 - 1

POOLING_PARAMS = NAMES["PoolingParams"]


@checked(RequestError, functools.partial(translate, table=POOLING_PARAMS, error=RequestError))
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What becomes of a prompt's hidden states.

    Attributes:
        dimensions: keep so many of an embedding's first numbers, as models with Matryoshka
            embeddings allow; None: all.
        use_activation: scale an embedding to length 1, or make probabilities of scores; None: as
            the checkpoint says. vLLM's `normalize`, `softmax` and `activation` are the same.
        pooling: which hidden states count; None: as the checkpoint says, else the last token's.
        truncate_prompt_tokens: keep at most so many tokens of a prompt, -1 being as many as the
            model takes; None: a longer one is refused.

    Raises:
        RequestError: a value is of another type, or out of range.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, RequestError, "dimensions")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            raise RequestError(f"truncate_prompt_tokens must be -1 or at least 1, got {shown(cut)}")


@dataclass(frozen=True, slots=True)
class PooledParams(SamplingParams):
    """A request of which nothing is sampled: it ends with its prompt's last token.

    To the core it is a prompt with scored positions, which must be computed: all of them, unless
    only the last token's hidden state counts. So only then may its beginning come from the prefix
    cache.
    """

    temperature: float = 0.0
    max_tokens: int | None = 1
    prompt_logprobs: int | None = 0
    _: KW_ONLY
    pooling: States = "last"

    @property
    def first_scored_position(self) -> int:
        """The first position that must be computed, beside the last one."""
        return NO_POSITION if self.pooling == "last" else 0
