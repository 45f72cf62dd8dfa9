"""parallel_for: a kernel's work in pieces, done by the caller and by the workers that are free.

    caller   publishes a job ─ takes pieces ─ takes pieces of others ─ waits for pieces begun ─►
    worker   ───────────────── takes pieces ─ takes pieces of others ─ waits for the next job

Each thread begins with its own pieces, the same ones in every job, so that a weight stays near the
core that reads it. A thread without pieces takes pieces of others. A core that another program
keeps busy therefore costs its share and no more, and no thread waits for a worker that does not
come: a job can finish without any. Workers first wait in a short loop, since the next job of a step
begins within microseconds. Then they sleep for short times, which leaves the core to others. After
a while they return to Python, where `threads.py` wakes them.

A core that another program wants is a problem: the system gives it to each for milliseconds. If a
worker loses it within a piece, all others wait for that piece. So a worker whose clocks show that
it had no core for a while yields: it leaves between two pieces, sleeps for some milliseconds, works
for one, and so on, and others do its pieces. If the caller loses its core, one of the workers
yields. (Systems then move the threads that share a core apart.)

Results never depend on which thread did a piece: pieces write to separate memory, and each has the
same bits anywhere.

Why not numba's `prange`: it uses OpenMP threads, which spin until all have arrived, so that a busy
core cost two thirds of the throughput; and it compiles each loop as one more function. Perf:
docs/benchmarks.md.

One job runs at a time. A thread that finds another thread's job running does its pieces alone.

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

from nanoengine.kernels.emit import writes
from nanoengine.kernels.jit import compiled

MOST = 4095  # pieces of a job, and workers: 12 bits
SMALL = 8192  # elements; about 2 us of work, the cost of a parallel region
PIECES = 4  # per worker: a late worker leaves some of them to others

# Words of the memory that all threads share; each has a separate cache line.
LINE = 8  # words
JOB, FUNCTION, ARGUMENTS, LEFT, BUSY, STOP, LOOKS, CORE, CROWDED, TAKEN = (
    i * LINE for i in range(10)
)
# JOB: number of the job << 24 | workers << 12 | pieces. TAKEN: from here on one line per worker:
# number of the job << 24 | the worker's next piece. LOOKS: how often a waiting thread looks at the
# memory before it sleeps, measured by `threads.py`. CORE: the caller's. CROWDED: the caller has
# lost its core for a while, and no worker has yielded since.

# Words after a worker's TAKEN, which only this worker reads; the caller is worker 0: its clocks
# when it last looked at them; when it last yielded, or ended a job as the caller; how many more
# times it will yield, and the initial number; when it last found that it had lost its core [ns].
WALL, CPU, ENDED, REST, RESTS, LOSS = range(1, 7)

NAP = 50  # us
NAPS = 1000  # before a worker returns to Python

TURN = 1_000_000  # ns of work between two looks at the clocks
LOST = 1_000_000  # ns without a core: another program has it
CALM = 20_000_000  # ns after which losing the core again is a new event
MOST_RESTS = 64
BESIDE = 4  # jobs in a row on the caller's core

IDLE, CROWD, MOVE = range(3)
"""Why a worker returns to Python: nothing to do; to yield its core; it runs on the caller's
core."""

FOLLOWS = sys.platform == "linux"
"""Whether workers query clocks and cores; other systems have other calls for them."""

_memory = np.zeros(TAKEN + (MOST + 1) * LINE, np.int64)
WORDS = _memory[-_memory.ctypes.data % 64 // 8 :]
"""The shared memory: int64, aligned to a cache line."""


def _system() -> tuple[Any, Any]:
    """The system's sleep function, which takes one number, and the number for `NAP`."""
    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32").Sleep, 1
    return ctypes.CDLL(None).usleep, NAP


_sleep, _SLEEPS = _system()
binding.add_symbol("nanoengine_pool", WORDS.ctypes.data)
binding.add_symbol("nanoengine_sleep", ctypes.cast(_sleep, ctypes.c_void_p).value)

