"""Kernel and InlineFunction: how compiled functions are linked with the functions that call them.

A kernel is machine code with a symbol name. There is one copy on disk and one per process, and
callers refer to the name. An inline function is linked into each kernel that calls it, and
optimized with it. numba itself does both with every function: it writes and optimizes machine code
for it, and puts a copy into each caller. The copy is optimized again with the caller, and with the
caller's callers.

Both borrow their arrays: callers keep them alive until the function returns. So no references to
arrays or their slices are counted. Counting is an instruction that locks a cache line, and took a
fifth of the time of one row's attention. A kernel may therefore only return arrays that it has
created.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import zlib
from collections.abc import Callable
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
        super().__init__(function, targetoptions=options, pipeline_class=KernelPipeline)
        KERNELS[self.qualified_name] = self

    @property
    def qualified_name(self) -> str:
        """The function's module and name."""
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"

    @property
    def _is_internal(self) -> bool:
        """Whether numba has written no wrapper that converts Python objects to its arguments."""
        return bool(self.targetoptions["no_cpython_wrapper"])

    def compile(self, sig: Any) -> Any:
        """Loads or compiles the code for these types.

        Why without garbage collection: it takes an eighth of the time, for the compiler's many
        objects.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if was_enabled:
                gc.enable()

    def add_overload(self, cres: Any) -> None:
        """Registers the code for these types; callers link only a reference to it."""
        if self._is_internal:
            self.overloads[tuple(cres.signature.args)] = cres
        else:
            super().add_overload(cres)
        self.targetctx.remove_user_function(cres.entry_point)
        reference = KernelReference(self, cres)
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [reference])

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        if self._is_internal:
            raise TypeError(f"{self.qualified_name} can only be called by compiled code")
        return super()._compile_for_args(*args, **kws)


class InlineFunction(CPUDispatcher):
    """A function whose code exists only inside the kernels that call it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options, pipeline_class=InlinePipeline)

    def add_overload(self, cres: Any) -> None:
        """Registers the LLVM code that callers link. `object()` is a placeholder for machine code,
        which does not exist."""
        cres = cres._replace(entry_point=object())
        self.overloads[tuple(cres.signature.args)] = cres
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [cres.library])

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} is inline: only kernels can call it")


def borrowed(context: Any, builder: Any, numba_type: types.Type, value: Any) -> Any:
    """The value without numba's reference counters of its arrays."""
    if isinstance(numba_type, types.Array):
        array = context.make_array(numba_type)(context, builder, value)
        for name in ("meminfo", "parent"):
            setattr(array, name, cgutils.get_null_value(getattr(array, name).type))
        return array._getvalue()
    if isinstance(numba_type, types.BaseTuple):
        for i, element_type in enumerate(numba_type):
            element = borrowed(context, builder, element_type, builder.extract_value(value, i))
            value = builder.insert_value(value, element, i)
    return value


class ResultBoxer(PythonAPI):
    """Writes the conversion of results to Python objects; the classes of arrays are constants.

    numba's own code unpickles the class of each returned array at each call. A Ctrl-C is raised
    there, and the code continues without the class: "returned a result with an exception set".
    """

    constants: EnvironmentManager

    def serialize_object(self, value: Any) -> Any:
        """A constant, which `unserialize` returns unchanged."""
        return EnvConstant(self.constants.read_const(self.constants.add_const(value)))

    def unserialize(self, source: Any) -> Any:
        return source.value if isinstance(source, EnvConstant) else super().unserialize(source)


class EnvConstant(NamedTuple):
    """A constant's location in the code."""

    value: Any


class CallFromPython(PyCallWrapper):
    """Writes the function that Python calls, a wrapper of the compiled one."""

    def build_wrapper(self, api: Any, builder: Any, *call_args: Any) -> None:
        super().build_wrapper(ResultBoxer(self.context, builder), builder, *call_args)

    def get_env(self, api: Any, builder: Any) -> EnvironmentManager:
        api.constants = super().get_env(api, builder)
        return api.constants


