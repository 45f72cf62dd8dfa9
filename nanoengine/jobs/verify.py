"""`nanoengine batch --verify N`: runs answered rows again, one at a time, and compares them.

    records of the output ── N, chosen by the seed ── their rows ── a new engine, one at a time
                                     └───────────── compared by character ────────┘

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
        raise ConfigError(
            "--verify reads rows and records again: give files as INPUT and --output, not - or a"
            " pipe"
        )
    return job.log


def verify(job: Job, stream: Stream, count: int, seed: int, *facts: Any) -> tuple[int, list[str]]:
    """Returns how many rows were run again, at most `count`, and a message per difference.

    Args:
        stream: the stream of a new LLM, with an empty prefix cache.
        facts: of the model, see `Job.work`.
    """
    log = readable_log(job)
    found = (record for record in log.records(job.num_rows) if record and not record.failed)
    by_seed = lambda one: xxh3_64_intdigest(b"%d/%d" % (seed, one.row))  # noqa: E731
    drawn = heapq.nsmallest(count, found, key=by_seed)
    recorded = log.lines(one.offset for one in drawn)
    lines = dict(zip((one.row for one in drawn), recorded, strict=True))
    reader, recorder = job.reader(*facts)
    told: list[str] = []

    def compare(task: Task, result: Result) -> None:
        how = _difference(lines[task.row], recorder.record(task, result))
        told.extend(f"row {task.row} ({task.input.name}:{task.number}): {one}" for one in how)

    for task in job.tasks(reader, lines.__contains__):
        Work([task], compare).run(stream)
    return len(lines), told


def _difference(recorded: bytes, again: bytes) -> list[str]:
    """The first difference of two records; empty if they are equal.

    Why not compare lines: another program may have written the file with other spacing.
    """
    before, after = (json.dumps(json.loads(one), sort_keys=True) for one in (recorded, again))
    if before == after:
        return []
    pairs = enumerate(zip(before, after, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, start - SHOWN_CHARS // 2)
    shown = (repr(text[start : start + SHOWN_CHARS]) for text in (before, after))
    return ["it has {}, and alone {}".format(*shown)]
