"""The doors of the core: who may take part in a step without the core knowing them.

An `Executor` runs plans, each of them `Launched`; a `Proposer` drafts tokens, an `Observer`
watches, a `OutputFollower` follows one sequence, a `TokenChooser` decides what the sequences of one
request go on with; a `TierStorage` moves blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nanoengine.core.layout import KVLayout
    from nanoengine.core.plan import StepPlan, StepResult
    from nanoengine.core.scheduler import Scheduler
    from nanoengine.core.sequence import Request, Sequence


class Launched(Protocol):
    """A step that an executor has taken on; it may still run."""

    def result(self) -> StepResult:
        """Waits for the step's sampled tokens; the same result each time."""


class Executor(Protocol):
    """Runs plans in order. In-process, tensor parallel, or fake."""

    def start(self) -> KVLayout:
        """Loads what it needs and allocates the KV cache."""

    def launch(self, plan: StepPlan) -> Launched:
        """Takes on one plan. Where the device works by itself this does not wait for it, nor for
        the step before: the next plan may be launched before this one's result is asked for."""

    def shutdown(self) -> None:
        """Gives all memory back; the executor can't be used afterwards."""


class Proposer(Protocol):
    """Drafts tokens that the next step verifies."""

    def propose(self, sequences: SequenceOf[Sequence]) -> list[list[int]]:
        """One list of draft tokens for each sequence; empty means none."""


class Observer(Protocol):
    """Watches steps; it may not change anything."""

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Called after each commit, with the scheduler to read counts from."""


class TierStorage(Protocol):
    """Moves blocks between the device and one tier, in the order of plans."""

    def store(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> Callable[[], None]:
        """Copies device blocks to the tier, as they are after all work issued so far, whatever
        comes after it; what it returns waits until they are there."""

    def load(self, src_ids: SequenceOf[int], dst_ids: SequenceOf[int]) -> float:
        """Copies the tier's blocks to the device, ahead of all work issued from now on; returns the
        seconds that it took."""


class OutputFollower(Protocol):
    """Follows one sequence's output, token by token: incremental text, stop strings, streaming."""

    def append(self, token_id: int) -> str | None:
        """Takes the next output token; a returned string ends the sequence: its stop reason."""


class TokenChooser(Protocol):
    """Decides the next tokens of one request's sequences in place of the sampler."""

    def choose(self, request: Request, scheduler: Scheduler) -> None:
        """Called by a commit once each unfinished sequence of the request rests: all its tokens are
        computed, and its `choices` holds the most likely next ones.

        Each must be given a token (`scheduler.append_token`), be forked (`fork`) as well, be
        dropped (`drop`) or be ended (`finish`).
        """
