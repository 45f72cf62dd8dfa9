"""read_lazily: reads prompts while an iterator is pulled. Called by `LLM.stream`."""

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
    """Reads prompts as they are pulled; parameters and priority are one for all."""
    check_on_error(on_error)
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be an iterable, got {type(prompts).__name__}")
    if isinstance(sampling_params, Sequence) or isinstance(priority, Sequence):
        raise RequestError(
            "prompts that are pulled lazily have no known number, so they share one"
            " SamplingParams and one priority: yield Row(prompt, sampling_params=...) to give"
            " one each"
        )
    (params,) = each_params(sampling_params, 1, reader.default_params)
    (rank,) = each_priority(priority, 1)
    return _each(reader, prompts, params, rank, on_error)


def _each(
    reader: PromptReader,
    prompts: Iterable[object],
    params: SamplingParams,
    rank: int | None,
    on_error: OnError,
) -> Iterator[CheckedPrompt | RefusedPrompt | Pause]:
    numbers = itertools.count()
    for one in prompts:
        if one is PAUSE:
            yield PAUSE
            continue
        own = (one.sampling_params if isinstance(one, Row) else None) or params
        while not reader.checker.is_ready(own):
            yield Pause.COMPILING
        yield reader.read(next(numbers), one, params, rank, on_error)