if FOLLOWS:
    for _name in ("clock_gettime", "sched_getcpu"):
        _address = ctypes.cast(getattr(ctypes.CDLL(None), _name), ctypes.c_void_p).value
        binding.add_symbol(f"nanoengine_{_name}", _address)

WORD, INT = ir.IntType(64), ir.IntType(32)
POINTER = ir.IntType(8).as_pointer()
DOES_A_PIECE = ir.FunctionType(ir.VoidType(), [POINTER, WORD])


def _word(builder: Any, place: Any) -> Any:
    """The address of a word of the shared memory."""
    name = "nanoengine_pool"
    memory = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, WORD, name)
    return builder.gep(memory, [place])


@writes(types.int64)
def _load(emit, place):
    return emit.builder.load_atomic(_word(emit.builder, place), "acquire", 8)


@writes()
def _store(emit, place, value):
    emit.builder.store_atomic(value, _word(emit.builder, place), "release", 8)


@writes(types.boolean)
def _replace(emit, place, expected, value):
    """Compare-and-swap: stores the value and returns True if the word is `expected`."""
    word = _word(emit.builder, place)
    found = emit.builder.cmpxchg(word, expected, value, "acq_rel", "acquire")
    return emit.builder.extract_value(found, 1)


@writes()
def _subtract(emit, place, value):
    emit.builder.atomic_rmw("sub", _word(emit.builder, place), value, "acq_rel")


@writes()
def _rest(emit):
    """Hints to the core that this is a spin loop."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        emit.call("llvm.aarch64.hint", ir.VoidType(), INT(1))  # the one called YIELD
    else:
        emit.call("llvm.x86.sse2.pause", ir.VoidType())


@writes()
def _nap(emit):
    emit.call("nanoengine_sleep", INT, INT(_SLEEPS))


@writes(types.int64)
def _time(emit, of_thread):
    """The wall clock, or this thread's CPU time [ns]."""
    if not FOLLOWS:
        return WORD(0)
    builder = emit.builder
    clocks = INT(time.CLOCK_THREAD_CPUTIME_ID), INT(time.CLOCK_MONOTONIC)
    memory = cgutils.alloca_once(builder, ir.ArrayType(WORD, 2))
    emit.call("nanoengine_clock_gettime", INT, builder.select(of_thread, *clocks), memory)
    s, ns = (builder.load(cgutils.gep_inbounds(builder, memory, 0, i)) for i in range(2))
    return builder.add(builder.mul(s, WORD(10**9)), ns)


@writes(types.int64)
def _core(emit):
    """The number of the core on which this runs."""
    if not FOLLOWS:
        return WORD(0)
    return emit.builder.sext(emit.call("nanoengine_sched_getcpu", INT), WORD)


@writes()
def _do(emit, function, arguments, piece):
    builder = emit.builder
    function = builder.inttoptr(function, DOES_A_PIECE.as_pointer())
    builder.call(function, [builder.inttoptr(arguments, POINTER), piece])


@compiled(fastmath=(), part=True)
def share_of(count, worker, workers):
    """(lo, hi): of `count` items in a row, this worker's are lo to hi - 1."""
    return count * worker // workers, count * (worker + 1) // workers


@compiled(fastmath=())
def _stamp(worker):
    """Stores the clocks; time before this call no longer counts."""
    place = TAKEN + worker * LINE
    _store(place + WALL, _time(False))
    _store(place + CPU, _time(True))


@compiled(fastmath=())
def _has_lost_core(worker, now):
    """Whether another program had the core since the last look, and also shortly before.

    Why twice: a daemon that wakes takes a core for a moment and gives it back, which costs less
    than yielding. A program that keeps running takes it again and again.
    """
    place = TAKEN + worker * LINE
    wall, cpu = _load(place + WALL), _load(place + CPU)
    _stamp(worker)
    if now - wall - (_load(place + CPU) - cpu) <= LOST:
        return False
    before = _load(place + LOSS)
    _store(place + LOSS, now)
    return now - before < CALM


