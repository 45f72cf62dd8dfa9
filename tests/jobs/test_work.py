"""The loop between tasks and engines, by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nanoengine.jobs.rows import Task
from nanoengine.jobs.source import Input
from nanoengine.jobs.work import Work
from nanoengine.outputs import RequestOutput
from nanoengine.text.prompt_forms import Pause, Row

COUNT = gc.get_freeze_count


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that was just started; the tests' own freezes what was imported."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("before", [False, True])
def test_the_collector_passes_over_what_was_there_while_rows_run(
    before: bool, nothing_frozen: None
) -> None:
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
    # Why not a count: one that is frozen can still be freed.
    assert (gc.get_freeze_count() > 0) == before
