"""TritonRows: a decode's inputs, and the advance of its rows, in one kernel each.

The DecodeStep uses them on CUDA. `device_rows.py` is their readable form in plain torch; the
kernels are in `kernels/triton_rows.py`.

The kernels have been run in Triton's interpreter and compiled ahead of time; they have not run on a
GPU yet.
"""

from __future__ import annotations

import torch

from nanoengine.kernels import triton_rows as kernels
from nanoengine.kernels.launch import Constants, cdiv, launch
from nanoengine.layers.embedding import Embedding
from nanoengine.layers.kernels import UnquantizedLinear
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.device_rows import DeviceRows, Inputs

WIDTH = 512
"""Entries of a block table copied at a time: 4 for each of 128 threads, 16 bytes."""

ADVANCED = 128
"""Rows that one program advances, one a thread."""


class TritonRows(DeviceRows):
    """As its twin, to the bit.

    Attributes:
        embedding, angles: tables [V, N] and [positions, D], of whose rows a plain model's layers
            begin; None: it looks them up itself.
    """

    embedding: torch.Tensor | None = None

    def look_up(self, model: CausalLM) -> None:
        """From now on `gather` finds the rows of a plain model's tables too."""
        if type(model) is not CausalLM or model.model.embed_tokens.method is not None:
            return
        embed = model.model.embed_tokens
        plain = embed.lookup.__func__ in (Embedding.plain_lookup, UnquantizedLinear.rows)
        if plain and embed.shard.world_size == 1 and embed.weight.dtype == embed.dtype:
            self.embedding, self.angles = embed.weight, model.model.rotary.table

    def gather(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Inputs | None]:
        num_groups, with_padding, num_blocks = self.tables.shape
        size, device = len(rows), rows.device
        gathered = {
            "token_ids": torch.empty(size, dtype=torch.int64, device=device),
            "positions": torch.empty(size, dtype=torch.int64, device=device),
            "slot_mapping": torch.empty((num_groups, size), dtype=torch.int64, device=device),
            "seq_lens": torch.empty(size, dtype=torch.int32, device=device),
            "block_tables": self.tables.new_empty((num_groups, size, num_blocks)),
        }
        found, sizes = [self.pool] * 4, None
        if self.embedding is not None:
            tables = self.embedding, self.angles
            x, rotation = (table.new_empty(size, table.shape[1]) for table in tables)
            found, sizes = [x, rotation, *tables], kernels.RowSizes(x.shape[1], rotation.shape[1])
        launch(
            kernels.gather_kernel, (size, num_groups),
            Constants(
                LINES=with_padding, NUM_BLOCKS=num_blocks, BLOCK_SIZE=self.block_size,
                WIDTH=WIDTH, SIZES=sizes, num_warps=4,
            ),
            *gathered.values(), self.draw_params,
            rows, self.pool, self.lengths, self.tables, self.columns, self.seeds, *found,
        )  # fmt: skip
        if sizes is None:
            return gathered, None
        return gathered, (x, rotation.unsqueeze(1).chunk(2, dim=-1))

    def advance(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        launch(
            kernels.advance_kernel, (cdiv(len(rows), ADVANCED),),
            Constants(PADDING=len(self.pool) - 1, SIZE=ADVANCED, num_warps=4),
            self.pool, self.lengths, rows, token_ids, len(rows),
        )  # fmt: skip
