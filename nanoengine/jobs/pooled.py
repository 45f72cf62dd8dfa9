"""Rows that ask for embeddings or scores: the bodies of /v1/embeddings, /score and /rerank.

    {"input": one or many, "dimensions": ..., "encoding_format": "float" | "base64"}
    {"text_1": one or many, "text_2": one or many}
    {"query": text, "documents": [...], "top_n": ...}

One row may hold many prompts, the parts of a `Task`, which run concurrently. This module is
imported when the first such row is read.
Source: OpenAI's API for embeddings, vLLM's API for scores, and the responses of both.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoengine.errors import RequestError
from nanoengine.settings.checks import nearest, repr_short
from nanoengine.settings.pooling import POOLING_PARAMS, PooledParams, PoolingParams

if TYPE_CHECKING:
    from nanoengine.features.pooled_outputs import PoolingRequestOutput
    from nanoengine.features.pooling import Pooler, PoolRequests
    from nanoengine.outputs import RequestOutput

KINDS = {
    "/v1/embeddings": "embedding",
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
}
_PARAMS = (*(one.name for one in dataclasses.fields(PoolingParams)), *POOLING_PARAMS)
_PAIR = ("answers", "template")
TEXTS = {
    **dict.fromkeys(("queries", "data_1"), "text_1"),
    **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
}
"""Other names for the texts of a score. Source: vLLM's score requests."""

BODY = {
    "embedding": ("model", "input", "encoding_format", *_PARAMS),
    "score": ("model", "text_1", "text_2", *TEXTS, *_PAIR, *_PARAMS),
    "rerank": ("model", "query", "documents", "top_n", *_PAIR, *_PARAMS),
}
"""Fields of a body, in the order in which error messages list them."""

ENCODINGS = ("float", "base64")


def read(
    kind: str, body: Mapping[str, Any], pools: Pooler
) -> tuple[list[Any], PooledParams, Callable[[list[RequestOutput]], dict[str, Any]]]:
    """The prompts of a row, their parameters, and a function that makes the body of its response.

    Raises:
        RequestError: a field is missing or invalid.
    """
    names = {"embedding": ("input",), "score": ("text_1", "text_2")}
    if kind == "score":
        body = {TEXTS.get(name, name): value for name, value in body.items()}
    for name in names.get(kind, ("query", "documents")):
        if name not in body:
            raise RequestError(f"the body has no {name}; {nearest(name, list(body))}")
    asked = _asked(kind, body, pools)
    if not asked.prompts:
        raise RequestError("the body has no prompt: input must not be empty")

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        found, usage = asked.finish(outputs), sum(len(one.prompt_token_ids) for one in outputs)
        return RESPONSES[kind](body, found) | {
            "usage": {"prompt_tokens": usage, "total_tokens": usage}
        }

    return asked.prompts, asked.params, answer


def _asked(kind: str, body: Mapping[str, Any], pools: Pooler) -> PoolRequests:
    params = PoolingParams(**{name: body[name] for name in _PARAMS if name in body})
    pair = {name: body[name] for name in _PAIR if name in body}
    if kind == "score":
        return pools.score(body["text_1"], body["text_2"], params, **pair)
    if kind == "rerank":
        top_n = body.get("top_n", 0)
        if not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 0:
            raise RequestError(f"top_n must be an integer of at least 0, got {repr_short(top_n)}")
        if not isinstance(body["query"], str) or not isinstance(body["documents"], list):
            raise RequestError("query must be a string, and documents a list of them")
        return pools.score(body["query"], [_text(one) for one in body["documents"]], params, **pair)
    given, encoding = body["input"], body.get("encoding_format", "float")
    if encoding not in ENCODINGS:
        raise RequestError(f"encoding_format must be float or base64, got {repr_short(encoding)}")
    if not isinstance(given, str | list):
        raise RequestError(f"input must be a string, token ids, or a list, got {repr_short(given)}")
    return pools.embed(given, params)


def _text(document: object) -> object:
    """The text of a document, which may be an object with a text."""
    return document.get("text") if isinstance(document, dict) else document


def _embeddings(body: Mapping[str, Any], found: list[PoolingRequestOutput]) -> dict[str, Any]:
    in_bytes = body.get("encoding_format") == "base64"

    def shape(vector: list[float]) -> object:
        return base64.b64encode(np.array(vector, "<f4")).decode() if in_bytes else vector

    data = [
        {"index": i, "object": "embedding", "embedding": shape(one.outputs.embedding)}
        for i, one in enumerate(found)
    ]
    return {"object": "list", "data": data}


def _scores(body: Mapping[str, Any], found: list[PoolingRequestOutput]) -> dict[str, Any]:
    scores = enumerate(one.outputs.score for one in found)
    return {
        "object": "list",
        "data": [{"index": i, "object": "score", "score": score} for i, score in scores],
    }


def _ranks(body: Mapping[str, Any], found: list[PoolingRequestOutput]) -> dict[str, Any]:
    """The documents, best first; equal scores keep their order."""
    ranked = sorted(enumerate(found), key=lambda one: -one[1].outputs.score)
    results = [
        {
            "index": i,
            "document": {"text": _text(body["documents"][i])},
            "relevance_score": one.outputs.score,
        }
        for i, one in ranked[: body.get("top_n") or None]
    ]
    return {"results": results}


RESPONSES = {"embedding": _embeddings, "score": _scores, "rerank": _ranks}
