"""The exact text of explanations of recorded runs."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from random import Random

import pytest

from nanoengine.cli import main as cli
from nanoengine.engine import LLMEngine
from nanoengine.observe.explain import explain_recording
from nanoengine.observe.trace import trace_engine
from nanoengine.observe.trace_reader import Recording, read_trace
from nanoengine.settings.params import SamplingParams
from tests.support.fake_disk import QuickDisk, make_tiers
from tests.support.fake_executor import make_engine, run

SAMPLE = Path(__file__).parent / "sample.trace.gz"
STEP_S = 0.01


def add(
    engine: LLMEngine, name: str, first: int, length: int, max_tokens: int, **more: int
) -> None:
    prompt = [(first + i) % 40 for i in range(length)]
    engine.add_request(
        name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), **more
    )


def recorded(engine: LLMEngine, path: Path) -> Recording:
    """Returns the trace with a step every 10 ms and arrivals at the end of the previous step."""
    engine.close()
    recording = read_trace(path)
    num_steps = 0
    for _, line in recording.lines:
        if "add" in line:
            line["t"] = num_steps * STEP_S
        elif "step" in line:
            num_steps += 1
            line |= {"t": num_steps * STEP_S, "s": [0, 0, 0, STEP_S, 0, 0]}
    return recording


@pytest.fixture
def preemption(tmp_path: Path) -> Recording:
    engine = make_engine(num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    trace_engine(engine, tmp_path / "run.trace")
    add(engine, "first", 0, 9, 16)
    add(engine, "second", 20, 10, 16)
    run(engine)
    return recorded(engine, tmp_path / "run.trace")


@pytest.fixture
def eviction(tmp_path: Path) -> Recording:
    engine = make_engine(num_blocks=10, block_size=4, max_num_seqs=2)
    trace_engine(engine, tmp_path / "run.trace")
    add(engine, "early", 0, 13, 2)
    run(engine)
    add(engine, "large", 20, 30, 2)
    run(engine)
    add(engine, "late", 0, 13, 2)
    run(engine)
    return recorded(engine, tmp_path / "run.trace")


@pytest.fixture
def starved(tmp_path: Path) -> Recording:
    engine = make_engine(num_blocks=33, block_size=4, max_num_seqs=1)
    trace_engine(engine, tmp_path / "run.trace")
    add(engine, "running", 0, 5, 4)
    engine.step()
    add(engine, "patient", 7, 5, 2, priority=1)
    for number in range(3):
        add(engine, f"urgent-{number}", 3 * number, 6, 3)
        engine.step()
        engine.step()
    run(engine)
    return recorded(engine, tmp_path / "run.trace")


@pytest.fixture
def tiers(tmp_path: Path) -> Recording:
    engine = make_engine(
        num_blocks=10, block_size=4, max_num_seqs=2,
        make_tiers=lambda executor: make_tiers(
            executor.layout, QuickDisk(executor.host, Random(0)), num_host_blocks=4
        ),
    )  # fmt: skip
    trace_engine(engine, tmp_path / "run.trace")
    for name, first, length in (("early", 0, 13), ("large", 20, 33), ("late", 0, 13)):
        add(engine, name, first, length, 2)
        run(engine)
    return recorded(engine, tmp_path / "run.trace")


GOLDEN = (Path(__file__).parent / "explained.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("preemption", {"request": "second"}),
        ("preemption", {"step": 7}),
        ("preemption", {"step": 15}),
        ("preemption", {}),
        ("eviction", {"request": "late"}),
        ("eviction", {}),
        ("starved", {"request": "patient"}),
        ("starved", {}),
        ("tiers", {"request": "late"}),
        ("tiers", {}),
    ],
)
def test_a_recorded_run_is_explained(
    name: str, question: dict[str, str | int], request: pytest.FixtureRequest
) -> None:
    recording = request.getfixturevalue(name)
    title = " ".join([name, *(f"--{key} {value}" for key, value in question.items())])
    narrative = explain_recording(recording, step=question.get("step"))  # type: ignore[arg-type]
    if "request" in question:
        lines = narrative.request_lines(str(question["request"]))
    else:
        lines = narrative.step_lines() if question else narrative.run_lines()
    expected = GOLDEN.partition(f"$ explain {title}\n")[2].partition("\n\n")[0]
    assert "\n".join(lines) == expected.rstrip("\n"), "\n".join(lines)


def test_aborted_requests_are_explained(tmp_path: Path) -> None:
    engine = make_engine(num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    trace_engine(engine, tmp_path / "run.trace")
    for name, first, length in (("a", 0, 9), ("b", 20, 10), ("c", 0, 9), ("gone", 3, 5)):
        add(engine, name, first, length, 16)
    engine.step()
    engine.abort("gone")
    run(engine)
    add(engine, "late", 3, 5, 3)
    engine.step()
    engine.abort("late")
    engine.close()
    narrative = explain_recording(read_trace(tmp_path / "run.trace"))
    assert "was never admitted" in "".join(narrative.request_lines("gone"))
    assert "aborted with 1 token" in narrative.request_lines("late")[-1]


def test_a_fork_preempted_before_its_first_plan_is_explained(tmp_path: Path) -> None:
    """Regression: it raised a KeyError."""
    engine = make_engine(num_blocks=4, block_size=4, max_num_seqs=2)
    trace_engine(engine, tmp_path / "run.trace")
    add(engine, "a", 0, 9, 3)
    engine.step()
    engine.fork("a")
    run(engine)
    engine.close()
    lines = explain_recording(read_trace(tmp_path / "run.trace")).request_lines("a")
    assert lines[2].startswith("step 1: its sequence 1: preempted with 9 tokens computed")


def test_the_explain_command_prints_lines_or_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["explain", str(SAMPLE)]) == 0
    run_lines = capsys.readouterr().out.splitlines()
    assert [line.partition(".")[0] for line in run_lines[1:]] == list("12345")
    assert cli.main(["explain", str(SAMPLE), "--request", "3"]) == 0
    assert "preempted" in capsys.readouterr().out
    assert cli.main(["explain", str(SAMPLE), "--step", "30"]) == 0
    assert capsys.readouterr().out.startswith("Step 30 was committed")
    (tmp_path / "header").write_bytes(gzip.decompress(SAMPLE.read_bytes()).splitlines()[0])
    for wrong, why in (
        ([str(SAMPLE), "--request", "none"], "the trace has no request 'none'; it has '0', '1', "),
        ([str(tmp_path / "header"), "--request", "0"], "no request '0'; it has none\n"),
        ([str(SAMPLE), "--step", "9999"], "the trace has no step 9999: it has steps 0 to 223"),
        ([str(SAMPLE), "--step", "1", "--request", "3"], "give only one"),
        ([str(tmp_path / "none")], "can't be read"),
    ):
        assert cli.main(["explain", *wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and why in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["über", "\ud800"])
def test_an_id_that_the_terminal_can_not_encode_is_escaped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = gzip.decompress(SAMPLE.read_bytes()).replace(
        b'"id":"1"', f'"id":{json.dumps(name)}'.encode()
    )
    (tmp_path / "a.trace").write_bytes(trace)
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    assert cli.main(["explain", str(tmp_path / "a.trace"), "--step", "0"]) == 0
    assert f"request {name}".encode(errors="backslashreplace") in terminal.getvalue()
