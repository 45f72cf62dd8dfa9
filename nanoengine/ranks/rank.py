"""One rank of a model: a process that runs the plans that its parent sends through a pipe.

    parent ── (step, plan) ──> runner.launch(plan)
           ── (step, None) ──> runner's result of that step ── (step, result) ──> parent, of rank 0
           ── (step, Path) ──> new weights there ── (step, names or error) ──> parent, of all

All ranks get the same messages in the same order, so they launch and end the same steps. A rank
that has missed a message exits before it could all-reduce values of another step.

Each rank samples its own tokens: the gathered logits are the same on all ranks, and a token depends
only on seed, position and logits.

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
    from nanoengine.layers.collectives import RankPosition
    from nanoengine.runner.memory import MemoryPlan
    from nanoengine.runner.model_runner import ModelRunner
    from nanoengine.runner.options import RunnerOptions
    from nanoengine.runner.step import LaunchedStep

Order = tuple[int, "StepPlan | Path | None"]
"""An order to a rank: the number of a step, and its plan to launch, or None to request its result;
or the folder of new weights."""

Reply = tuple[int, "StepResult | list[str] | WeightLoadError"]

REPORTED = ("memory", "kv_dtype", "num_parameters", "weight_bytes", "products", "load_s")
"""Attributes of the runner that a rank reports after its start."""

POLL_S = 1.0
"""Interval at which a rank checks that its parent exists, and reports its position [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The data that a rank needs to start. Ranks connect to `port`; `listener` is a descriptor of
    rank 0 that listens there. On GPUs, each rank replaces the device of `options` by its own."""

    world_size: int
    port: int
    listener: int
    num_threads: int
    options: RunnerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """The state of a rank after its start; sizes in bytes."""

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
    """Why a rank exits. `time` is from the machine's monotonic clock. `start_error` is an error
    that is raised unchanged: an unsupported setting or checkpoint, or too little memory."""

    rank: int
    time: float
    text: str
    start_error: Exception | None


def pickled(message: object) -> bytes:
    """A pickled message for a pipe. Plans consist of small ints, which take 2 or 3 bytes each.

    Perf: 19 us for a plan of 256 decodes, 14 us to read it (one Zen 5 core).
    """
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Parent:
    """The connection to the parent, used by two threads of a rank. If the parent has exited, this
    process exits.

    Attributes:
        position: of this rank; None until it has started.
    """

    def __init__(self, pipe: Connection) -> None:
        self.position: RankPosition | None = None
        self._pipe, self._lock = pipe, threading.Lock()
        self._numbers = itertools.count()

    def send(self, message: object) -> None:
        """Sends a message; ignores a closed pipe."""
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send_bytes(pickled(message))

    def next(self) -> Any:
        """The next message."""
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
        """Ends this process as soon as the parent exits, even during a step. Reports the position
        of this rank when it changes.

        Why two checks: the pipe closes immediately, unless the parent has forked another process,
        which keeps it open.
        """
        reported, parent, hangup = None, os.getppid(), select.poll()
        hangup.register(self._pipe, 0)  # a hangup is reported in any case
        while not hangup.poll(1000 * POLL_S) and os.getppid() == parent:
            if self.position != reported:
                reported = copy.copy(self.position)
                self.send(reported)
        os._exit(1)


def main(connection: Connection, rank: int) -> None:
    """Runs rank `rank`; `connection` is its pipe to the parent."""
    parent, start_error = Parent(connection), None
    threading.Thread(target=parent.watch, daemon=True).start()
    try:
        try:
            runner = _start(rank, parent)
        except (NanoEngineError, MemoryError) as error:
            start_error = error
            raise
        _run(runner, parent, replies=rank == 0)
    except BaseException:
        text = f"at {parent.position or 'its start'}: {traceback.format_exc()}"
        parent.send(Failure(rank=rank, time=time.monotonic(), text=text, start_error=start_error))
        # Why not a normal exit: it would wait for the other ranks forever.
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
    found = {name: getattr(runner, name) for name in REPORTED}
    parent.send(RankStarted(rank=rank, layout=layout, **found))
    parent.position = ranks.position
    return runner


def _run(runner: ModelRunner, parent: Parent, *, replies: bool) -> NoReturn:
    launched: dict[int, LaunchedStep] = {}
    position = runner.ranks.position
    while True:
        order: Order = parent.next()
        step, plan = order
        if isinstance(plan, Path):
            parent.send((step, _new_weights(runner, plan)))
            continue
        if plan is not None:
            position.step, position.number = step, 0
            launched[step] = runner.launch(plan)
            continue
        result = launched.pop(step).result()
        for earlier in [other for other in launched if other < step]:
            del launched[earlier]  # its result is not needed: the caller was interrupted
        if replies:
            parent.send((step, result))


def _new_weights(runner: ModelRunner, folder: Path) -> list[str] | WeightLoadError:
    """The names of the loaded weights, or the error; the same on all ranks."""
    from nanoengine.runner.new_weights import load_weights

    try:
        return load_weights(runner, folder)
    except WeightLoadError as error:
        return error
