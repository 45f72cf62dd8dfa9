"""`nanoengine learn`: days solved by the reference, bodies left out, and typical wrong bodies."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from nanoengine.assets import demo_model_path
from nanoengine.cli import course
from nanoengine.cli.main import main
from nanoengine.observe.trace_reader import read_trace
from nanoengine.settings.params import SamplingParams
from tests.observe.test_viewer import unpacked
from tests.test_small import decisions

pytestmark = pytest.mark.guards(
    "nanoengine/small/*.py",
    "nanoengine/small/course/*",
    "nanoengine/cli/course.py",
    "nanoengine/cli/learn.py",
    "nanoengine/core/scheduler.py",
    "nanoengine/core/block_manager.py",
)

DAYS = course.COURSE["days"]
FUNCTIONS = [(day, name) for day, one in enumerate(DAYS, 1) for name in one["functions"]]


@pytest.fixture(scope="module")
def expected():
    return [(work, list(course.steps_of(work))) for work in course.COURSE["works"]]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A new course, whose engine is imported anew at each check."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Why: files change within a second.
    assert main(["learn", str(tmp_path / "course")]) == 0
    return tmp_path / "course"


def check(directory: Path, day: int) -> int:
    for name in [name for name in sys.modules if name.partition(".")[0] == course.ENGINE]:
        del sys.modules[name]
    return main(["learn", str(directory), "--check", str(day)])


def solve(directory: Path, day: int, old: str = "", new: str = "") -> None:
    """Writes the reference's bodies of one day, with one change."""
    changed = 0
    for name in DAYS[day - 1]["functions"]:
        path = directory / course.ENGINE / f"{name.partition('.')[0]}.py"
        source, without_body = course._without_body(name, day)
        text = path.read_text(encoding="utf-8")
        assert text.count(without_body) == 1, name
        changed += source.count(old)
        path.write_text(text.replace(without_body, source.replace(old, new)), encoding="utf-8")
    assert not old or changed == 1, f"{old!r} must occur once"


@pytest.mark.parametrize("day", range(1, len(DAYS) + 1))
def test_a_day_is_done_with_the_bodies_of_the_reference(day, directory, monkeypatch, capsys):
    monkeypatch.setattr(course, "_measure", lambda rung: rung["label"])
    names = DAYS[day - 1]["functions"]
    assert check(directory, day) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["not", "written", name] for name in names
    ]
    solve(directory, day)
    assert check(directory, day) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[: len(names) + 1]] == [
        ["equal", name] for name in (*names, "llm.LLM")
    ]
    assert shown[-1] == f"day {day} is done"
    assert f"# Day {day}: {DAYS[day - 1]['title']}" in (directory / f"day{day}.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize(("day", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_a_body_that_is_left_out_differs(day, name, expected):
    assert course.first_difference(expected[:1]) is None
    with mock.patch(f"nanoengine.small.{name}", return_value=None):
        assert course.first_difference(expected) is not None


WRONG = {
    "a block is not freed": (
        2, "deallocate", "reversed(seq.block_table)", "seq.block_table[1:]", "is a block not freed",
    ),
    "off by one at a block's edge": (
        2, "may_append", "num_computed_tokens + num_new_tokens",
        "num_computed_tokens + num_new_tokens - 1", "a token at a block's edge",
    ),
    "a hash without its parent": (
        4, "_digest", "before + tokens", "tokens", "its digest covers the digest before it",
    ),
    "another victim": (
        6, "_ensure_blocks", "self.running.pop()", "self.running.pop(0)",
        "the victim is the running sequence that arrived last",
    ),
    "a chunk that forgets its logits": (
        5, "_schedule_one", "int(seq.num_computed_tokens == seq.num_tokens)", "int(start == 0)",
        "a chunk forgets its logits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_typical_wrong_body_is_named(fault, directory, capsys):
    day, function, old, new, hint = WRONG[fault]
    solve(directory, day, old, new)
    assert check(directory, day) == 1
    shown = capsys.readouterr().out
    differs = [line.split(".")[-1] for line in shown.splitlines() if line.startswith("differs")]
    assert differs == [function], shown
    assert hint in shown, shown
    page = directory / f"day{day}.html"
    [url] = [line.split()[0] for line in shown.splitlines() if "file://" in line]
    assert url.startswith(page.as_uri() + "#step=")
    meta, _ = unpacked(page.read_text("utf-8"))
    step = int(url.rpartition("=")[2])
    assert [n for n, _ in meta["notes"]] == [step] * len(meta["notes"])
    assert meta["notes"][0][1].startswith(f"step {step} of ")
    assert hint in meta["notes"][-1][1]


def test_an_exception_shows_the_line_of_the_learner(directory, capsys):
    solve(directory, 1, "self.weights[", "self.weight[")
    assert check(directory, 1) == 1
    shown = capsys.readouterr().out
    assert "my_engine/model.py" in shown
    assert "no attribute 'weight'" in shown


class Plans(list):
    """Collects the plans of a run, without what a trace does not contain."""

    def on_plan(self, plan):
        plan = decisions(plan)
        plan.admitted = [new._replace(params=None, seed=0) for new in plan.admitted]
        self.append(plan)


@pytest.mark.parametrize("work", course.COURSE["works"], ids=lambda work: work["name"])
def test_the_page_shows_the_plans_of_the_reference(work, tmp_path):
    """The large engine, whose run is shown, plans the same steps; n completions are forks there."""
    course._write_page(tmp_path / "page.html", work, 3, ["differs here"])
    large, small = Plans(), Plans()
    read_trace(tmp_path / "page.trace").replay().run(large)
    llm = course.reference.LLM(demo_model_path(), **work["engine"])
    llm.engine.watch = small.on_plan
    llm.engine.add_requests(work["prompts"], SamplingParams(**work["params"]))
    llm.engine.run()
    assert len(small) == len(large)
    if work["params"].get("n", 1) == 1:
        assert small == large


def test_the_whole_engine_is_checked_last(directory, capsys):
    """A change outside of the day's functions."""
    solve(directory, 6)
    path = directory / course.ENGINE / "block_manager.py"
    path.write_text(
        path.read_text("utf-8").replace("fresh + unused <=", "fresh + unused <"), "utf-8"
    )
    assert check(directory, 6) == 1
    shown = capsys.readouterr().out
    assert shown.count("differs") == 1
    assert "differs      llm.LLM" in shown
    assert "measured" not in shown


def test_the_prefix_cache_computes_fewer_tokens():
    without, cached = map(course._measure, DAYS[3]["rungs"])
    assert " 2,262 computed in " in without
    assert " 342 computed in " in cached


def test_errors(directory, capsys):
    for arguments, message in {
        (directory,): "my_engine exists: give another directory",
        (directory / "other", "--check", 1): "has no my_engine: `nanoengine learn",
        (directory, "--check", 8): "check=8 is not a day: give 1 to 7",
    }.items():
        assert main(["learn", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
