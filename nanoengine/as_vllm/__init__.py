"""Runs unmodified vLLM programs: provides vLLM's modules with nanoengine's classes. Opt-in.

    python -m nanoengine.as_vllm PROGRAM [ARGS]       a file
    python -m nanoengine.as_vllm -m MODULE [ARGS]     a module, such as lm_eval
    import nanoengine.as_vllm; nanoengine.as_vllm.install()         first cell of a notebook

    vllm.sampling_params.SamplingParams   "names" of vllm.json    as_vllm/params.py
    vllm.lora.request.LoRARequest         "absent"                a class that raises when used
    vllm.unknown.module                   not listed              ImportError

vLLM has moved names between modules, so each module here provides all of them, and programs for any
vLLM version find their imports. The rest of nanoengine does not import this package. Importing it
installs nothing and loads no torch. Source: modules, names and defaults of vLLM up to 0.33.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import nearest
from nanoengine.version import __version__

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("vllm.json").read_text())
"""vllm.json: modules, names and their definitions here, and names without a meaning here."""

VERSION: str = TABLES["version"]
"""The vLLM version whose API is provided."""

PATH = str(Path(__file__).with_name("path"))
"""A folder on programs' module path with vLLM's version and a `vllm` for child processes."""

USAGE = """usage: python -m nanoengine.as_vllm PROGRAM [ARGS]
       python -m nanoengine.as_vllm -m MODULE [ARGS]"""


def install() -> None:
    """Provides `vllm` and `nanovllm`, before installed packages; prints one line to stderr.

    Raises:
        ConfigError: one of them is imported already.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    for top in ("vllm", "nanovllm"):
        if top in sys.modules:
            raise ConfigError(f"{top} is imported already: call install() before the first import")
    sys.meta_path.insert(0, Finder())
    sys.path.insert(0, PATH)
    about = f"nanoengine {__version__} provides the API of vllm {VERSION}: docs/moving_from_vllm.md"
    print(about, file=sys.stderr)


def run(arguments: Sequence[str]) -> None:
    """Runs a program as Python would, with this `vllm` for it and for its child processes.

    Raises:
        SystemExit: raised by the program, or there is no such program.
    """
    import runpy

    is_module = arguments[:1] == ["-m"]
    words = list(arguments[is_module:])
    if not words or words[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    if not is_module and not Path(words[0]).is_file():
        raise SystemExit(f"there is no file {words[0]!r}: give a program file, or -m and a module")
    install()
    paths = [PATH, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.argv = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


class Finder:
    """Finds and creates vLLM's modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module; None for other packages."""
        if name.partition(".")[0] not in ("vllm", "nanovllm"):
            return None
        if name not in TABLES["modules"]:
            # Why without `name=`: `from vllm import unknown` would replace the message.
            raise ModuleNotFoundError(
                f"nanoengine provides vLLM's offline API, and has no {name!r}; {_near(name)}"
            )
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that looks up its names at access."""
        return ModuleShim(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


class ModuleShim(ModuleType):
    """One of vLLM's modules."""

    def __getattr__(self, name: str) -> Any:
        """The object with this name in nanoengine.

        Raises:
            AttributeError: there is none.
        """
        is_nano = self.__name__.startswith("nano")
        home = TABLES["nano_names" if is_nano else "names"].get(name)
        if home is not None:
            module, _, attribute = home.partition(":")
            return getattr(importlib.import_module(module), attribute)
        why = next((why for why, names in TABLES["absent"].items() if name in names), None)
        if why is None or is_nano:
            raise AttributeError(f"{self.__name__} has no {name!r} in nanoengine; {_near(name)}")
        setattr(self, name, unsupported(name, why))
        return getattr(self, name)


def _near(name: str) -> str:
    known = [*TABLES["modules"], *TABLES["names"]]
    hint = nearest(name.rpartition(".")[2], known)
    return hint if hint.startswith("did you mean") else "see docs/moving_from_vllm.md"


class Unsupported(type):
    """A vLLM name without a meaning here: a class, for annotations and `isinstance`."""

    why: str

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Unsupported:
        for base in bases:
            base()
        return super().__new__(mcs, name, bases, space)

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        raise ConfigError(f"vLLM's {cls.__name__} is not supported: {cls.why}")

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"vLLM's {cls.__name__}.{name} is not supported: {cls.why}")


def unsupported(name: str, why: str) -> Any:
    """An object that raises with the reason when it is called, accessed or subclassed."""
    return Unsupported(name, (), {"why": why})
