"""Decode attention of nanoengine's Triton kernels compared with FlashAttention-3.

    python benchmarks/gpu_peers/fa3.py [--out FILE]

Both read the same paged cache, with the sizes of the standard workload, each alone in a CUDA graph;
the store of the new token is excluded in both. FlashAttention-3 comes from a vLLM wheel, or from an
installed `flash_attn_interface`.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch

from benchmarks.suite.gpu import kernels
from benchmarks.suite.gpu.kernels import Heads, Inputs, Timer, make_inputs
from nanoengine.attention import make_backend
from nanoengine.attention.base import LayerCache

Attend = Callable[[Inputs, LayerCache], torch.Tensor]
"""Attention of a batch of decodes over one layer's cache."""

BLOCK_SIZE = 64
QWEN = Heads()


def fa3() -> Attend:
    """FlashAttention-3 from any package that contains it.

    Raises:
        ImportError: no such package is installed.
    """
    try:
        package = importlib.import_module("flash_attn_interface")
    except ImportError:
        over_vllm = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

        def attend(inputs: Inputs, cache: LayerCache) -> torch.Tensor:
            batch = inputs.batch
            return over_vllm.flash_attn_varlen_func(
                inputs.q, cache.k_cache, cache.v_cache, max_seqlen_q=1,
                cu_seqlens_q=batch.query_start_loc, max_seqlen_k=batch.max_seq_len,
                seqused_k=batch.seq_lens,
                softmax_scale=cache.spec.scale, causal=True, block_table=batch.block_tables[0],
                fa_version=3,
            )  # fmt: skip

        return attend

    def attend(inputs: Inputs, cache: LayerCache) -> torch.Tensor:
        batch = inputs.batch
        out = package.flash_attn_with_kvcache(
            inputs.q.unsqueeze(1), cache.k_cache, cache.v_cache, cache_seqlens=batch.seq_lens,
            page_table=batch.block_tables[0], softmax_scale=cache.spec.scale, causal=True,
        )  # fmt: skip
        return out.squeeze(1)

    return attend


def ours(name: str, device: torch.device, heads: Heads) -> Attend:
    """A backend of nanoengine."""
    backend = make_backend(
        name, device=device, dtype=torch.bfloat16, head_dim=heads.head_dim, block_size=BLOCK_SIZE
    )

    def attend(inputs: Inputs, cache: LayerCache) -> torch.Tensor:
        inputs.batch.attention = backend.prepare(inputs.batch)
        return backend.attend(inputs.q, cache, inputs.batch)

    return attend


def over_layers(attend: Attend, inputs: Inputs) -> None:
    """One layer after the other."""
    for cache in inputs.caches:
        attend(inputs, cache)


def compare(
    attends: dict[str, Attend],
    device: torch.device,
    timer: Timer,
    *,
    heads: Heads = QWEN,
    batches: tuple[int, ...] = kernels.DECODE_BATCHES,
    contexts: tuple[int, ...] = kernels.DECODE_CONTEXTS,
) -> Iterator[dict[str, Any]]:
    """One row per size: GB/s of each, and the largest difference of their results."""
    entry = 2 * heads.num_kv_heads * heads.head_dim * 2
    for context in contexts:
        for batch in batches:
            kv_bytes = batch * context * entry
            layers = min(kernels.MAX_LAYERS, -(-kernels.ROTATED_BYTES // kv_bytes))
            inputs = make_inputs(
                [(1, context)] * batch, heads=heads, block_size=BLOCK_SIZE, dtype=torch.bfloat16,
                device=device, layers=layers, max_seq_len=context,
            )  # fmt: skip
            row: dict[str, Any] = {"batch": batch, "context": context}
            outputs = []
            for name, attend in attends.items():
                outputs.append(attend(inputs, inputs.caches[0]).float())
                seconds = timer(partial(over_layers, attend, inputs))
                row[f"{name}_gbs"] = kv_bytes * layers / seconds / 1e9
            row["max_difference"] = max(float((o - outputs[0]).abs().max()) for o in outputs)
            yield row


def main() -> None:
    """Prints one line per size, and the copy bandwidth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="write the rows as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"needs an NVIDIA GPU, and torch {torch.__version__} finds none here")
    from benchmarks.suite.gpu.timing import graph_seconds

    device = torch.device("cuda")
    attends = {"triton": ours("triton", device, QWEN)}
    try:
        attends["fa3"] = fa3()
    except ImportError as error:
        print(f"FlashAttention-3 is skipped: {error}")
    copy_gbs = common.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copy_gbs:,.0f} GB/s")
    rows = []
    for row in compare(attends, device, graph_seconds):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out is not None:
        found = {"gpu": torch.cuda.get_device_name(), "copy_gbs": copy_gbs, "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
