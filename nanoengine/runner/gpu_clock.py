"""Timing on a GPU with CUDA events on its stream. Called by a runner on a GPU and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def event_now() -> torch.cuda.Event:
    """The point in time at which all GPU work issued so far is done.

    Why an event: to time GPU work with the host's clock, the host would have to wait for it.
    """
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def event_seconds(marks: Sequence[torch.cuda.Event]) -> list[float]:
    """Seconds from each event to the next, after the last of them has been reached."""
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
