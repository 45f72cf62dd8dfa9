"""Others' programs unchanged: vLLM's modules, as names of what is here. Opt-in.

    python -m nanoengine.as_vllm PROGRAM [ARGS]       a file
    python -m nanoengine.as_vllm -m MODULE [ARGS]     a module, such as lm_eval
    import nanoengine.as_vllm; nanoengine.as_vllm.install()         in a notebook, first of all

    vllm.sampling_params.SamplingParams ── names.HERE ──> as_vllm/params.py
    vllm.lora.request.LoRARequest ──────── names.ABSENT ─> a class that raises when it is used
    vllm.unheard.of ────────────────────── ImportError

Nothing of the package imports this room. Importing it installs nothing and loads no torch.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nanoengine.as_vllm.names import ABSENT, HERE, MODULES, NANO, PLAIN, VERSION
from nanoengine.errors import ConfigError
from nanoengine.settings.checks import nearest
from nanoengine.version import __version__

PATH = Path(__file__).parent / "path"
"""On the module path of programs: what tells vLLM's version, and children where vLLM is."""


def install() -> None:
    """Puts `vllm` and `nanovllm` in front of whatever has these names; says so once on stderr.

    Raises:
        ConfigError: another `vllm` is imported already.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    for top in ("vllm", "nanovllm"):
        if top in sys.modules:
            raise ConfigError(f"{top} is imported already: call install() before anything does")
    sys.meta_path.insert(0, Finder())
    sys.path.insert(0, str(PATH))
    print(
        f"nanoengine {__version__} answers for vllm {VERSION}: see docs/moving_from_vllm.md",
        file=sys.stderr,
    )


class Finder:
    """Finds vLLM's modules, and makes them: each gives all names that are known."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The place of a module; None for those of others."""
        if name.partition(".")[0] not in ("vllm", "nanovllm"):
            return None
        if name not in MODULES:
            top, _, last = name.rpartition(".")
            beside = [one.rpartition(".")[2] for one in MODULES if one.startswith(f"{top}.")]
            # Why without `name=`: `from vllm import unknown` would put its own words in the place.
            raise ModuleNotFoundError(
                f"nanoengine stands in for vLLM's offline API, and has no {name!r}"
                f"{_hint(last, [*HERE, *ABSENT, *beside])}"
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module whose names are looked up when they are asked for."""
        return Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


class Stand(ModuleType):
    """One of vLLM's modules."""

    def __getattr__(self, name: str) -> Any:
        """What the name means here.

        Raises:
            AttributeError: nothing; `from vllm import name` makes an ImportError of it.
        """
        homes = NANO if self.__name__.startswith("nanovllm") else HERE
        if name in homes:
            module, _, attribute = homes[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        elif name in PLAIN:
            found = PLAIN[name]
        elif name in ABSENT and homes is HERE:
            found = Absent(name, (), {"why": ABSENT[name]})
        elif name.startswith("__") or f"{self.__name__}.{name}" in MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            hint = _hint(name, [*homes, *PLAIN, *ABSENT])
            raise AttributeError(f"nanoengine has no {name!r} of {self.__name__}{hint}")
        setattr(self, name, found)
        return found


def _hint(name: str, known: Collection[str]) -> str:
    """The known name that looks like it, if one does."""
    hint = nearest(name, known)
    return f"; {hint}" if hint.startswith("did you mean") else ""


class Absent(type):
    """A name of vLLM's without a meaning here: a class, for annotations and `isinstance`."""

    why: str

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        raise ConfigError(f"vLLM's {cls.__name__} is not offered by nanoengine: {cls.why}")

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"vLLM's {cls.__name__}.{name} is not offered by nanoengine: {cls.why}"
        )

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Absent:
        for base in bases:
            base()
        return super().__new__(mcs, name, bases, space)


def run(arguments: Sequence[str]) -> None:
    """Runs a program as Python would, with this `vllm` for it and for its child processes.

    Raises:
        SystemExit: the program's own, or there is no such program.
    """
    import runpy

    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        raise SystemExit("usage: python -m nanoengine.as_vllm PROGRAM [ARGS]\n"
                         "       python -m nanoengine.as_vllm -m MODULE [ARGS]")  # fmt: skip
    program = Path(arguments[0])
    if arguments[0] != "-m" and not program.is_file():
        raise SystemExit(f"no program {arguments[0]!r}: give a file, or -m and a module")
    install()
    paths = [str(PATH), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(program.resolve().parent))
    runpy.run_path(str(program), run_name="__main__")
