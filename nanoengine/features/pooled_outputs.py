"""What embed, score, classify and reward return: frozen values with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nanoengine.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """A prompt's classes: a number each."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """How well the two texts of a pair belong together."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """A prompt's numbers as they come from the head, float32."""

    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput:
    """One prompt, or one pair of texts.

    Attributes:
        outputs: what it came to; None if there is an error.
        num_cached_tokens: prompt tokens found in the prefix cache, so they were not computed.
        error: why there is no result; None if all is well.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, make: Callable[[np.ndarray], Any]) -> Self:
        """The result of a request: what is made of its vector [hidden_size], or its error."""
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
    """`outputs` is a ScoringOutput. The token ids are the pair's, or of both texts in turn."""

    __slots__ = ()
