"""python -m nanoengine.kernels.aot forwards|backwards [ISA]: compiles the kernels that models
usually need.

`setup.py` runs it while the package is installed, in an environment without torch; the code goes to
`NANOENGINE_CACHE`. `aot.txt` lists what is compiled, one line for each signature with which
Python calls a kernel; kernels that are called by these are compiled as well. `tools/aot.py`
writes that file.

Two processes can run at once, one from each end of the table: each finds what the other has
compiled.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from numba import types
from numba.core import config

from nanoengine.kernels import isa

TABLE = Path(__file__).with_suffix(".txt")


def main(order: str, name: str | None = None) -> None:
    """Compiles all of the table, for this CPU's instruction set or for another one."""
    for candidate in isa.ISAS:
        if candidate.name == name:  # Why: nothing runs here, and `use` rejects what this CPU lacks.
            config.CPU_FEATURES = isa.target_features(candidate)
    isa.use(name)
    from nanoengine.kernels import argument_table, cpu_decoder, jit

    jit.BUILT = jit.cache_dirs()[0]  # Why: previously built code may be deleted after this.
    operands = cpu_decoder.Attention, cpu_decoder.GatedMLP, cpu_decoder.LayerTail
    names: dict[str, Any] = {**vars(types), "ArgumentTableType": argument_table.ArgumentTableType}
    names |= {k.__name__: lambda *fields, kind=k: types.NamedTuple(fields, kind) for k in operands}
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    for line in lines if order == "forwards" else reversed(lines):
        qualified_name, _, signature = line.partition(" ")
        module_name, _, kernel_name = qualified_name.rpartition(".")
        module = importlib.import_module(f"nanoengine.kernels.{module_name}")
        getattr(module, kernel_name).compile(eval(signature, names))


if __name__ == "__main__":
    main(*sys.argv[1:])
