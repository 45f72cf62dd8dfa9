"""RankedExecutor: an Executor whose model is split over ranks, each in its own process.

    this process                                    rank 0         rank 1
    launch(plan)     ─ sender ── (step, plan) ─────> launch ─sums─ launch
    Launched.result  ─ sender ── (step, None) ─────> result        result
                     <─ receiver ─ (step, result) ──┘

Every rank is a child process; this process computes nothing. So Ctrl-C can't stop one rank in an
all-reduce for which the others wait: the ranks finish their step, and accept the next plan.

Two threads serve all pipes. Why: signals interrupt only the main thread, so an exception can't
interrupt a message, or its sending to all ranks.

If a rank raises an exception or crashes, the others end too, and every call raises EngineDeadError.
The same happens if ranks wait for each other, or for a stopped one. No rank outlives this process
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
from nanoengine.ranks.rank import POLL_S, Failure, Order, RankStarted, Reply, Setup, pickled
from nanoengine.ranks.worker import Worker
from nanoengine.runner.options import RunnerOptions

RANK = "nanoengine.ranks.rank"

HANG_TIMEOUT_S = 600.0
"""The ranks are ended if none reaches another collective within this time during a step [s]. Each
layer has two, so the time between two collectives is short even in a long step."""

FAILURE_GRACE_S = 1.0
"""Time for the other ranks to report failures after one rank has ended [s]."""


def require_ranks(options: RunnerOptions) -> None:
    """Raises ConfigError for models and settings that tensor parallelism does not support."""
    config, model_config, quantization = options.config, options.model_config, options.quantization
    device = options.device
    ranks = config.tensor_parallel_size
    check_ranks(model_config, ranks)
    is_gpu = device.type == "cuda"
    num_devices = torch.cuda.device_count() if is_gpu else ranks
    unsupported = (
        (config.kv_tiers, "kv_tiers: only one rank's blocks would be offloaded"),
        (config.deterministic, "deterministic=True: sums over ranks may depend on the batch"),
        (is_gpu and device.index is not None, f"device='{device}': each rank needs its own GPU"),
        (num_devices < ranks, f"too few GPUs: torch finds {num_devices}"),
        (quantization and _why_not_split(quantization, model_config, ranks), None),
    )
    for is_set, why in unsupported:
        if is_set:
            raise ConfigError(f"tensor_parallel_size={ranks} is not supported with {why or is_set}")
    for processor in config.logits_processors:
        require_sendable("logits_processors", processor, ConfigError)


def _why_not_split(quantization: Quantization, config: ModelConfig, ranks: int) -> str | None:
    """Why splitting a quantized model would change its results; None: it would not."""
    from nanoengine.layers.quantized_weight import BLOCK

    stored = quantization.stored
    if quantization.activations == "int8":
        return "int8 activations: a token's scale needs all inputs, and a rank has only a part"
    group_size = stored.group_size if stored else BLOCK if quantization.bits == 4 else None
    if group_size is None and stored is None:
        return (
            f"int{quantization.bits} weights quantized while loading: the scale of an output needs"
            " all inputs, and a rank has a part; set quantization=None or 'int4_weight_only'"
        )
    heads = {"num_attention_heads * head_dim": config.num_attention_heads * config.head_dim}
    for name, size in (heads | config.linear_inputs).items():
        if name == "hidden_size":  # not split
            continue
        if group_size and size // ranks % group_size:
            return (
                f"weights quantized in groups of {group_size} inputs, because {name}={size}: a"
                f" rank's part of {size // ranks} is not a multiple of {group_size}"
            )
    return None


def require_sendable(name: str, value: object, error: type[Exception]) -> None:
    """Raises `error` for objects that can't be sent to a rank. A pickle refers to functions and
    classes by module, and a rank does not run the main script."""
    try:
        data = pickled(value)
    except Exception as why:
        raise error(f"{name}: {value!r} can't be sent to a rank: {why}") from why
    if b"__main__" in data:
        raise error(
            f"{name}: {value!r} is defined in the main script, which ranks do not run: move it to a"
            " module that the script imports"
        )


class RankedExecutor:
    """Runs one model on `config.tensor_parallel_size` ranks of one machine.

    Takes the same options as `ModelRunner`.

    Attributes:
        memory, kv_dtype, products, load_s: of rank 0; similar on the other ranks.
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
        # Why a finalizer: an engine may be garbage-collected without a shutdown.
        self._end = weakref.finalize(self, self._ranks.end)
        try:
            self._ranks.orders.put(pickled(setup))
            started: list[RankStarted] = [self._ranks.next_reply() for _ in range(self._world_size)]
        except BaseException:
            self.shutdown()
            raise
        self._ranks.positions = {one.rank: RankPosition() for one in started}
        first = min(started, key=lambda one: one.rank)
        assert {one.layout for one in started} == {first.layout}, started
        self.memory, self.kv_dtype, self.load_s = first.memory, first.kv_dtype, first.load_s
        self.products = first.products
        self.num_parameters = sum(one.num_parameters for one in started)
        self.weight_bytes = sum(one.weight_bytes for one in started)
        return first.layout

    def launch(self, plan: StepPlan) -> RankedStep:
        """Sends a plan to all ranks, without waiting.

        Raises:
            EngineDeadError: a rank has failed, or the executor is shut down.
        """
        self._num_launched += 1
        self._ranks.send((self._num_launched, plan))
        return RankedStep(ranks=self._ranks, step=self._num_launched)

    def load_weights(self, folder: Path) -> list[str]:
        """Loads new weights on all ranks; see `runner/new_weights.py`.

        Raises:
            WeightLoadError: they don't fit, and nothing has changed.
            EngineDeadError: a rank has failed, or only some of them have loaded.
        """
        self._num_launched += 1
        self._ranks.send((self._num_launched, folder))
        # Why all: the caller may delete the folder when this returns.
        replies = [self._ranks.wait_reply(self._num_launched) for _ in range(self._world_size)]
        errors = [reply for reply in replies if isinstance(reply, WeightLoadError)]
        if 0 < len(errors) < len(replies):
            raise EngineDeadError(f"not all ranks have loaded new weights: {errors[0]}")
        if errors:
            raise errors[0]
        names: list[str] = replies[0]
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
            self.ranks.send((self.step, None))
            self._result = self.ranks.wait_reply(self.step)
        return self._result


