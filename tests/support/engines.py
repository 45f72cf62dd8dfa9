"""Engines on tiny random checkpoints, for tests of the whole stack."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanoengine.build import build_engine
from nanoengine.core.sequence import Request
from nanoengine.engine import LLMEngine
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.late_device import LateDownload

_directory = tempfile.TemporaryDirectory(prefix="nanoengine-tests-")


@functools.cache
def checkpoint(family: str, **overrides: Any) -> str:
    """Directory of a tiny random checkpoint, written once per test run."""
    name = "-".join([family, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
    path = Path(_directory.name) / name
    make_checkpoint(path, family, **overrides)
    return str(path)


@functools.cache
def reference(directory: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same checkpoint in transformers."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


def make_engine(directory: str, **options: Any) -> LLMEngine:
    """A small engine that checks its invariants after each step. With `overlap`, samples arrive on
    the host as late as possible."""
    if "num_kv_blocks" not in options:
        options.setdefault("kv_cache_gib", 0.02)
    defaults = {"dtype": "float64", "attention_backend": "naive", "debug_checks": True}
    # Why: tests need preemptions, and the default policy avoids them.
    options = defaults | {"admission": "watermark"} | options
    engine = build_engine(EngineConfig(model=directory, **options))
    if engine.overlap and engine.info.device == "cpu":
        engine.executor.start_download = LateDownload
    return engine


def random_prompts(count: int, lengths: Sequence[int], *, vocab_size: int = 256, seed: int = 0):
    """Prompts of random ids that cycle through the lengths."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, vocab_size) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def run(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Request]:
    """Runs all prompts to completion; returns the requests in the order of the prompts."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [
        engine.add_request(f"{i}", prompt, p)
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
    ]
    finish(engine)
    assert not [r.error for r in requests if r.error]
    return requests


def finish(engine: LLMEngine) -> None:
    """Steps until no request is left."""
    while engine.has_unfinished():
        engine.step()


def tokens(requests: Sequence[Request]) -> list[list[list[int]]]:
    """Output tokens of each sequence of each request."""
    return [[seq.output_token_ids for seq in request.sequences] for request in requests]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
