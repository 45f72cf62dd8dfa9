"""vLLM's logits processors: classes whose objects edit the logits of a whole batch.

    update_state(BatchUpdate)  which request has which index, if that has changed; else None
    apply(logits)              [requests, V], one row per index

`wrap_processors` converts `LLM(logits_processors=...)` to the engine's logits processors
(runner/sampling/logits_processors.py). They keep indices like vLLM's batch: a finished request
leaves a gap, a new one fills it, and moves put the others to their rows in a step. A grammar's
drafts are separate requests in a step, so an edit must depend on parameters, prompt and output
only.
"""

from __future__ import annotations

import enum
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoengine.as_vllm import unsupported
from nanoengine.core.plan import AdmittedSequence
from nanoengine.features.custom_processors import TokenIds, takes_prompt


class MoveDirectionality(enum.Enum):
    """Whether a request moves to a free index, or two requests are swapped."""

    UNIDIRECTIONAL, SWAP = range(2)


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of a batch, in the order of these fields.

    Attributes:
        batch_size: number of requests after the changes.
        removed: indices; added: index, parameters, prompt ids and the list of output ids, which
            grows; moved: from, to, and whether the two are swapped.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int], list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class VLLMProcessor(ABC):
    """vLLM's LogitsProcessor: the base class of programs' processors."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for a request's parameters that it does not support."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether vLLM may skip it for greedy rows; here it is always applied."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the edited logits, which may be the same tensor."""


class AdapterLogitsProcessor(VLLMProcessor):
    """Applies functions of single requests, for the requests that have one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
        """A request's function of output ids, or of prompt and output ids, and logits."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps one function per index."""
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies each function to its row."""
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits

    def _bind(self, params: Any, prompt: list[int], output: list[int]) -> Any:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        ids = (prompt, output) if takes_prompt(function) else (output,)
        return lambda logits: function(*ids, logits)


def process_dict_updates(
    req_entries: dict[int, Any], batch_update: BatchUpdate | None, new_state: Callable[..., Any]
) -> bool:
    """Updates a dict by index; returns whether anything may have changed.

    `new_state` returns an entry or None for parameters, prompt ids and output ids.
    """
    if batch_update is None:
        return False
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, *request in batch_update.added:
        req_entries[index] = new_state(*request)
    for start, end, _ in batch_update.moved:
        found = req_entries.get(start), req_entries.get(end)
        req_entries[end], req_entries[start] = found
    for index in [index for index, entry in req_entries.items() if entry is None]:
        del req_entries[index]
    return True


def wrap_processors(processors: Iterable[Any], device: str | None) -> list[Any]:
    """Wraps vLLM's classes, or their import names, among logits processors; keeps the others."""
    found = [pkgutil.resolve_name(p) if isinstance(p, str) else p for p in processors]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = unsupported("vllm_config", "pass the configuration to LLM as keyword arguments")
    return [
        BatchedProcessor(p(config, where, False))
        if isinstance(p, type) and issubclass(p, VLLMProcessor)
        else p
        for p in found
    ]


class BatchedProcessor:
    """Wraps an object of a vLLM class as a logits processor of the engine.

    Attributes:
        requests: the requests of the previous step, by index.
    """

    def __init__(self, processor: VLLMProcessor) -> None:
        self.processor = processor
        self.requests: list[TokenIds] = []

    def admit(self, sequence: AdmittedSequence) -> TokenIds:
        """Every row has a state, because the processor handles all requests."""
        self.processor.validate_params(sequence.params)
        return TokenIds.of(sequence.params, sequence)

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[TokenIds]) -> None:
        """Reports the changes to the processor, and applies it to the rows `lines`."""
        self.processor.update_state(self._arrange(states))
        logits[list(lines)] = self.processor.apply(logits[list(lines)])

    def _arrange(self, states: Sequence[TokenIds]) -> BatchUpdate | None:
        """Moves each request to its index among `states`; returns the changes."""
        current, added, moved = set(states), [], []
        slots = [state if state in current else None for state in self.requests]
        for state in current.difference(self.requests):
            index = slots.index(None) if None in slots else len(slots)
            slots[index : index + 1] = [state]
            added.append((index, state.used_by, state.prompt, state.output))
        removed = [i for i, state in enumerate(slots) if state is None]
        for end, state in enumerate(states):
            start = slots.index(state)
            if start != end:
                direction = "UNIDIRECTIONAL" if slots[end] is None else "SWAP"
                moved.append((start, end, MoveDirectionality[direction]))
                slots[start], slots[end] = slots[end], state
        self.requests = list(states)
        changed = removed or added or moved
        return BatchUpdate(len(states), removed, added, moved) if changed else None
