"""A GPU's clock: moments as events of its stream. Called by a runner on a GPU and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def event_now() -> torch.cuda.Event:
    """The moment at which all work that a GPU was given so far is done.

    Why an event: to time a GPU's work by the host's clock, the host would have to wait for it.
    """
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def event_seconds(marks: Sequence[torch.cuda.Event]) -> list[float]:
    """Time from each event to the next, once the last of them has been reached."""
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
