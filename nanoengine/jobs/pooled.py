"""Rows that ask for embeddings or scores: the bodies of /v1/embeddings, /score and /rerank.

    {"input": text(s) or token ids, "dimensions": ..., "encoding_format": "float" | "base64"}
    {"text_1": text(s), "text_2": text(s)}
    {"query": text, "documents": [...], "top_n": ...}

A row may have many prompts, the parts of a `Task`, which run concurrently. This module is imported
when the first such row is read.
Source: requests and responses of OpenAI's API (embeddings) and vLLM's API (scores).
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoengine.errors import RequestError
from nanoengine.settings.checks import nearest, quoted
from nanoengine.settings.pooling import POOLING_PARAMS, PooledParams, PoolingParams

if TYPE_CHECKING:
    from nanoengine.features.pooled_outputs import PoolingRequestOutput
    from nanoengine.features.pooling import PoolingTasks, PoolRequests
    from nanoengine.outputs import RequestOutput

KINDS = {
    "/v1/embeddings": "embedding",
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
}
_PARAMS = (*(field.name for field in dataclasses.fields(PoolingParams)), *POOLING_PARAMS)
_SCORE_OPTIONS = ("answers", "template")
TEXT_ALIASES = {
    **dict.fromkeys(("queries", "data_1"), "text_1"),
    **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
}
"""Other names for the texts of a score. Source: vLLM's score requests."""

BODY_FIELDS = {
    "embedding": ("model", "input", "encoding_format", *_PARAMS),
    "score": ("model", "text_1", "text_2", *TEXT_ALIASES, *_SCORE_OPTIONS, *_PARAMS),
    "rerank": ("model", "query", "documents", "top_n", *_SCORE_OPTIONS, *_PARAMS),
}
"""Fields of a body, in the order in which error messages list them."""

ENCODINGS = ("float", "base64")


def read(
    kind: str, body: Mapping[str, Any], pools: PoolingTasks
) -> tuple[list[Any], PooledParams, Callable[[list[RequestOutput]], dict[str, Any]]]:
    """The prompts of a row, their parameters, and a function that makes the body of its response.

    Raises:
        RequestError: a field is missing or invalid.
    """
    names = {"embedding": ("input",), "score": ("text_1", "text_2")}
    if kind == "score":
        body = {TEXT_ALIASES.get(name, name): value for name, value in body.items()}
    for name in names.get(kind, ("query", "documents")):
        if name not in body:
            raise RequestError(f"the body has no {name}; {nearest(name, list(body))}")
    request = _pooling_request(kind, body, pools)
    if not request.prompts:
        raise RequestError("the body has no prompt: input must not be empty")

    def make_body(outputs: list[RequestOutput]) -> dict[str, Any]:
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return RESPONSES[kind](body, request.finish(outputs)) | {"usage": usage}

    return request.prompts, request.params, make_body


def _pooling_request(kind: str, body: Mapping[str, Any], pools: PoolingTasks) -> PoolRequests:
    params = PoolingParams(**{name: body[name] for name in _PARAMS if name in body})
    options = {name: body[name] for name in _SCORE_OPTIONS if name in body}
    if kind == "score":
        return pools.score(body["text_1"], body["text_2"], params, **options)
    if kind == "rerank":
        top_n = body.get("top_n", 0)
        if not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 0:
            raise RequestError(f"top_n must be an integer of at least 0, got {quoted(top_n)}")
        if not isinstance(body["query"], str) or not isinstance(body["documents"], list):
            raise RequestError("query must be a string, and documents a list of strings")
        return pools.score(body["query"], [_text(d) for d in body["documents"]], params, **options)
    texts, encoding = body["input"], body.get("encoding_format", "float")
    if encoding not in ENCODINGS:
        raise RequestError(f"encoding_format must be float or base64, got {quoted(encoding)}")
    if not isinstance(texts, str | list):
        raise RequestError(f"input must be a string, token ids, or a list, got {quoted(texts)}")
    return pools.embed(texts, params)


def _text(document: object) -> object:
    """The text of a document: a string, or an object with a field text."""
    return document.get("text") if isinstance(document, dict) else document


def _embeddings(body: Mapping[str, Any], outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
    is_base64 = body.get("encoding_format") == "base64"

    def encode(vector: list[float]) -> object:
        return base64.b64encode(np.array(vector, "<f4")).decode() if is_base64 else vector

    return _list("embedding", [encode(output.outputs.embedding) for output in outputs])


def _scores(body: Mapping[str, Any], outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
    return _list("score", [output.outputs.score for output in outputs])


def _list(kind: str, values: list[Any]) -> dict[str, Any]:
    data = [{"index": i, "object": kind, kind: value} for i, value in enumerate(values)]
    return {"object": "list", "data": data}


def _ranks(body: Mapping[str, Any], outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
    """The documents, best first; equal scores keep their order."""
    ranked = sorted(enumerate(outputs), key=lambda item: -item[1].outputs.score)
    results = [
        {
            "index": i,
            "document": {"text": _text(body["documents"][i])},
            "relevance_score": output.outputs.score,
        }
        for i, output in ranked[: body.get("top_n") or None]
    ]
    return {"results": results}


RESPONSES = {"embedding": _embeddings, "score": _scores, "rerank": _ranks}
