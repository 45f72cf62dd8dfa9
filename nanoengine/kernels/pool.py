"""parallel_for: splits a kernel's work into pieces, for the calling thread and idle workers.

    caller   publishes a job ─ own pieces ─ pieces of other threads ─ waits for the last pieces ─►
    worker   ───────────────── own pieces ─ pieces of other threads ─ waits for the next job

Each thread begins with its own pieces, the same ones in every job, so that a weight stays in the
cache of the core that reads it. A thread without pieces steals pieces of other threads. A core that
another program keeps busy therefore costs only its share, and a job can finish without any worker.
Workers first spin, because the next job of a step begins within microseconds. Then they sleep for
short times, which frees the core. After a while they return to Python, where `threads.py` wakes
them.

If another program also uses a core, the system alternates between both every few milliseconds. If a
worker loses its core within a piece, all other threads wait for that piece. So a worker whose
clocks show that it had no core for a while yields: it stops between two pieces, sleeps for some
milliseconds, works for one, and so on; other threads run its pieces. If the caller loses its core,
one of the workers yields. (The system then moves the threads that share a core apart.)

Results never depend on which thread runs a piece: pieces write to separate memory, and each has the
same bits on any thread.

Why not numba's `prange`: it uses OpenMP threads, which spin until all are finished, so that a busy
core cost two thirds of the throughput; and it compiles each loop as a separate function. Perf:
docs/benchmarks.md.

One job runs at a time. A thread that finds another thread's job running runs its pieces alone.

Source: work stealing, Blumofe and Leiserson, "Scheduling Multithreaded Computations by Work
Stealing" (1999); here pieces are few and known in advance, so one counter per worker replaces the
queues.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import emit_intrinsic
from nanoengine.kernels.jit import compiled

MAX_PIECES = MAX_WORKERS = 4095  # of a job: 12 bits each
SMALL = 8192  # elements; about 2 us of work, the cost of a parallel region
PIECES = 4  # per worker: a late worker leaves some of them to others

# Words of the memory that all threads share; each has a separate cache line.
LINE = 8  # words
JOB, FUNCTION, ARGUMENTS, REMAINING, BUSY, STOP, SPINS, CORE, CALLER_LOST_CORE, NEXT_PIECE = (
    i * LINE for i in range(10)
)
# JOB: job ID << 24 | workers << 12 | pieces. REMAINING: pieces of the job that are not finished.
# BUSY: a job is running. STOP: workers must end. SPINS: how often a waiting thread reads the memory
# before it sleeps, measured by `threads.py`. CORE: the core on which the caller runs.
# CALLER_LOST_CORE: the caller had no core for a while, and no worker has yielded since. NEXT_PIECE:
# from here on one cache line per worker: job ID << 24 | the worker's next piece.

# Words after a worker's NEXT_PIECE, which only this worker reads; the caller is worker 0. WALL,
# CPU: its clocks when it last read them. LAST_END: when it last yielded, or ended a job as the
# caller. YIELDS_LEFT, YIELDS: how many more times it will yield, and the initial number. LAST_LOSS:
# when it last found that it had lost its core. All times in ns.
WALL, CPU, LAST_END, YIELDS_LEFT, YIELDS, LAST_LOSS = range(1, 7)

SLEEP_US = 50
MAX_SLEEPS = 1000  # before a worker returns to Python

CHECK_NS = 1_000_000  # of work between two checks of the clocks
LOST_NS = 1_000_000  # without a core: another program has it
CALM_NS = 20_000_000  # after which losing the core again is a new event
MAX_YIELDS = 64  # in a row
SAME_CORE_JOBS = 4  # consecutive jobs on the caller's core, after which a worker moves

IDLE, YIELD, MOVE = range(3)
"""Why a worker returns to Python: it has nothing to do; it yields its core; it runs on the caller's
core and must move to another one."""

HAS_CLOCKS = sys.platform == "linux"
"""Whether workers read clocks and cores, by system calls of Linux."""

_memory = np.zeros(NEXT_PIECE + (MAX_PIECES + 1) * LINE, np.int64)
WORDS = _memory[-_memory.ctypes.data % 64 // 8 :]
"""The shared memory: int64, aligned to a cache line."""


def _sleep_function() -> tuple[Any, Any]:
    """The system's sleep function, which takes one integer, and the integer for `SLEEP_US`."""
    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32").Sleep, 1
    return ctypes.CDLL(None).usleep, SLEEP_US


