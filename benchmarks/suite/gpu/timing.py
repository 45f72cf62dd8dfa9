"""How the GPU report measures time: graph replays between events, events around calls, a profile.

`graph_seconds` times kernels, `Seams` the parts of an engine's step; `kernel_table` lists the
kernels of a profile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol, Self

import torch

from nanoengine.runner.graphs import CudaGraphs

REPEATS = 20


def graph_seconds(work: Callable[[], object]) -> float:
    """Median seconds of one call, over 20 replays of a CUDA graph between two events.

    Why a graph: a launch from Python takes longer than a short kernel, and an engine's decode steps
    are graphs, too.
    """
    replay, _ = CudaGraphs().capture(work)  # type: ignore[arg-type]
    replay()
    torch.cuda.synchronize()
    seconds: list[float] = []
    for _ in range(REPEATS):
        start, end = cuda_event(), cuda_event()
        start.record()
        replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


class Event(Protocol):
    """The used part of `torch.cuda.Event`; `elapsed_time` is in ms."""

    def record(self) -> object:
        """Records this moment on the GPU's stream."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`."""


def cuda_event() -> torch.cuda.Event:
    """An event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Seam(NamedTuple):
    """Where a part of the step is called: an attribute with a callable."""

    name: str
    owner: object
    attribute: str


class Seams:
    """Records two events around every call of some attributes while the context is active.

    The time between them is the GPU's: its kernels, and gaps in which it waits for the next launch
    of the same part. Owners without the attribute are listed in `missing`.
    """

    def __init__(self, seams: SequenceOf[Seam], make_event: Callable[[], Event]) -> None:
        self._seams, self._make_event = seams, make_event
        self._events: dict[str, list[tuple[Event, Event]]] = {}
        self._undo: list[Callable[[], None]] = []
        self.missing = [s.name for s in seams if not callable(getattr(s.owner, s.attribute, None))]

    def __enter__(self) -> Self:
        for seam in self._seams:
            if seam.name not in self.missing:
                self._wrap(seam)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrap(self, seam: Seam) -> None:
        owner, attribute = seam.owner, seam.attribute
        original = getattr(owner, attribute)
        events = self._events.setdefault(seam.name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = self._make_event(), self._make_event()
            start.record()
            result = original(*args, **kwargs)
            end.record()
            events.append((start, end))
            return result

        # Why the difference: a method is found on the class again after the instance's attribute
        # is deleted.
        if attribute in vars(owner):
            self._undo.append(lambda: setattr(owner, attribute, original))
        else:
            self._undo.append(lambda: delattr(owner, attribute))
        setattr(owner, attribute, timed)

    def total_ms(self) -> dict[str, float]:
        """Milliseconds of each part over all its calls; the GPU must have finished."""
        return {
            name: sum(start.elapsed_time(end) for start, end in pairs)
            for name, pairs in self._events.items()
        }


class KernelTime(NamedTuple):
    """A kernel in a profile: its name, number of runs, and microseconds of all runs."""

    name: str
    calls: int
    total_us: float


def kernel_times(averages: Iterable[Any]) -> list[KernelTime]:
    """What ran on the GPU, from the `key_averages()` of a torch profile."""
    return [
        KernelTime(event.key, event.count, event.self_device_time_total)
        for event in averages
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]


def kernel_table(kernels: SequenceOf[KernelTime], num_steps: int, most: int = 15) -> dict[str, Any]:
    """Per step: milliseconds in which the GPU was busy, number of kernels, and the longest of
    them."""
    longest = sorted(kernels, key=lambda kernel: -kernel.total_us)[:most]
    return {
        "busy_ms": sum(kernel.total_us for kernel in kernels) / num_steps / 1e3,
        "kernels": sum(kernel.calls for kernel in kernels) / num_steps,
        "longest": [
            {
                "name": kernel.name[:100],
                "calls": kernel.calls / num_steps,
                "us": kernel.total_us / num_steps,
            }
            for kernel in longest
        ],
    }
