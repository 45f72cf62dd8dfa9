"""A stand-in for CUDA graphs on the CPU: it records operators and replays them.

As a CUDA graph does, it keeps what a function did and not the function: the operators with their
tensors, and every Python number as it was. What the function would decide anew from Python, and
what it reads from the host, stays as it was at capture, and a test notices. Before a replay all
that the graph computes is overwritten with nonsense, and so are the results of all other graphs,
whose memory a real pool would share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nanoengine.runner.graphs import Captured, Outputs

FORBIDDEN = ("nonzero", "masked_select", "_local_scalar_dense", "unique")
"""Operators that make the host wait, or whose shapes depend on values."""


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def nonsense(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(-77)


class Recorder(TorchDispatchMode):
    """The operators that ran inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            t.dtype == torch.bool for t in tensors_of(args[1:2])
        )
        assert name not in FORBIDDEN and not by_mask, f"{name} would make the host wait"
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class RecordedGraphs:
    """Captures by recording; counts its replays."""

    def __init__(self) -> None:
        self.num_replayed = 0
        self.num_captured = 0
        self._fresh: list[list[torch.Tensor]] = []

    def capture(self, function: Callable[[], Outputs]) -> Captured:
        function()  # as a warm-up does
        with Recorder() as recorder:
            outputs = function()
        calls = recorder.calls
        fresh = list(self._made_inside(calls))
        self._fresh.append(fresh)
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for made in self._fresh:
                for tensor in made:
                    nonsense(tensor)
            for func, args, kwargs, out in calls:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_of(out), tensors_of(again), strict=True):
                    assert old.shape == new.shape
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay, outputs

    @staticmethod
    def _made_inside(calls: list[tuple[Any, tuple, dict, Any]]) -> Iterator[torch.Tensor]:
        """The tensors whose memory was allocated by a call: neither inputs nor views."""
        known = set()
        for _, args, kwargs, out in calls:
            known |= {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))} - known
            for tensor in tensors_of(out):
                storage = tensor.untyped_storage().data_ptr()
                if storage not in known and tensor.numel():
                    known.add(storage)
                    yield tensor
