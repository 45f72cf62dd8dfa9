"""GraphedForward: replays a captured CUDA graph for batches of decodes; same signature as forward.

Why: a decode step of a small model is a few hundred short kernels, and launching them from Python
takes longer than running them. A graph launches all of them at once, for one fixed batch size:

    sizes captured          1   2   4   8   16   24   32 ...
    batch of 5 decodes                  |---> rows 0..4 are copied in, rows 5..7 are padding
    batch with a prompt                       runs eagerly, as any batch with a longer query

Made by the ModelRunner once the KV cache is bound to the layers, for a graph keeps its addresses.
It knows batches, not models. The logic is tested on the CPU with a stand-in for the graph; capture
itself has not run on a GPU yet.

Source: CUDA graphs in one shared pool, largest first, are how vLLM and nano-vllm capture decodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from nanoengine.runner.batch import Batch

Forward = Callable[[Batch], torch.Tensor]
Captured = tuple[Callable[[], None], torch.Tensor]
"""What replays a capture, and the tensor that a replay fills."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense, so that padding is cheap, and up to `max_num_seqs` itself.

    >>> capture_sizes(20)
    [1, 2, 4, 8, 16, 20]

    Why the last one: every batch that the scheduler can make has a size that covers it.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaGraphs:
    """Captures functions as CUDA graphs that share one memory pool.

    Why one pool: the graphs never run at the same time, so the intermediates of all of them fit
    into the memory of the largest.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        """Runs `function` once to warm up and once to record it."""
        # Why warm up, and on another stream: kernels compile and libraries allocate at their first
        # call, which a capture forbids; the default stream can't be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        return graph.replay, output


class GraphedForward:
    """A forward that replays graphs where it can and runs eagerly where it can't.

    Args:
        forward: batch -> hidden states [T, hidden_size].
        prepare: the attention backend's; captured too, so that its tensors follow the batch.
        num_groups: KV groups, G.
        max_num_seqs: most sequences of a batch.
        max_model_len: most tokens of a sequence; captured launches are sized for it.
        block_size: tokens of a KV block.
        graphs: what captures; on a GPU a `CudaGraphs`.
    """

    def __init__(
        self,
        forward: Forward,
        prepare: Callable[[Batch], object],
        *,
        num_groups: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        graphs: CudaGraphs,
    ) -> None:
        self._forward, self._prepare = forward, prepare
        self._max_model_len = max_model_len
        num_blocks = -(-max_model_len // block_size)
        ints = {"device": device, "dtype": torch.int64}
        self._inputs = Batch(
            token_ids=torch.zeros(max_num_seqs, **ints),
            positions=torch.zeros(max_num_seqs, **ints),
            slot_mapping=torch.zeros(num_groups, max_num_seqs, **ints),
            query_start_loc=torch.arange(max_num_seqs + 1, device=device, dtype=torch.int32),
            seq_lens=torch.ones(max_num_seqs, device=device, dtype=torch.int32),
            block_tables=torch.zeros(
                num_groups, max_num_seqs, num_blocks, device=device, dtype=torch.int32
            ),
            logits_indices=torch.arange(max_num_seqs, **ints),
            num_decodes=max_num_seqs,
            max_query_len=1,
            max_seq_len=max_model_len,
        )
        self.sizes = capture_sizes(max_num_seqs)
        self._captured: dict[int, Captured] = {}
        with torch.inference_mode():
            for size in reversed(self.sizes):  # Why: the first fills the pool, the others reuse it.
                self._captured[size] = graphs.capture(self._step(size))

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden_size]; those of a graph are valid until the next call."""
        if batch.num_decodes != batch.num_tokens:
            return self._forward(batch)
        size = self.sizes[bisect.bisect_left(self.sizes, batch.num_tokens)]
        self._copy(batch, size)
        replay, hidden = self._captured[size]
        replay()
        return hidden[: batch.num_tokens]

    def _step(self, size: int) -> Callable[[], torch.Tensor]:
        """The function to capture for batches of `size`: it reads the first rows of the inputs."""
        inputs = self._inputs
        batch = Batch(
            token_ids=inputs.token_ids[:size],
            positions=inputs.positions[:size],
            slot_mapping=inputs.slot_mapping[:, :size],
            query_start_loc=inputs.query_start_loc[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_tables=inputs.block_tables[:, :size],
            logits_indices=inputs.logits_indices[:size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )

        def step() -> torch.Tensor:
            batch.attention = self._prepare(batch)
            return self._forward(batch)

        return step

    def _copy(self, batch: Batch, size: int) -> None:
        """Puts a batch into the graph's inputs; rows up to `size` become padding.

        A padding row is a sequence of one token in the null block: it writes slot 0 and reads it.
        Why each time: what a row held before would write into blocks that have other owners now.
        """
        inputs, count = self._inputs, batch.num_tokens
        inputs.token_ids[:count].copy_(batch.token_ids)
        inputs.positions[:count].copy_(batch.positions)
        inputs.slot_mapping[:, :count].copy_(batch.slot_mapping)
        inputs.seq_lens[:count].copy_(batch.seq_lens)
        inputs.block_tables[:, :count, : batch.block_tables.shape[2]].copy_(batch.block_tables)
        if count < size:
            inputs.token_ids[count:size].zero_()
            inputs.positions[count:size].zero_()
            inputs.slot_mapping[:, count:size].zero_()
            inputs.seq_lens[count:size].fill_(1)
            inputs.block_tables[:, count:size].zero_()
