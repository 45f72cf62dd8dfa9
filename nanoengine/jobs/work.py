"""The main loop: tasks to engines, outputs to records.

    tasks ─ order ─ rows() ─▶ stream of an engine ─▶ outputs ─ take() ─ finish: one record per task
      ▲                                                          │
      └────────────────── the next turn of a conversation ◀──────┘

An engine is a `stream`: it pulls rows, and yields one output per row, with the index of the pull.
Several streams may share one `Work`, one thread per stream: each row is given out once, and one
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
from nanoengine.text.prompt_forms import PAUSE, Pause, Row

Stream = Callable[[Iterator[Row | Pause]], Generator[RequestOutput, None, None]]
Result = RequestOutput | RowError
"""The result of a row: its last output, or an error."""


MOST_DEATHS = 3
"""A row is poison if this many processes have died while it ran."""

GROUPS = {2: 1, 1: 16}
"""Deaths per row -> how many such rows run at once, so that the third death identifies one row.
Rows with the most deaths run first."""

IDLE_S = 0.02
"""Interval of polling for tasks while there are none and nothing runs [s]."""


class TooManyErrorsError(NanoEngineError):
    """More rows failed than the job allows."""


@contextlib.contextmanager
def young_alone() -> Iterator[None]:
    """Excludes all existing objects from garbage collection while rows run.

    Why: waiting rows live long enough for the collector to walk them, and all objects of the
    loaded libraries, seven times in 20,000 rows: 43 of 195 us per row (Zen 5).
    """
    if gc.get_freeze_count():  # by the caller, or by another thread of ours
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
        empty, cut: answers without text, and answers that ended at max_tokens.
        reasons: error code -> number of rows, and a description of the first one.
    """

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    empty: int = 0
    cut: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)


