"""Interfaces through which other packages take part in a step without the core importing them.

An `Executor` runs plans, each of them `Launched`; a `Proposer` drafts tokens; an `Observer` watches
steps; a `TierStorage` moves blocks. The two interfaces of a single request, `OutputFollower` and
`TokenChooser`, are in sequence.py.
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
    """A step that an executor has taken on; it may still run."""

    def result(self) -> StepResult:
        """Waits for the step's sampled tokens; the same result each time."""


class Executor(Protocol):
    """Runs plans in order. In-process, tensor parallel, or fake."""

    def start(self) -> KVLayout:
        """Loads what it needs and allocates the KV cache."""

    def launch(self, plan: StepPlan) -> Launched:
        """Takes on one plan. Where the device works by itself, this waits neither for the plan nor
        for the step before it: the next plan may be launched before this result is asked for."""

    def shutdown(self) -> None:
        """Gives all memory back; the executor can't be used afterwards."""


class Proposer(Protocol):
    """Drafts tokens that the next step verifies."""

    def propose(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        """Draft tokens for each of the sequences that are about to decode; () means none."""

    def needs_tokens(self) -> bool:
        """False if the next step may be planned without asking for drafts."""


@runtime_checkable
class Observer(Protocol):
    """Watches steps; it may not change anything."""

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Called after each commit, with the scheduler to read counts from."""


class TierStorage(Protocol):
    """Moves blocks between the device and one tier, in the order of plans."""

    def store(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> Callable[[], None]:
        """Copies device blocks to the tier, as they are after all work issued so far and before any
        issued later. The function that it returns waits until the copies are there."""

    def load(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> float:
        """Copies the tier's blocks to the device, ahead of all work issued later; returns the
        seconds that this took."""
