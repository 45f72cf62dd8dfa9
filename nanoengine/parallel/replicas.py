"""Replicas: several engines behind one `Work`, a process each.

    Work ─┬─ thread ─ Replica ── rows ──> process: LLM (replica.py)
          │                   <─ outputs ─┘
          └─ thread ─ Replica ...

Rows are given out once, and what comes back is written by this process alone. It loads no model.

A replica that dies gives its rows back to `Work`, which runs them apart from others, and is started
again. One that can't be started again is given up; the others go on. No replica outlives this
process: each has a pipe that closes with it.

Called by `cli/batch.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, Self

from nanoengine.core.doors import Observer
from nanoengine.core.engine_stats import EngineInfo, EngineStats
from nanoengine.errors import ConfigError, EngineDeadError, NanoEngineError
from nanoengine.jobs.work import Work
from nanoengine.llm import LOOK_AHEAD
from nanoengine.outputs import RequestOutput
from nanoengine.parallel.replica import Failed, Refused, Started
from nanoengine.settings.config import EngineConfig
from nanoengine.text.prompt_forms import PAUSE, Pause, Row

PROGRAM = (
    "import sys; pipe, cores, sys.path[:] = int(sys.argv[1]), sys.argv[2], sys.argv[3:];"
    " from multiprocessing.connection import Connection;"
    " from nanoengine.parallel.replica import main;"
    " main(Connection(pipe), [int(core) for core in cores.split()])"
)
"""What a replica runs. Why not multiprocessing's spawn: it would run the caller's script again."""

AHEAD = 32
"""Rows that a replica has beyond those that its engine pulls: they fill what a step has freed."""

SILENT_S = 300.0
"""A replica that has rows and has said nothing for so long is named, and left alone: from outside a
step of minutes and one that never ends look alike."""

ENDED_S = 5.0
"""Time for a process whose pipe has closed to be gone."""


class Process(Protocol):
    """Where a replica runs; `parallel/ray_cluster.py` has another one."""

    def connect(self) -> Connection:
        """Waits for the process; the pipe to it."""

    def kill(self) -> None:
        """Ends it at once, from any thread; it has nothing to put in order."""

    def how_ended(self) -> str:
        """Waits until it is gone, which its pipe says that it is about to be."""


class LocalProcess:
    """A process on this machine.

    Args:
        cores: those to run on; none: any.
        environment: variables that differ from this process's.
    """

    def __init__(self, cores: Sequence[int], environment: Mapping[str, str]) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            fixed = [str(theirs.fileno()), " ".join(map(str, cores))]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *fixed, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Why: records may go to this process's.
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                start_new_session=True,  # Why: a Ctrl-C at the terminal is for the parent.
            )

    def connect(self) -> Connection:
        """The pipe, which is there."""
        return self._pipe

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def how_ended(self) -> str:
        """Waits until it is gone."""
        self._pipe.close()
        try:
            code = self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


Launch = Callable[[], Process]


@dataclass(eq=False, slots=True, kw_only=True)
class Replica:
    """One engine, in whatever process it is at present.

    Attributes:
        launch: starts a process.
        options: of its LLM.
        on_stats: called when `stats` is new.
        is_lost: it can't be started any more.
    """

    number: int
    launch: Launch
    options: dict[str, Any]
    on_stats: Callable[[], None]
    is_lost: bool = False
    pid: int = 0
    info: EngineInfo | None = None
    stats: EngineStats | None = None
    past: list[EngineStats] = field(default_factory=list)
    _process: Process | None = None
    _pipe: Connection | None = None
    _is_ended: bool = False
    _waits_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Starts the process; `wait_started` waits for its model."""
        with self._lock:
            if self._is_ended:
                raise EngineDeadError("the replicas are closed")
            self._process, self._pipe = self.launch(), None

    def wait_started(self) -> EngineInfo:
        """Waits until the model is loaded.

        Raises:
            NanoEngineError: the model can't be loaded.
        """
        assert self._process is not None
        try:
            self._pipe = self._process.connect()
            self._pipe.send(self.options)
        except (OSError, EOFError):
            self._died("while it started")
        found = self._receive("while it started")
        if isinstance(found, Refused):
            raise found.error
        assert isinstance(found, Started)
        self.info, self.stats, self.pid = found.info, found.stats, found.pid
        return found.info

    def serve(self, work: Work, window: int) -> None:
        """Answers rows until none is left or the replica is lost, starting it again when it dies.

        Args:
            window: most rows that it has at once.
        """
        while True:
            try:
                return work.run(lambda rows: self.stream(rows, window))
            except EngineDeadError as error:
                if work.is_stopping:
                    return
                warnings.warn(f"{error}; its rows go back, and it starts again", stacklevel=1)
            try:
                self.start()
                self.wait_started()
            except NanoEngineError as error:
                if not work.is_stopping:
                    warnings.warn(f"replica {self.number} is given up: {error}", stacklevel=1)
                    self.is_lost = True
                return

    def stream(
        self, rows: Iterator[Row | Pause], window: int
    ) -> Generator[RequestOutput, None, None]:
        """As `LLM.stream`: yields an output for each row, with the index of its pull.

        Raises:
            EngineDeadError: the process has died.
            MissingDependencyError: a row needs a package that the process lacks.
            RuntimeError: the stream failed in the process; it can be used on.
        """
        num_left, has_more = 0, True
        while True:
            while has_more and num_left < window:
                row = next(rows, None)
                if row is PAUSE:  # Its counters, if nothing else, are soon told; then rows again.
                    break
                has_more = row is not None
                num_left += has_more
                self._send(row)
            if not num_left:
                return
            self._waits_since = time.monotonic()
            try:
                found = self._receive("while rows ran")
            finally:
                self._waits_since = None
            if isinstance(found, RequestOutput):
                num_left -= 1
                yield found
            elif isinstance(found, EngineStats):
                self.stats = found
                self.on_stats()
            elif isinstance(found, Refused):
                raise found.error
            else:
                assert isinstance(found, Failed)
                if has_more:
                    self._send(None)
                raise RuntimeError(found.told)

    def _send(self, row: object) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send(row)
        except OSError:
            self._died("while rows ran")

    def _receive(self, when: str) -> Any:
        assert self._pipe is not None
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._died(when)

    def warn_of_silence(self) -> None:
        """Tells once that the replica has said nothing for long; from any thread."""
        since = self._waits_since
        if since is not None and time.monotonic() - since > SILENT_S:
            self._waits_since = None
            warnings.warn(
                f"replica {self.number} (pid {self.pid}) has said nothing for {SILENT_S:g} s: it"
                f" computes, or it hangs; `kill -9 {self.pid}` on its machine starts it again, and"
                " has its rows run",
                stacklevel=1,
            )

    def _died(self, when: str) -> NoReturn:
        if self.stats is not None:
            idle = {"num_running": 0, "num_waiting": 0, "active_blocks": 0}
            self.past.append(replace(self.stats, **idle, empty_blocks=0, cached_blocks=0))
            self.stats = None
        assert self._process is not None
        how = self._process.how_ended()
        raise EngineDeadError(f"replica {self.number} (pid {self.pid}) {how} {when}")

    def end(self) -> None:
        """Ends the process for good."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                self._process.kill()


class Replicas:
    """Engines with the same options; a context manager, as an LLM is.

    Args:
        options: of each LLM.
        launches: how each is started.

    Attributes:
        info: of the first one.
        observers: are told whenever there is news of the engines, without a plan.

    Raises:
        ConfigError: the options ask for a trace.
        NanoEngineError: a model can't be loaded.
    """

    def __init__(self, options: dict[str, Any], launches: Sequence[Launch]) -> None:
        self.observers: list[Observer] = []
        self._lock = threading.Lock()
        config = EngineConfig.from_kwargs(**options)
        if config.trace is not None:
            raise ConfigError("a trace is of one engine: leave out trace, or replicas")
        self._max_num_seqs = config.max_num_seqs
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes, at once."""
        for replica in self._replicas:
            replica.end()

    def stats(self) -> EngineStats:
        """Counters of all engines together."""
        found = [stats for replica in self._replicas for stats in (*replica.past, replica.stats)]
        return _added([stats for stats in found if stats is not None])

    def answer(self, work: Work, num_rows: int | None = None) -> None:
        """Answers the rows of a job.

        Args:
            num_rows: how many there are, if that is known: few are shared evenly.

        Raises:
            EngineDeadError: no replica is left.
            Exception: what `Work.run` raises; rows that ran are dropped.
        """
        window = self._max_num_seqs + LOOK_AHEAD + AHEAD
        while live := [replica for replica in self._replicas if not replica.is_lost]:
            share = window if num_rows is None else -(-num_rows // len(live))
            self._answer(work, live, max(1, min(window, share)))
            if not any(replica.is_lost for replica in live):
                return
            # Why again: the others may have ended before the rows of the lost one came back.
        raise EngineDeadError("no replica is left; what is finished is kept")

    def _answer(self, work: Work, live: Sequence[Replica], window: int) -> None:
        with ThreadPoolExecutor(len(live)) as threads:
            serving = [threads.submit(replica.serve, work, window) for replica in live]
            try:
                left = set(serving)
                while left:
                    ended, left = wait(left, SILENT_S / 10, FIRST_EXCEPTION)
                    for one in ended:
                        one.result()
                    for replica in live:
                        replica.warn_of_silence()
            except BaseException:
                work.stop()  # Why first: nothing that ends now is a death.
                self.close()
                raise

    def _on_stats(self) -> None:
        with self._lock:
            for observer in self.observers:
                observer.on_step(None, None, None)  # type: ignore[arg-type]


def _added(stats: Sequence[EngineStats]) -> EngineStats:
    """The counters of several engines as of one; what can't be added is the first one's."""
    names = [
        one.name for one in fields(EngineStats) if isinstance(getattr(stats[0], one.name), int)
    ]
    misses: Counter[str] = Counter()
    for one in stats:
        misses.update(one.cache_misses)
    sums = {name: sum(getattr(one, name) for one in stats) for name in names}
    return replace(stats[0], **sums, cache_misses=dict(misses))


# --- on one machine -------------------------------------------------------------------------------


def local_replicas(options: dict[str, Any], count: int, threads: int | None = None) -> Replicas:
    """Replicas on this machine: a GPU each, or cores.

    Args:
        threads: cores of each; None: what there is, shared evenly. For replicas on a CPU.

    Raises:
        ConfigError: there are not so many GPUs or cores.
    """
    config = EngineConfig.from_kwargs(**options)
    if config.device.startswith("cuda:"):
        raise ConfigError(f"replicas have a GPU each: say --device cuda, got {config.device!r}")
    gpus = _gpus(config)
    if gpus and threads is not None:
        raise ConfigError("--threads is for replicas on a CPU, and these have a GPU each")
    if gpus:
        return Replicas(options, _on_gpus(gpus, count, config.tensor_parallel_size))
    return Replicas(options, _on_cores(count, threads))


def _gpus(config: EngineConfig) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if config.device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()  # It asks the driver, and starts nothing.
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else named.split(",")[:count]


def _on_gpus(gpus: Sequence[str], count: int, ranks: int) -> list[Launch]:
    if count * ranks > len(gpus):
        each = "one each" if ranks == 1 else f"{ranks} each"
        raise ConfigError(f"{count} replicas need a GPU, {each}, and this machine has {len(gpus)}")
    shares = [",".join(gpus[i * ranks : (i + 1) * ranks]) for i in range(count)]
    return [_launch((), {"CUDA_VISIBLE_DEVICES": share}) for share in shares]


def _on_cores(count: int, threads: int | None) -> list[Launch]:
    """Cores that no other replica has, as long as there are as many."""
    if not hasattr(os, "sched_getaffinity"):
        each = threads or max(1, (os.cpu_count() or 1) // count)
        return [_launch((), {"OMP_NUM_THREADS": str(each)})] * count
    cores = sorted(os.sched_getaffinity(0))
    if threads is not None and not 1 <= threads * count <= len(cores):
        raise ConfigError(
            f"{count} replicas of {threads} threads need {threads * count} cores, and this process"
            f" may use {len(cores)}"
        )
    each = threads or max(1, len(cores) // count)
    starts = [i * each % len(cores) for i in range(count)]
    variables = {"OMP_NUM_THREADS": str(each)}
    return [_launch(cores[start : start + each], variables) for start in starts]


def _launch(cores: Sequence[int], environment: Mapping[str, str]) -> Launch:
    return lambda: LocalProcess(cores, environment)
