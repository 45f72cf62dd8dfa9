"""One rank of a model: a process that runs the plans which its parent sends down a pipe.

    parent ── (step, plan) ──> runner.launch(plan)
           ── (step, None) ──> runner's result of that step ── (step, result) ──> parent, of rank 0

All ranks get the same messages in the same order, so they launch and end the same steps. Each
samples its own tokens: the gathered logits are the same on all, and a token follows from seed,
position and logits.

Started by `executor.py` as a program of its own, which loads nothing of the caller's.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from nanoengine.errors import NanoEngineError

if TYPE_CHECKING:
    import torch

    from nanoengine.core.layout import KVLayout
    from nanoengine.core.plan import StepPlan, StepResult
    from nanoengine.runner.memory import MemoryPlan
    from nanoengine.runner.model_runner import ModelRunner
    from nanoengine.runner.step import LaunchedStep

Order = tuple[int, "StepPlan | None"]
"""To a rank: a step's number, and its plan to launch, or None to ask for its result."""

Answer = tuple[int, "StepResult"]

STILL_TO_SEE_S = 1.0
"""How often a rank looks whether its parent is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a rank needs to start. `runner` are the arguments of ModelRunner but for device and
    ranks; `port` is where ranks meet, and `listener` a descriptor of rank 0 that listens there."""

    world_size: int
    device_type: str
    port: int
    listener: int
    num_threads: int
    runner: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a rank has found at its start; sizes in bytes."""

    rank: int
    layout: KVLayout
    memory: MemoryPlan
    kv_dtype: torch.dtype
    num_parameters: int
    weight_bytes: int
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


def main(rank: int, pipe: int, parent: int) -> None:
    """Runs rank `rank`, whose pipe to the process `parent` is the descriptor `pipe`."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection, refusal = Connection(pipe), None
    try:
        try:
            runner = _start(rank, connection)
        except (NanoEngineError, MemoryError) as error:
            refusal = error
            raise
        _run(runner, connection, answers=rank == 0)
    except BaseException:
        failure = Failure(
            rank=rank, time=time.monotonic(), text=traceback.format_exc(), refusal=refusal
        )
        connection.send(failure)
        # Why not the usual way: what waits for other ranks would wait here for ever.
        os._exit(1)


def _end_with(parent: int) -> None:
    """Ends this process as soon as its parent is gone, whatever it is doing then.

    Why both signs: the pipe at stdin closes at once, unless a process that the parent has forked
    holds it open.
    """
    while not select.select([sys.stdin], [], [], STILL_TO_SEE_S)[0] and os.getppid() == parent:
        pass
    os._exit(1)


def _next(connection: Connection) -> Any:
    """What the parent sends next. Ends this process if it is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def _start(rank: int, connection: Connection) -> ModelRunner:
    setup: Setup = _next(connection)
    import torch

    from nanoengine.layers.collectives import Collectives
    from nanoengine.layers.shard import Shard
    from nanoengine.runner.model_runner import ModelRunner

    torch.set_num_threads(setup.num_threads)
    device = torch.device("cuda", rank) if setup.device_type == "cuda" else torch.device("cpu")
    ranks = Collectives.connect(
        Shard(rank, setup.world_size),
        device,
        port=setup.port,
        listener=setup.listener if rank == 0 else None,
    )
    runner = ModelRunner(**setup.runner, device=device, ranks=ranks)
    try:
        layout = runner.start()
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    started = Started(
        rank=rank,
        layout=layout,
        memory=runner.memory,
        kv_dtype=runner.kv_dtype,
        num_parameters=runner.num_parameters,
        weight_bytes=runner.weight_bytes,
        load_s=runner.load_s,
    )
    connection.send(started)
    return runner


def _run(runner: ModelRunner, connection: Connection, *, answers: bool) -> NoReturn:
    launched: dict[int, LaunchedStep] = {}
    while True:
        order: Order = _next(connection)
        step, plan = order
        if plan is not None:
            launched[step] = runner.launch(plan)
            continue
        result = launched.pop(step).result()
        for earlier in [other for other in launched if other < step]:
            del launched[earlier]  # its result will not be asked for: an exception came between
        if answers:
            connection.send_bytes(pickled((step, result)))