class Work:
    """The rows of a job that this process runs.

    Args:
        tasks: the tasks in order; pulled when the engine can take one. PAUSE: none at present.
        suspects: tasks that ran while a process died, with their number of deaths.
        finish: writes the record of a task: its outputs, of all turns, or its error.
        note: called with each task before it runs.
        max_errors: how many rows may fail.

    Attributes:
        is_stopping: any thread may set it, to give out no more rows; running ones continue.
    """

    def __init__(
        self,
        tasks: Iterable[Task | Pause],
        finish: Callable[[Task, Result], None],
        *,
        suspects: Iterable[tuple[Task, int]] = (),
        note: Callable[[Task], None] = lambda task: None,
        max_errors: int | None = None,
    ) -> None:
        self.counts = Counts()
        self._tasks = iter(tasks)
        self._finish = finish
        self._note = note
        self._max_errors = max_errors
        self._lock = threading.RLock()
        self.is_stopping = False
        self._turns: deque[Task | Pause] = deque()  # conversations with further turns
        self._deaths: Counter[int] = Counter()
        self._suspects: dict[int, list[Task]] = {deaths: [] for deaths in GROUPS}
        for task, deaths in suspects:
            self.suspect(task, deaths)

    def run(self, stream: Stream) -> None:
        """Answers rows until none is left.

        Raises:
            TooManyErrorsError: more than `max_errors` rows failed. `finish` may raise as well.
            EngineDeadError: the engine died; its rows are back in this object, for another engine.
            Exception: the engine raised it while no row was running.
        """
        with young_alone():
            for _ in self.steps(stream):
                pass

    def steps(self, stream: Stream) -> Iterator[None]:
        """Does the same as `run`, and yields after each output."""
        while not self.is_stopping and (group := self._next_group()):
            yield from self._pump(stream, group)

    def _next_group(self) -> Iterator[Task | Pause] | None:
        """Rows that may run together: suspects run apart from all others."""
        with self._lock:
            for deaths, most in GROUPS.items():
                if group := self._suspects[deaths][:most]:
                    del self._suspects[deaths][:most]
                    return iter(group)
            first = next(self._rest(), None)
            if first is None:
                return None
            self._turns.appendleft(first)
            return self._rest()

    def _rest(self) -> Iterator[Task | Pause]:
        """Further turns of conversations, then new rows."""
        while True:
            with self._lock:
                task = self._turns.popleft() if self._turns else next(self._tasks, None)
            if task is None:
                return
            yield task

    def _pump(self, stream: Stream, tasks: Iterator[Task | Pause]) -> Iterator[None]:
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
                self._note(task)
                if task.parts:
                    task.outputs.clear()  # Why: some may be left from before a death.
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
                    # Why two: a hang takes a replica's whole timeout; the next must name the row.
                    least = MOST_DEATHS - 1 if isinstance(error, EngineHungError) else 1
                    if not self.is_stopping:
                        self._suspect_all(running.values(), str(error), least)
                    raise
                except (NanoEngineError, OSError):
                    raise
                except Exception as error:
                    if not running:
                        raise
                    told = f"the step failed: {type(error).__name__}: {error}"
                    self._suspect_all(running.values(), told)
                    return
                if output is None:
                    return
                self._take(running.pop(output.index), output)
                yield

    def _suspect_all(self, tasks: Iterable[Task], why: str, least: int = 1) -> None:
        """Counts one more death for each task, or raises its count to `least`."""
        for task in {task.row: task for task in tasks if task.error is None}.values():
            self.suspect(task, max(least, self._deaths[task.row] + 1), why)

    def suspect(self, task: Task, deaths: int, why: str = "the process died") -> None:
        """Schedules a row with this many deaths to run apart from others, or fails it as poison."""
        with self._lock:
            self._deaths[task.row] = deaths
            if deaths < MOST_DEATHS:
                self._suspects[deaths].append(task)
            else:
                self._fail(task, RowError("poison", f"{why}, as each time that this row ran"))

    def _take(self, task: Task, output: RequestOutput) -> None:
        with self._lock:
            counts = self.counts
            counts.prompt_tokens += len(output.prompt_token_ids)
            counts.cached_tokens += output.num_cached_tokens
            counts.output_tokens += sum(len(one.token_ids) for one in output.outputs)
            if task.error is not None:
                return  # another part of it has failed
            if output.error is not None:
                code = "invalid_request" if output.metrics.e2e_s is None else "request_failed"
                task.error = RowError(code, output.error)
                self._fail(task, task.error)
            elif task.parts and len(task.outputs) + 1 < len(task.parts):
                task.outputs.append(output)
            elif task.turns:
                self._go_on(task, output)
            else:
                self._finish(task, output)
                counts.answered += 1
                for one in output.outputs if task.params.max_tokens != 0 else ():
                    counts.empty += task.params.detokenize and not one.text.strip()
                    counts.cut += one.finish_reason == "length"

    def _go_on(self, task: Task, output: RequestOutput) -> None:
        """Queues the next turn: the conversation, the answer, and the user's next message."""
        shown = output if task.form is None else task.form.parse(output, task.key)
        answer = {"role": "assistant", "content": shown.outputs[0].text}
        question = {"role": "user", "content": task.turns.pop(0)}
        messages = [*task.prompt["messages"], answer, question]
        task.prompt = {**task.prompt, "messages": messages}
        task.outputs.append(output)
        self._turns.append(task)

    def _fail(self, task: Task, error: RowError) -> None:
        with self._lock:
            self._finish(task, error)
            self.counts.failed += 1
            first = f"{task.input.name}:{task.number}: {error}"
            count, first = self.counts.reasons.get(error.code, (0, first))
            self.counts.reasons[error.code] = count + 1, first
            if self._max_errors is not None and self.counts.failed > self._max_errors:
                raise TooManyErrorsError(
                    f"{self.counts.failed} rows failed, and --max-errors {self._max_errors} are"
                    f" allowed; the last: {task.input.name}:{task.number}: {error}"
                )
