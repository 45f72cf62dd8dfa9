"""Kernels of one step on this CPU: attention and linear layers, compared with alternatives.

    python -m benchmarks.cpu_kernels --threads 1 --only linear --seconds 2

Alternatives alternate after each call, so a busy machine slows all of them equally. With one
thread, CPU time is measured instead of wall time, because other programs disturb it less. One JSON
line per case: the 10th percentile and the median in ms, for attention also GB/s or GFLOP/s at the
median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.ao.quantization import quantize_dynamic

from nanoengine.attention import make_backend
from nanoengine.attention.base import AttentionSpec, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.packed import PackedLinear
from nanoengine.layers.quantized_weight import GROUP_SIZE, QuantizedWeight
from nanoengine.runner.kv_cache import stored_dim, zeros
from tests.support.groupwise_weights import make_weight

SHAPES = {  # hidden, intermediate, query heads, KV heads, head dim
    "small": (640, 1920, 10, 5, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
}
CPU = torch.device("cpu")


def compare(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    work: dict[str, int] | None = None,
    **labels: object,
) -> None:
    """Times the calls, alternating, and prints one line; with `work` (bytes, FLOPs), also 1e9 per
    s."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(calls))]) < 5:
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(1e3 * (clock() - start))
    line: dict[str, object] = {**labels, "rounds": len(times[next(iter(calls))])}
    for name, milliseconds in times.items():
        milliseconds.sort()
        line[name] = [
            round(milliseconds[len(milliseconds) // 10], 3),
            round(milliseconds[len(milliseconds) // 2], 3),
        ]
        if work is not None:
            line[name].append(round(work[name] / line[name][1] / 1e6, 1))
    print(json.dumps(line), flush=True)


def attention_call(
    shape: str, lengths: list[tuple[int, int]], block_size: int, layers: int,
    dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype = torch.float32,
) -> Callable[[], object]:  # fmt: skip
    """One layer's forward; each call uses the next of `layers` caches, so that memory is read.

    Queries are float32; with a `dtype` of bfloat16 they are rounded for the products.
    """
    _, _, heads, k_heads, head_dim = SHAPES[shape]
    count = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = (1 + torch.randperm(sum(count))).int().split(count)
    tables = torch.nn.utils.rnn.pad_sequence(order, batch_first=True)
    positions = [torch.arange(n - q, n) for q, n in lengths]
    slots = [
        table[p // block_size].long() * block_size + p % block_size
        for table, p in zip(tables, positions, strict=True)
    ]
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
    tokens = int(starts[-1])
    batch = Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64), positions=torch.cat(positions),
        slot_mapping=torch.cat(slots)[None], query_start_loc=starts.int(),
        seq_lens=torch.tensor([n for _, n in lengths]).int(), block_tables=tables[None],
        logits_indices=starts[1:] - 1, num_decodes=sum(q == 1 for q, _ in lengths),
        max_query_len=max(q for q, _ in lengths), max_seq_len=max(n for _, n in lengths),
    )  # fmt: skip
    backend = make_backend(
        "cpu", device=CPU, dtype=dtype, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype
    )
    batch.attention = backend.prepare(batch)
    stored = stored_dim(head_dim, kv_dtype)
    caches = zeros((layers, 2, sum(count) + 1, k_heads, block_size, stored), kv_dtype, CPU)
    caches.fill_(1 if kv_dtype == torch.int8 else 0.01)
    q, k, v = torch.randn(tokens, heads + 2 * k_heads, head_dim).split([heads, k_heads, k_heads], 1)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=k_heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    numbers = iter(range(1 << 60))

    def call() -> object:
        cache = LayerCache(*caches[next(numbers) % layers], spec)
        return backend.forward(q, k, v, cache, batch)

    return call


KINDS = {  # compute dtype, and dtype of the cache
    "float32": (torch.float32, torch.float32),
    "float32, KV bf16": (torch.float32, torch.bfloat16),
    "float32, KV int8": (torch.float32, torch.int8),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, KV int8": (torch.bfloat16, torch.int8),
}


def decode(shape: str, seconds: float) -> None:
    """Decodes with each pair of dtypes: ms, and GB/s of the keys and values that are read."""
    _, _, _, k_heads, head_dim = SHAPES[shape]
    for batch, context in itertools.product((1, 8, 32), (256, 1024, 4096)):
        rows = 2 * batch * context * k_heads
        numbers = rows * head_dim
        layers = max(2, min(16, 2**26 // numbers))
        calls = {
            name: attention_call(shape, [(1, context)] * batch, 64, layers, *kind)
            for name, kind in KINDS.items()
        }
        work = {
            name: rows * stored_dim(head_dim, kind[1]) * kind[1].itemsize
            for name, kind in KINDS.items()
        }
        compare(calls, seconds, work, what="decode", shape=shape, batch=batch, context=context)


def prefill(shape: str, seconds: float) -> None:
    """The last 1,024 tokens of a prompt: ms, and GFLOP/s of the unmasked part."""
    _, _, heads, _, head_dim = SHAPES[shape]
    for context in (1024, 4096, 16384):
        calls = {
            name: attention_call(shape, [(1024, context)], 64, 1, *kind)
            for name, kind in KINDS.items()
        }
        flops = 4 * heads * head_dim * sum(range(context - 1023, context + 1))
        work = dict.fromkeys(calls, flops)
        compare(calls, seconds, work, what="prefill", shape=shape, chunk=1024, context=context)


def loaded(method: LinearMethod, weight: torch.Tensor | QuantizedWeight) -> LinearMethod:
    """The method with this weight."""
    if isinstance(weight, QuantizedWeight):
        method.create(weight.values.shape, torch.float32, CPU)
        method.load_quantized(weight)
    else:
        method.create(weight.shape, torch.float32, CPU)
        method.load(weight)
    return method


def module_of(weight: torch.Tensor) -> torch.nn.Linear:
    """A plain layer of torch."""
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def linear(shape: str, seconds: float) -> None:
    """Four layers' matrices at each number of tokens, with every implementation of the product."""
    hidden, intermediate, heads, k_heads, head_dim = SHAPES[shape]
    sizes = [
        ((heads + 2 * k_heads) * head_dim, hidden), (hidden, heads * head_dim),
        (2 * intermediate, hidden), (hidden, intermediate),
    ]  # fmt: skip
    plain = [torch.randn(size) * 0.02 for _ in range(4) for size in sizes]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in plain]
    int8, int4 = (
        partial(CPUQuantizedLinear, "", bits=bits, group_size=group, activations="int8")
        for bits, group in ((8, None), (4, GROUP_SIZE))
    )
    methods_of = {
        name: [loaded(method(), weight) for weight in plain]
        for name, method in (("ours", partial(PackedLinear, "")), ("int8", int8), ("int4", int4))
    }
    # Why not always: K-quants have blocks of 256 inputs.
    in_blocks = () if hidden % 256 or intermediate % 256 else ("Q4_K", "Q6_K")
    for name in ("Q8_0", *in_blocks):
        methods_of[name] = [loaded(int4(), make_weight(name, *weight.shape)) for weight in plain]
    fbgemm = [quantize_dynamic(torch.nn.Sequential(module_of(w)), dtype=torch.qint8) for w in plain]
    for tokens in (1, 2, 4, 8, 16, 32, 64, 256):
        inputs = {width: torch.randn(tokens, width) for _, width in sizes}
        calls: dict[str, Callable[[], object]] = {
            "F.linear": lambda x=inputs: [F.linear(x[w.shape[1]], w) for w in plain],
            "oneDNN packed": lambda x=inputs: [
                torch.ops.mkldnn._linear_pointwise(x[w.shape[1]], packed, None, "none", [], "")
                for w, packed in zip(plain, onednn, strict=True)
            ],
            "torch int8": lambda x=inputs: [
                module(x[w.shape[1]]) for w, module in zip(plain, fbgemm, strict=True)
            ],
        }
        for name, methods in methods_of.items():
            calls[name] = lambda x=inputs, methods=methods: [
                method.apply(x[w.shape[1]], None) for w, method in zip(plain, methods, strict=True)
            ]
        compare(calls, seconds, what="linear", shape=shape, tokens=tokens)


def main() -> None:
    """Parses the command line and runs the chosen parts."""
    parts = {"decode": decode, "prefill": prefill, "linear": linear}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=parts, action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for shape in args.shape or SHAPES:
            for part in args.only or parts:
                parts[part](shape, args.seconds)


if __name__ == "__main__":
    main()
