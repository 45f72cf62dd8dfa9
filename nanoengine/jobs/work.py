"""The main loop: tasks to engines, outputs to records.

    tasks ─▶ rows() ─▶ stream of an engine ─▶ outputs ─▶ finish: writes one record per task
      ▲                                          │
      └──── the next turn of a conversation ◀────┘

An engine is a `stream`: it pulls rows, and yields one output per row, with the index of the row.
Several streams may share one `Work`, one thread per stream: each row goes to one stream, and one
record is written at a time.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from nanoengine.errors import EngineDeadError, EngineHungError, NanoEngineError
from nanoengine.jobs.rows import Task
from nanoengine.jobs.source import RowError
from nanoengine.outputs import RequestOutput
from nanoengine.settings.checks import counted
from nanoengine.text.prompt_forms import PAUSE, Pause, Row

Stream = Callable[[Iterator[Row | Pause]], Generator[RequestOutput, None, None]]
Result = RequestOutput | RowError
"""The result of a row: its last output, or an error."""


MAX_CRASHES = 3
"""A row is poison if the process crashed this often while the row ran."""

SUSPECT_GROUPS = {2: 1, 1: 16}
"""Crashes of a row -> number of such rows that run at once. After two crashes a row runs alone, so
that a third identifies it. Rows with two crashes run first."""

IDLE_S = 0.02
"""Interval of polling for tasks while there are none and nothing runs [s]."""


class TooManyErrorsError(NanoEngineError):
    """More rows failed than the job allows."""


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Excludes all existing objects from garbage collection while rows run.

    Why: waiting rows live so long that the collector walks them, and all objects of the loaded
    libraries, seven times in 20,000 rows. This takes 43 of 195 us per row (Zen 5).
    """
    if gc.get_freeze_count():  # frozen by the caller, or by another stream's thread
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class Counts:
    """Counters of the rows that ran in this process.

    Attributes:
        empty_answers, cut_answers: without text, and ended at max_tokens.
        reasons: error code -> number of rows, and a description of the first one.
        steps, block_waits: steps of the engine, and the ones in which rows waited for blocks.
    """

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    empty_answers: int = 0
    cut_answers: int = 0
    steps: int = 0
    block_waits: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)


