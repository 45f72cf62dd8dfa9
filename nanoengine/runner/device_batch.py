"""DeviceBatch: the device's copy of each batch row, for decode steps that run without the host.

    one entry per row; the last entry belongs to padding, and stays 0
        pool              the next token                       (`InputBatch.pool`)
        next_positions    its position                         tables    block ids
        params            temperature, top_k, top_p, min_p     seeds     as in `Sampler.seeds`

    rows of a decode ─► gather ─► forward, sample ─► advance

Used by the DecodeStep. `gather` and `advance` are 40 small torch kernels. They have fixed shapes
and never wait for the host, so a CUDA graph can capture them.
"""

from __future__ import annotations

import torch

from nanoengine.runner.sampling.draw import random_bits


class DeviceBatch:
    """The tensors of all rows.

    Args:
        pool: the next token of each row, and 0 for padding, [R + 1] int64; owned by `InputBatch`.
        num_groups, num_blocks: shape of a row's block tables.
        block_size: tokens per block.

    Attributes:
        draw_params: `DrawParams` of the rows that were gathered last, [5, R + 1] float64.
    """

    def __init__(
        self, pool: torch.Tensor, *, num_groups: int, num_blocks: int, block_size: int
    ) -> None:
        size, device = len(pool), pool.device
        self.pool, self.block_size = pool, block_size
        self.next_positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.tables = torch.zeros((num_groups, size, num_blocks), dtype=torch.int32, device=device)
        self.params = torch.zeros((4, size), dtype=torch.float64, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.draw_params = torch.zeros((5, size), dtype=torch.float64, device=device)

    def gather(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a decode of these rows [S] int64, named as in `Batch`: token_ids and
        positions [S] int64, slot_mapping [G, S] int64, seq_lens [S] int32, block_tables [G, S, M]
        int32. Fills `draw_params`."""
        positions = self.next_positions.index_select(0, rows)
        tables = self.tables.index_select(1, rows)  # [G, S, M]
        indices = (positions // self.block_size).expand(len(tables), -1)[:, :, None]
        blocks = tables.gather(2, indices)[:, :, 0].long()
        self.draw_params[:4, : len(rows)] = self.params.index_select(1, rows)
        seeds = self.seeds.index_select(0, rows)
        self.draw_params[4, : len(rows)] = random_bits(seeds, positions + 1).double() * 2.0**-53
        return {
            "token_ids": self.pool.index_select(0, rows),
            "positions": positions,
            "slot_mapping": blocks * self.block_size + positions % self.block_size,
            "seq_lens": (positions + 1).int(),
            "block_tables": tables,
        }

    def advance(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Stores the next tokens [S] and increments the positions; the padding entry stays 0."""
        self.pool.index_copy_(0, rows, token_ids)
        self.next_positions.index_copy_(0, rows, self.next_positions.index_select(0, rows) + 1)
        self.pool[-1:].zero_()
        self.next_positions[-1:].zero_()
