"""Collectives over gloo, with one thread per rank in one process: they have no global state."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanoengine.checkpoint.config import load_model_config
from nanoengine.layers.collectives import LOOPBACK, Collectives, Shard
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.settings.config import EngineConfig
from tests.support.engines import checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> list[Collectives]:
    with socket.create_server((LOOPBACK, 0)) as listener, ThreadPoolExecutor(2) as pool:
        port, descriptors = listener.getsockname()[1], [listener.detach(), None]
        waiting = [
            pool.submit(Collectives.connect, Shard(rank, 2), CPU, port=port, listener=descriptor)
            for rank, descriptor in enumerate(descriptors)
        ]
        return [each.result() for each in waiting]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_reduce_all_gather_and_the_minimum(
    ranks: list[Collectives], dtype: torch.dtype
) -> None:
    parts = [torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(Collectives.all_gather, ranks, parts))
        sums = list(pool.map(Collectives.all_reduce, ranks, [part.clone() for part in parts]))
        assert list(pool.map(Collectives.min_over_ranks, ranks, [2**40, 7])) == [7, 7]
    for found in sums:
        assert torch.equal(found, parts[0] + parts[1])
    for found in joined:
        assert torch.equal(found, torch.cat(parts, dim=-1))


@dataclass(frozen=True)
class SmallerRank(Collectives):
    """Simulates a rank with memory for 17 blocks."""

    def min_over_ranks(self, number: int) -> int:
        return min(number, 17)


def test_all_ranks_use_the_smallest_number_of_blocks() -> None:
    directory = checkpoint("llama")
    config = EngineConfig(model=directory, kv_cache_gib=0.02)
    options = RunnerOptions(
        config=config,
        model_config=load_model_config(directory),
        directory=Path(directory),
        device=CPU,
        dtype=torch.float64,
        backend="naive",
    )
    runner = ModelRunner(options, SmallerRank())
    assert runner.start().num_blocks == runner.memory.layout.num_blocks == 17
    assert runner.memory.max_model_len == 16 * runner.block_size
