"""Kernel and Part: compiled functions, and what is linked into the functions that call them.

A kernel is machine code with a name. There is one copy on disk and one per process, and callers use
the name. A part is linked into each kernel that calls it, and optimized with it. numba itself does
both with every function: it writes and optimizes machine code for it, and puts a copy into each
caller. The copy is optimized again with the caller, and with the caller's callers.

Both borrow their arrays: callers keep them alive until the function returns. So no references to
arrays or their slices are counted. Counting is an instruction that locks a cache line, and took a
fifth of the time of one row's attention. An array that a kernel returns must therefore be one that
it has made.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import binding
from llvmlite import ir as llvm
from numba import types
from numba.core import cgutils, ir
from numba.core.callwrapper import PyCallWrapper
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.pythonapi import EnvironmentManager, PythonAPI
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


class Kernel(CPUDispatcher):
    """A function whose code exists once."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options, pipeline_class=StepsOfKernel)
        KERNELS[self.place] = self

    @property
    def place(self) -> str:
        """Its module and name."""
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"

    @property
    def _is_inner(self) -> bool:
        """Whether numba has written no wrapper that converts Python objects to its arguments."""
        return bool(self.targetoptions["no_cpython_wrapper"])

    def compile(self, sig: Any) -> Any:
        """Loads or compiles the code for these types.

        Why without garbage collection: it walks the compiler's many objects, an eighth of the time.
        """
        with _no_collection():
            return super().compile(sig)

    def add_overload(self, cres: Any) -> None:
        """Keeps the code for these types; callers link only a reference to it."""
        if self._is_inner:
            self.overloads[tuple(cres.signature.args)] = cres
        else:
            super().add_overload(cres)
        self.targetctx.remove_user_function(cres.entry_point)
        reference = Reference(self, cres)
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [reference])

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        if self._is_inner:
            raise TypeError(f"{self.place} is called by compiled code only")
        return super()._compile_for_args(*args, **kws)


class Part(CPUDispatcher):
    """A function whose code exists only inside the kernels that call it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options, pipeline_class=StepsOfPart)

    def add_overload(self, cres: Any) -> None:
        """Keeps what callers link. `object()` is a placeholder for machine code, which does not
        exist."""
        cres = cres._replace(entry_point=object())
        self.overloads[tuple(cres.signature.args)] = cres
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [cres.library])

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} is a part of kernels, which alone call it")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def borrowed(context: Any, builder: Any, of: types.Type, value: Any) -> Any:
    """The value without numba's reference counters of its arrays."""
    if isinstance(of, types.Array):
        array = context.make_array(of)(context, builder, value)
        for name in ("meminfo", "parent"):
            setattr(array, name, cgutils.get_null_value(getattr(array, name).type))
        return array._getvalue()
    if isinstance(of, types.BaseTuple):
        for i, kind in enumerate(of):
            part = borrowed(context, builder, kind, builder.extract_value(value, i))
            value = builder.insert_value(value, part, i)
    return value


class Objects(PythonAPI):
    """Writes the conversion of results to Python objects, with constants that are ready to use.

    numba has Python unpickle the class of each array at each call. A Ctrl-C is raised there, and
    the code goes on with no class and a result: "returned a result with an exception set".
    """

    constants: EnvironmentManager

    def serialize_object(self, value: Any) -> Any:
        """A constant, which `unserialize` returns unchanged."""
        return Ready(self.constants.read_const(self.constants.add_const(value)))

    def unserialize(self, source: Any) -> Any:
        return source.value if isinstance(source, Ready) else super().unserialize(source)


class Ready(NamedTuple):
    """A constant's location in the code."""

    value: Any


class CallFromPython(PyCallWrapper):
    """The function that Python calls, a wrapper of the compiled one."""

    def build_wrapper(self, api: Any, builder: Any, *of_call: Any) -> None:
        super().build_wrapper(Objects(self.context, builder), builder, *of_call)

    def get_env(self, api: Any, builder: Any) -> EnvironmentManager:
        api.constants = super().get_env(api, builder)
        return api.constants


