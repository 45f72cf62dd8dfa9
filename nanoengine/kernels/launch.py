"""launch: the only function that launches our Triton kernels, and small helpers for grids.

Called by the code that chooses grids. Tests replace `launch` to record or forbid launches.
"""

from __future__ import annotations

import subprocess
import sysconfig
from typing import Any

import triton

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import truncate

Constants = dict[str, Any]
"""All constexprs of a launch, and options such as num_warps."""


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants, *args: Any) -> None:
    """Launches a kernel; `args` may differ between launches: tensors, ints, floats."""
    kernel[grid](*args, **constants)


@triton.jit
def empty_kernel():
    """Does nothing: see `require_compiler`."""


def require_compiler() -> None:
    """Launches a kernel, for which Triton compiles C code on this machine unless it did before.

    Raises:
        ConfigError: compilation fails, usually because there is no C compiler or no Python.h.
    """
    try:
        launch(empty_kernel, (1,), {})
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"Triton can't build kernels for this GPU: {truncate(error)}; it needs a C compiler and"
            f" Python's headers, such as the packages gcc and python3-dev, and Python.h in"
            f" {sysconfig.get_paths()['include']}: install them, or set device='cpu'"
        ) from error


def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up. Why not Triton's: it takes 1 us on the host, 14 times per
    layer."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()
