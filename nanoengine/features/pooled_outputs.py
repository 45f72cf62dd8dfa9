"""Results of embed, score, classify and reward: frozen values with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nanoengine.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """The class probabilities or scores of a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """How well the two texts of a pair match."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The raw float32 results for a prompt."""

    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput:
    """One prompt, or one pair of texts.

    Attributes:
        outputs: the result; None if there is an error.
        num_cached_tokens: prompt tokens found in the prefix cache, which were not computed.
        error: why there is no result; None if it did not fail.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, make: Callable[[np.ndarray], Any]) -> Self:
        """The result of a request: `make` of its vector [hidden_size], or its error."""
        return cls(
            request_id=output.request_id,
            outputs=make(output.pooled) if output.error is None else None,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
        )


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an EmbeddingOutput."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput):
    """`outputs` is a ClassificationOutput."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a ScoringOutput. The token ids are the pair's, or both texts' in sequence."""

    __slots__ = ()
