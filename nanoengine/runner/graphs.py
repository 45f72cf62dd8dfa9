"""GraphedDecode: replays captured CUDA graphs for steps of decodes.

Why: a decode step of a small model is a few hundred short kernels, and launching them from Python
takes longer than running them. A graph launches all of them at once, for one fixed batch size:

    sizes captured          1   2   4   8   16   24   32 ...      forward and logits: one graph each
                            └ for every `SamplingKind` a small one, from logits to tokens
    batch of 5 decodes                  |---> rows 5..7 are padding
    batch with a prompt                       runs eagerly, as any batch with a longer query

The graphs contain all of a `DecodeStep`, so the host only launches them: one for the forward pass,
one for sampling. If the graph of each kind contained the forward pass too, there would be five
times as many nodes, and each node costs driver memory and start-up time.

The ModelRunner makes a GraphedDecode after the KV cache is bound to the layers, because a graph
keeps addresses. Tests run it on the CPU with a substitute that records and replays operators;
capture itself has not run on a GPU yet.

Source: vLLM and nano-vllm also capture decodes as CUDA graphs in one shared pool, largest first.
"""

from __future__ import annotations

import bisect
import functools
import time
from collections.abc import Callable, Sequence

import torch

from nanoengine.runner.decode_step import DecodeStep
from nanoengine.runner.sampling.draw import SamplingKind
from nanoengine.runner.sampling.greedy import pack_tokens
from nanoengine.runner.sampling.sampler import SampledTokens
from nanoengine.runner.sampling.step_sampler import StepSampler
from nanoengine.runner.step import LaunchedStep

Outputs = tuple[torch.Tensor, ...]
Captured = tuple[Callable[[], None], Outputs]
"""A function that replays a capture, and the tensors that a replay fills."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense, so that padding is cheap, and up to `max_num_seqs` itself.

    >>> capture_sizes(20)
    [1, 2, 4, 8, 16, 20]

    Why the last one: it covers every batch that the scheduler can make.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaGraphs:
    """Captures functions as CUDA graphs that share one memory pool.

    Why one pool: the graphs never run at the same time, so the memory of the largest suffices for
    the intermediates of all.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(torch.cuda.current_device())

    def capture(self, function: Callable[[], Outputs]) -> Captured:
        """Runs `function` once to warm up and once to record it."""
        # Why warm up, and on another stream: kernels compile and libraries allocate at their first
        # call, which is not allowed in a capture; the default stream can't be captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = function()
        return graph.replay, outputs


@functools.cache
def capture_stream(device_index: int) -> torch.cuda.Stream:
    """The stream on which all captures of a device warm up and record.

    Why one: cuBLAS keeps a workspace per stream, 32 MiB on a Hopper, and torch cycles through 32
    streams. One stream per capture would waste 1 GiB.
    """
    return torch.cuda.Stream(device_index)


class GraphedDecode:
    """A decode step for every batch size.

    Args:
        step: what to capture; all its rows must be padding until then, since capturing runs it.
        graphs: captures functions; on a GPU a `CudaGraphs`.

    Attributes:
        sizes: batch sizes, up to all rows.
    """

    def __init__(self, step: DecodeStep, graphs: CudaGraphs) -> None:
        self.sizes = capture_sizes(step.num_rows)
        self.step, self._graphs = step, graphs
        self._captured: dict[tuple[int, SamplingKind | None], Captured] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures the step for these sizes. Why from the largest on: it fills the pool, and the
        others reuse that memory."""
        for size in sorted(sizes, reverse=True):
            forward = functools.partial(self.step.forward, size)
            self._captured[size, None] = self._graphs.capture(forward)
            for kind in SamplingKind:
                sample = functools.partial(self.step.sample, size, kind)
                self._captured[size, kind] = self._graphs.capture(sample)

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured size that holds this many sequences."""
        return self.sizes[bisect.bisect_left(self.sizes, num_seqs)]

    def __call__(self, size: int, kind: SamplingKind | None) -> Outputs:
        """Replays; the outputs are valid until the next call. Without a kind: the logits."""
        for part in (None, kind) if kind else (None,):
            replay, outputs = self._captured[size, part]
            replay()
        return outputs

    def run(self, step: LaunchedStep, step_sampler: StepSampler) -> list[torch.Tensor]:
        """Runs a step of decodes whose inputs are on the device; returns the tensors for the
        host."""
        num_rows, decode = len(step.plan.rows), self.step
        size = self.size_for(num_rows)
        step.lines = lines = decode.load(step.plan, size)
        on_host = step_sampler.sampler.needs_all_logits(lines.rows)  # sampled without a graph
        step.times.prepare_s = time.perf_counter() - step.started - step.times.load_s
        step.marks.append(step.now())
        outputs = self(size, None if on_host else step_sampler.sampler.kind(lines.rows))
        step.marks.append(step.now())
        unpadded = [output[:num_rows] for output in outputs]
        if on_host:
            sampled = step_sampler.sample(step, unpadded[0])
            decode.device_batch.advance(lines.rows_on_device, sampled.token_ids)
        else:
            sampled = SampledTokens(packed=pack_tokens(*unpadded))
        tensors = step_sampler.expect_tokens(step, sampled)
        step.marks.append(step.now())
        return tensors


def graph_bytes(make: Callable[[], GraphedDecode], free_bytes: Callable[[], int]) -> int:
    """GPU memory that the graphs of all sizes will need, measured by capturing the two largest.

    The first fills the pool that all of them share. The second needs as much as every further graph
    does: only memory of the driver, which torch doesn't count.

    Args:
        make: makes a GraphedDecode with nothing captured; its buffers are counted too.
        free_bytes: returns the free memory of the GPU.
    """
    free = [free_bytes()]
    graphed = make()
    for size in (graphed.sizes[-1], graphed.sizes[-2:][0]):
        graphed.capture([size])
        free.append(free_bytes())
    largest, per_graph = free[0] - free[1], free[1] - free[2]
    return max(0, largest) + max(0, per_graph) * (len(graphed.sizes) - 1)