class BorrowingLower(Lower):
    """numba's LLVM code generation, with the arguments and the returns of a function that borrows
    its arrays."""

    def create_cpython_wrapper(self, release_gil: bool = False) -> None:
        """Writes the function that Python calls."""
        module, fndesc = self.context.create_module("wrapper"), self.fndesc
        function_type = self.context.call_conv.get_function_type(fndesc.restype, fndesc.argtypes)
        function = llvm.Function(module, function_type, fndesc.llvm_func_name)
        CallFromPython(
            self.context, module, function, fndesc, self.env, self.call_helper, release_gil
        ).build()
        self.library.add_ir_module(module)

    def extract_function_arguments(self) -> list[Any]:
        args = super().extract_function_arguments()
        arg_types = self.fndesc.argtypes
        self.fnargs = [
            borrowed(self.context, self.builder, arg_type, value)
            for arg_type, value in zip(arg_types, args, strict=True)
        ]
        return self.fnargs

    def lower_inst(self, inst: Any) -> None:
        if isinstance(inst, ir.Return):
            self._reject_borrowed(self.fndesc.restype, self.loadvar(inst.value.name))
        super().lower_inst(inst)

    def _reject_borrowed(self, numba_type: types.Type, value: Any) -> None:
        """Makes the function raise if it would return a borrowed array, which may have been
        freed."""
        if isinstance(numba_type, types.BaseTuple):
            for i, element_type in enumerate(numba_type):
                self._reject_borrowed(element_type, self.builder.extract_value(value, i))
        if isinstance(numba_type, types.Array):
            array = self.context.make_array(numba_type)(self.context, self.builder, value)
            with self.builder.if_then(cgutils.is_null(self.builder, array.meminfo), likely=False):
                reason = ("a kernel returned a borrowed array: return a copy",)
                self.call_conv.return_user_exc(self.builder, AssertionError, reason, self.loc)


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):
    """numba's pass that writes LLVM code."""

    _name = "borrowing lowering"
    lowering_class = BorrowingLower


class BorrowingPipeline(Compiler):
    """numba's passes, with `Lowering` instead of numba's own."""

    def define_pipelines(self) -> list[Any]:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (Lowering if step is NativeLowering else step, name)
                for step, name in pipeline.passes
            ]
        return pipelines


class KernelPipeline(BorrowingPipeline):
    """numba's passes, for a symbol name that depends only on the function and its types.

    numba's own names contain the number of functions that the process has compiled before. With
    them, code on disk would not find a function that another process has compiled again.
    """

    def _compile_bytecode(self) -> Any:
        function = self.state.func_id
        function.unique_id = zlib.crc32(function.code.co_code)
        self.state.library = KernelLib(self.state.targetctx.codegen(), function.func_qualname)
        self.state.library.enable_object_caching()
        return super()._compile_bytecode()


class InlinePipeline(BorrowingPipeline):
    """numba's passes except the last, which makes the code executable."""

    def _compile_bytecode(self) -> Any:
        self.state.flags.no_compile = True
        self.state.library = IRLib(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super()._compile_bytecode()


class KernelLib(JITCodeLibrary):
    """numba's container for the code of a kernel and its inline functions.

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


class IRLib(JITCodeLibrary):
    """numba's container for the LLVM code of an inline function, not optimized: its kernels are
    optimized with it."""

    _optimize_functions = KernelLib._optimize_functions

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class KernelReference:
    """The library that a caller links instead of a kernel's code: it is empty, because the symbol's
    name is enough.

    The kernel must be loaded before its caller, so the stored code of the caller lists the kernels
    that it needs.
    """

    def __init__(self, kernel: Kernel, cres: Any) -> None:
        self._codegen = cres.library.codegen
        module, name = kernel.py_func.__module__, cres.fndesc.llvm_func_name
        load_args = module, kernel.qualified_name, cres.signature.args, name
        self._reload_init = {functools.partial(_load_kernel, *load_args)}

    def _ensure_finalized(self) -> None:
        pass

    def _get_module_for_linking(self) -> binding.ModuleRef:
        return binding.parse_assembly(str(self._codegen._create_empty_module("reference")))


KERNELS: dict[str, Kernel] = {}
"""Maps `Kernel.qualified_name` to the latest kernel with that name."""


def _load_kernel(module: str, qualified_name: str, types: tuple[Any, ...], name: str) -> None:
    """Loads or compiles a kernel for these types, before a caller's code on disk is loaded, which
    refers to the symbol `name`.

    Raises:
        LookupError: the kernel does not exist, or its symbol has another name. Why here: the linker
            would terminate the process.
    """
    if qualified_name not in KERNELS:  # Why: loading a caller doesn't import it
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    KERNELS[qualified_name].compile(types)
    if KERNELS[qualified_name].overloads[types].fndesc.llvm_func_name != name:
        raise LookupError(f"{qualified_name} has changed since its caller was compiled")
