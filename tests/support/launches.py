"""Launches by `launch` and by Triton's binder, caught where the driver would get them.

Run by tests/kernels/test_launch.py in its own process; see there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from nanoengine.kernels import launch as module
from nanoengine.kernels.launch import constants, launch

SEEN: list[tuple[str, tuple]] = []


class Utils:
    def load_binary(self, name, *rest):
        return 1, name, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Launcher:
    def __init__(self, source, metadata):
        self.metadata = metadata

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        SEEN.append((self.metadata.hash, (x, y, z, stream, function, packed, *map(place, args))))


class Driver(DriverBase):
    def __init__(self):
        self.utils, self.launcher_cls = Utils(), Launcher

    @classmethod
    def is_active(cls):
        return True

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, ty):
        return "int"

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return None


def place(value):
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@triton.jit(do_not_specialize=["free"])
def kernel(out, x, num, free, factor, SIZE: tl.constexpr, WIDE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < num + free, other=0.0) * factor
    tl.store(out + at, value.to(out.dtype.element_ty))


def cases():
    """Kinds of arguments, each with two lists of values that are of one kind."""
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    other, one = torch.ones(80), {"SIZE": 16, "WIDE": True, "num_warps": 4}
    yield [(x, other, 16, 5, 0.5), (other, x, 32, 7, 1.5)], (3,), one
    yield [(x, x, 17, 5, 0.5), (x, x, 19, 16, 0.5)], (3, 2), one
    yield [(x, x, 1, 5, 0.5), (x, other, 1, 1, 0.25)], (3, 2, 4), one
    yield [(x[1:], x, 16, 5, 0.5), (x[3:], x, 48, 5, 0.5)], (3,), one
    yield [(half, x, 16, 5, 0.5), (half, x, 64, 5, 0.5)], (3,), one
    yield [(x, x, 16, 5, 0.5)] * 2, (3,), one | {"SIZE": 32}
    yield [(x, x, 16, 5, 0.5)] * 2, (3,), one | {"num_warps": 8}
    yield [(x, x, 2**40, 5, 0.5)] * 2, (3,), one


def compare() -> None:
    for lists, grid, names in cases():
        for args in [*lists, *lists]:
            SEEN.clear()
            launch(kernel, grid, constants(**names), *args)
            kernel[grid](*args, **names)
            assert len(SEEN) == 2, "one launch each, whatever is only shown"
            assert SEEN[0] == SEEN[1], (args, names, SEEN)


def ready() -> list:
    """All that has been found of all kinds of launches; forgotten when asked for."""
    found = []
    for names in {id(made): made for made in (constants(**c) for _, _, c in cases())}.values():
        found += names.ready.values()
        names.ready.clear()
    return found


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    compare()
    print("same")
    found = ready()
    assert len(found) == 10 and None not in found, found
    print("kinds")
    compare()

    heard: list[object] = []
    (args, *_), grid, names = next(cases())
    knobs.runtime.launch_enter_hook.add(heard.append)
    launch(kernel, grid, constants(**names), *args)
    knobs.runtime.launch_enter_hook.remove(heard.append)
    knobs.runtime.launch_enter_hook.calls.clear()
    binder = kernel.run
    kernel.run = lambda *args, **options: heard.append(args)
    launch(kernel, grid, constants(**names), *args)
    kernel.run = binder
    assert heard == [], "the second launch had no need of the binder, nor the stand-in of a hook"
    print("hooked")

    ready()  # what follows is a release that passes something else
    module.operator.is_, kept = lambda a, b: False, module.operator.is_
    compare()
    module.operator.is_ = kept
    assert set(ready()) == {None}
    print("renamed")


if __name__ == "__main__":
    main()
