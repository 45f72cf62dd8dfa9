"""Test configuration: GPU if there is one, else Triton kernels run in Triton's interpreter.

Nothing here imports torch: the tests of the core don't need it and finish before it is loaded.
"""

import ctypes
import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import guarded, limits


def has_gpu() -> bool:
    """Returns `torch.cuda.is_available()` without torch: by its build and the driver's count."""
    if "+cpu" in version("torch"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 == driver.cuDeviceGetCount(ctypes.byref(count)) and count.value > 0


if not has_gpu():
    # Why here: Triton reads it when kernels and `triton.language` are imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Why: a shell starts background jobs with SIGINT ignored, and tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Why: collecting tests creates no garbage, and garbage collection took a third of that time.
gc.disable()


# Why: two workers share the cores, and a thread that busy-waits takes them from the other worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the tests' own plugins."""
    guarded.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the tests' own plugins: skipping of guarded tests, and timeouts."""
    plugin = guarded.Guarded(config, guarded.ROOT, guarded.ROOT / "tests" / "guarded.json")
    config.pluginmanager.register(plugin, "guarded")
    config.pluginmanager.register(limits.Limits(), "limits")
    # Why: pytest-xdist would run files with few tests last, and the longest files have one test.
    config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without the requested mark, whose imports take half of the collection's time."""
    if re.fullmatch(r"\w+( or \w+)*", config.option.markexpr):
        marks = config.option.markexpr.split(" or ")
    elif config.option.guarded == "only":
        marks = ["guards"]
    else:
        return None
    if not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    source = collection_path.read_text(encoding="utf-8")
    return None if any(f"mark.{name}" in source for name in marks) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts a worker's files: those with timeouts first, then by number of tests. A worker that
    ends with a long file would leave the others idle."""
    if not hasattr(config, "workerinput"):
        return
    limits_s, counts = Counter[Path](), Counter(item.path for item in items)
    for item in items:
        for mark in item.iter_markers("timeout"):
            limits_s[item.path] = max(limits_s[item.path], mark.args[0])
    items.sort(key=lambda item: (-limits_s[item.path], -counts[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Limits torch to one thread, since tiny models gain nothing from more."""
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ and "triton.language" in sys.modules:
        from tests.support import interpreter

        interpreter.quicken()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Freezes existing objects before each file; collecting them took a tenth of the total time.

    `gc.get_freeze_count` takes 20 ms and each LLM and each batch calls it, so it is patched.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


def pytest_unconfigure(config: pytest.Config) -> None:
    """Unfreezes objects, so that libraries see them freed; otherwise some warn of leaks."""
    gc.unfreeze()
