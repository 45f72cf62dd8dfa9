"""Ranks end with their engine, with their parent, and all together when one fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch

from nanoengine import HostTier
from nanoengine.build import build_engine
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError, EngineDeadError, WeightLoadError
from nanoengine.ranks import executor
from nanoengine.ranks.executor import find_end_error
from nanoengine.ranks.rank import Failure
from nanoengine.settings.config import EngineConfig
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.thread_ranks import thread_ranks_fixture as thread_ranks_fixture

# Why: most of these tests start processes that load torch.
pytestmark = pytest.mark.guards(
    "nanoengine/ranks/*.py",
    "nanoengine/engine.py",
    "nanoengine/locking.py",
)

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
"""Timeout [s]. Ranks end within about a second; a busy machine must not fail a test."""


def make_ranks(**options: object) -> LLMEngine:
    """Creates an engine with two ranks on the CPU, even on a machine with GPUs."""
    ranks = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    return make_engine(checkpoint("qwen3"), **{"num_kv_blocks": 40} | ranks | options)


def processes_of(engine: LLMEngine) -> list[psutil.Process]:
    found = [psutil.Process(worker.pid) for worker in engine.executor._ranks.workers]
    assert len(found) == 2 and all(process.is_running() for process in found)
    return found


def require_exited(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


@contextlib.contextmanager
def run_soon(action: Callable[[], object], after_s: float) -> Iterator[None]:
    """Runs `action` in a thread after a delay, while the block runs."""
    timer = threading.Timer(after_s, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def run_until_it_raises(engine: LLMEngine) -> None:
    """Runs steps until one raises an exception, which must happen."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        run(engine, random_prompts(4, [5]), greedy(40))
    pytest.fail(f"nothing has ended the steps for {PATIENCE_S} s")


@pytest.fixture(name="ctrl_c")
def ctrl_c_fixture() -> Iterator[None]:
    """Enables SIGINT. Why: a shell starts background jobs with SIGINT ignored, so the test would
    wait for an interrupt that never arrives."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_ends_requests_but_no_rank() -> None:
    """After Ctrl-C at any time, the ranks finish their step, and run the next requests."""
    engine = make_ranks()
    work = random_prompts(3, [5, 20]), greedy(12)
    expected = tokens(run(engine, *work))
    processes = processes_of(engine)
    for turn in range(6):
        interrupt = run_soon(lambda: os.kill(os.getpid(), signal.SIGINT), 0.01 + 0.006 * turn)
        with pytest.raises(KeyboardInterrupt), interrupt:
            run_until_it_raises(engine)
        engine.abort_all()
        assert tokens(run(engine, *work)) == expected
    assert processes_of(engine) == processes
    engine.close()
    engine.close()
    require_exited(processes)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step()


def test_an_exception_in_a_rank_ends_all_with_its_traceback() -> None:
    engine = make_ranks(overlap=True)
    processes = processes_of(engine)
    run(engine, random_prompts(2, [5]), greedy(3))
    second = engine.executor._ranks.workers[1].pipe
    raises_error = pytest.raises(EngineDeadError, match=r"(?s)rank 1 .*Traceback.*UnpicklingError")
    with raises_error, run_soon(lambda: second.send_bytes(b"no plan"), 0.1):
        run_until_it_raises(engine)
    require_exited(processes)
    with pytest.raises(EngineDeadError, match="rank 1"):
        run(engine, random_prompts(1, [5]), greedy(3))
    engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(rank: int) -> None:
    engine = make_ranks()
    processes = processes_of(engine)
    run(engine, random_prompts(2, [5]), greedy(3))
    raises_error = pytest.raises(EngineDeadError, match=f"rank {rank} was killed by SIGKILL")
    with raises_error, run_soon(processes[rank].kill, 0.1):
        run_until_it_raises(engine)
    require_exited(processes)


def test_hanging_ranks_are_ended_with_their_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_ranks()
    processes = processes_of(engine)
    monkeypatch.setattr(executor, "POLL_S", 0.1)
    monkeypatch.setattr(executor, "HANG_TIMEOUT_S", 3.0)
    processes[1].suspend()
    at = r"step \d+, collective \d+ \(.*\)"
    with pytest.raises(EngineDeadError, match=f"for 3 s: rank 0 was at {at}; rank 1 was at {at}"):
        run_until_it_raises(engine)
    require_exited(processes)
    with pytest.raises(EngineDeadError, match="no rank has advanced"):
        run(engine, random_prompts(1, [5]), greedy(3))


def test_a_rank_that_missed_a_plan_ends_all_at_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the ranks would sum values of different steps."""
    engine = make_ranks()
    processes = processes_of(engine)
    pipe = engine.executor._ranks.workers[1].pipe
    send, lost = pipe.send, []
    monkeypatch.setattr(pipe, "send", lambda order: send(order) if lost else lost.append(order))
    with pytest.raises(EngineDeadError, match=r"(?s)rank 1 has failed.*message 1 was lost"):
        run_until_it_raises(engine)
    require_exited(processes)