@compiled(fastmath=())
def _makes_room(worker):
    """Whether a worker leaves now. If it must yield again shortly after, it does so twice as often
    in a row."""
    place = TAKEN + worker * LINE
    now = _time(False)
    if now - _load(place + WALL) < TURN:
        return False
    if _has_lost_core(worker, now) or _replace(CROWDED, 1, 0):
        is_calm = now - _load(place + ENDED) > CALM
        rests = 1 if is_calm else min(2 * _load(place + RESTS), MOST_RESTS)
        _store(place + RESTS, rests)
        _store(place + REST, rests)
    rest = _load(place + REST)
    if rest > 0:
        _store(place + REST, rest - 1)
        _store(place + ENDED, now)
    return rest > 0


@compiled(fastmath=())
def _work(job, worker):
    """Does pieces of a job until all have been taken, or until this worker must yield; returns
    whether it must.

    A word of TAKEN only grows. A thread that still has an older job in mind therefore takes no
    piece: all pieces of that job were taken before the next job was published. A thread that has
    taken a piece finds the job's function and arguments unchanged, as nothing is published before
    the piece is done.
    """
    number, workers, done = job >> 24 << 24, job >> 12 & MOST, 0
    for i in range(workers):
        owner = worker + i if worker + i < workers else worker + i - workers
        first, stop = share_of(job & MOST, owner, workers)
        place = TAKEN + owner * LINE
        taken = _load(place)
        while True:
            piece = first if taken < number else taken - number
            if piece >= stop:
                break
            if _replace(place, taken, number + piece + 1):
                _do(_load(FUNCTION), _load(ARGUMENTS), piece)
                done += 1
                if FOLLOWS and worker and _makes_room(worker):
                    _subtract(LEFT, done)
                    return True
            taken = _load(place)
    if done:
        _subtract(LEFT, done)
    return False


@compiled(fastmath=())
def _run(function, arguments, pieces, workers):
    """Runs all pieces, and waits for the pieces that workers have begun."""
    if not _replace(BUSY, 0, 1):
        for piece in range(pieces):
            _do(function, arguments, piece)
        return
    job = ((_load(JOB) >> 24) + 1) << 24 | workers << 12 | pieces
    _store(FUNCTION, function)
    _store(ARGUMENTS, arguments)
    _store(LEFT, pieces)
    _store(JOB, job)
    if _time(False) - _load(TAKEN + ENDED) > TURN // 10:  # It was in Python, and may have slept.
        _stamp(0)
    _work(job, 0)
    looks, most = 0, _load(LOOKS)
    while _load(LEFT) > 0:
        looks += 1
        if looks < most:
            _rest()
        else:
            _nap()
    now = _time(False)
    if looks > most:
        _stamp(0)
    elif now - _load(TAKEN + WALL) > TURN and _has_lost_core(0, now):
        _store(CROWDED, 1)
    _store(TAKEN + ENDED, now)
    _store(CORE, _core())
    _store(BUSY, 0)


@compiled(fastmath=())
def serve(worker):
    """Works on other threads' jobs; returns the reason for stopping."""
    seen, looks, most, beside = _load(JOB), 0, _load(LOOKS), 0
    _stamp(worker)
    while looks < most + NAPS and not _load(STOP):
        job = _load(JOB)
        if job != seen:
            if looks >= most:
                _stamp(worker)
            seen, looks = job, 0
            if worker < job >> 12 & MOST and _work(job, worker):
                return CROWD
            beside = beside + 1 if FOLLOWS and _core() == _load(CORE) else 0
            if beside > BESIDE:
                return MOVE
        elif looks < most:
            _rest()
        else:
            _nap()
        looks += 1
    return IDLE


@compiled(fastmath=())
def look(times):
    """Looks at the memory this many times, like a waiting thread."""
    for _ in range(times):
        if _load(STOP) < 2:
            _rest()


RUN = types.Dispatcher(_run)


