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
from nanoengine.kernels.threads import REST, _threads, num_workers
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
def _room(out, size, lo, hi):
    for i in range(lo, hi):
        out[i] = np.empty(size, np.int8)[0]


@compiled(fastmath=())
def room(out, size, workers):
    parallel_for(_room, len(out), workers, (out, size))


@compiled(fastmath=())
def makes_room(worker):
    return pool._makes_room(worker)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield num_workers()
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 5000])
def test_each_thing_is_done_once(count, workers, two_threads):
    out = np.zeros(count)
    for _ in range(20):
        add(out, 1.0, workers)
    assert (out == 20).all()


def test_a_job_needs_no_worker():
    """With more workers than threads, the existing threads compute all pieces."""
    out = np.zeros(1000)
    add(out, 1.0, 64)
    assert (out == 1).all()


def test_a_piece_may_have_pieces_itself(two_threads):
    out = np.zeros((40, 30))
    add_everywhere(out, 1.0, 2)
    assert (out == 1).all()


def test_threads_that_call_at_once_disturb_each_other_in_nothing(two_threads):
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


def test_workers_that_have_slept_come_back(two_threads):
    """The counter `TAKEN` of the second worker increases, so it has computed pieces."""
    out = np.zeros(64)
    taken = pool.WORDS[pool.TAKEN + pool.LINE]
    for _ in range(50):
        threading.Event().wait(0.002)
        num_workers()
        add(out, 1.0, 2)
    assert (out == 50).all() and pool.WORDS[pool.TAKEN + pool.LINE] > taken


@pytest.fixture
def clocks():
    """The counters of a worker that does not exist, and a function that simulates its check."""
    worker = pool.MOST - 1
    own = pool.WORDS[pool.TAKEN + worker * pool.LINE :][: pool.LINE]

    def look(had_core: bool) -> bool:
        """Uses a second, because this test's own process may lose its core at any time."""
        own[pool.WALL] = time.monotonic_ns() - (pool.TURN if had_core else 10**9)
        own[pool.CPU] = time.thread_time_ns() - (10**9 if had_core else 0)
        return makes_room(worker)

    look(True)  # compiles it
    pool.WORDS[pool.CROWDED] = own[:] = 0
    yield own, look
    pool.WORDS[pool.CROWDED] = own[:] = 0


on_linux = pytest.mark.skipif(not pool.FOLLOWS, reason="workers read the clocks of Linux alone")


@on_linux
def test_a_worker_that_had_no_core_makes_room_and_longer_when_it_must_again(clocks):
    own, look = clocks
    assert not look(True)
    assert not look(False), "a daemon that woke once"
    spans = []
    for _ in range(9):
        assert look(False)
        spans.append(1)
        while look(True):
            spans[-1] += 1
    assert spans == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    own[pool.ENDED] -= 2 * pool.CALM
    assert look(False) and not look(True), "after a calm it begins anew"
    own[pool.LOSS] -= 2 * pool.CALM
    assert not look(False) and not look(True)


@on_linux
def test_one_worker_makes_room_where_the_caller_has_lost_its_core(clocks):
    _, look = clocks
    pool.WORDS[pool.CROWDED] = 1
    assert look(True) and not look(True) and not pool.WORDS[pool.CROWDED]


@on_linux
def test_what_a_worker_leaves_behind_is_done(two_threads, monkeypatch):
    """The worker is asked to yield its core at each job."""
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    out, deadline = np.zeros((64, 20_000)), time.monotonic() + 60
    done = 0
    while len(slept) < 6 and time.monotonic() < deadline:
        pool.WORDS[pool.CROWDED] = 1
        num_workers()
        add_to_rows(out, 1.0, 2)
        done += 1
    assert (out == done).all() and slept[:5] == [REST] * 5


@on_linux
@pytest.mark.skipif(affinity() < 2, reason="one core, which all share")
def test_a_worker_leaves_the_caller_s_core(two_threads):
    out, before = np.zeros((64, 2000)), os.sched_getaffinity(0)
    mine, (worker, *_) = min(before), _threads
    try:
        os.sched_setaffinity(0, {mine})
        for _ in range(10_000):
            num_workers()
            os.sched_setaffinity(worker.native_id, {mine})
            for _ in range(4 * pool.BESIDE):
                add_to_rows(out, 1.0, 2)
            if mine not in os.sched_getaffinity(worker.native_id):
                break
        assert mine not in os.sched_getaffinity(worker.native_id)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_piece_raises_is_raised(workers):
    with pytest.raises(MemoryError):
        room(np.zeros(8), 1 << 60, workers)
    out = np.zeros(8)
    add(out, 1.0, workers)
    assert (out == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # since Python 3.12
def test_a_forked_process_computes_alone(two_threads):
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
def test_shares_make_up_the_whole(workers):
    shares = [share_of.py_func(120, worker, workers) for worker in range(workers)]
    assert [i for lo, hi in shares for i in range(lo, hi)] == list(range(120))


def test_every_page_is_touched():
    memory = np.ones(10 * PAGE + 17, np.uint8)
    touch(memory, 3)
    pages = memory[: 10 * PAGE].reshape(10, -1)
    assert (pages == 0).any(1).all() and (pages == 1).sum(1).min() > PAGE - 14
    touch(memory[:0], 3)
