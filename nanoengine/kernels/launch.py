"""launch: a compiled Triton kernel goes to the GPU without Triton's binder.

Called by what chooses grids for our kernels. `kernel[grid](...)` describes all arguments of a
launch anew, to find the compiled kernel. That is 7 us of a fast core, some 140 times in a step
with a prompt, which no graph holds. `launch` keeps what was found, by all that it depends on.

What is passed on is never guessed. The first launch of each kind is Triton's own; a second, which
reaches no GPU, shows what Triton would pass to the compiled kernel. Where that is not exactly what
`launch` would pass (another release of Triton), the binder keeps that kind of launch.

Has run with Triton's compiler and a stand-in for the driver; has not run on a GPU yet.
"""

from __future__ import annotations

import functools
import operator
import subprocess
import sysconfig
import threading
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import brief

BINDING = threading.Lock()
"""Why: what one thread only shows, no other thread may launch meanwhile."""


class Constants(dict[str, Any]):
    """All constexprs of a launch, and options such as num_warps: made once, by what is cached.

    Attributes:
        ready: what a launch with them passes, by all else that it depends on; None: Triton's binder
            has this kind.
    """

    def __init__(self, **constants: Any) -> None:
        super().__init__(constants)
        self.ready: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}


constants = functools.cache(Constants)
"""The same object for the same names and values."""


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants, *args: Any) -> None:
    """As `kernel[grid](*args, **constants)`; `args` are all that may change from launch to launch:
    tensors, ints, floats."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    active = driver.active
    device = active.get_current_device()
    key: list[Any] = [id(kernel), device]
    add = key.append
    for value in args:
        if isinstance(value, torch.Tensor):
            add(value.dtype)
            if value.data_ptr() & 15:
                add("unaligned")
        elif type(value) is int and -(2**31) <= value < 2**31:
            add("one" if value == 1 else value & 15 == 0)
        else:  # a float has one kind; of anything else each value is one
            add(float if type(value) is float else (type(value), value))
    kind = tuple(key)
    ready = constants.ready.get(kind)
    if ready is None or hooked():
        with BINDING:
            compiled = kernel.run(*args, grid=grid, warmup=False, **constants)
            if kind not in constants.ready:
                constants.ready[kind] = prepared(compiled, kernel, grid, args, constants)
        return
    run, function, packed, tail, _ = ready
    stream = active.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, stream, function, packed, None, None, None, *args, *tail)


@triton.jit
def empty_kernel():
    """Does nothing: see `require_compiler`."""


def require_compiler() -> None:
    """Launches a kernel, for which Triton compiles C code on this machine unless it did before.

    Raises:
        ConfigError: it can't, mostly because there is no C compiler, or no Python.h.
    """
    try:
        launch(empty_kernel, (1,), constants())
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"Triton can't build kernels for this GPU: {brief(error)}; it needs a C compiler and"
            f" Python's headers, such as the packages gcc and python3-dev, and Python.h in"
            f" {sysconfig.get_paths()['include']}: install them, or set device='cpu'"
        ) from error


def hooked() -> bool:
    """Whether a profiler of Triton's listens to launches: these the binder tells it."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def prepared(
    compiled: Any, kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]
) -> tuple[Any, ...] | None:
    """What `launch` needs besides the arguments; None where Triton would pass anything else."""
    if [p.is_constexpr for p in kernel.params] != sorted(p.is_constexpr for p in kernel.params):
        return None
    tail = tuple(constants.get(p.name, p.default) for p in kernel.params[len(args) :])
    run, shown = getattr(compiled, "_run", None), []
    if run is None or len(tail) != sum(p.is_constexpr for p in kernel.params):
        return None
    compiled._run = lambda *given: shown.append(given)
    try:
        kernel.run(*args, grid=grid, warmup=False, **constants)
    finally:
        compiled._run = run
    device = driver.active.get_current_device()
    function, packed = compiled.function, compiled.packed_metadata
    stream = driver.active.get_current_stream(device)
    passed = (*(*grid, 1, 1)[:3], stream, function, packed)
    rest = (*args, *tail)
    if len(shown) != 1 or shown[0][:6] != passed or len(shown[0]) != 9 + len(rest):
        return None
    if not all(map(operator.is_, shown[0][9:], rest)):
        return None
    return run, function, packed, tail, compiled  # Why compiled: what it has loaded stays loaded.


def cdiv(number: int, by: int) -> int:
    """number / by rounded up. Why not Triton's: some 1 us of host, 14 times in a layer."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two from `number` on, which is 1 or more."""
    return 1 << (number - 1).bit_length()