_system_sleep, _SLEEP_ARGUMENT = _sleep_function()
binding.add_symbol("nanoengine_pool", WORDS.ctypes.data)
binding.add_symbol("nanoengine_sleep", ctypes.cast(_system_sleep, ctypes.c_void_p).value)

if HAS_CLOCKS:
    for _name in ("clock_gettime", "sched_getcpu"):
        _address = ctypes.cast(getattr(ctypes.CDLL(None), _name), ctypes.c_void_p).value
        binding.add_symbol(f"nanoengine_{_name}", _address)

WORD, INT = ir.IntType(64), ir.IntType(32)
POINTER = ir.IntType(8).as_pointer()
PIECE_FUNCTION = ir.FunctionType(ir.VoidType(), [POINTER, WORD])


def _word_address(builder: Any, index: Any) -> Any:
    """The address of a word of the shared memory."""
    name = "nanoengine_pool"
    memory = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, WORD, name)
    return builder.gep(memory, [index])


@emit_intrinsic(types.int64)
def _load(emit, index):
    return emit.builder.load_atomic(_word_address(emit.builder, index), "acquire", 8)


@emit_intrinsic()
def _store(emit, index, value):
    emit.builder.store_atomic(value, _word_address(emit.builder, index), "release", 8)


@emit_intrinsic(types.boolean)
def _compare_and_swap(emit, index, expected, value):
    """Compare-and-swap: stores the value and returns True if the word is `expected`."""
    word = _word_address(emit.builder, index)
    found = emit.builder.cmpxchg(word, expected, value, "acq_rel", "acquire")
    return emit.builder.extract_value(found, 1)


@emit_intrinsic()
def _subtract(emit, index, value):
    emit.builder.atomic_rmw("sub", _word_address(emit.builder, index), value, "acq_rel")


@emit_intrinsic()
def _spin_hint(emit):
    """Hints to the core that this is a spin loop."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        emit.call("llvm.aarch64.hint", ir.VoidType(), INT(1))  # the YIELD instruction
    else:
        emit.call("llvm.x86.sse2.pause", ir.VoidType())


@emit_intrinsic()
def _sleep(emit):
    emit.call("nanoengine_sleep", INT, INT(_SLEEP_ARGUMENT))


@emit_intrinsic(types.int64)
def _time(emit, of_thread):
    """The wall clock, or this thread's CPU time [ns]."""
    if not HAS_CLOCKS:
        return WORD(0)
    builder = emit.builder
    clocks = INT(time.CLOCK_THREAD_CPUTIME_ID), INT(time.CLOCK_MONOTONIC)
    memory = cgutils.alloca_once(builder, ir.ArrayType(WORD, 2))
    emit.call("nanoengine_clock_gettime", INT, builder.select(of_thread, *clocks), memory)
    s, ns = (builder.load(cgutils.gep_inbounds(builder, memory, 0, i)) for i in range(2))
    return builder.add(builder.mul(s, WORD(10**9)), ns)


@emit_intrinsic(types.int64)
def _core(emit):
    """The number of the core on which this runs."""
    if not HAS_CLOCKS:
        return WORD(0)
    return emit.builder.sext(emit.call("nanoengine_sched_getcpu", INT), WORD)


@emit_intrinsic()
def _run_piece(emit, function, arguments, piece):
    builder = emit.builder
    function = builder.inttoptr(function, PIECE_FUNCTION.as_pointer())
    builder.call(function, [builder.inttoptr(arguments, POINTER), piece])


@compiled(fastmath=(), inline=True)
def share_of(count, worker, workers):
    """(lo, hi): this worker's share of `count` items is lo ... hi - 1."""
    return count * worker // workers, count * (worker + 1) // workers


@compiled(fastmath=())
def _store_clocks(worker):
    """Stores the worker's clocks, so that a later check ignores the time before this call."""
    base = NEXT_PIECE + worker * LINE
    _store(base + WALL, _time(False))
    _store(base + CPU, _time(True))


@compiled(fastmath=())
def _has_lost_core(worker, now):
    """Whether another program had the core since the last check, and also shortly before that.

    Why twice: a daemon that wakes up uses a core for a moment, which costs less than yielding. A
    program that keeps running takes the core again and again.
    """
    base = NEXT_PIECE + worker * LINE
    wall, cpu = _load(base + WALL), _load(base + CPU)
    _store_clocks(worker)
    if now - wall - (_load(base + CPU) - cpu) <= LOST_NS:
        return False
    last_loss = _load(base + LAST_LOSS)
    _store(base + LAST_LOSS, now)
    return now - last_loss < CALM_NS