@intrinsic
def parallel_for(typing_context, kernel, count, workers, arguments):
    """kernel(*arguments, lo, hi) for parts that cover range(count), on up to `workers` threads.
    With one worker or one item it is a single call.

    Raises:
        MemoryError: raised by a piece; other pieces may have run.
    """
    every = (*(types.unliteral(of) for of in arguments), types.int64, types.int64)
    called = kernel.get_call_type(typing_context, every, {})
    running = RUN.get_call_type(typing_context, (types.int64,) * 4, {})
    signature = types.void(kernel, types.int64, types.int64, arguments)

    def call(context, builder, values, lo, hi):
        """Writes a call of the kernel; returns whether the call failed."""
        described = kernel.dispatcher.overloads[called.args].fndesc
        function = context.declare_function(builder.module, described)
        status, _ = context.call_conv.call_function(
            builder, function, called.return_type, called.args, [*values, lo, hi]
        )
        return status.is_error

    def written(context, module, kind):
        """A function that does one piece, with (failed, count, pieces, *values) in memory."""
        function = ir.Function(module, DOES_A_PIECE, module.get_unique_name("piece"))
        function.linkage = "internal"
        builder = ir.IRBuilder(function.append_basic_block())
        memory, piece = builder.bitcast(function.args[0], kind.as_pointer()), function.args[1]
        places = [cgutils.gep_inbounds(builder, memory, 0, i) for i in range(len(kind.elements))]
        _, count, pieces, *values = (builder.load(place) for place in places)
        lo, hi = (
            builder.sdiv(builder.mul(count, at), pieces)
            for at in (piece, builder.add(piece, WORD(1)))
        )
        with builder.if_then(call(context, builder, values, lo, hi), likely=False):
            builder.store(WORD(1), places[0])
        builder.ret_void()
        return function

    def codegen(context, builder, signature, args):
        for of in (context.get_function(kernel, called), context.get_function(RUN, running)):
            context.add_linking_libs(getattr(of, "libs", ()))
        _, count, workers, packed = args
        values = [
            context.cast(builder, builder.extract_value(packed, i), of, every[i])
            for i, of in enumerate(arguments)
        ]
        failed = cgutils.alloca_once_value(builder, WORD(0))
        few = (builder.icmp_signed("<=", number, WORD(1)) for number in (count, workers))
        with builder.if_else(builder.or_(*few)) as (alone, together):
            with alone:
                error = call(context, builder, values, WORD(0), count)
                builder.store(builder.zext(error, WORD), failed)
            with together:
                most = builder.mul(workers, WORD(PIECES))
                for limit in (count, WORD(MOST)):
                    less = builder.icmp_signed("<", limit, most)
                    most = builder.select(less, limit, most)
                fields = [WORD(0), count, most, *values]
                kind = ir.LiteralStructType([field.type for field in fields])
                memory = cgutils.alloca_once(builder, kind)
                for i, field in enumerate(fields):
                    builder.store(field, cgutils.gep_inbounds(builder, memory, 0, i))
                addresses = written(context, builder.module, kind), memory
                where = [builder.ptrtoint(address, WORD) for address in addresses]
                context.get_function(RUN, running)(builder, [*where, most, workers])
                error = builder.load(cgutils.gep_inbounds(builder, memory, 0, 0))
                builder.store(error, failed)
        with builder.if_then(cgutils.is_not_null(builder, builder.load(failed)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("in a piece of a kernel",))
        return context.get_dummy_value()

    return signature, codegen


PAGE = 4096  # bytes; for larger pages only the first touch matters


@compiled(fastmath=())
def _touch(memory, lo, hi):
    for at in range(lo, hi, PAGE):
        memory[at] = 0


@compiled(fastmath=())
def touch(memory, workers):
    """Touches each page of flat bytes, not yet initialised, from the worker that will read it.

    A system with several sockets places a page on the socket whose thread touches it first. Why by
    bytes: panels are equally long, so each panel is touched by the worker that reads it, except
    where two shares meet.
    """
    parallel_for(_touch, len(memory), workers, (memory,))
