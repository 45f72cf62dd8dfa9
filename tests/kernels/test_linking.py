"""Compiled code does not count references to its arguments. Arguments that never change are packed
once instead of being unpacked from Python on each call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.runtime import _nrt_python as memory
from numba.core.runtime import rtsys

from nanoengine.kernels import linking
from nanoengine.kernels.argument_table import ArgumentTable, table_entry
from nanoengine.kernels.arrays import empty
from nanoengine.kernels.linking import InlineFunction, Kernel

X, LENGTHS, SUMS = np.arange(12.0).reshape(3, 4), np.array([1, 3, 4]), [0.0, 15.0, 38.0]


def options(*, inner: bool = False) -> dict[str, Any]:
    return {"nopython": True, "error_model": "numpy", "no_cpython_wrapper": inner}


def add_rows(x, lengths, out):
    flat, size = x.reshape(-1), x.shape[1]
    for i in range(len(x)):
        for value in flat[i * size : i * size + lengths[i]]:
            out[i] += value


@pytest.fixture
def counted_memory() -> Iterator[None]:
    memory.memsys_enable_stats()
    yield
    memory.memsys_disable_stats()


def counts_references() -> bool:
    """Whether `add_rows`, compiled as a kernel, updates reference counts."""
    kernel = Kernel(add_rows, options(inner=True))
    kernel.compile(tuple(numba.typeof(value) for value in (X, LENGTHS, np.zeros(3))))
    (compiled,) = kernel.overloads.values()
    text = compiled.library.get_llvm_str()
    body = text[text.index("define ") : text.index("\n}\n")]
    assert "add_rows" in body
    return "atomicrmw" in body or "@NRT_incref" in body


def test_slices_of_arguments_are_not_counted(monkeypatch):
    assert not counts_references()
    monkeypatch.setattr(linking, "Lowering", linking.NativeLowering)
    assert counts_references()


@pytest.mark.parametrize("kind", [Kernel, InlineFunction])
def test_borrowed_arrays_outlive_the_call_and_are_freed_once(kind, counted_memory):
    callee = kind(add_rows, options(inner=True))

    def call_often(x, lengths, count):
        results = empty((count, len(x)), np.float64)
        for i in range(count):
            out = empty((len(x),), np.float64)
            out[:] = 0
            callee(x, lengths, out)
            results[i] = out
        return results

    caller = Kernel(call_often, options())
    assert caller(X, LENGTHS, 1).tolist() == [SUMS]
    before = rtsys.get_allocation_stats()
    for count in range(2, 50):
        assert caller(X, LENGTHS, count).tolist() == [SUMS] * count
    after = rtsys.get_allocation_stats()
    assert after.alloc > before.alloc + 1000
    assert after.alloc - before.alloc == after.free - before.free


def layer_arguments(number: int) -> tuple[Any, ...]:
    """One value of each type that a model's layers pass to kernels."""
    return (
        (X + number, (LENGTHS.astype(np.uint16), np.empty(0, np.uint8))),
        number,
        np.float32(number / 4),
        (number % 2 == 1, np.float64(number), ()),
        np.full((2, 1, 2, 3), number, np.float32)[1:],
    )


def test_an_argument_table_returns_its_entries():
    @numba.njit
    def entry(table, i):
        (x, (lengths, none)), number, quarter, (odd, real, nothing), cache = table_entry(table, i)
        sizes = len(nothing), len(none), cache.size
        return (number, quarter, odd, real, *sizes, cache[0, 0, 1, 2]), x.copy(), lengths.copy()

    table = ArgumentTable([layer_arguments(number) for number in range(5)])
    for i in (0, 3, 4):
        (*numbers, last), x, lengths = entry(table, i)
        assert numbers == [i, i / 4, i % 2 == 1, i, 0, 0, 6]
        assert last == i
        assert x.tolist() == (X + i).tolist()
        assert lengths.tolist() == LENGTHS.tolist()


def test_entries_of_an_argument_table_have_one_type():
    with pytest.raises(AssertionError, match="entries of several types"):
        ArgumentTable([(X,), (X.astype(np.float32),)])


@pytest.mark.parametrize("kind", [Kernel, InlineFunction])
def test_returning_a_borrowed_array_raises(kind):
    def either(x, lengths, count):
        row = empty((4,), np.float64)
        row[:] = count
        return (x[0] if lengths[0] > count else row), count

    def first(x, lengths, count):
        row, _ = callee(x, lengths, count)
        return row[0]

    callee = kind(either, options(inner=True))
    caller = Kernel(first, options())
    assert caller(X, LENGTHS, 2) == 2
    with pytest.raises(AssertionError, match="borrowed"):
        caller(X, LENGTHS, 0)


def test_an_interrupt_during_a_kernel_raises_keyboard_interrupt(counted_memory):
    """The interrupt is raised when Python code runs next; a kernel call may run no Python code."""

    def halves(x):
        return x[: len(x) // 2].copy(), x[len(x) // 2 :].copy()

    def on_alarm(*args):
        raise KeyboardInterrupt

    def call_until(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            kernel(LENGTHS)

    kernel = Kernel(halves, options())
    assert [half.tolist() for half in kernel(LENGTHS)] == [[1], [3, 4]]
    before, handler = rtsys.get_allocation_stats(), signal.signal(signal.SIGALRM, on_alarm)
    try:
        for _ in range(300):
            with pytest.raises(KeyboardInterrupt):
                call_until(0.0005)
    finally:
        signal.signal(signal.SIGALRM, handler)
    after = rtsys.get_allocation_stats()
    assert after.alloc - before.alloc == after.free - before.free
