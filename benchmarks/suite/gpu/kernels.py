"""Single kernels: copy bandwidth, GEMM rate, attention speed, and attention parity.

Cases of the GPU report. Every function takes the device and a timer, so that tests can use a CPU
and a fake timer. Attention is measured through `AttentionBackend`, as in an engine: random paged
keys and values (never zeros, which draw less power), including the store of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.suite.gpu.parts import Case, Row
from nanoengine.attention import backend_class, make_backend
from nanoengine.attention.base import AttentionBackend, AttentionSpec, LayerCache
from nanoengine.attention.batch import Batch

Timer = Callable[[Callable[[], object]], float]
"""Median seconds of one call."""

BACKENDS = ("triton", "flash_attn")
MIB = 2**20
COPY_MIB = (256, 1024, 4096)
GEMM_SIZES = (4096, 8192, 16384)
DECODE_BATCHES = (1, 16, 64, 256)
DECODE_CONTEXTS = (512, 1024, 4096)
MAX_MODEL_LEN = 4096
"""Launches are sized for this context, as in a captured graph."""
PREFILL_LENGTHS = (512, 2048, 8192, 16384)
PREFILL_TOKENS = 16384
ROTATED_BYTES = 256 * MIB
"""The alternating layers have at least this many bytes of KV, several times an L2 cache (H200: 50
MiB)."""
MAX_LAYERS = 64
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error against float64 for outputs of size 1: a few roundings of the dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, KV heads, head dim; the defaults are Qwen3-0.6B's."""

    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128


