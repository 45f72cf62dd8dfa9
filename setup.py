"""Compiles the CPU kernels while the package is built: its first start finds them ready.

The rest of the build is in pyproject.toml. `NANOENGINE_ISAS="avx2 avx512_vnni ..."` names the
instruction sets of a wheel for other machines; without it there is the one of this CPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path

from llvmlite.binding import get_host_cpu_features
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class OfOnePlatform(Distribution):
    """Its wheel is for this Python and this kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class BuildAhead(build_py):
    """Copies the package's files, then compiles its kernels."""

    def run(self) -> None:
        super().run()
        package = "." if self.editable_mode else self.build_lib
        built = Path(package, "nanoengine", "kernels", "built")
        isas = os.environ.get("NANOENGINE_ISAS", "").split()
        mark, made_from = built / "made_from", ground(isas)
        if mark.exists() and mark.read_text(encoding="utf-8") == made_from:
            return
        shutil.rmtree(built, ignore_errors=True)
        runs = [[order, *isa] for isa, order in product([[isa] for isa in isas] or [[]], ORDERS)]
        with tempfile.TemporaryDirectory() as cache:
            start = time.perf_counter()
            failed = any(ThreadPool(os.cpu_count()).map(lambda run: compiles(run, cache), runs))
            for kept in Path(cache).iterdir():
                shutil.copytree(kept, built)
        if failed:
            print("WARNING: kernels could not be compiled: they will be at their first use")
        else:
            mark.write_text(made_from, encoding="utf-8")
            print(f"compiled the CPU kernels in {time.perf_counter() - start:.0f} s")


ORDERS = ("forwards", "backwards")


def ground(isas: list[str]) -> str:
    """A digest of all that the compiled code depends on: what it is made from is not made again."""
    made_by = sys.implementation.cache_tag, version("numba"), version("llvmlite")
    digest = hashlib.sha256(repr((made_by, isas, str(get_host_cpu_features()))).encode())
    for path in sorted(Path("nanoengine", "kernels").glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiles(run: list[str], cache: str) -> int:
    """Compiles from one end of the table; the exit status."""
    command = [sys.executable, "-B", "-m", "nanoengine.kernels.aot", *run]
    return subprocess.call(command, env={**os.environ, "NANOENGINE_CACHE": cache})


setup(cmdclass={"build_py": BuildAhead}, distclass=OfOnePlatform)
