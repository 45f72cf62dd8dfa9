"""compiled: numba's compiler with the options that all kernels share, and a cache that knows them.

numba keeps compiled code on disk and looks at the file of a function alone to tell whether it is
still good. A kernel that calls one of another file would keep that one's old code, so here the code
is good as long as no file of this room has changed. Where no cache can be written, kernels are
compiled at each start.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import logging
import zlib
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.regions import on_threads

log = logging.getLogger(__name__)


@cache
def stamp(room: Path) -> str:
    """A digest of all sources in a directory."""
    digest = hashlib.sha256()
    for path in sorted(room.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiled(
    *, fastmath: Collection[str], parallel: bool = False, inlined: bool = False
) -> Callable[..., Any]:
    """Compiles the function at its first call and keeps the code on disk, where that can be.

    What has an underscore before its name is called by compiled code only.

    Args:
        fastmath: LLVM's flags. None of ours has "nnan" or "ninf": a row with NaN or infinity must
            come out as NaN, there and only there.
        parallel: all threads run the function, each with its own first argument, which callers
            leave out; `shared` says which turns of a loop are a thread's.
        inlined: written into its callers. For what is called in inner loops.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        if parallel:
            return _kernel(_starter(function, fastmath), fastmath)
        return _kernel(function, fastmath, inlined=inlined)

    return decorate


def _starter(work: Callable[..., Any], fastmath: Collection[str]) -> Callable[..., Any]:
    """A function of `work`'s arguments but the first that has all threads run it."""
    name = work.__name__
    work.__qualname__ = f"_{name}_of_a_thread"
    names = ", ".join(list(inspect.signature(work).parameters)[1:])
    room = {"on_threads": on_threads, "work": _kernel(work, fastmath)}
    source = f"def {name}({names}): on_threads(work, ({names},))"
    # Why the file of `work`: beside it numba keeps the code.
    exec(compile(source, work.__code__.co_filename, "exec"), room)
    starter: Any = room[name]
    starter.__module__, starter.__doc__ = work.__module__, work.__doc__
    return starter


def _kernel(
    function: Callable[..., Any], fastmath: Collection[str], *, inlined: bool = False
) -> Kernel:
    kernel = Kernel(
        function,
        targetoptions={
            "nopython": True,
            "nogil": True,
            "boundscheck": None,
            "error_model": "numpy",
            "fastmath": set(fastmath),
            "inline": "always" if inlined else "never",
            "no_cfunc_wrapper": True,
            "no_cpython_wrapper": function.__qualname__.startswith("_"),
        },
        pipeline_class=Named,
    )
    KERNELS[kernel.place] = kernel
    try:
        kernel._cache = KernelCache(function)
    except RuntimeError:  # Why: numba's way to say that it may write nowhere.
        _warn("no directory for them can be written")
    return kernel


@njit(inline="always")
def shared(thread: tuple[int, int], count: int) -> range:
    """The numbers below `count` that are this thread's: (which thread, of how many)."""
    which, threads = thread
    return range(count * which // threads, count * (which + 1) // threads)


class Named(Compiler):
    """numba's steps, for code whose name follows from the function and its types.

    numba adds how many functions the process has compiled so far. Code on the disk that calls this
    one would not find it when another process has compiled it again.
    """

    def _compile_bytecode(self) -> Any:
        function = self.state.func_id
        function.unique_id = zlib.crc32(function.code.co_code)
        code = Code(self.state.targetctx.codegen(), function.func_qualname)
        code.enable_object_caching()
        self.state.library = code
        return super()._compile_bytecode()


class Code(JITCodeLibrary):
    """numba's container of a function's code, less what ours do without.

    numba optimizes each function by itself, and then all that it has linked together. Nothing of
    ours is linked. Nor does anybody link this, so what is kept for that is the functions' names.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _get_module_for_linking(self) -> binding.ModuleRef:
        self._ensure_finalized()
        text = str(self._codegen._create_empty_module("names"))
        for function in self.get_defined_functions():
            text += f'define void @"{function.name}"() {{ unreachable }}\n'
        return binding.parse_assembly(text)


class Kernel(CPUDispatcher):
    """A compiled function that other kernels call, where numba would give each a copy.

    A copy is optimized and written out again in each caller, and in each of its callers.
    """

    @property
    def place(self) -> str:
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"

    @property
    def _is_inner(self) -> bool:
        """Whether numba has written nothing that turns Python's objects into its arguments."""
        return bool(self.targetoptions["no_cpython_wrapper"])

    def compile(self, sig: Any) -> Any:
        """Loads or compiles the code for these types.

        Why without garbage collection: it walks the compiler's many objects, an eighth of the time.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if was_enabled:
                gc.enable()

    def add_overload(self, cres: Any) -> None:
        """Keeps compiled code, and has callers link a reference to it."""
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


class Reference:
    """What a caller links in place of a kernel's code: nothing, since the code's name is enough.

    The code must be there when the caller's is loaded, so what is kept of the caller on the disk
    says which kernels it needs.
    """

    def __init__(self, kernel: Kernel, cres: Any) -> None:
        self._codegen = cres.library.codegen
        need = kernel.place, cres.signature.args, cres.fndesc.llvm_func_name
        self._reload_init = {functools.partial(_bring, *need)}

    def _ensure_finalized(self) -> None:
        pass

    def _get_module_for_linking(self) -> binding.ModuleRef:
        return binding.parse_assembly(str(self._codegen._create_empty_module("reference")))


KERNELS: dict[str, Kernel] = {}
"""By module and name: the last of that name."""


def _bring(place: str, types: tuple[Any, ...], name: str) -> None:
    """Loads or compiles a kernel for these types, whose code a caller on the disk calls `name`.

    Raises:
        LookupError: it has another name. Why now: the process would end where it is not found.
    """
    KERNELS[place].compile(types)
    if KERNELS[place].overloads[types].fndesc.llvm_func_name != name:
        raise LookupError(f"{place} is another function than it was")


class KernelCache(FunctionCache):
    """numba's cache of one function, for which a damaged file and a full disk are no errors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = stamp(Path(__file__).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types; None: it must be compiled."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # Why: a torn pickle raises nearly anything.
            self._forget()
            _warn(f"{self.cache_path} has damaged files ({error})")
            found = None
        if found is None:
            _tell(self.cache_path)
        return found

    def _index_key(self, *of_call: Any) -> tuple[Any, ...]:
        """Why with the instruction set: code for two of them is kept side by side."""
        return (*super()._index_key(*of_call), CURRENT.name)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps compiled code for the next start."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self._forget()
            _warn(str(error))

    def _forget(self) -> None:
        """Why: an index without its new data would name the data of an older source."""
        with contextlib.suppress(OSError):
            Path(self._cache_file._index_path).unlink(missing_ok=True)


@functools.cache
def _tell(directory: str) -> None:
    """Once in a process that compiles anything: ten seconds of silence look like a hang."""
    log.warning(
        "compiling kernels for this CPU (%s): once, some ten seconds; the code is kept in %s",
        CURRENT.name,
        directory,
    )


@functools.cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    log.warning(
        "compiled kernels can't be read or kept: %s. They are compiled now, which takes about a"
        " minute at each start unless NUMBA_CACHE_DIR names a directory that you, and only you, can"
        " write",
        reason,
    )
