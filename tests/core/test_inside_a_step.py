"""Engine calls from a thread within its own step, as a signal handler may make at any moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.checks import check
from nanoengine.engine import LLMEngine
from nanoengine.errors import EngineDeadError, NanoEngineError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def inside_a_step(
    monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, call: Callable[[], Any]
) -> list[Any]:
    """Makes the call while the second step is planned; the returned list gets its result."""
    results: list[Any] = []
    original = BlockManager.may_append

    def may_append(self: BlockManager, *args: Any) -> bool:
        if engine.scheduler.stats.steps == 2 and not results:
            results.append("called")
            results.append(call())
        return original(self, *args)

    monkeypatch.setattr(BlockManager, "may_append", may_append)
    return results


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["abort", "abort_all"])
def test_an_abort_waits_for_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool
) -> None:
    """Regression: an abort freed blocks of a sequence while its step was planned, and another
    sequence got them."""
    engine = make_engine(overlap=overlap)
    first = engine.add_request("first", range(1, 8), PARAMS)
    other = engine.add_request("other", range(11, 18), PARAMS)
    ids = ("first",) if name == "abort" else ()
    results = inside_a_step(monkeypatch, engine, lambda: getattr(engine, name)(*ids))
    run(engine)
    assert results == ["called", None]
    assert first.sequences[0].finish_reason == "abort"
    assert 1 <= first.sequences[0].num_output_tokens <= 3
    assert other.sequences[0].finish_reason == ("length" if name == "abort" else "abort")
    check(engine.scheduler)
    assert engine.stats().active_blocks == 0


def test_a_close_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    request = engine.add_request("a", range(1, 8), PARAMS)
    results = inside_a_step(monkeypatch, engine, engine.close)
    run(engine)
    assert results == ["called", None]
    assert request.sequences[0].finish_reason == "abort"
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step()


def test_a_deferred_call_runs_even_if_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler calls close() and exits."""
    engine = make_engine()
    engine.add_request("a", range(1, 8), PARAMS)

    def close_and_exit() -> None:
        engine.close()
        raise SystemExit(5)

    inside_a_step(monkeypatch, engine, close_and_exit)
    with pytest.raises(SystemExit):
        run(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.fork("a"),
        lambda engine: engine.add_request("b", [1, 2], PARAMS),
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.finish_in_flight(),
    ],
)
def test_calls_that_change_blocks_raise_inside_a_step(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[LLMEngine], Any]
) -> None:
    engine = make_engine()
    request = engine.add_request("a", range(1, 8), PARAMS)

    def refused() -> None:
        with pytest.raises(NanoEngineError, match="inside a step"):
            call(engine)

    results = inside_a_step(monkeypatch, engine, refused)
    run(engine)
    assert results == ["called", None]
    assert request.sequences[0].num_output_tokens == 20
    assert len(request.sequences) == 1


def test_stats_work_inside_a_step_and_observers_abort_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    engine.add_request("a", range(1, 8), PARAMS)
    results = inside_a_step(monkeypatch, engine, engine.stats)

    class Observer:
        def on_step(self, plan: Any, result: Any, scheduler: Any) -> None:
            if plan.step == 4:
                results.append(engine.abort("a"))

    engine.observers.append(Observer())
    run(engine)
    assert results[1].num_running == 1
    assert results[2].sequences[0].finish_reason == "abort"
