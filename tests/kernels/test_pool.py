"""parallel_for: each piece is computed exactly once, by any available thread."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoengine.kernels import pool
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import PAGE, parallel_for, share_of, touch
from nanoengine.kernels.threads import YIELD_SECONDS, _threads, num_workers
from nanoengine.settings.cores import affinity

ROOT = Path(__file__).resolve().parents[2]


@compiled(fastmath=())
def _add(out, number, lo, hi):
    for i in range(lo, hi):
        out[i] += number


@compiled(fastmath=())
def add(out, number, workers):
    parallel_for(_add, len(out), workers, (out, number))


@compiled(fastmath=())
def _add_to_rows(out, number, lo, hi):
    for i in range(lo, hi):
        out[i] += number


@compiled(fastmath=())
def add_to_rows(out, number, workers):
    parallel_for(_add_to_rows, len(out), workers, (out, number))


@compiled(fastmath=())
def _add_everywhere(out, number, workers, lo, hi):
    for i in range(lo, hi):
        add(out[i], number, workers)


@compiled(fastmath=())
def add_everywhere(out, number, workers):
    parallel_for(_add_everywhere, len(out), workers, (out, number, workers))


@compiled(fastmath=())
def _allocate(out, size, lo, hi):
    for i in range(lo, hi):
        out[i] = np.empty(size, np.int8)[0]


@compiled(fastmath=())
def allocate(out, size, workers):
    parallel_for(_allocate, len(out), workers, (out, size))


@compiled(fastmath=())
def must_yield(worker):
    return pool._must_yield(worker)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield num_workers()
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 5000])
def test_each_item_is_computed_once(count, workers, two_threads):
    out = np.zeros(count)
    for _ in range(20):
        add(out, 1.0, workers)
    assert (out == 20).all()


def test_a_job_needs_no_worker():
    """With more workers than threads, the threads that exist compute all pieces."""
    out = np.zeros(1000)
    add(out, 1.0, 64)
    assert (out == 1).all()


def test_parallel_calls_can_be_nested(two_threads):
    out = np.zeros((40, 30))
    add_everywhere(out, 1.0, 2)
    assert (out == 1).all()


def test_concurrent_calls_do_not_affect_each_other(two_threads):
    outs = [np.zeros(500) for _ in range(4)]

    def call(out: np.ndarray) -> None:
        for _ in range(2000):
            add(out, 1.0, 2)

    threads = [threading.Thread(target=call, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((out == 2000).all() for out in outs)


def test_sleeping_workers_wake_up(two_threads):
    """The counter `NEXT_PIECE` of the second worker increases, so it has computed pieces."""
    out = np.zeros(64)
    next_piece = pool.WORDS[pool.NEXT_PIECE + pool.LINE]
    for _ in range(50):
        threading.Event().wait(0.002)
        num_workers()
        add(out, 1.0, 2)
    assert (out == 50).all() and pool.WORDS[pool.NEXT_PIECE + pool.LINE] > next_piece


@pytest.fixture
def clocks():
    """The words of a worker that does not exist, and a function that simulates its check of the
    clocks."""
    worker = pool.MAX_WORKERS - 1
    words = pool.WORDS[pool.NEXT_PIECE + worker * pool.LINE :][: pool.LINE]

    def check(had_core: bool) -> bool:
        """Simulates whole seconds, because the test's process may lose its core at any time."""
        words[pool.WALL] = time.monotonic_ns() - (pool.CHECK_NS if had_core else 10**9)
        words[pool.CPU] = time.thread_time_ns() - (10**9 if had_core else 0)
        return must_yield(worker)

    check(True)  # compiles it
    pool.WORDS[pool.CALLER_LOST_CORE] = words[:] = 0
    yield words, check
    pool.WORDS[pool.CALLER_LOST_CORE] = words[:] = 0


on_linux = pytest.mark.skipif(not pool.HAS_CLOCKS, reason="workers read clocks only on Linux")


@on_linux
def test_a_worker_that_loses_its_core_again_yields_longer(clocks):
    words, check = clocks
    assert not check(True)
    assert not check(False), "a daemon that wakes once is ignored"
    yields = []
    for _ in range(9):
        assert check(False)
        yields.append(1)
        while check(True):
            yields[-1] += 1
    assert yields == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    words[pool.LAST_END] -= 2 * pool.CALM_NS
    assert check(False) and not check(True), "after CALM_NS the count starts again"
    words[pool.LAST_LOSS] -= 2 * pool.CALM_NS
    assert not check(False) and not check(True)


@on_linux
def test_one_worker_yields_if_the_caller_has_lost_its_core(clocks):
    _, check = clocks
    pool.WORDS[pool.CALLER_LOST_CORE] = 1
    assert check(True) and not check(True) and not pool.WORDS[pool.CALLER_LOST_CORE]


@on_linux
def test_pieces_that_a_yielding_worker_leaves_are_computed(two_threads, monkeypatch):
    """The worker must yield its core at each job."""
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    out, deadline = np.zeros((64, 20_000)), time.monotonic() + 60
    done = 0
    while len(slept) < 6 and time.monotonic() < deadline:
        pool.WORDS[pool.CALLER_LOST_CORE] = 1
        num_workers()
        add_to_rows(out, 1.0, 2)
        done += 1
    assert (out == done).all() and slept[:5] == [YIELD_SECONDS] * 5


@on_linux
@pytest.mark.skipif(affinity() < 2, reason="needs two cores")
def test_a_worker_leaves_the_caller_s_core(two_threads):
    out, before = np.zeros((64, 2000)), os.sched_getaffinity(0)
    own_core, (worker, *_) = min(before), _threads
    try:
        os.sched_setaffinity(0, {own_core})
        for _ in range(10_000):
            num_workers()
            os.sched_setaffinity(worker.native_id, {own_core})
            for _ in range(4 * pool.SAME_CORE_JOBS):
                add_to_rows(out, 1.0, 2)
            if own_core not in os.sched_getaffinity(worker.native_id):
                break
        assert own_core not in os.sched_getaffinity(worker.native_id)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_piece_is_raised(workers):
    with pytest.raises(MemoryError):
        allocate(np.zeros(8), 1 << 60, workers)
    out = np.zeros(8)
    add(out, 1.0, workers)
    assert (out == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # since Python 3.12
def test_a_forked_process_computes_without_workers(two_threads):
    def child(queue) -> None:
        out = np.zeros(100)
        add(out, 1.0, 2)
        queue.put(out.sum())

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == 100
    process.join()


def test_a_process_ends_while_workers_wait():
    code = (
        "import torch; torch.set_num_threads(2);"
        "from nanoengine.kernels.threads import num_workers; print(num_workers())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_shares_cover_all_items_once(workers):
    shares = [share_of.py_func(120, worker, workers) for worker in range(workers)]
    assert [i for lo, hi in shares for i in range(lo, hi)] == list(range(120))


def test_every_page_is_touched():
    memory = np.ones(10 * PAGE + 17, np.uint8)
    touch(memory, 3)
    pages = memory[: 10 * PAGE].reshape(10, -1)
    assert (pages == 0).any(1).all() and (pages == 1).sum(1).min() > PAGE - 14
    touch(memory[:0], 3)