class Work:
    """The rows of a job that this process runs.

    Args:
        tasks: pulled one by one when the engine accepts a row; PAUSE: no task is ready yet.
        suspects: tasks that ran while a process crashed, with their number of crashes.
        finish: writes the record of a task from its outputs of all turns, or its error.
        on_start: called with each task before it runs.
        max_errors: maximum number of failed rows; None: no limit.

    Attributes:
        is_stopping: any thread may set it; then no more rows start, and running ones continue.
    """

    def __init__(
        self,
        tasks: Iterable[Task | Pause],
        finish: Callable[[Task, Result], None],
        *,
        suspects: Iterable[tuple[Task, int]] = (),
        on_start: Callable[[Task], None] = lambda task: None,
        max_errors: int | None = None,
    ) -> None:
        self.counts = Counts()
        self._tasks = iter(tasks)
        self._finish = finish
        self._on_start = on_start
        self._max_errors = max_errors
        self._lock = threading.RLock()
        self.is_stopping = False
        self._next_turns: deque[Task | Pause] = deque()  # conversations with further turns
        self._crashes: Counter[int] = Counter()
        self._suspects: dict[int, list[Task]] = {crashes: [] for crashes in SUSPECT_GROUPS}
        for task, crashes in suspects:
            self.suspect(task, crashes)

    def run(self, stream: Stream) -> None:
        """Runs rows until none is left.

        Raises:
            TooManyErrorsError: more than `max_errors` rows failed. `finish` may raise as well.
            EngineDeadError: the engine died; its rows are queued again, for another engine.
            Exception: the engine raised it while no row was running.
        """
        with gc_frozen():
            for _ in self.steps(stream):
                pass

    def steps(self, stream: Stream) -> Iterator[None]:
        """Like `run`, but yields after each output."""
        while not self.is_stopping and (group := self._next_group()):
            yield from self._run_group(stream, group)

    def _next_group(self) -> Iterator[Task | Pause] | None:
        """Rows that may run together: a group of suspects, or all other rows; None: no row left."""
        with self._lock:
            for crashes, size in SUSPECT_GROUPS.items():
                if group := self._suspects[crashes][:size]:
                    del self._suspects[crashes][:size]
                    return iter(group)
            first = self._next_task()
            if first is None:
                return None
            self._next_turns.appendleft(first)
            return iter(self._next_task, None)

    def _next_task(self) -> Task | Pause | None:
        """The next turn of a conversation, otherwise a new row; None: none is left."""
        with self._lock:
            return self._next_turns.popleft() if self._next_turns else next(self._tasks, None)

    def _run_group(self, stream: Stream, tasks: Iterator[Task | Pause]) -> Iterator[None]:
        running: dict[int, Task] = {}

        def rows() -> Iterator[Row | Pause]:
            index = 0
            for task in tasks:
                if self.is_stopping:
                    return
                if task is PAUSE:
                    if running:
                        yield PAUSE
                    else:  # Why not PAUSE: it would end a stream that runs nothing.
                        time.sleep(IDLE_S)
                    continue
                if task.error is not None:
                    self._fail(task, task.error)
                    continue
                self._on_start(task)
                if task.parts:
                    task.outputs.clear()  # Why: an engine that died may have left some.
                key = f"{task.key}/{len(task.outputs)}" if task.outputs else task.key
                for prompt in task.parts or (task.prompt,):
                    if task.error is None:
                        running[index] = task
                        index += 1
                        yield Row(prompt, sampling_params=task.params, key=key)

        with contextlib.closing(stream(rows())) as outputs:
            while True:
                try:
                    output = next(outputs, None)
                except EngineDeadError as error:
                    # Why two: each hang costs the whole --replica-timeout, so rows now run alone.
                    count = MAX_CRASHES - 1 if isinstance(error, EngineHungError) else 1
                    if not self.is_stopping:
                        self._add_crash(running.values(), str(error), count)
                    raise
                except (NanoEngineError, OSError):
                    raise
                except Exception as error:
                    if not running:
                        raise
                    reason = f"the step failed: {type(error).__name__}: {error}"
                    self._add_crash(running.values(), reason)
                    return
                if output is None:
                    return
                self._handle(running.pop(output.index), output)
                yield

    def _add_crash(self, tasks: Iterable[Task], reason: str, min_count: int = 1) -> None:
        """Counts one more crash for each task; the count becomes at least `min_count`."""
        for task in {task.row: task for task in tasks if task.error is None}.values():
            self.suspect(task, max(min_count, self._crashes[task.row] + 1), reason)

    def suspect(self, task: Task, crashes: int, reason: str = "the process crashed") -> None:
        """Queues a row with this many crashes to run apart from others, or fails it as poison."""
        with self._lock:
            self._crashes[task.row] = crashes
            if crashes < MAX_CRASHES:
                self._suspects[crashes].append(task)
            else:
                self._fail(task, RowError("poison", f"{reason} each time that this row ran"))

    def _handle(self, task: Task, output: RequestOutput) -> None:
        """Counts an output, and finishes, continues or fails its task."""
        with self._lock:
            counts = self.counts
            counts.prompt_tokens += len(output.prompt_token_ids)
            counts.cached_tokens += output.num_cached_tokens
            counts.output_tokens += sum(len(c.token_ids) for c in output.outputs)
            if task.error is not None:
                return  # Why: another part of the row has failed.
            if output.error is not None:
                code = "invalid_request" if output.metrics.e2e_s is None else "request_failed"
                task.error = RowError(code, output.error)
                self._fail(task, task.error)
            elif task.parts and len(task.outputs) + 1 < len(task.parts):
                task.outputs.append(output)
            elif task.turns:
                self._queue_next_turn(task, output)
            else:
                self._finish(task, output)
                counts.answered += 1
                for completion in output.outputs if task.params.max_tokens != 0 else ():
                    counts.empty_answers += task.params.detokenize and not completion.text.strip()
                    counts.cut_answers += completion.finish_reason == "length"

    def _queue_next_turn(self, task: Task, output: RequestOutput) -> None:
        """Queues the next turn: the conversation, the answer, and the user's next message."""
        parser = task.output_parser
        parsed = output if parser is None else parser.parse(output, task.key)
        answer = {"role": "assistant", "content": parsed.outputs[0].text}
        user = {"role": "user", "content": task.turns.pop(0)}
        messages = [*task.prompt["messages"], answer, user]
        task.prompt = {**task.prompt, "messages": messages}
        task.outputs.append(output)
        self._next_turns.append(task)

    def _fail(self, task: Task, error: RowError) -> None:
        with self._lock:
            self._finish(task, error)
            self.counts.failed += 1
            message = f"{task.input.name}:{task.number}: {error}"
            count, first = self.counts.reasons.get(error.code, (0, message))
            self.counts.reasons[error.code] = count + 1, first
            if self._max_errors is not None and self.counts.failed > self._max_errors:
                failed = f"{counted(self.counts.failed, 'row')} failed"
                limit = f"more than --max-errors {self._max_errors}"
                raise TooManyErrorsError(f"{failed}, {limit}; the last: {message}")
