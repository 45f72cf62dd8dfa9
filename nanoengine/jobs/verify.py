"""`nanoengine batch --verify N`: runs answered rows again, one at a time, and compares them.

    N records of the output, chosen by the seed ── their rows ── a new engine, one at a time
                        └───────────── compared by character ────────────┘

It shows that answers don't depend on the batch, and that the file contains what was generated.
`cli/batch.py` calls it after a complete job.
"""

from __future__ import annotations

import heapq
import json
from typing import Any

from xxhash import xxh3_64_intdigest

from nanoengine.errors import ConfigError
from nanoengine.jobs.job import Job
from nanoengine.jobs.record_log import RecordLog
from nanoengine.jobs.rows import Task
from nanoengine.jobs.work import Result, Stream, Work

SHOWN_CHARS = 40
"""Characters shown of each of two records, around the first difference."""


def readable_log(job: Job) -> RecordLog:
    """The job's records.

    Raises:
        ConfigError: the records or the rows can't be read again.
    """
    if not isinstance(job.log, RecordLog) or job.num_rows is None:
        raise ConfigError("--verify needs an INPUT and an --output that can be read again, not -")
    return job.log


def verify(job: Job, stream: Stream, count: int, seed: int, *args: Any) -> tuple[int, list[str]]:
    """Returns how many rows were run again, at most `count`, and a message per difference.

    Args:
        stream: the stream of a new LLM, with an empty prefix cache.
        args: the arguments of `Job.work`, for the model of that LLM.
    """
    log = readable_log(job)
    records = (record for record in log.records(job.num_rows) if record and not record.failed)
    by_seed = lambda record: xxh3_64_intdigest(b"%d/%d" % (seed, record.row))  # noqa: E731
    sample = heapq.nsmallest(count, records, key=by_seed)
    recorded = log.lines(record.offset for record in sample)
    lines = dict(zip((record.row for record in sample), recorded, strict=True))
    reader, recorder = job.reader(*args)
    messages: list[str] = []

    def compare(task: Task, result: Result) -> None:
        if difference := _difference(lines[task.row], recorder.record(task, result)):
            messages.append(f"row {task.row} ({task.input.name}:{task.number}): {difference}")

    for task in job.tasks(reader, lines.__contains__):
        Work([task], compare).run(stream)
    return len(lines), messages


def _difference(recorded: bytes, repeated: bytes) -> str | None:
    """The first difference of two records; None if they are equal.

    Why not compare bytes: another program may have rewritten the file with other spacing.
    """
    old, new = (json.dumps(json.loads(line), sort_keys=True) for line in (recorded, repeated))
    if old == new:
        return None
    pairs = enumerate(zip(old, new, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    start = max(0, start - SHOWN_CHARS // 2)
    excerpts = (repr(text[start : start + SHOWN_CHARS]) for text in (old, new))
    return "the output has {}, but run again it is {}".format(*excerpts)