def test_an_interrupt_at_any_instruction_keeps_ranks_synchronized(
    thread_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_ranks()
    work = random_prompts(1, [5]), greedy(1)
    expected = tokens(run(engine, *work))
    before, left, places = sys.gettrace(), 0, set()

    def interrupt(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = frame.f_code.co_filename == executor.__file__
        if event == "opcode":
            left -= 1
            if not left:
                places.add((frame.f_lineno, frame.f_lasti))
                raise KeyboardInterrupt
        return interrupt

    is_interrupted, instruction = True, 0
    # Why: Python 3.12 traces instructions only if a frame asked for it before the tracer was set.
    sys._getframe().f_trace_opcodes = True
    while is_interrupted:
        left = instruction = instruction + 1
        sys.settrace(interrupt)
        try:
            run(engine, *work)
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        engine.abort_all()
        assert tokens(run(engine, *work)) == expected
    assert len(places) > 40
    engine.close()


def test_a_garbage_collected_engine_ends_its_ranks() -> None:
    engine = make_ranks()
    processes = processes_of(engine)
    del engine
    gc.collect()
    require_exited(processes)


SCRIPT = """
import os, sys
from nanoengine import LLM, SamplingParams
llm = LLM({model!r}, skip_tokenizer_init=True, device="cpu",
          tensor_parallel_size=2, num_kv_blocks=40)
if len(sys.argv) > 1:  # a process that keeps all pipes open, and continues
    if os.fork() == 0:
        sys.exit()  # ends only this process
    os.wait()
    if os.fork() == 0:
        import time
        time.sleep({patience})
        os._exit(0)
print(*(worker.pid for worker in llm.engine.executor._ranks.workers), flush=True)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
while True:
    llm.generate([{{"prompt_token_ids": [5, 6, 7]}}] * 3, params, use_tqdm=False)
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork"])
def test_no_rank_outlives_a_killed_parent(forks: bool, tmp_path: Path) -> None:
    """Nor does a suspended rank. Replicas kill the parent of their ranks the same way.

    The script has no `if __name__ == "__main__"`: a rank doesn't run it.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=checkpoint("qwen3"), patience=PATIENCE_S))
    command = [sys.executable, str(script), *(["fork"] if forks else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(ranks) == 2
    children = psutil.Process(parent.pid).children()
    time.sleep(0.2)  # some time within a step
    if not forks:
        ranks[1].suspend()
    parent.kill()
    parent.wait()
    require_exited(ranks)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    parent.stdout.close()


def test_a_rank_that_cannot_start_raises_its_error() -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="max_model_len=512 does not fit the KV cache"):
        make_ranks(num_kv_blocks=None, kv_cache_gib=1e-4, max_model_len=512)
    assert psutil.Process().children() == before


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 must divide num_attention_heads=4"),
        ({"kv_tiers": [HostTier(gib=0.01)]}, "tensor_parallel_size=2 is not supported with kv_"),
        ({"deterministic": True}, "is not supported with deterministic=True"),
        ({"quantization": "int8"}, "is not supported with int8 activations"),
        ({"quantization": "int4"}, "is not supported with int8 activations"),
        ({"quantization": "int8_weight_only"}, "int8 weights quantized while.*int4_weight_only"),
        (
            {"quantization": "int4_weight_only"},
            "groups of 256 inputs, because .*head_dim=64: a rank's",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_options_raise_before_a_rank_starts(
    options: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    directory = checkpoint("llama")
    with pytest.raises(ConfigError, match=why):
        build_engine(
            EngineConfig(model=directory, device="cpu", **{"tensor_parallel_size": 2} | options)
        )


@pytest.mark.parametrize(
    ("device", "found", "why"),
    [
        ("cuda", 1, "is not supported with too few GPUs: torch finds 1"),
        ("cuda:1", 2, "device='cuda:1': each rank needs its own GPU"),
    ],
)
def test_ranks_on_gpus_need_their_own_gpus(
    device: str, found: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    config = EngineConfig(model=checkpoint("llama"), tensor_parallel_size=2, device=device)
    with pytest.raises(ConfigError, match=why):
        build_engine(config)


# --- which of several causes is reported ----------------------------------------------------------


def failure(rank: int, time: float, start_error: Exception | None = None) -> Failure:
    return Failure(rank=rank, time=time, text=f"traceback of {rank}", start_error=start_error)


def test_the_first_failure_is_reported() -> None:
    found = find_end_error(
        {0: "exited with 1", 1: "exited with 1"}, [failure(0, 2.0), failure(1, 1.0)]
    )
    assert isinstance(found, EngineDeadError)
    assert "rank 1 has failed:\ntraceback of 1" in str(found)


def test_a_killed_rank_is_reported_before_failures_of_others() -> None:
    ends = {0: "exited with 1", 1: "was killed by SIGSEGV"}
    assert "rank 1 was killed by SIGSEGV" in str(find_end_error(ends, [failure(0, 2.0)]))
    assert "rank 0 exited with 1" in str(find_end_error(ends, []))


def test_an_error_of_the_start_is_raised_unchanged() -> None:
    start_error = WeightLoadError("missing")
    assert (
        find_end_error({0: "exited with 1"}, [failure(1, 2.0), failure(0, 1.0, start_error)])
        is start_error
    )
