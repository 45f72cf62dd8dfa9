"""Interfaces that other packages implement, so that the core does not import them.

An `Executor` runs plans and returns a `Launched` for each; a `Proposer` drafts tokens; an
`Observer` observes steps; a `TierStorage` moves blocks. The two interfaces per request,
`OutputFollower` and `TokenChooser`, are in sequence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from nanoengine.core.layout import KVLayout
    from nanoengine.core.plan import StepPlan, StepResult
    from nanoengine.core.sequence import Sequence


class Launched(Protocol):
    """A step that an executor has launched; it may still run."""

    def result(self) -> StepResult:
        """Waits for the step's sampled tokens; repeated calls return the same result."""


class Executor(Protocol):
    """Runs plans in order: in-process, tensor parallel, or fake."""

    def start(self) -> KVLayout:
        """Loads the model and allocates the KV cache."""

    def launch(self, plan: StepPlan) -> Launched:
        """Launches one plan. On an asynchronous device this waits neither for the plan nor for the
        step before it: the next plan may be launched before `result` is called."""

    def shutdown(self) -> None:
        """Frees all memory; the executor can't be used afterwards."""


class Proposer(Protocol):
    """Drafts tokens that the next step verifies."""

    def propose(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        """Draft tokens for each of the sequences that are about to decode; () means none."""

    def needs_tokens(self) -> bool:
        """False if the next step may be planned without asking for drafts."""


@runtime_checkable
class Observer(Protocol):
    """Observes steps; it may not change anything."""

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Called after each commit; `scheduler` gives access to counts."""


class TierStorage(Protocol):
    """Moves blocks between the device and one tier, in the order of plans."""

    def store(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> Callable[[], None]:
        """Copies device blocks to the tier, after all work issued so far and before any work issued
        later. The returned function waits until the copies have finished."""

    def load(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> float:
        """Copies the tier's blocks to the device, before all work issued later; returns the seconds
        that this took."""
