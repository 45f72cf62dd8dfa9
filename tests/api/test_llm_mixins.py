"""Concurrent and nested calls: aborts inside loops, calls inside calls, threads, close, forks.

Each case is a former hang. No test here can hang: an engine that is stepped too often fails, and a
thread that does not end fails its test.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nanoengine import LLM, BeamSearchParams, NanoEngineError, RequestOutput, SamplingParams
from nanoengine.core.checks import check
from nanoengine.errors import EngineDeadError
from tests.support.fake_llm import ANSWERS, LONG, Bar, MakeLLM, assert_idle, executor, texts

MAX_STEPS = 2_000
TIMEOUT_S = 20.0


class TooManySteps(AssertionError):
    """A loop has run far more steps than its requests need."""


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(make_llm: MakeLLM, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm(ANSWERS) as llm:
        llm.engine.overlap = request.param
        bound_steps(llm)
        yield llm


def bound_steps(llm: LLM) -> None:
    left, step = MAX_STEPS, llm.engine.step

    def counted() -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooManySteps
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]


def start(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` in a daemon thread, so that a hanging one does not block the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def reasons(outputs: list[RequestOutput]) -> dict[int, str | None]:
    return {o.index: o.outputs[0].finish_reason for o in outputs if o.finished}


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_an_aborted_request_of_a_stream_has_finish_reason_abort(llm: LLM, kind: str) -> None:
    """Regression: the stream waited for the aborted request forever."""
    outputs = []
    for output in llm.stream(["€", "one", "dog"], LONG, kind=kind):  # type: ignore[arg-type]
        outputs.append(output)
        if output.index == 1 and not output.finished:
            llm.engine.abort(output.request_id)
    assert reasons(outputs) == {0: "stop", 1: "abort", 2: "stop"}
    assert sum(output.finished for output in outputs) == 3, "each request finishes once"
    assert_idle(llm)


def test_abort_all_ends_a_stream(llm: LLM) -> None:
    """Aborted requests keep their text."""
    outputs = []
    for number, output in enumerate(llm.stream(["€", "one", "dog"], LONG, kind="cumulative")):
        outputs.append(output)
        if number == 4:
            llm.engine.abort_all()
    assert reasons(outputs) == dict.fromkeys(range(3), "abort")
    final = {o.index: o.outputs[0].text for o in outputs if o.finished}
    assert all(ANSWERS[p].startswith(final[i]) for i, p in enumerate(["€", "one", "dog"]))
    assert any(final.values())
    assert_idle(llm)


def test_aborts_in_a_lazy_stream_free_rows_for_the_next_prompts(make_llm: MakeLLM) -> None:
    """Later prompts of the iterator are added when requests before them are aborted."""
    with make_llm(ANSWERS, max_num_seqs=2) as llm:
        bound_steps(llm)
        outputs = []
        for output in llm.stream(iter(["€"] * 30), LONG, kind="delta"):
            outputs.append(output)
            if not output.finished and output.index % 2:
                llm.engine.abort(output.request_id)
        assert reasons(outputs) == {i: "abort" if i % 2 else "stop" for i in range(30)}
        assert_idle(llm)


def test_a_request_with_several_completions_is_finished_once_it_is_aborted(llm: LLM) -> None:
    """Also before its prompt is computed, when the other sequences have not been forked yet."""
    llm.engine.scheduler.long_prefill_threshold = 1
    params = SamplingParams(n=3, max_tokens=4)
    prompts = ["one", "the cat sat in the park and the dog"]
    outputs = []
    for output in llm.stream(prompts, params, kind="delta"):
        outputs.append(output)
        llm.engine.abort("1")
    assert reasons(outputs)[1] == "abort"
    assert_idle(llm)


def test_a_step_run_by_the_caller_ends_requests_of_a_stream(llm: LLM) -> None:
    """Regression: `engine.step()` returns finished requests to its caller, and the stream hung."""
    outputs = []
    for output in llm.stream(["€", "one", "dog"], LONG, kind="delta"):
        outputs.append(output)
        while llm.engine.has_unfinished():
            llm.engine.step()
    assert reasons(outputs) == dict.fromkeys(range(3), "stop")
    assert "".join(o.outputs[0].text for o in outputs if o.index == 0) == ANSWERS["€"]


def test_a_request_added_by_the_caller_does_not_affect_a_stream(llm: LLM) -> None:
    """A step also returns finished requests that the stream did not add."""
    own = None
    outputs = []
    for output in llm.stream(["€", "one"], LONG, kind="delta"):
        if own is None:
            own = llm.engine.add_request("own", [5, 6, 7], LONG)
            llm.engine.abort(output.request_id)
        outputs.append(output)
    assert own is not None
    assert own.finished
    assert sorted(filter(None, reasons(outputs).values())) == ["abort", "stop"]


@pytest.fixture
def eager_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.observe.progress.REFRESH_S", 0.0)


@pytest.mark.usefixtures("eager_bars")
def test_a_progress_bar_may_abort(llm: LLM) -> None:
    """The bar is updated within a step, after its commit and before it returns."""
    (first, second) = llm.generate(["€", "one"], LONG, use_tqdm=Bar(lambda: llm.engine.abort("0")))
    assert [o.outputs[0].finish_reason for o in (first, second)] == ["abort", "stop"]
    outputs = llm.generate(["€", "one"], LONG, use_tqdm=Bar(llm.engine.abort_all))
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"] * 2
    (found,) = llm.beam_search(
        "one",
        BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True),
        use_tqdm=Bar(llm.engine.abort_all),
    )
    assert (found.sequences, found.error) == ([], "the search was aborted")
    assert_idle(llm)


# --- nested calls ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager_bars")
def test_a_progress_bar_can_not_make_calls(llm: LLM) -> None:
    """The bar is updated within a step, so the step would never end."""
    for call in (
        lambda: llm.generate("one", LONG, use_tqdm=False),
        lambda: next(llm.stream("one", LONG)),
        llm.engine.step,
    ):
        with pytest.raises(NanoEngineError, match="an observer of a step"):
            llm.generate("€", LONG, use_tqdm=Bar(call))
        assert_idle(llm)
    assert texts(llm.generate("one", LONG, use_tqdm=False)) == [ANSWERS["one"]]


def test_a_call_inside_the_generator_of_prompts_ends_its_stream(llm: LLM) -> None:
    """The inner call returns its outputs, and the stream raises an error that explains why."""
    inner: list[str] = []

    def prompts() -> Iterator[str]:
        yield "one"
        inner.extend(texts(llm.generate("dog", LONG, use_tqdm=False)))

    with pytest.raises(NanoEngineError, match="ended by another call"):
        list(llm.stream(prompts(), LONG))
    assert inner == [ANSWERS["dog"]]
    assert_idle(llm)


# --- threads --------------------------------------------------------------------------------------


def test_calls_of_several_threads_wait_for_each_other(llm: LLM) -> None:
    """Regression: one call had a KeyError for the other's request, and the other call hung."""
    prompts = list(ANSWERS) * 5
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    talk = [{"role": "user", "content": "hi"}]
    together = threading.Barrier(6, timeout=TIMEOUT_S)
    executor(llm).hook = lambda plan: time.sleep(0.0002)  # lets another thread run

    def at_once(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (together.wait(), call())[1]

    calls = [at_once(lambda: llm.generate(prompts, LONG, use_tqdm=False))] * 4
    calls.append(at_once(lambda: llm.beam_search(["one", "dog"], params, use_tqdm=False)))
    calls.append(
        at_once(lambda: llm.chat(talk, LONG, chat_template="{{messages}}", use_tqdm=False))
    )
    *generated, searched, chatted = [
        future.result(TIMEOUT_S) for future in [start(call) for call in calls]
    ]
    for outputs in generated:
        assert texts(outputs) == [ANSWERS[prompt] for prompt in prompts]
    assert searched == llm.beam_search(["one", "dog"], params, use_tqdm=False)
    assert len(chatted) == 1
    assert_idle(llm)


def test_a_suspended_stream_does_not_block_other_threads(llm: LLM) -> None:
    """The call of the other thread is the later one, so it ends the stream."""
    stream = llm.stream(["€"] * 3, LONG, kind="delta")
    next(stream)
    other = start(lambda: llm.generate("one", LONG, use_tqdm=False))
    assert texts(other.result(TIMEOUT_S)) == [ANSWERS["one"]]
    with pytest.raises(NanoEngineError, match="ended by another call"):
        next(stream)
    assert_idle(llm)


def test_a_stream_waits_until_another_threads_call_has_ended(llm: LLM) -> None:
    """Otherwise the stream would end a call that can't be restarted."""
    inside, resume = threading.Event(), threading.Event()
    shown: list[RequestOutput] = []

    def wait(plan: Any) -> None:
        inside.set()
        assert resume.wait(TIMEOUT_S)

    executor(llm).hook = wait
    first = start(lambda: llm.generate(["€", "one"], LONG, use_tqdm=False))
    assert inside.wait(TIMEOUT_S)
    second = start(lambda: shown.extend(llm.stream("dog", LONG)))
    assert not second.done()
    assert not shown
    resume.set()
    assert texts(first.result(TIMEOUT_S)) == [ANSWERS["€"], ANSWERS["one"]]
    second.result(TIMEOUT_S)
    assert texts(shown) == [ANSWERS["dog"]]


def test_close_from_another_thread_ends_the_running_call(llm: LLM) -> None:
    """Regression: the call raised an AttributeError, because the runner had no model, or looped."""
    run, inside, resume = executor(llm), threading.Event(), threading.Event()

    def wait(plan: Any) -> None:
        inside.set()
        assert resume.wait(TIMEOUT_S)
        assert not run.is_shut_down, "closed in the middle of a step"

    run.hook = wait
    call = start(lambda: llm.generate(["€", "one"], LONG, use_tqdm=False))
    assert inside.wait(TIMEOUT_S)
    closing = start(llm.close)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    resume.set()
    with pytest.raises(NanoEngineError, match="closed"):
        call.result(TIMEOUT_S)
    closing.result(TIMEOUT_S)
    assert run.is_shut_down
    with pytest.raises(NanoEngineError, match="closed"):
        llm.generate("one", use_tqdm=False)


def test_another_thread_may_abort_requests(llm: LLM) -> None:
    """The abort happens between two steps: neither within one, nor after the last one."""
    inside, starting = threading.Event(), threading.Event()

    def wait(plan: Any) -> None:
        inside.set()
        assert starting.wait(TIMEOUT_S)
        time.sleep(0.001)  # Why: scripted steps end before another thread wakes up.

    executor(llm).hook = wait
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    call = start(lambda: llm.generate(["€", "one"], endless, use_tqdm=False))
    assert inside.wait(TIMEOUT_S)
    aborting = start(lambda: (starting.set(), llm.engine.abort("0"))[1])
    request = aborting.result(TIMEOUT_S)
    outputs = call.result(TIMEOUT_S)
    assert request is not None
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "length"]
    check(llm.engine.scheduler)


