"""Routers that choose experts as no kernel does; in plain torch everywhere.

Taken by `models/moe.py` for a plan that asks for one.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch

from nanoengine.layers.moe import Router


class SparseMixer(Router):
    """Takes the best expert, then the best of the others, each with its share of a softmax over
    the experts that come near it.

    Source: Phi-3.5-MoE's model code; Liu et al., GRIN (arXiv 2409.12136).
    """

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
        left, weights, experts = logits, [], []
        for _ in range(2):
            best, expert = left.max(dim=-1, keepdim=True)
            distance = (best - logits) / logits.abs().clamp(min=best)
            near = left.masked_fill(distance > 2 * self.moe.jitter, -torch.inf)
            weights.append(near.softmax(dim=-1).gather(1, expert))
            experts.append(expert)
            left = left.scatter(1, expert, -torch.inf)
        return torch.cat(weights, dim=1).to(hidden.dtype), torch.cat(experts, dim=1)
