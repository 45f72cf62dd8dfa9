"""read_lazily: reads the prompts of an iterator one by one. Called by `LLM.stream`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams
from nanoengine.text.prompt_forms import PAUSE, Pause, Row, each_params, each_priority
from nanoengine.text.prompts import (
    CheckedPrompt,
    OnError,
    ParamsInput,
    PriorityInput,
    PromptReader,
    RefusedPrompt,
    check_on_error,
)


def read_lazily(
    reader: PromptReader,
    prompts: object,
    sampling_params: ParamsInput,
    priority: PriorityInput,
    on_error: OnError,
) -> Iterator[CheckedPrompt | RefusedPrompt | Pause]:
    """Reads each prompt when it is needed. All prompts have the same parameters and priority."""
    check_on_error(on_error)
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be an iterable, got {type(prompts).__name__}")
    if isinstance(sampling_params, Sequence) or isinstance(priority, Sequence):
        raise RequestError(
            "the number of prompts of an iterator is unknown, so they share one SamplingParams and"
            " one priority; yield Row(prompt, sampling_params=...) for parameters per prompt"
        )
    (params,) = each_params(sampling_params, 1, reader.default_params)
    (one_priority,) = each_priority(priority, 1)
    return _read_each(reader, prompts, params, one_priority, on_error)


def _read_each(
    reader: PromptReader,
    prompts: Iterable[object],
    params: SamplingParams,
    priority: int | None,
    on_error: OnError,
) -> Iterator[CheckedPrompt | RefusedPrompt | Pause]:
    indices = itertools.count()
    for prompt in prompts:
        if prompt is PAUSE:
            yield PAUSE
            continue
        prompt_params = (prompt.sampling_params if isinstance(prompt, Row) else None) or params
        while not reader.checker.is_ready(prompt_params):
            yield Pause.COMPILING
        yield reader.read(next(indices), prompt, params, priority, on_error)