@compiled(fastmath=())
def _must_yield(worker):
    """Whether a worker must yield its core now. If it must yield again shortly after, it yields
    twice as many times in a row."""
    base = NEXT_PIECE + worker * LINE
    now = _time(False)
    if now - _load(base + WALL) < CHECK_NS:
        return False
    if _has_lost_core(worker, now) or _compare_and_swap(CALLER_LOST_CORE, 1, 0):
        is_calm = now - _load(base + LAST_END) > CALM_NS
        yields = 1 if is_calm else min(2 * _load(base + YIELDS), MAX_YIELDS)
        _store(base + YIELDS, yields)
        _store(base + YIELDS_LEFT, yields)
    left = _load(base + YIELDS_LEFT)
    if left > 0:
        _store(base + YIELDS_LEFT, left - 1)
        _store(base + LAST_END, now)
    return left > 0


@compiled(fastmath=())
def _work(job, worker):
    """Runs pieces of a job until none is left, or until this worker must yield; returns whether it
    must.

    The words at NEXT_PIECE only grow. A thread that has read an older job therefore gets no piece:
    all pieces of that job were claimed before the next job was published. A thread that has claimed
    a piece finds the job's function and arguments unchanged, because no job is published before the
    piece is finished.
    """
    job_id, workers, done = job >> 24 << 24, job >> 12 & MAX_PIECES, 0
    for i in range(workers):
        owner = worker + i if worker + i < workers else worker + i - workers
        first, stop = share_of(job & MAX_PIECES, owner, workers)
        counter = NEXT_PIECE + owner * LINE
        next_piece = _load(counter)
        while True:
            piece = first if next_piece < job_id else next_piece - job_id
            if piece >= stop:
                break
            if _compare_and_swap(counter, next_piece, job_id + piece + 1):
                _run_piece(_load(FUNCTION), _load(ARGUMENTS), piece)
                done += 1
                if HAS_CLOCKS and worker and _must_yield(worker):
                    _subtract(REMAINING, done)
                    return True
            next_piece = _load(counter)
    if done:
        _subtract(REMAINING, done)
    return False


@compiled(fastmath=())
def _run(function, arguments, pieces, workers):
    """Runs a job: publishes it, works on it, and waits for the pieces that workers have begun."""
    if not _compare_and_swap(BUSY, 0, 1):
        for piece in range(pieces):
            _run_piece(function, arguments, piece)
        return
    job = ((_load(JOB) >> 24) + 1) << 24 | workers << 12 | pieces
    _store(FUNCTION, function)
    _store(ARGUMENTS, arguments)
    _store(REMAINING, pieces)
    _store(JOB, job)
    if _time(False) - _load(NEXT_PIECE + LAST_END) > CHECK_NS // 10:  # It was in Python.
        _store_clocks(0)
    _work(job, 0)
    spins, max_spins = 0, _load(SPINS)
    while _load(REMAINING) > 0:
        spins += 1
        if spins < max_spins:
            _spin_hint()
        else:
            _sleep()
    now = _time(False)
    if spins > max_spins:
        _store_clocks(0)
    elif now - _load(NEXT_PIECE + WALL) > CHECK_NS and _has_lost_core(0, now):
        _store(CALLER_LOST_CORE, 1)
    _store(NEXT_PIECE + LAST_END, now)
    _store(CORE, _core())
    _store(BUSY, 0)


@compiled(fastmath=())
def serve(worker):
    """The loop of a worker: runs pieces of other threads' jobs; returns why it returns to
    Python."""
    seen, spins, max_spins, same_core_jobs = _load(JOB), 0, _load(SPINS), 0
    _store_clocks(worker)
    while spins < max_spins + MAX_SLEEPS and not _load(STOP):
        job = _load(JOB)
        if job != seen:
            if spins >= max_spins:
                _store_clocks(worker)
            seen, spins = job, 0
            if worker < job >> 12 & MAX_PIECES and _work(job, worker):
                return YIELD
            same_core_jobs = same_core_jobs + 1 if HAS_CLOCKS and _core() == _load(CORE) else 0
            if same_core_jobs > SAME_CORE_JOBS:
                return MOVE
        elif spins < max_spins:
            _spin_hint()
        else:
            _sleep()
        spins += 1
    return IDLE


@compiled(fastmath=())
def spin(times):
    """Reads the shared memory this many times, like a waiting thread."""
    for _ in range(times):
        if _load(STOP) < 2:
            _spin_hint()


