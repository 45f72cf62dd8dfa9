"""Where tests run: on the GPU if there is one; else Triton kernels run in its interpreter.

Nothing here imports torch: the tests of the core need none, and are done before it would be loaded.
"""

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import guarded, limits


def has_gpu() -> bool:
    """What `torch.cuda.is_available` tells, without torch: its build, and the driver's count."""
    if "+cpu" in version("torch"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 == driver.cuDeviceGetCount(ctypes.byref(count)) and count.value > 0


if not has_gpu():
    # Why here: Triton reads it when kernels, and its own library, are imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Why: a shell starts what runs behind its back with Ctrl-C ignored, and tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Why: nothing is garbage while tests are collected, and looking for it took a third of that time.
gc.disable()


# Why: two workers share the cores, and a thread that spins for work takes them from the other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests' own plugins."""
    guarded.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """The tests' own plugins: what need not run is left out, and what hangs is ended."""
    plugin = guarded.Guarded(config, guarded.ROOT, guarded.ROOT / "tests" / "guarded.json")
    config.pluginmanager.register(plugin, "guarded")
    config.pluginmanager.register(limits.Limits(), "limits")
    # Why: pytest-xdist would end with the files of few tests, and the longest have one.
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among workers, files whose tests have time begin, then those of many tests: a worker that
    ends with a long one leaves the others without work."""
    if not hasattr(config, "workerinput"):
        return
    limits_s, counts = Counter[Path](), Counter(item.path for item in items)
    for item in items:
        for mark in item.iter_markers("timeout"):
            limits_s[item.path] = max(limits_s[item.path], mark.args[0])
    items.sort(key=lambda item: (-limits_s[item.path], -counts[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread, as tiny models gain nothing from more."""
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ and "triton.language" in sys.modules:
        from tests.support import interpreter

        interpreter.quicken()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """No collection walks what was there before a file's tests, which took a tenth of all time.

    Whoever asks is told so without a count, which takes 20 ms: each LLM and each batch asks.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


def pytest_unconfigure(config: pytest.Config) -> None:
    """Lets libraries see everything freed at the end; some warn of leaks otherwise."""
    gc.unfreeze()
