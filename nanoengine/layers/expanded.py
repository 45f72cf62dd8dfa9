"""Weights that a checkpoint stores quantized, held as floats: where no kernel multiplies the stored
form.

Each matrix becomes floats while it loads, so the stored form of one at a time is in memory. Called
by `runner/numerics.py`; `quantized.py` is for CPUs, `triton_quantized.py` for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.layers.kernels import ROUTERS, LinearMethod
from nanoengine.layers.quantized_formats import FORMATS, GGUF, StoredFormat
from nanoengine.layers.quantized_weight import QuantizedWeight


def expanded_linears(
    stored: StoredQuantization, exact: Callable[[str], LinearMethod]
) -> Callable[[str], LinearMethod]:
    """What makes the method of a linear layer, given its full name: one that `exact` makes, but
    that it reads the stored form.

    Why no class of its own: kernels go by the classes of methods whose weights are floats.
    """

    def method(name: str) -> LinearMethod:
        made = exact(name)
        own = None if name.endswith(ROUTERS) else stored.of(name)
        if own is not None:
            slot = partial(_slot, made, made.weight_slot, FORMATS[own.format](own))
            object.__setattr__(made, "weight_slot", slot)
        return made

    return method


def _slot(
    method: LinearMethod,
    plain: Callable[[str, MatrixPart], WeightSlot],
    reader: StoredFormat | GGUF,
    name: str,
    matrix: MatrixPart,
) -> WeightSlot:
    """`LinearMethod.weight_slot`, with the tensors of the stored form as pieces."""
    rows, columns = (*matrix.part, slice(None), slice(None))[:2]

    def load(weight: QuantizedWeight, first: int) -> None:
        # Why columns last: a rank's may cut through a group.
        method.load(weight.dequantized()[:, columns], first)

    pieces = reader.matrix_slots(name, matrix._replace(part=(rows,)), load)
    return replace(plain(name, matrix), pieces=pieces, pieces_only=True)
