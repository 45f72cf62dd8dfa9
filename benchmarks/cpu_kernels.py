"""Kernels of one step on this CPU: attention and linear layers, each against its alternatives.

    python benchmarks/cpu_kernels.py --threads 1 --only linear --seconds 2

Alternatives take turns call by call, so a busy machine slows all of them alike. With one thread,
CPU time is measured instead of the clock, which other programs disturb less. One JSON line a case:
the 10th percentile and the median in ms.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.ao.quantization import quantize_dynamic

from nanoengine.attention import backend_class, make_backend
from nanoengine.attention.base import AttentionSpec
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.linear import LinearMethod
from nanoengine.layers.packed import PackedLinear
from nanoengine.layers.quantized import GROUP_SIZE
from nanoengine.runner.batch import Batch

SHAPES = {  # hidden, intermediate, query heads, KV heads, head dim
    "small": (640, 1920, 10, 5, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
}
CPU = torch.device("cpu")


def compare(calls: dict[str, Callable[[], object]], seconds: float, **labels: object) -> None:
    """Times the calls in turn and prints one line."""
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
    for name, taken in times.items():
        taken.sort()
        line[name] = [round(taken[len(taken) // 10], 3), round(taken[len(taken) // 2], 3)]
    print(json.dumps(line), flush=True)


def attention_call(
    shape: str, name: str, lengths: list[tuple[int, int]], block_size: int, layers: int
) -> Callable[[], object]:
    """One layer's forward; each call takes the next of `layers` caches, to read from memory."""
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
        name, device=CPU, dtype=torch.float32, head_dim=head_dim, block_size=block_size
    )
    batch.attention = backend.prepare(batch)
    inside = (k_heads, block_size) if backend.kv_layout == "KPD" else (block_size, k_heads)
    caches = torch.full((layers, 2, sum(count) + 1, *inside, head_dim), 0.01)
    q, k, v = torch.randn(tokens, heads + 2 * k_heads, head_dim).split([heads, k_heads, k_heads], 1)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=k_heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    turn = iter(range(1 << 60))

    def call() -> object:
        keys, values = caches[next(turn) % layers]
        return backend.forward(q, k, v, keys, values, batch, spec)

    return call


def decode(shape: str, seconds: float) -> None:
    """Decodes with each block size."""
    for batch, context in ((1, 256), (8, 256), (2, 1024)):
        calls = {
            f"block {size}": attention_call(shape, "cpu", [(1, context)] * batch, size, 16)
            for size in (16, 32, 64, 128)
        }
        compare(calls, seconds, what="decode", shape=shape, batch=batch, context=context)


def prefill(shape: str, seconds: float) -> None:
    """A whole prompt, paged, against torch's attention on dense tensors with heads repeated."""
    _, _, heads, k_heads, head_dim = SHAPES[shape]
    for length in (256, 512):
        q = torch.randn(1, heads, length, head_dim)
        k, v = torch.randn(2, 1, k_heads, length, head_dim).repeat_interleave(heads // k_heads, 2)
        calls = {
            f"paged {size}": attention_call(shape, "cpu", [(length, length)], size, 1)
            for size in (16, backend_class("cpu").default_block_size)
        }
        calls["dense SDPA"] = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )
        compare(calls, seconds, what="prefill", shape=shape, length=length)


def loaded(method: LinearMethod, weight: torch.Tensor) -> LinearMethod:
    """The method with this weight."""
    method.create(weight.shape[1], weight.shape[0], dtype=torch.float32, device=CPU)
    method.load(weight, slice(0, weight.shape[0]))
    return method


def module_of(weight: torch.Tensor) -> torch.nn.Linear:
    """A plain layer of torch."""
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def linear(shape: str, seconds: float) -> None:
    """Four layers' matrices at each number of tokens, by every way there is to multiply them."""
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
    made = {
        name: [loaded(method(), weight) for weight in plain]
        for name, method in (("ours", partial(PackedLinear, "")), ("int8", int8), ("int4", int4))
    }
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
        for name, methods in made.items():
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
