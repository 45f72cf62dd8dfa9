"""Replicas: several engines for one `Work`, each in its own process.

    Work ─┬─ thread ─ Replica ── rows ──> process: LLM (replica.py)
          │                   <─ outputs ─┘
          └─ thread ─ Replica ...

Each row is sent to one replica, and only this process writes results. It loads no model.

If a replica crashes, it is restarted, and its rows go back to `Work`, which runs them separately
from others. A replica that sends nothing for long is killed. If it can't be restarted, the others
continue without it. No replica outlives this process (`worker.py`).

Called by `cli/batch.py`.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from nanoengine.core.engine_stats import EngineInfo, EngineStats
from nanoengine.core.interfaces import Observer
from nanoengine.errors import ConfigError, EngineDeadError, EngineHungError, NanoEngineError
from nanoengine.jobs.work import MAX_CRASHES, Work
from nanoengine.llm import LOOK_AHEAD
from nanoengine.outputs import RequestOutput
from nanoengine.ranks.worker import Worker
from nanoengine.settings.config import EngineConfig
from nanoengine.text.prompt_forms import PAUSE, Pause, Row
from nanoengine.text.tokenizer import Tokenizer

REPLICA = "nanoengine.parallel.replica"

EXTRA_ROWS = 32
"""Rows that a replica has in addition to those in its engine, to replace finished ones."""

REPLICA_TIMEOUT_S = 1800.0
"""A replica with rows that sends nothing for this time [s] is killed. It sends its counters after
each step, and a long step of a large model takes minutes on a CPU."""

NUM_CHECKS = 6
"""Number of consecutive checks without a message before a replica is killed; the first warns."""

Launch = Callable[[], Worker]
"""Starts the process of a replica."""


@dataclass(eq=False, slots=True, kw_only=True)
class Replica:
    """One engine, in its current process.

    Attributes:
        launch: starts a process.
        options: the options of its LLM.
        on_stats: called after `stats` has changed.
        is_lost: it can't be restarted.
        past: the last counters of its crashed processes.
    """

    number: int
    launch: Launch
    options: dict[str, Any]
    on_stats: Callable[[], None]
    is_lost: bool = False
    pid: int = 0
    stats: EngineStats | None = None
    past: list[EngineStats] = field(default_factory=list)
    _process: Worker | None = None
    _is_closed: bool = False
    _why_killed: str = ""
    _wait: object = None  # identifies the current send or receive, while rows run
    _last_wait: object = None  # `_wait` at the last check
    _num_silent: int = 0  # consecutive checks with the same `_wait`
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Starts the process; `wait_started` waits for its model."""
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the replicas are closed")
            self._process, self._why_killed = self.launch(), ""

    def wait_started(self) -> EngineInfo:
        """Waits until the model is loaded.

        Raises:
            NanoEngineError: the model can't be loaded.
        """
        assert self._process is not None
        try:
            self._process.pipe.send(self.options)
            found = self._process.pipe.recv()
        except (OSError, EOFError):
            self._raise_died("while it started")
        if isinstance(found, NanoEngineError):
            raise found
        info, self.stats, self.pid = found
        return info

    def serve(self, work: Work, window: int) -> None:
        """Runs rows until none is left or the replica is lost. Restarts it if it crashes, even
        during a restart.

        Args:
            window: maximum number of rows that it has at a time.
        """
        num_starts = 0  # since the last successful start
        while True:
            try:
                if num_starts:
                    self.start()
                    self.wait_started()
                    num_starts = 0
                return work.run(lambda rows: self.stream(rows, window))
            except NanoEngineError as error:
                has_died = isinstance(error, EngineDeadError)
                if not (has_died or num_starts):  # an error of the job
                    raise
                if work.is_stopping:
                    return
                if not has_died or num_starts == MAX_CRASHES:
                    warnings.warn(f"replica {self.number} is not restarted: {error}", stacklevel=1)
                    self.is_lost = True
                    return
                warnings.warn(f"{error}; restarting it, and running its rows again", stacklevel=1)
                num_starts += 1

    def stream(
        self, rows: Iterator[Row | Pause], window: int
    ) -> Generator[RequestOutput, None, None]:
        """As `LLM.stream`: yields one output per row, with the row's index in `rows`.

        Raises:
            EngineDeadError: the process has crashed.
            RuntimeError: the stream failed in the process, which can run another one.
        """
        num_left, has_more = 0, True
        while True:
            while has_more and num_left < window:
                row = next(rows, None)
                if row is PAUSE:  # pulls again when the next counters arrive
                    break
                has_more = row is not None
                num_left += has_more
                self._call_watched(self._process.pipe.send, row)
            if not num_left:
                return
            message = self._call_watched(self._process.pipe.recv)
            if isinstance(message, RequestOutput):
                num_left -= 1
                yield message
            elif isinstance(message, EngineStats):
                self.stats = message
                self.on_stats()
            else:
                if has_more:
                    self._call_watched(self._process.pipe.send, None)
                raise message

    def _call_watched(self, call: Callable[..., Any], *message: object) -> Any:
        """Sends or receives; if the process hangs, `check_silence` ends the call."""
        self._wait = object()
        try:
            return call(*message)
        except (EOFError, OSError):
            self._raise_died("while rows ran")
        finally:
            self._wait = None

    def check_silence(self, timeout_s: float) -> None:
        """Kills the process if `_call_watched` has waited during `NUM_CHECKS` checks, which
        take `timeout_s` seconds in total. Called from one thread.

        Why no clock: it would continue while all processes of a job are stopped.
        """
        wait, before = self._wait, self._last_wait
        self._last_wait = wait
        self._num_silent = self._num_silent + 1 if wait is not None and wait is before else 0
        if self._num_silent == 1:
            warnings.warn(
                f"replica {self.number} (pid {self.pid}) has sent nothing for"
                f" {timeout_s / NUM_CHECKS:g} s: it is slow, or it hangs; after {timeout_s:g} s"
                " it is killed, and its rows run again",
                stacklevel=1,
            )
        with self._lock:  # The process can't change meanwhile.
            if self._num_silent == NUM_CHECKS and self._wait is wait and self._process is not None:
                self._why_killed = f"was killed: it had sent nothing for {timeout_s:g} s"
                self._process.kill()

    def _raise_died(self, when: str) -> NoReturn:
        if self.stats is not None:
            idle = {"num_running": 0, "num_waiting": 0, "active_blocks": 0}
            self.past.append(replace(self.stats, **idle, empty_blocks=0, cached_blocks=0))
            self.stats = None
        assert self._process is not None
        how = self._process.describe_exit()
        error = EngineHungError if self._why_killed else EngineDeadError
        raise error(f"replica {self.number} (pid {self.pid}) {self._why_killed or how} {when}")

    def end(self) -> None:
        """Ends the process permanently."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()


class Replicas(AbstractContextManager["Replicas"]):
    """Engines with the same options; a context manager, like an LLM.

    Args:
        options: the options of each LLM.
        launches: functions that start the processes.

    Attributes:
        timeout_s: a replica with rows is killed if it sends nothing for this time.
        info: of the first replica.
        observers: called without a plan when a replica reports counters.

    Raises:
        ConfigError: the options contain a trace.
        NanoEngineError: a model can't be loaded.
    """

    def __init__(self, options: dict[str, Any], launches: Sequence[Launch]) -> None:
        self.observers: list[Observer] = []
        self._lock = threading.Lock()
        self.config, self.timeout_s = EngineConfig.from_kwargs(**options), REPLICA_TIMEOUT_S
        if self.config.trace is not None:
            raise ConfigError("a trace can record only one engine: remove trace, or replicas")
        self._replicas = [
            Replica(number=i, launch=launch, options=options, on_stats=self._on_stats)
            for i, launch in enumerate(launches)
        ]
        try:
            for replica in self._replicas:
                replica.start()
            self.info, *_ = [replica.wait_started() for replica in self._replicas]
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes immediately."""
        for replica in self._replicas:
            replica.end()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this process; each engine has its own."""
        return Tokenizer.of(self.config)

    def stats(self) -> EngineStats:
        """The sums of the counters of all engines."""
        parts = [stats for replica in self._replicas for stats in (*replica.past, replica.stats)]
        return _sum_stats([stats for stats in parts if stats is not None])

    def run(self, work: Work, num_rows: int | None = None) -> None:
        """Runs the rows of a job.

        Args:
            num_rows: their number, if known; few rows are distributed evenly.

        Raises:
            EngineDeadError: all replicas are lost.
            Exception: see `Work.run`; running rows are dropped.
        """
        window = self.config.max_num_seqs + LOOK_AHEAD + EXTRA_ROWS
        while live := [replica for replica in self._replicas if not replica.is_lost]:
            share = window if num_rows is None else -(-num_rows // len(live))
            self._run_round(work, live, max(1, min(window, share)))
            if not any(replica.is_lost for replica in live):
                return
            # Why again: the others may have ended before the rows of the lost one came back.
        raise EngineDeadError("all replicas are lost; finished rows are kept")

    def _run_round(self, work: Work, live: Sequence[Replica], window: int) -> None:
        with ThreadPoolExecutor(len(live)) as threads:
            running = {threads.submit(replica.serve, work, window) for replica in live}
            try:
                while running:
                    ended, running = wait(running, self.timeout_s / NUM_CHECKS, FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
                    for replica in live:
                        replica.check_silence(self.timeout_s)
            except BaseException:
                work.is_stopping = True  # Why first: processes that end now have not crashed.
                self.close()
                raise

    def _on_stats(self) -> None:
        with self._lock:
            for observer in self.observers:
                observer.on_step(None, None, None)  # type: ignore[arg-type]


def _sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of the counters of several engines; other values are from the first one."""
    counters = [f.name for f in fields(EngineStats) if isinstance(getattr(stats[0], f.name), int)]
    misses: Counter[str] = Counter()
    for part in stats:
        misses.update(part.cache_misses)
    sums = {name: sum(getattr(part, name) for part in stats) for name in counters}
    return replace(stats[0], **sums, cache_misses=dict(misses))


