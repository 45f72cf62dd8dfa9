"""RankedExecutor: an Executor whose model is split over ranks, each in its own process.

    this process                                    rank 0         rank 1
    launch(plan)     ─ sender ── (step, plan) ─────> launch ─sums─ launch
    Launched.result  ─ sender ── (step, None) ─────> result        result
                     <─ receiver ─ (step, result) ──┘

Every rank is a child process; this process computes nothing. So Ctrl-C never stops one rank in an
all-reduce that the others wait for: the ranks finish their step, and take the next plan.

Two threads serve all pipes. Why: signals interrupt only the main thread, so an exception can
neither cut a message nor send it to only some of the ranks.

If a rank raises or dies, the others end too, and every call raises EngineDeadError. The same
happens if ranks wait for each other, or for a stopped one. No rank outlives this process
(`worker.py`).

Implements `Executor`; `build.py` creates it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.errors import ConfigError, EngineDeadError, WeightLoadError
from nanoengine.layers.collectives import LOOPBACK, RankPosition
from nanoengine.models.loader import check_ranks
from nanoengine.ranks.rank import LOOK_S, Answer, Failure, Order, RankStarted, Setup, pickled
from nanoengine.ranks.worker import Worker
from nanoengine.runner.options import RunnerOptions

RANK = "nanoengine.ranks.rank"

QUIET_S = 600.0
"""Ranks hang if a result is awaited, and no rank reaches another collective within this time [s].
Each layer has two, so the time between two collectives is short even in a long step."""

LAST_WORDS_S = 1.0
"""Time for the other ranks to report failures after one has ended [s]."""


def require_ranks(options: RunnerOptions) -> None:
    """Raises ConfigError for models and settings that tensor parallelism does not support."""
    config, model_config, quantization = options.config, options.model_config, options.quantization
    device = options.device
    ranks = config.tensor_parallel_size
    check_ranks(model_config, ranks)
    gpu = device.type == "cuda"
    found = torch.cuda.device_count() if gpu else ranks
    refused = (
        (config.kv_tiers, "kv_tiers: blocks of one rank alone would be moved"),
        (config.deterministic, "deterministic=True: how ranks are summed may depend on the batch"),
        (gpu and device.index is not None, f"device='{device}': each rank takes a GPU of its own"),
        (found < ranks, f"fewer GPUs than ranks: torch finds {found}"),
        (quantization and _why_not(quantization, model_config, ranks), None),
    )
    for holds, why in refused:
        if holds:
            raise ConfigError(f"tensor_parallel_size={ranks} does not go with {why or holds}")
    for processor in config.logits_processors:
        require_sendable("logits_processors", processor, ConfigError)


def _why_not(quantization: Quantization, config: ModelConfig, ranks: int) -> str | None:
    """Why splitting a quantized model would change its results; None: it would not."""
    from nanoengine.layers.quantized_weight import BLOCK

    stored = quantization.stored
    if quantization.activations == "int8":
        return "int8 activations: a token is scaled by all inputs of a layer, and a rank has a part"
    group_size = stored.group_size if stored else BLOCK if quantization.bits == 4 else None
    if group_size is None and stored is None:
        return (
            f"int{quantization.bits} weights made while loading: a scale is that of a whole row,"
            " and a rank reads a part; set quantization=None or 'int4_weight_only'"
        )
    heads = {"num_attention_heads * head_dim": config.num_attention_heads * config.head_dim}
    for name, size in (heads | config.linear_inputs).items():
        if name == "hidden_size":  # not split
            continue
        if group_size and size // ranks % group_size:
            return (
                f"weights quantized in groups of {group_size} inputs where {name}={size}: a rank's"
                f" part of {size // ranks} cuts through them"
            )
    return None


def require_sendable(name: str, value: object, error: type[Exception]) -> None:
    """Raises `error` for objects that can't be sent to a rank. A pickle only names functions and
    classes, and a rank does not run the script that defines them."""
    try:
        way = pickled(value)
    except Exception as why:
        raise error(f"{name}: {value!r} can't be sent to a rank: {why}") from why
    if b"__main__" in way:
        raise error(
            f"{name}: {value!r} can't be sent to a rank, which does not run the main script: put it"
            " into a module that is imported"
        )


class RankedExecutor:
    """Runs one model on `config.tensor_parallel_size` ranks of one machine.

    Takes the same options as `ModelRunner`.

    Attributes:
        memory, kv_dtype, products, load_s: the values of rank 0; the other ranks' are similar.
        num_parameters, weight_bytes: sums over all ranks, including copies.

    Raises:
        ConfigError: see `require_ranks`.
    """

    def __init__(self, options: RunnerOptions) -> None:
        require_ranks(options)
        self.options, self.model_config = options, options.model_config
        self.device, self.dtype = options.device, options.dtype
        self._world_size = options.config.tensor_parallel_size
        self._num_launched = 0

    def start(self) -> KVLayout:
        """Starts the ranks. Each loads its part and sizes its cache; all have equally many blocks.

        Raises:
            ConfigError, ModelError, MemoryError: a rank's `ModelRunner.start` raised it.
            EngineDeadError: a rank failed in another way.
        """
        with socket.create_server((LOOPBACK, 0)) as listener:
            setup = Setup(
                world_size=self._world_size,
                port=listener.getsockname()[1],
                listener=listener.fileno(),
                num_threads=max(1, torch.get_num_threads() // self._world_size),
                options=self.options,
            )
            self._ranks = RankProcesses.start(self._world_size, listener)
        # Why a finalizer: an engine that is garbage-collected was never shut down.
        self._end = weakref.finalize(self, self._ranks.end)
        try:
            self._ranks.orders.put(pickled(setup))
            found: list[RankStarted] = [self._ranks.answer() for _ in range(self._world_size)]
        except BaseException:
            self.shutdown()
            raise
        self._ranks.places = {started.rank: RankPosition() for started in found}
        first = min(found, key=lambda started: started.rank)
        assert {started.layout for started in found} == {first.layout}, found
        self.memory, self.kv_dtype, self.load_s = first.memory, first.kv_dtype, first.load_s
        self.products = first.products
        self.num_parameters = sum(started.num_parameters for started in found)
        self.weight_bytes = sum(started.weight_bytes for started in found)
        return first.layout

    def launch(self, plan: StepPlan) -> RankedStep:
        """Sends a plan to all ranks, without waiting.

        Raises:
            EngineDeadError: a rank has failed, or the executor is shut down.
        """
        self._num_launched += 1
        self._ranks.give((self._num_launched, plan))
        return RankedStep(ranks=self._ranks, step=self._num_launched)

    def load_weights(self, folder: Path) -> list[str]:
        """Loads new weights on all ranks; see `runner/new_weights.py`.

        Raises:
            WeightLoadError: they don't fit, and nothing has changed.
            EngineDeadError: a rank has failed, or only some of them have loaded.
        """
        self._num_launched += 1
        self._ranks.give((self._num_launched, folder))
        # Why all: the caller may delete the folder when this returns.
        found = [self._ranks.answer_of(self._num_launched) for _ in range(self._world_size)]
        refused = [one for one in found if isinstance(one, WeightLoadError)]
        if 0 < len(refused) < len(found):
            raise EngineDeadError(f"not all ranks have loaded new weights: {refused[0]}")
        if refused:
            raise refused[0]
        names: list[str] = found[0]
        return names

    def shutdown(self) -> None:
        """Ends all ranks, which frees their memory."""
        self._end()


@dataclass(slots=True, kw_only=True)
class RankedStep:
    """A step that was sent to the ranks; implements `Launched`."""

    ranks: RankProcesses
    step: int
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for rank 0.

        Raises:
            EngineDeadError: a rank has failed.
        """
        if self._result is None:
            self.ranks.give((self.step, None))
            self._result = self.ranks.answer_of(self.step)
        return self._result