# --- forks ----------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child and returns its exit status, 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    for _ in range(int(TIMEOUT_S * 100)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        threading.Event().wait(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_not_use_the_engine(make_llm: MakeLLM) -> None:
    """Regression: OpenMP ended the child with its own message. Also while a thread holds locks."""
    with make_llm(ANSWERS) as llm:
        stream = llm.stream("€", LONG, kind="delta")
        next(stream)
        uses: list[Callable[[], Any]] = [
            lambda: llm.generate("one", use_tqdm=False),
            lambda: next(stream),
            lambda: next(llm.stream("one")),
            llm.stats,
            llm.engine.step,
            lambda: llm.beam_search("one", BeamSearchParams(beam_width=1, max_tokens=1)),
            make_llm,
        ]

        def child() -> None:
            for use in uses:
                with pytest.raises(EngineDeadError, match="spawn"):
                    use()
            assert "LLM(" in repr(llm)
            llm.close()

        locked, release = threading.Event(), threading.Event()

        def hold() -> None:
            with llm.engine.lock.hold(), llm._calls.lock:
                locked.set()
                release.wait(TIMEOUT_S)

        holder = start(hold)
        assert locked.wait(TIMEOUT_S)
        try:
            assert in_child(child) == 0
        finally:
            release.set()
        holder.result(TIMEOUT_S)
        assert texts(llm.generate("one", LONG, use_tqdm=False)) == [ANSWERS["one"]]


@pytest.mark.parametrize("copy_llm", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copying_or_pickling_an_llm_raises(llm: LLM, copy_llm: Callable[[Any], Any]) -> None:
    with pytest.raises(NanoEngineError, match="an LLM can't be copied or sent to another process"):
        copy_llm(llm)
