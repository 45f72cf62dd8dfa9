"""One rank of a model: a process that runs the plans which its parent sends down a pipe.

    parent ── (step, plan) ──> runner.launch(plan)
           ── (step, None) ──> runner's result of that step ── (step, result) ──> parent, of rank 0
           ── (step, Path) ──> new weights there ── (step, names, or why not) ──> parent, of all

All ranks get the same messages in the same order, so they launch and end the same steps. One that
has missed a message ends, before anything is summed that belongs to different steps.

Each samples its own tokens: the gathered logits are the same on all, and a token follows from seed,
position and logits.

Started by `executor.py` as a worker (`worker.py`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import select
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanoengine.errors import NanoEngineError, WeightLoadError

if TYPE_CHECKING:
    import torch

    from nanoengine.core.layout import KVLayout
    from nanoengine.core.plan import StepPlan, StepResult
    from nanoengine.layers.collectives import Whereabouts
    from nanoengine.runner.memory import MemoryPlan
    from nanoengine.runner.model_runner import ModelRunner
    from nanoengine.runner.numerics import RunnerOptions
    from nanoengine.runner.step import LaunchedStep

Order = tuple[int, "StepPlan | Path | None"]
"""To a rank: a step's number, and its plan to launch, or None to ask for its result; or the folder
of new weights."""

Answer = tuple[int, "StepResult | list[str] | WeightLoadError"]

FOUND = ("memory", "kv_dtype", "num_parameters", "weight_bytes", "products", "load_s")
"""What a rank tells of its runner once that has started."""

LOOK_S = 1.0
"""How often a rank looks whether its parent is still there, and tells it how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a rank needs to start: `port` is where ranks meet, and `listener` a descriptor of rank 0
    that listens there. Each rank of a GPU takes one of its own in place of that of `options`."""

    world_size: int
    port: int
    listener: int
    num_threads: int
    options: RunnerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """What a rank has found at its start; sizes in bytes."""

    rank: int
    layout: KVLayout
    memory: MemoryPlan
    kv_dtype: torch.dtype
    num_parameters: int
    weight_bytes: int
    products: tuple[str, ...]
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ends. `time` is of the machine's monotonic clock; `refusal` an error that a caller
    is told as it is: a setting or a checkpoint that can't be obeyed, or too little memory."""

    rank: int
    time: float
    text: str
    refusal: Exception | None


def pickled(message: object) -> bytes:
    """A message as it goes down a pipe. What carries plans is small ints, 2 or 3 bytes each.

    Perf: 19 us for a plan of 256 decodes, 14 us to read it (one Zen 5 core).
    """
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Parent:
    """The parent, for two threads of a rank. What finds it gone ends this process.

    Attributes:
        place: how far this rank is; None until it has started.
    """

    def __init__(self, pipe: Connection) -> None:
        self.place: Whereabouts | None = None
        self._pipe, self._lock = pipe, threading.Lock()
        self._numbers = itertools.count()

    def send(self, message: object) -> None:
        """Sends a message, if it is still there."""
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send_bytes(pickled(message))

    def next(self) -> Any:
        """What it sends next."""
        try:
            number, message = self._pipe.recv()
        except (EOFError, OSError):
            self._end()
        expected = next(self._numbers)
        assert number == expected, f"message {expected} was lost"
        return pickle.loads(message)

    def _end(self) -> NoReturn:
        os._exit(1)

    def watch(self) -> None:
        """Ends this process as soon as the parent is gone, whatever it is doing then. Tells it how
        far this rank is, where that is new.

        Why both signs: the pipe closes at once, unless a process that the parent has forked holds
        it open.
        """
        told, parent, hangup = None, os.getppid(), select.poll()
        hangup.register(self._pipe, 0)  # that the other end is closed is told in any case
        while not hangup.poll(1000 * LOOK_S) and os.getppid() == parent:
            if self.place != told:
                told = copy.copy(self.place)
                self.send(told)
        os._exit(1)


def main(connection: Connection, rank: int) -> None:
    """Runs rank `rank`, whose pipe to the parent is `connection`."""
    parent, refusal = Parent(connection), None
    threading.Thread(target=parent.watch, daemon=True).start()
    try:
        try:
            runner = _start(rank, parent)
        except (NanoEngineError, MemoryError) as error:
            refusal = error
            raise
        _run(runner, parent, answers=rank == 0)
    except BaseException:
        text = f"at {parent.place or 'its start'}: {traceback.format_exc()}"
        parent.send(Failure(rank=rank, time=time.monotonic(), text=text, refusal=refusal))
        # Why not the usual way: what waits for other ranks would wait here for ever.
        os._exit(1)


def _start(rank: int, parent: Parent) -> ModelRunner:
    setup: Setup = parent.next()
    import torch

    from nanoengine.layers.collectives import Collectives, Shard
    from nanoengine.runner.model_runner import ModelRunner

    torch.set_num_threads(setup.num_threads)
    options = setup.options
    if options.device.type == "cuda":
        options = replace(options, device=torch.device("cuda", rank))
    ranks = Collectives.connect(
        Shard(rank, setup.world_size),
        options.device,
        port=setup.port,
        listener=setup.listener if rank == 0 else None,
    )
    runner = ModelRunner(options, ranks)
    try:
        layout = runner.start()
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    found = {name: getattr(runner, name) for name in FOUND}
    parent.send(RankStarted(rank=rank, layout=layout, **found))
    parent.place = ranks.place
    return runner


def _run(runner: ModelRunner, parent: Parent, *, answers: bool) -> NoReturn:
    launched: dict[int, LaunchedStep] = {}
    place = runner.ranks.place
    while True:
        order: Order = parent.next()
        step, plan = order
        if isinstance(plan, Path):
            parent.send((step, _new_weights(runner, plan)))
            continue
        if plan is not None:
            place.step, place.number = step, 0
            launched[step] = runner.launch(plan)
            continue
        result = launched.pop(step).result()
        for earlier in [other for other in launched if other < step]:
            del launched[earlier]  # its result will not be asked for: an exception came between
        if answers:
            parent.send((step, result))


def _new_weights(runner: ModelRunner, folder: Path) -> list[str] | WeightLoadError:
    """The names of what was loaded, or why nothing was: the same on all ranks."""
    from nanoengine.runner.new_weights import load_weights

    try:
        return load_weights(runner, folder)
    except WeightLoadError as error:
        return error