# --- on one machine -------------------------------------------------------------------------------


def local_replicas(options: dict[str, Any], count: int, threads: int | None = None) -> Replicas:
    """Replicas on this machine, each with its own GPUs or cores.

    Args:
        threads: cores per replica, on a CPU; None: all cores are distributed evenly.

    Raises:
        ConfigError: there are not enough GPUs or cores.
    """
    config = EngineConfig.from_kwargs(**options)
    if config.device.startswith("cuda:"):
        raise ConfigError(f"replicas need one GPU each: set --device cuda, got {config.device!r}")
    gpus = _gpus(config)
    if not gpus:
        return Replicas(options, _on_cores(count, threads))
    if threads is not None:
        raise ConfigError(
            "--threads-per-replica is only for replicas on a CPU: remove it, or set --device cpu"
        )
    return Replicas(options, _on_gpus(gpus, count, config.tensor_parallel_size))


def _gpus(config: EngineConfig) -> list[str]:
    """The GPUs that this process may use, with their names in CUDA_VISIBLE_DEVICES."""
    if config.device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()  # does not initialize CUDA
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if visible is None else visible.split(",")[:count]


def _on_gpus(gpus: Sequence[str], count: int, ranks: int) -> list[Launch]:
    needed = count * ranks
    if needed > len(gpus):
        raise ConfigError(f"{count} replicas need {needed} GPUs, and this machine has {len(gpus)}")
    shares = [",".join(gpus[i * ranks : (i + 1) * ranks]) for i in range(count)]
    variables = [{"CUDA_VISIBLE_DEVICES": share} for share in shares]
    return [functools.partial(Worker, REPLICA, environment=env) for env in variables]


def _on_cores(count: int, threads: int | None) -> list[Launch]:
    """Assigns separate cores to replicas, if there are enough."""
    if not hasattr(os, "sched_getaffinity"):
        each = threads or max(1, (os.cpu_count() or 1) // count)
        variables = {"OMP_NUM_THREADS": str(each)}
        return [functools.partial(Worker, REPLICA, environment=variables)] * count
    cores = sorted(os.sched_getaffinity(0))
    if threads is not None and not 1 <= threads * count <= len(cores):
        raise ConfigError(
            f"{count} replicas of {threads} threads need {threads * count} cores, and this process"
            f" may use {len(cores)}"
        )
    each = threads or max(1, len(cores) // count)
    starts = [i * each % len(cores) for i in range(count)]
    variables = {"OMP_NUM_THREADS": str(each)}
    start_worker = functools.partial(Worker, REPLICA, environment=variables)
    return [functools.partial(start_worker, *cores[first : first + each]) for first in starts]