@dataclass(slots=True, kw_only=True)
class Inputs:
    """The arguments of `AttentionBackend.forward`, for some layers that share one batch.

    `caches` has one entry per layer, [B, P, K, D] each.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: list[LayerCache]
    batch: Batch


def make_inputs(
    lengths: SequenceOf[tuple[int, int]],
    *,
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: int = 1,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Inputs:
    """Random tensors for sequences of (query, context) tokens, one-token queries first.

    Blocks are in random order. The same arguments give the same values on one kind of device.

    Args:
        max_seq_len: context that launches are sized for; None: the longest context.
    """
    generator = torch.Generator(device).manual_seed(0)
    longest = max(max_seq_len or 0, *(context for _, context in lengths))
    blocks = [-(-context // block_size) for _, context in lengths]
    order = 1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(1, len(lengths), -(-longest // block_size), dtype=torch.int32)
    slots, positions, first = [], [], 0
    for i, (query, context) in enumerate(lengths):
        table = order[first : first + blocks[i]]
        first += blocks[i]
        tables[0, i, : blocks[i]] = table
        position = torch.arange(context - query, context)
        positions.append(position)
        slots.append(table[position // block_size] * block_size + position % block_size)
    starts = torch.tensor([0, *(query for query, _ in lengths)]).cumsum(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    tokens, kv_heads, dim = int(starts[-1]), heads.num_kv_heads, heads.head_dim
    # Why one tensor: a model's q, k and v are slices of one projection, with its strides.
    sizes = [heads.num_heads, kv_heads, kv_heads]
    q, k, v = normal(tokens, sum(sizes), dim).split(sizes, 1)
    k_caches, v_caches = normal(2, layers, sum(blocks) + 1, block_size, kv_heads, dim)
    batch = Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device)[None],
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor([c for _, c in lengths], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_indices=(starts[1:] - 1).to(device),
        num_decodes=sum(query == 1 for query, _ in lengths),
        max_query_len=max(query for query, _ in lengths),
        max_seq_len=longest,
    )
    spec = AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    caches = [LayerCache(*slices, spec) for slices in zip(k_caches, v_caches, strict=True)]
    return Inputs(q=q, k=k, v=v, caches=caches, batch=batch)


# --- peaks ----------------------------------------------------------------------------------------


def peak_cases(
    device: torch.device,
    timer: Timer,
    *,
    copy_mib: SequenceOf[int] = COPY_MIB,
    gemm_sizes: SequenceOf[int] = GEMM_SIZES,
) -> Iterator[Case]:
    """Copies of several sizes, and square bf16 products."""
    for size in copy_mib:
        yield Case(f"copy {size} MiB", partial(copy_row, device, timer, size))
    for size in gemm_sizes:
        yield Case(f"gemm {size}", partial(gemm_row, device, timer, size))


def copy_row(device: torch.device, timer: Timer, size_mib: int) -> Row:
    """GB/s of copying a buffer; it is read once and written once, so both count."""
    source = torch.empty(size_mib * MIB // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    seconds = timer(lambda: target.copy_(source))
    return {"mib": size_mib, "gbs": 2 * source.nbytes / seconds / 1e9}


def gemm_row(device: torch.device, timer: Timer, size: int) -> Row:
    """TFLOP/s of a product of two square matrices of random bf16 values."""
    a, b = torch.empty(2, size, size, dtype=torch.bfloat16, device=device).normal_()
    out = torch.empty_like(a)
    seconds = timer(lambda: torch.mm(a, b, out=out))
    return {"size": size, "tflops": 2 * size**3 / seconds / 1e12}


# --- attention: speed -----------------------------------------------------------------------------


def decode_cases(
    device: torch.device,
    timer: Timer,
    *,
    backends: SequenceOf[str] = BACKENDS,
    batches: SequenceOf[int] = DECODE_BATCHES,
    contexts: SequenceOf[int] = DECODE_CONTEXTS,
    heads: Heads = Heads(),
) -> Iterator[Case]:
    """Decode attention of every backend with every batch and context."""
    for context in contexts:
        for batch in batches:
            for name in backends:
                measure = partial(decode_row, device, timer, name, batch, context, heads)
                yield Case(f"{name} {batch} x {context}", measure)


def decode_row(
    device: torch.device, timer: Timer, name: str, batch: int, context: int, heads: Heads
) -> Row:
    """GB/s at which one decode step of one layer reads its keys and values."""
    dtype = torch.bfloat16
    entry = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    kv_bytes = batch * context * entry
    layers = min(MAX_LAYERS, -(-ROTATED_BYTES // kv_bytes))
    seconds = _attention_seconds(
        device, timer, name, [(1, context)] * batch, heads, dtype, layers=layers
    )
    return {
        "backend": name, "batch": batch, "context": context, "us": 1e6 * seconds,
        "gbs": kv_bytes / seconds / 1e9,
    }  # fmt: skip


def prefill_cases(
    device: torch.device,
    timer: Timer,
    *,
    backends: SequenceOf[str] = BACKENDS,
    lengths: SequenceOf[int] = PREFILL_LENGTHS,
    tokens: int = PREFILL_TOKENS,
    heads: Heads = Heads(),
) -> Iterator[Case]:
    """Prefill attention of every backend, always with the same total number of tokens."""
    for length in lengths:
        for name in backends:
            measure = partial(prefill_row, device, timer, name, tokens // length, length, heads)
            yield Case(f"{name} {tokens // length} x {length}", measure)


def prefill_row(
    device: torch.device, timer: Timer, name: str, count: int, length: int, heads: Heads
) -> Row:
    """TFLOP/s of causal attention over whole prompts: 4 FLOPs per query, key and head element."""
    seconds = _attention_seconds(
        device, timer, name, [(length, length)] * count, heads, torch.bfloat16
    )
    pairs = count * length * (length + 1) // 2
    flops = 4 * heads.num_heads * heads.head_dim * pairs
    return {
        "backend": name, "prompts": count, "length": length, "us": 1e6 * seconds,
        "tflops": flops / seconds / 1e12,
    }  # fmt: skip


def _attention_seconds(
    device: torch.device,
    timer: Timer,
    name: str,
    lengths: SequenceOf[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    layers: int = 1,
) -> float:
    """Seconds of one layer: store, attention, and everything that the backend does in between."""
    block_size = backend_class(name).default_block_size
    backend = make_backend(
        name, device=device, dtype=dtype, head_dim=heads.head_dim, block_size=block_size
    )
    inputs = make_inputs(
        lengths, heads=heads, block_size=block_size, dtype=dtype, device=device, layers=layers,
        max_seq_len=MAX_MODEL_LEN,
    )  # fmt: skip
    inputs.batch.attention = backend.prepare(inputs.batch)

    def work() -> None:
        for cache in inputs.caches:
            backend.forward(inputs.q, inputs.k, inputs.v, cache, inputs.batch)

    return timer(work) / layers


# --- attention: parity ----------------------------------------------------------------------------

DECODES = [(1, 1 + 131 * i) for i in range(16)]
LONG_DECODES = [(1, 8192), (1, 9001)]
PREFILLS = [(300, 300), (2, 700), (65, 1000), (128, 128), (17, 17)]
PARITY: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODES, {}),
    "decode, long": (LONG_DECODES, {}),
    "prefill": (PREFILLS, {}),
    "mixed": (DECODES[:5] + PREFILLS, {}),
    "mixed, window 100": (DECODES[:5] + PREFILLS, {"sliding_window": 100}),
    "mixed, softcap 5": (DECODES[:5] + PREFILLS, {"softcap": 5.0}),
}
"""Name -> sequences of (query, context) tokens, and options of `make_inputs`."""


def parity_cases(
    device: torch.device,
    *,
    backends: SequenceOf[str] = BACKENDS,
    dtypes: SequenceOf[torch.dtype] = (torch.bfloat16, torch.float16),
    heads: Heads = Heads(),
) -> Iterator[Case]:
    """Compares every backend with the naive one in float64."""
    for name in backends:
        for dtype in dtypes:
            for what in PARITY:
                text = str(dtype).removeprefix("torch.")
                measure = partial(parity_row, device, name, dtype, what, heads)
                yield Case(f"{name} {text} {what}", measure)


def parity_row(device: torch.device, name: str, dtype: torch.dtype, what: str, heads: Heads) -> Row:
    """Largest error of the output, and whether the new keys and values are stored correctly."""
    block_size = backend_class(name).default_block_size
    lengths, options = PARITY[what]
    common: dict[str, Any] = {
        "device": device,
        "head_dim": heads.head_dim,
        "block_size": block_size,
    }
    backend = make_backend(name, dtype=dtype, **common)
    oracle = make_backend("naive", dtype=torch.float64, **common)
    inputs = make_inputs(
        lengths, heads=heads, block_size=block_size, dtype=dtype, device=device, **options
    )
    (cache,) = inputs.caches
    exact = LayerCache(cache.k_cache.double(), cache.v_cache.double(), cache.spec)

    def attend(backend: AttentionBackend, cache: LayerCache, *qkv: torch.Tensor) -> torch.Tensor:
        batch = replace(inputs.batch, attention=backend.prepare(inputs.batch))
        return backend.forward(*qkv, cache, batch)

    qkv = (inputs.q, inputs.k, inputs.v)
    expected = attend(oracle, exact, *(x.double() for x in qkv))
    found = attend(backend, cache, *qkv)
    error = float((found.double() - expected).abs().max())
    stored = all(torch.equal(a.double(), b) for a, b in zip(cache[:2], exact[:2], strict=True))
    return {
        "backend": name, "dtype": str(dtype).removeprefix("torch."), "what": what,
        "max_error": error, "tolerance": TOLERANCE[dtype], "stored": stored,
        "ok": stored and error < TOLERANCE[dtype],
    }  # fmt: skip