class Borrowing:
    """Writes the arguments of a borrowing function, and its returns."""

    def create_cpython_wrapper(self, release_gil: bool = False) -> None:
        """Writes the function that Python calls."""
        module, called = self.context.create_module("wrapper"), self.fndesc
        kind = self.context.call_conv.get_function_type(called.restype, called.argtypes)
        function = llvm.Function(module, kind, called.llvm_func_name)
        CallFromPython(
            self.context, module, function, called, self.env, self.call_helper, release_gil
        ).build()
        self.library.add_ir_module(module)

    def extract_function_arguments(self) -> list[Any]:
        given = super().extract_function_arguments()
        kinds = self.fndesc.argtypes
        self.fnargs = [
            borrowed(self.context, self.builder, kind, value)
            for kind, value in zip(kinds, given, strict=True)
        ]
        return self.fnargs

    def lower_inst(self, inst: Any) -> None:
        if isinstance(inst, ir.Return):
            self._require_own(self.fndesc.restype, self.loadvar(inst.value.name))
        super().lower_inst(inst)

    def _require_own(self, of: types.Type, value: Any) -> None:
        """Makes the function raise if it would return a borrowed array, which may have been
        freed."""
        if isinstance(of, types.BaseTuple):
            for i, kind in enumerate(of):
                self._require_own(kind, self.builder.extract_value(value, i))
        if isinstance(of, types.Array):
            array = self.context.make_array(of)(self.context, self.builder, value)
            with self.builder.if_then(cgutils.is_null(self.builder, array.meminfo), likely=False):
                reason = ("a kernel returns an array that it has borrowed",)
                self.call_conv.return_user_exc(self.builder, AssertionError, reason, self.loc)


class BorrowingLower(Borrowing, Lower):
    """numba's LLVM code generation, for a function that borrows."""


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):
    """numba's pass that writes LLVM code."""

    _name = "borrowing lowering"
    lowering_class = BorrowingLower


class Steps(Compiler):
    """numba's passes, with `Lowering` in place of numba's own."""

    def define_pipelines(self) -> list[Any]:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (Lowering if step is NativeLowering else step, name)
                for step, name in pipeline.passes
            ]
        return pipelines


class StepsOfKernel(Steps):
    """numba's passes, for code whose name depends only on the function and its types.

    numba adds the number of functions that the process has compiled so far. Code on disk that calls
    this function would not find it after another process has compiled it again.
    """

    def _compile_bytecode(self) -> Any:
        function = self.state.func_id
        function.unique_id = zlib.crc32(function.code.co_code)
        self.state.library = Code(self.state.targetctx.codegen(), function.func_qualname)
        self.state.library.enable_object_caching()
        return super()._compile_bytecode()


class StepsOfPart(Steps):
    """numba's passes except the last, which makes the code executable."""

    def _compile_bytecode(self) -> Any:
        self.state.flags.no_compile = True
        self.state.library = Text(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super()._compile_bytecode()


class Code(JITCodeLibrary):
    """numba's container for the code of a kernel and its parts.

    No other code links it, so only the names of its functions are stored on disk for linking.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        """Does nothing, because everything is optimized together at the end."""
        ll_module.data_layout = self._codegen._data_layout

    def _get_module_for_linking(self) -> binding.ModuleRef:
        self._ensure_finalized()
        text = str(self._codegen._create_empty_module("names"))
        for function in self.get_defined_functions():
            text += f'define void @"{function.name}"() {{ unreachable }}\n'
        return binding.parse_assembly(text)


class Text(JITCodeLibrary):
    """numba's container for the code of a part, not optimized: its kernels do that."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class Reference:
    """What a caller links instead of a kernel's code: nothing, since the code's name is enough.

    The code must be loaded before the caller's, so the stored code of the caller names the kernels
    that it needs.
    """

    def __init__(self, kernel: Kernel, cres: Any) -> None:
        self._codegen = cres.library.codegen
        module, name = kernel.py_func.__module__, cres.fndesc.llvm_func_name
        need = module, kernel.place, cres.signature.args, name
        self._reload_init = {functools.partial(_bring, *need)}

    def _ensure_finalized(self) -> None:
        pass

    def _get_module_for_linking(self) -> binding.ModuleRef:
        return binding.parse_assembly(str(self._codegen._create_empty_module("reference")))


KERNELS: dict[str, Kernel] = {}
"""By module and name: the latest kernel with that name."""


def _bring(module: str, place: str, types: tuple[Any, ...], name: str) -> None:
    """Loads or compiles a kernel for these types. A caller's code on disk calls it `name`.

    Raises:
        LookupError: it does not exist, or has another name. Why now: the process would be
            terminated where the name is not found.
    """
    if place not in KERNELS:  # Why: compiling the caller imports it, loading the caller doesn't
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    KERNELS[place].compile(types)
    if KERNELS[place].overloads[types].fndesc.llvm_func_name != name:
        raise LookupError(f"{place} is another function than it was")
