"""Linear layers whose checkpoints store rows otherwise: fused already, or heads in another order.

Called by `models/variants.py` and `models/states.py`.
"""

from __future__ import annotations

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.layers.layer import ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear
from nanoengine.layers.other_rotary import head_order


class OneTensor(MergedLinear):
    """Matrices that the checkpoint holds as one tensor, of this layer's own name."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.row_order(name, len(rows))))
            first += size
        matrix = MatrixPart((first, self.in_features), order=torch.cat(found))
        return self.slots_of(path, matrix)


class OtherQKV(QKVLinear):
    """The query, key and value projections, with rows in the order that the layer reads them.

    Dimensions of query and key heads are ordered as `other_rotary.head_order` says. Where the
    checkpoint holds a gate behind each query head, all gates come first here, before the queries:
    [..., (2 H + 2 K) * D].
    """

    def __init__(self, name: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(name, config, context, query_rows=1 + config.plan.output_gate)
        self.head_order, self.head_dim = head_order(config), config.head_dim
        self.gated = config.plan.output_gate

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        gated, order = self.gated and name == "q_proj", self.head_order
        if name == "v_proj" or (order is None and not gated):
            return None
        heads = torch.arange(num_rows).view(-1, self.head_dim)
        queries = heads[::2] if gated else heads
        queries = queries if order is None else queries[:, order]
        return torch.cat((heads[1::2], queries) if gated else (queries,)).flatten()


class OneTensorQKV(OtherQKV, OneTensor):
    """Both at once."""