@dataclass(slots=True, kw_only=True, eq=False)
class RankProcesses:
    """The processes, the threads that serve their pipes, and the received messages.

    Attributes:
        workers: the processes, by rank.
        orders: pickled orders for all ranks; None ends the sender.
        replies: messages from ranks; None: they have ended.
        positions: rank -> the position that it has reported last.
        end_error: the exception to raise after the ranks have ended.
    """

    workers: list[Worker]
    orders: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    replies: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    positions: dict[int, RankPosition] = field(default_factory=dict)
    end_error: Exception | None = None
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

    def send(self, order: Order) -> None:
        """Sends an order to all ranks. Raises the same exceptions as `next_reply`."""
        if self.end_error is not None:
            raise self.end_error
        self.orders.put(pickled(order))

    def wait_reply(self, step: int) -> Any:
        """Waits for a rank's reply to a step. Raises the same exceptions as `next_reply`."""
        reply: Reply = self.next_reply()
        while reply[0] != step:  # a reply whose caller was interrupted
            reply = self.next_reply()
        return reply[1]

    def next_reply(self) -> Any:
        """Waits for the next message of a rank.

        Raises:
            EngineDeadError: the ranks have ended, or hang.
            ConfigError, ModelError, MemoryError: a rank could not start.
        """
        # Why no clock: it would continue while this process is stopped.
        positions, num_quiet = None, 0
        while num_quiet * POLL_S < HANG_TIMEOUT_S:
            try:
                reply = self.replies.get(timeout=POLL_S)
            except queue.Empty:
                before, positions = positions, dict(self.positions)
                num_quiet = num_quiet + 1 if positions and positions == before else 0
                continue
            if reply is None:
                self.replies.put(None)  # for the next caller
                assert self.end_error is not None
                raise self.end_error
            return reply
        at = "; ".join(f"rank {rank} was at {where}" for rank, where in sorted(positions.items()))
        self.end_error = EngineDeadError(f"no rank has advanced for {HANG_TIMEOUT_S:g} s: {at}")
        self.end()
        raise self.end_error

    def end(self) -> None:
        """Ends all ranks immediately: they have nothing to clean up."""
        if os.getpid() != self.parent:  # a forked copy of the parent
            return
        self.end_error = self.end_error or EngineDeadError("the ranks are shut down")
        for worker in self.workers:
            worker.kill()
        self.orders.put(None)

    # --- threads ------------------------------------------------------------------------------

    def _send(self) -> None:
        """Sends orders with sequence numbers, until one is None or a rank has exited."""
        pipes = [worker.pipe for worker in self.workers]
        with contextlib.suppress(OSError):
            for number, order in enumerate(iter(self.orders.get, None)):
                for pipe in pipes:
                    pipe.send((number, order))

    def _receive(self) -> None:
        """Receives replies, until a rank has failed or exited; then ends all ranks."""
        failures: list[Failure] = []
        exits: dict[int, str] = {}
        deadline = None
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as pipes:
            for rank, worker in enumerate(self.workers):
                pipe = pipes.enter_context(worker.pipe)
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                for key, _ in selector.select(None if deadline is None else FAILURE_GRACE_S / 10):
                    try:
                        message = key.fileobj.recv()
                    except (EOFError, OSError):
                        selector.unregister(key.fileobj)
                        exits[key.data] = self.workers[key.data].describe_exit()
                        message = None
                    if message is None or isinstance(message, Failure):
                        deadline = deadline or time.monotonic() + FAILURE_GRACE_S
                        failures += [message] if message else []
                    elif isinstance(message, RankPosition):
                        self.positions[key.data] = message
                    else:
                        self.replies.put(message)
            self.end_error = self.end_error or find_end_error(exits, failures)
            self.end()
            self.replies.put(None)


def find_end_error(exits: Mapping[int, str], failures: Sequence[Failure]) -> Exception:
    """The exception that explains the end of the ranks: from their exits, and from the failures
    that they have reported."""
    reported = {failure.rank for failure in failures}
    # Why exits first: if a rank was killed, the others only report a lost connection.
    for rank, how in exits.items():
        if rank not in reported:
            return EngineDeadError(f"rank {rank} {how}, perhaps out of memory")
    first = min(failures, key=lambda failure: failure.time)
    if first.start_error is not None:
        return first.start_error
    return EngineDeadError(f"rank {first.rank} has failed:\n{first.text}")