RUN = types.Dispatcher(_run)


@intrinsic
def parallel_for(typing_context, kernel, count, workers, arguments):
    """Calls kernel(*arguments, lo, hi) for ranges that cover range(count), on up to `workers`
    threads. With one worker or one item it is a single call.

    Raises:
        MemoryError: a piece could not allocate memory; other pieces may have run.
    """
    arg_types = (*(types.unliteral(arg_type) for arg_type in arguments), types.int64, types.int64)
    kernel_call = kernel.get_call_type(typing_context, arg_types, {})
    run = RUN.get_call_type(typing_context, (types.int64,) * 4, {})
    signature = types.void(kernel, types.int64, types.int64, arguments)

    def call(context, builder, values, lo, hi):
        """Writes a call of the kernel; returns whether the call failed."""
        descriptor = kernel.dispatcher.overloads[kernel_call.args].fndesc
        function = context.declare_function(builder.module, descriptor)
        status, _ = context.call_conv.call_function(
            builder, function, kernel_call.return_type, kernel_call.args, [*values, lo, hi]
        )
        return status.is_error

    def write_piece_function(context, module, struct):
        """Writes a function that runs one piece; (failed, count, pieces, *values) are in memory."""
        function = ir.Function(module, PIECE_FUNCTION, module.get_unique_name("piece"))
        function.linkage = "internal"
        builder = ir.IRBuilder(function.append_basic_block())
        memory, piece = builder.bitcast(function.args[0], struct.as_pointer()), function.args[1]
        fields = [cgutils.gep_inbounds(builder, memory, 0, i) for i in range(len(struct.elements))]
        _, count, pieces, *values = (builder.load(pointer) for pointer in fields)
        lo, hi = (
            builder.sdiv(builder.mul(count, at), pieces)
            for at in (piece, builder.add(piece, WORD(1)))
        )
        with builder.if_then(call(context, builder, values, lo, hi), likely=False):
            builder.store(WORD(1), fields[0])
        builder.ret_void()
        return function

    def codegen(context, builder, signature, args):
        for function in (context.get_function(kernel, kernel_call), context.get_function(RUN, run)):
            context.add_linking_libs(getattr(function, "libs", ()))
        _, count, workers, packed = args
        values = [
            context.cast(builder, builder.extract_value(packed, i), arg_type, arg_types[i])
            for i, arg_type in enumerate(arguments)
        ]
        failed = cgutils.alloca_once_value(builder, WORD(0))
        conditions = (builder.icmp_signed("<=", number, WORD(1)) for number in (count, workers))
        with builder.if_else(builder.or_(*conditions)) as (single, parallel):
            with single:
                error = call(context, builder, values, WORD(0), count)
                builder.store(builder.zext(error, WORD), failed)
            with parallel:
                pieces = builder.mul(workers, WORD(PIECES))
                for limit in (count, WORD(MAX_PIECES)):
                    is_less = builder.icmp_signed("<", limit, pieces)
                    pieces = builder.select(is_less, limit, pieces)
                fields = [WORD(0), count, pieces, *values]
                struct = ir.LiteralStructType([field.type for field in fields])
                memory = cgutils.alloca_once(builder, struct)
                for i, field in enumerate(fields):
                    builder.store(field, cgutils.gep_inbounds(builder, memory, 0, i))
                pointers = write_piece_function(context, builder.module, struct), memory
                addresses = [builder.ptrtoint(address, WORD) for address in pointers]
                context.get_function(RUN, run)(builder, [*addresses, pieces, workers])
                error = builder.load(cgutils.gep_inbounds(builder, memory, 0, 0))
                builder.store(error, failed)
        with builder.if_then(cgutils.is_not_null(builder, builder.load(failed)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("out of memory in a kernel",))
        return context.get_dummy_value()

    return signature, codegen


PAGE = 4096  # bytes; for larger pages only the first touch matters


@compiled(fastmath=())
def _touch(memory, lo, hi):
    for at in range(lo, hi, PAGE):
        memory[at] = 0


@compiled(fastmath=())
def touch(memory, workers):
    """Touches each page of flat, uninitialized bytes from the worker that will read it.

    A system with several sockets places a page on the socket whose thread touches it first. Why by
    bytes: panels are equally long, so each panel is touched by the worker that reads it, except
    where two shares meet.
    """
    parallel_for(_touch, len(memory), workers, (memory,))
