"""on_threads: a compiled function on all of numba's threads at once.

It stands in for numba's `prange`, which takes half a second a loop to compile, and Python's lock
whenever a loop begins.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic
from numba.np.ufunc.parallel import _launch_threads

BYTE, WORD, FLAG = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(8)


@intrinsic
def on_threads(typing, work, arguments):
    """Each thread calls work((which it is, how many there are), *arguments), once.

    Raises:
        MemoryError: a call failed, and nothing else makes one fail.
    """
    kinds = (types.UniTuple(types.intp, 2), *(types.unliteral(kind) for kind in arguments))
    typing.resolve_function_type(work, kinds, {})

    def codegen(context, builder, sig, args):
        _launch_threads()  # makes the functions below known, here and where the code is loaded
        context.active_code_library._reload_init.add(_launch_threads)
        fndesc = work.dispatcher.overloads[kinds].fndesc
        called = context.get_function(work, signature(fndesc.restype, *kinds))
        context.add_linking_libs(called.libs)
        packer = context.get_arg_packer(kinds[1:])
        numbers = packer.as_arguments(builder, cgutils.unpack_tuple(builder, args[1]))
        threads = builder.call(_external(builder, "get_num_threads", WORD, []), [])
        fields = [FLAG(0), threads, *numbers]
        kind = ir.LiteralStructType([field.type for field in fields])
        shared = cgutils.alloca_once(builder, kind)
        for i, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, shared, 0, i))
        places, counts, steps = (
            cgutils.alloca_once_value(builder, value) for value in (BYTE(None), threads, WORD(1))
        )
        run = _external(builder, "numba_parallel_for", ir.VoidType(), [BYTE] * 5 + [WORD] * 3)
        function = _of_a_thread(context, builder.module, fndesc, packer, kind)
        pointers = [
            builder.bitcast(pointer, BYTE) for pointer in (function, places, counts, steps, shared)
        ]
        builder.call(run, [*pointers, WORD(0), WORD(1), threads])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_not_null(builder, failed)):
            context.call_conv.return_user_exc(builder, MemoryError, ("a thread had no memory",))
        return context.get_dummy_value()

    return types.void(work, arguments), codegen


def _external(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _of_a_thread(context, module, fndesc, packer, kind):
    """The function that numba's threads call: (places, counts, steps, shared). A place is a number
    here, the first of the `counts[0]` that are to be done."""
    of = [BYTE.as_pointer(), WORD.as_pointer(), WORD.as_pointer(), BYTE]
    name = module.get_unique_name("of_a_thread")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), of), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    first = builder.ptrtoint(builder.load(function.args[0]), WORD)
    shared = builder.bitcast(function.args[3], kind.as_pointer())
    with cgutils.for_range(builder, builder.load(function.args[1])) as loop:
        threads, *numbers = (
            builder.load(cgutils.gep_inbounds(builder, shared, 0, i))
            for i in range(1, len(kind.elements))
        )
        thread = cgutils.pack_array(builder, [builder.add(first, loop.index), threads])
        status, _ = context.call_conv.call_function(
            builder, context.declare_function(module, fndesc), fndesc.restype, fndesc.argtypes,
            [thread, *packer.from_arguments(builder, numbers)],
        )  # fmt: skip
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(FLAG(1), cgutils.gep_inbounds(builder, shared, 0, 0))
    builder.ret_void()
    return function
