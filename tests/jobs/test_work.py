"""The loop between tasks and engines, and the journal of running rows, tested alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoengine.jobs.journal import Journal
from nanoengine.jobs.rows import Task
from nanoengine.jobs.source import Input
from nanoengine.jobs.work import Work
from nanoengine.outputs import RequestOutput
from nanoengine.text.prompt_forms import Pause, Row

COUNT = gc.get_freeze_count


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unfreezes objects, as in a new process; the tests' `frozen` fixture freezes imports."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("before", [False, True])
def test_existing_objects_are_frozen_while_rows_run(before: bool, nothing_frozen: None) -> None:
    if before:
        gc.freeze()
    seen: list[int] = []

    def stream(rows: Iterator[Row | Pause]) -> Iterator[RequestOutput]:
        seen.append(gc.get_freeze_count())
        for index, _ in enumerate(rows):
            yield RequestOutput(
                request_id="", index=index, prompt="", prompt_token_ids=[], outputs=[],
                finished=True,
            )  # fmt: skip

    tasks = [Task(row=0, input=Input(name="x", form="txt"), number=1)]
    Work(tasks, lambda task, result: None).run(stream)  # type: ignore[arg-type]
    assert seen[0] > 0
    # Why not a count: a frozen object can still be freed.
    assert (gc.get_freeze_count() > 0) == before


@pytest.mark.parametrize(
    ("text", "num_done", "counts"),
    [
        (b"\nrun 1 0\n3\n4\n", 0, {4: 1}),
        (b"\nrun 1 0\n4\n", 1, {}),
        (b"\nrun 1 0\n4\nFatal Python error: Aborted\n", 1, {4: 1}),
        (b"\nrun 1 1\n4\n5\n\nrun 2 1\n5\n6", 1, {4: 1, 5: 2}),
        (b"\nrun 1 1\n4\n4\n4\n", 1, {4: 1}),
    ],
    ids=[
        "killed",
        "killed after a record",
        "crashed",
        "crashed twice, with a torn line",
        "a conversation of three turns",
    ],
)
def test_a_crash_counts_once_for_each_row_that_ran(
    tmp_path: Path, text: bytes, num_done: int, counts: dict[int, int]
) -> None:
    path = tmp_path / "runs"
    path.write_bytes(text)
    for _ in range(2):  # the first one is closed normally, so the second one counts the same
        journal = Journal(path, num_done, lambda row: row == 3)
        journal.record_start(7)
        journal.close(is_complete=False)
        assert journal.crashes == counts
    assert path.read_bytes().startswith(text + b"\nrun ")
