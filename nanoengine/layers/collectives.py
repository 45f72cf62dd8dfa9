"""Shard: which part of a model a rank holds. Collectives: operations over all ranks.

The process group is an object here, never torch.distributed's global group, so several engines with
ranks can share a process. `ranks/rank.py` makes it. The ModelRunner uses it, and through the
`ModelContext` all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world_size`.

    >>> Shard(1, 2).slice(8)
    slice(4, 8, None)
    """

    rank: int = 0
    world_size: int = 1

    def split(self, size: int, what: str = "dimension") -> int:
        """Returns the size of one part. Raises ValueError if `size` does not divide evenly."""
        if size % self.world_size:
            raise ValueError(f"{what} of {size} does not divide over {self.world_size} ranks")
        return size // self.world_size

    def for_kv_heads(self, num_heads: int) -> Shard:
        """Returns this rank's shard of `num_heads` KV heads. With more ranks than heads, adjacent
        ranks have the same shard, because their query heads use the same KV head.

        >>> [Shard(rank, 4).for_kv_heads(2) for rank in (1, 2)]
        [Shard(rank=0, world_size=2), Shard(rank=1, world_size=2)]
        """
        if num_heads >= self.world_size:
            return self
        return Shard(self.rank * num_heads // self.world_size, num_heads)

    def slice(self, size: int, what: str = "dimension") -> slice:
        """Returns this rank's part of a dimension of `size`."""
        part = self.split(size, what)
        return slice(self.rank * part, (self.rank + 1) * part)


@dataclass(slots=True)
class RankPosition:
    """A rank's progress: the step, the number of its latest collective, and that one's name."""

    step: int = 0
    number: int = 0
    what: str = "none yet"

    def __str__(self) -> str:
        return f"step {self.step}, collective {self.number} ({self.what})"


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collective operations over ranks. All ranks must call the same ones in the same order.

    Attributes:
        shard: this rank and the number of ranks.
        device: where the tensors are.
        group: a process group of gloo or NCCL; None for a single rank.
        position: this rank's progress.
    """

    shard: Shard = field(default_factory=Shard)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    position: RankPosition = field(default_factory=RankPosition)

    @classmethod
    def connect(
        cls, shard: Shard, device: torch.device, *, port: int, listener: int | None
    ) -> Collectives:
        """Waits for the other ranks of this machine.

        Args:
            device: a CPU, where ranks communicate by gloo, or this rank's own GPU, by NCCL.
            port: on the loopback interface, where the ranks connect.
            listener: rank 0's file descriptor of a socket that listens there.
        """
        store = dist.TCPStore(
            LOOPBACK, port, shard.world_size, shard.rank == 0,
            wait_for_workers=False, master_listen_fd=listener,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            group = dist.ProcessGroupNCCL(store, shard.rank, shard.world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            # Why explicit: gloo's default is the host's name, which may resolve to an external
            # network.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            group = dist.ProcessGroupGloo(store, shard.rank, shard.world_size, options)
        return cls(shard, device, group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums the ranks' tensors, in place."""
        self._enter("all_reduce")
        self.group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the ranks' tensors along the last dimension, in rank order."""
        self._enter("all_gather")
        parts = [torch.empty_like(tensor) for _ in range(self.shard.world_size)]
        self.group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    def _enter(self, what: str) -> None:
        self.position.number += 1
        self.position.what = what

    def min_over_ranks(self, number: int) -> int:
        """Returns the smallest `number` over all ranks."""
        if self.group is None:
            return number
        return int(self.all_gather(torch.tensor([number], device=self.device)).min())
