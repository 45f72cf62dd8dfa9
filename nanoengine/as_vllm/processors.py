"""vLLM's logits processors: classes whose objects edit the logits of a whole batch.

    update_state(BatchUpdate)  which request has which index, when that has changed; else None
    apply(logits)              [requests, V], a row for each index

`stages` makes stages of the engine (runner/sampling/logits_processors.py) of what
`LLM(logits_processors=...)` is given. Such a stage keeps the indices, as vLLM's batch does: a
request that ends leaves a gap, a new one fills it, and moves bring the others to the rows that they
have in a step. What a grammar drafts is a request for that step: an edit must follow from
parameters, prompt and output alone.
"""

from __future__ import annotations

import enum
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoengine.as_vllm import absent
from nanoengine.core.plan import AdmittedSequence
from nanoengine.features.processors import ShownIds, takes_prompt


class MoveDirectionality(enum.Enum):
    """Whether a request moves to a free index, or two change places."""

    UNIDIRECTIONAL, SWAP = range(2)


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed, in this order.

    Attributes:
        batch_size: requests after it.
        removed: indices; added: index, parameters, prompt ids and the list of output ids, which
            grows; moved: from, to, and whether what is there goes back.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int], list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class VLLMProcessor(ABC):
    """vLLM's LogitsProcessor: what a program derives its own from."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for parameters of a request that it can't obey."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy rows may go without it; here they go with it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each `apply`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The edited logits, which may be the same tensor."""


class AdapterLogitsProcessor(VLLMProcessor):
    """Functions of one request, for the requests that have one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
        """The function of a request, of output ids, or of prompt and output ids, and logits."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps a function for each index."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Each function on its row."""
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits

    def _bound(self, params: Any, prompt: list[int], output: list[int]) -> Any:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        ids = (prompt, output) if takes_prompt(function) else (output,)
        return lambda logits: function(*ids, logits)


def process_dict_updates(
    req_entries: dict[int, Any], batch_update: BatchUpdate | None, new_state: Callable[..., Any]
) -> bool:
    """Brings a dict by index up to date; `new_state` gives an entry or None, of parameters, prompt
    and output ids. Returns whether something may have changed."""
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


def stages(given: Iterable[Any], device: str | None) -> list[Any]:
    """Logits processors with stages in the place of vLLM's classes, and of names of such."""
    found = [pkgutil.resolve_name(one) if isinstance(one, str) else one for one in given]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = absent("vllm_config", "the keyword arguments of LLM are the configuration")
    return [
        Batched(one(config, where, False))
        if isinstance(one, type) and issubclass(one, VLLMProcessor)
        else one
        for one in found
    ]


class Batched:
    """A stage around an object of a processor's class.

    Attributes:
        requests: those of the step before, by index.
    """

    def __init__(self, processor: VLLMProcessor) -> None:
        self.processor = processor
        self.requests: list[ShownIds] = []

    def admit(self, sequence: AdmittedSequence) -> ShownIds:
        """Every row has a state: the processor sees all requests."""
        self.processor.validate_params(sequence.params)
        return ShownIds.to(sequence.params, sequence)

    def apply(self, logits: torch.Tensor, lines: Sequence[int], states: Sequence[ShownIds]) -> None:
        """Tells what has changed, and edits the lines."""
        self.processor.update_state(self._arrange(states))
        logits[list(lines)] = self.processor.apply(logits[list(lines)])

    def _arrange(self, states: Sequence[ShownIds]) -> BatchUpdate | None:
        """Brings each request to the index that it has among `states`."""
        held = set(states)
        now, added, moved = [one if one in held else None for one in self.requests], [], []
        for state in held.difference(self.requests):
            index = now.index(None) if None in now else len(now)
            now[index : index + 1] = [state]
            added.append((index, state.whom, state.prompt, state.output))
        removed = [i for i, one in enumerate(now) if one is None]
        for end, state in enumerate(states):
            start = now.index(state)
            if start != end:
                way = "UNIDIRECTIONAL" if now[end] is None else "SWAP"
                moved.append((start, end, MoveDirectionality[way]))
                now[start], now[end] = now[end], state
        self.requests = list(states)
        changed = removed or added or moved
        return BatchUpdate(len(states), removed, added, moved) if changed else None
