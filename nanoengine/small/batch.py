"""Batch: the tensors of one step. Attention: one layer's keys and values in blocks, and their use.

    block table of a sequence     3    7    1      with block_size 4 and 10 tokens
    position of token i           block table[i // 4], offset i % 4
    slot of token 9               table[2] * 4 + 1 = 1 * 4 + 1 = 5

Legend: T tokens of the step, S sequences, C tokens of a sequence so far, H query heads, K key and
value heads, D head dimension, N blocks, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The T tokens that a step computes, one sequence after the other.

    Attributes:
        token_ids, positions: [T] int64.
        slot_mapping: [T] int64; the slot of each token's key and value.
        num_scheduled_tokens: per sequence, how many of the T tokens belong to it; [S].
        context_slots: per sequence, the slots of its tokens so far, [C] int64.
        logits_indices: which of the T tokens need logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_scheduled_tokens: list[int]
    context_slots: list[torch.Tensor]
    logits_indices: torch.Tensor


class Attention:
    """Attention of one layer over the paged KV cache.

    Attributes:
        k_cache, v_cache: [N, P, K, D]; the ModelRunner binds each layer to its slice.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores the keys and values of the step, then computes causal attention per sequence.

        Args:
            query: [T, H, D]; key, value: [T, K, D].

        Returns:
            [T, H * D].
        """
        k_slots, v_slots = self.k_cache.flatten(0, 1), self.v_cache.flatten(0, 1)  # [N * P, K, D]
        k_slots[batch.slot_mapping] = key
        v_slots[batch.slot_mapping] = value
        outputs = []
        for queries, slots in zip(
            query.split(batch.num_scheduled_tokens), batch.context_slots, strict=True
        ):
            num_new, context_len = len(queries), len(slots)
            # Row i is the token at position context_len - num_new + i; it attends up to itself.
            mask = torch.ones(num_new, context_len, dtype=torch.bool, device=query.device)
            output = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],  # [1, H, num_new, D]
                k_slots[slots].transpose(0, 1)[None],  # [1, K, C, D]
                v_slots[slots].transpose(0, 1)[None],
                attn_mask=mask.tril(context_len - num_new),
                enable_gqa=True,  # H / K query heads share a key head
            )
            outputs.append(output[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)