@dataclass(slots=True, kw_only=True, eq=False)
class RankProcesses:
    """The processes, the threads that serve their pipes, and the received messages.

    Attributes:
        workers: the processes, by rank.
        orders: pickled orders for all ranks; None ends the sender.
        answers: messages from ranks; None after they have ended.
        places: rank -> the position that it last reported.
        why_dead: the exception to raise after the ranks have ended.
    """

    workers: list[Worker]
    orders: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    places: dict[int, RankPosition] = field(default_factory=dict)
    why_dead: Exception | None = None
    parent: int = field(default_factory=os.getpid)

    @classmethod
    def start(cls, world_size: int, listener: socket.socket) -> RankProcesses:
        """Starts the processes and the threads."""
        ranks = cls(workers=[])
        try:
            for rank in range(world_size):
                descriptors = [listener.fileno()] if rank == 0 else []
                ranks.workers.append(Worker(RANK, rank, descriptors=descriptors))
        except BaseException:
            ranks.end()
            raise
        for serve in (ranks._send, ranks._receive):
            threading.Thread(target=serve, daemon=True).start()
        return ranks

    def give(self, order: Order) -> None:
        """Sends an order to all ranks. Raises the same exceptions as `answer`."""
        if self.why_dead is not None:
            raise self.why_dead
        self.orders.put(pickled(order))

    def answer_of(self, step: int) -> Any:
        """Waits for a rank's answer to a step. Raises the same exceptions as `answer`."""
        answer: Answer = self.answer()
        while answer[0] != step:  # an answer whose caller was interrupted
            answer = self.answer()
        return answer[1]

    def answer(self) -> Any:
        """Waits for the next message of a rank.

        Raises:
            EngineDeadError: the ranks have ended, or hang. If a rank could not start, its own error
                is raised.
        """
        seen, num_looks = None, 0  # Why no clock: it would run on while this process is stopped.
        while num_looks * LOOK_S < QUIET_S:
            try:
                found = self.answers.get(timeout=LOOK_S)
            except queue.Empty:
                before, seen = seen, dict(self.places)
                num_looks = num_looks + 1 if seen and seen == before else 0
                continue
            if found is None:
                self.answers.put(None)  # for the next caller
                assert self.why_dead is not None
                raise self.why_dead
            return found
        at = "; ".join(f"rank {rank} was at {place}" for rank, place in sorted(seen.items()))
        self.why_dead = EngineDeadError(f"no rank has got on for {QUIET_S:g} s: {at}")
        self.end()
        raise self.why_dead

    def end(self) -> None:
        """Ends all ranks immediately: they have nothing to clean up."""
        if os.getpid() != self.parent:  # a forked process only drops its copy
            return
        self.why_dead = self.why_dead or EngineDeadError("the ranks are shut down")
        for worker in self.workers:
            worker.kill()
        self.orders.put(None)

    # --- threads ------------------------------------------------------------------------------

    def _send(self) -> None:
        """Sends numbered orders, until one is None or a rank has exited."""
        pipes = [worker.pipe for worker in self.workers]
        with contextlib.suppress(OSError):
            for number, order in enumerate(iter(self.orders.get, None)):
                for pipe in pipes:
                    pipe.send((number, order))

    def _receive(self) -> None:
        """Receives answers, until a rank has failed or exited; then ends all."""
        failures: list[Failure] = []
        ends: dict[int, str] = {}
        until = None
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as pipes:
            for rank, worker in enumerate(self.workers):
                pipe = pipes.enter_context(worker.pipe)
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and (until is None or time.monotonic() < until):
                for key, _ in selector.select(None if until is None else LAST_WORDS_S / 10):
                    try:
                        message = key.fileobj.recv()
                    except (EOFError, OSError):
                        selector.unregister(key.fileobj)
                        ends[key.data] = self.workers[key.data].how_ended()
                        message = None
                    if message is None or isinstance(message, Failure):
                        until = until or time.monotonic() + LAST_WORDS_S
                        failures += [message] if message else []
                    elif isinstance(message, RankPosition):
                        self.places[key.data] = message
                    else:
                        self.answers.put(message)
            self.why_dead = self.why_dead or why_dead(ends, failures)
            self.end()
            self.answers.put(None)


def why_dead(ends: Mapping[int, str], failures: Sequence[Failure]) -> Exception:
    """The exception for the exit states and the failures of ranks."""
    told = {failure.rank for failure in failures}
    # Why first: if a rank was killed, its neighbours only report a lost connection.
    for rank, how in ends.items():
        if rank not in told:
            return EngineDeadError(f"rank {rank} {how}, perhaps for want of memory")
    first = min(failures, key=lambda failure: failure.time)
    if first.refusal is not None:
        return first.refusal
    return EngineDeadError(f"rank {first.rank} has failed:\n{first.text}")
