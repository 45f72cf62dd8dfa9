"""User-defined logits processors: functions, and objects with the engine's own interface.

    f(output_ids, logits)                         SamplingParams(logits_processors=[f])
    g(prompt_ids, output_ids, logits)             LLM(..., logits_processors=[g]): for all requests
    admit(sequence), apply(logits, lines, states) LLM(..., logits_processors=[object])

A function is called for one row at a time, with lists of ids and the row's logits. It keeps no
state: its result depends only on its arguments, so it is the same after a preemption, after drafts,
and in each rank. An object (`runner/sampling/logits_processors.py`) handles all rows of a step at
once and keeps a state per row.

Called by `build.py`. The signatures of functions are the same as in vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanoengine.core.plan import AdmittedSequence
from nanoengine.errors import ConfigError, RequestError
from nanoengine.runner.sampling.logits_processors import LogitsProcessor
from nanoengine.settings.checks import describe_error
from nanoengine.settings.config import BatchLogitsProcessor

LogitsFunction = Callable[..., torch.Tensor]


def make_processors(given: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
    """The LLM's own objects, then one processor for its functions and the functions of requests.

    Raises:
        ConfigError: one is a class.
    """
    for one in given:
        if isinstance(one, type):
            raise ConfigError(f"logits_processors must be functions or instances, got {one!r}")
    objects = [one for one in given if isinstance(one, BatchLogitsProcessor)]
    functions = [one for one in given if not isinstance(one, BatchLogitsProcessor)]
    return (*objects, FunctionProcessor(functions))


class FunctionProcessor:
    """Applies functions: first the LLM's, then the request's own."""

    one_by_one = True  # Why: an exception then ends only the row that raised it.

    def __init__(self, for_all: Sequence[LogitsFunction]) -> None:
        self.for_all = tuple(for_all)

    def admit(self, sequence: AdmittedSequence) -> TokenIds | None:
        functions = (*self.for_all, *(sequence.params.logits_processors or ()))
        if not functions:
            return None
        return TokenIds.of([(f, takes_prompt(f)) for f in functions], sequence)

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[TokenIds]) -> None:
        for line, state in zip(lines, states, strict=True):
            edited = row = logits[line]
            for function, with_prompt in state.used_by:
                ids = (state.prompt, state.output) if with_prompt else (state.output,)
                edited = _call_checked(function, *ids, edited)
            if edited is not row:
                logits[line] = edited


@dataclass(eq=False)
class TokenIds:
    """The token ids of a sequence; `used_by` holds the functions or parameters that read them."""

    used_by: Any
    prompt: list[int]
    output: list[int]

    @classmethod
    def of(cls, used_by: Any, sequence: AdmittedSequence) -> TokenIds:
        """The token ids of a sequence that is being admitted."""
        ids, start = list(sequence.token_ids), sequence.num_prompt_tokens
        return cls(used_by, ids[:start], ids[start:])

    def accept(self, token_id: int) -> None:
        """Appends to the list of output ids, to which functions may keep a reference."""
        self.output.append(token_id)

    def fork(self) -> TokenIds:
        """A copy for another row."""
        return replace(self, output=list(self.output))


def takes_prompt(function: LogitsFunction) -> bool:
    """Whether a function also takes the prompt's ids."""
    return len(inspect.signature(function).parameters) == 3


def _call_checked(function: LogitsFunction, *args: Any) -> torch.Tensor:
    """Calls a function with the row's logits as the last argument, and checks the result.

    Raises:
        RequestError: it raised, or did not return logits.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        edited = function(*args)
    except Exception as error:
        raise RequestError(f"logits processor {name} raised {describe_error(error)}") from error
    shape = args[-1].shape
    if not isinstance(edited, torch.Tensor) or edited.shape != shape:
        got = getattr(edited, "shape", None)
        if not isinstance(edited, torch.Tensor | None):
            got = f"a value of type {type(edited).__name__}: return a torch.Tensor"
        raise RequestError(
            f"logits processor {name} must return logits of shape {tuple(shape)}, got {got}"
        )
    return edited
