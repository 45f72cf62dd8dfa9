"""Group-wise quantized weights of every kernel format, from seeded random values."""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.kernels.groupwise_gemm import TABLES
from nanoengine.layers.quantized_weight import QuantizedWeight

FORMS: dict[str, dict[str, Any]] = {
    "Q8_0": {"bits": 8},
    "Q4_0": {"bits": 4},
    "Q4_1": {"bits": 4, "lowest": 0, "mins": True},
    "Q5_0": {"bits": 5},
    "Q5_1": {"bits": 5, "lowest": 0, "mins": True},
    "Q2_K": {"bits": 2, "lowest": 0, "mins": True, "size": 16, "blocks": True},
    "Q3_K": {"bits": 3, "size": 16, "blocks": True},
    "Q4_K": {"bits": 4, "lowest": 0, "mins": True, "blocks": True},
    "Q5_K": {"bits": 5, "lowest": 0, "mins": True, "blocks": True},
    "Q6_K": {"bits": 6, "size": 16, "blocks": True},
    "IQ4_NL": {"bits": 4, "table": TABLES[1]},
    "IQ4_XS": {"bits": 4, "table": TABLES[1], "blocks": True},
    "MXFP4": {"bits": 4, "table": TABLES[2]},
    "NVFP4": {"bits": 4, "table": TABLES[2], "size": 16, "row_factors": True},
    "IQ2_S": {"bits": 4, "table": TABLES[3], "size": 16, "blocks": True},
    "GPTQ 8": {"bits": 8, "size": 128, "zeros": True},
    "GPTQ 4": {"bits": 4, "size": 64, "zeros": True},
    "GPTQ groups of 16": {"bits": 4, "size": 16, "zeros": True},
    "groups of 96": {"bits": 4, "size": 96},
}


def make_weight(
    name: str, outputs: int, inputs: int, *, seed: int = 0, size: int | None = None
) -> QuantizedWeight:
    """A weight of a form of `FORMS`; `size` overrides the form's group size."""
    form = dict(FORMS[name])
    random = torch.Generator().manual_seed(seed)
    bits, size = form["bits"], size or form.get("size", 32)
    lowest, table = form.get("lowest"), form.get("table", ())
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=random)
    codes[0], codes[1] = 0, (1 << bits) - 1
    values = (
        torch.tensor(table)[codes] if table else codes - (1 << bits - 1 if lowest is None else 0)
    )
    groups, blocks = (outputs, inputs // size), (outputs, inputs // 256)

    def halves(shape: tuple[int, int]) -> torch.Tensor:
        return (torch.randn(shape, generator=random) / 32).half().float()

    scales, mins, zeros = halves(groups), None, None
    if not form.get("mins"):
        scales[2:4] *= 2.0**30  # above float16's range
    if form.get("blocks"):
        scales = torch.randint(-128, 128, groups, generator=random).to(torch.int8)
    if form.get("mins"):
        mins = halves(groups) * 8
        if form.get("blocks"):
            limit = 16 if size == 16 else 64  # the range of the file's bits
            mins = torch.randint(0, limit, groups, generator=random).to(torch.uint8)
            scales = torch.randint(0, limit, groups, generator=random).to(torch.int8)
    factors = halves(blocks) / (127 if mins is None else 1) if form.get("blocks") else None
    if form.get("row_factors"):
        factors = torch.randn(outputs, 1, generator=random)
    if form.get("zeros"):
        zeros = torch.randint(-128, 128, groups, generator=random).float()
    return QuantizedWeight(
        values=values.to(torch.int8), scales=scales, zeros=zeros, bits=bits, group_size=size,
        lowest=lowest, table=table, mins=mins,
        factors=factors, min_factors=None if mins is None or factors is None else halves(blocks),
    )  # fmt: skip
