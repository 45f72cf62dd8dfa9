"""Steps over long contexts, with keys and values in float32, bfloat16 and int8.

    python benchmarks/kv_dtypes.py --case 1x16384 --case 32x4096 --case 1x4096x1024

A case SEQUENCESxCONTEXT is a decode step of this many sequences with this many tokens of context,
from token ids to the most likely tokens, on a model with random weights; a third number makes it a
prefill of this many last tokens. The caches contain random bytes: reading takes the same time for
any content. The blocks of all sequences come from one small pool, so that 32 sequences do not need
the memory of 32 contexts, and no two sequences share a prefix.

The dtypes alternate step by step, and after each step the attention of all its layers is measured
alone. One JSON line per case and round: the median step in ms, tok/s, attention's ms and the GB/s
of keys and values that a decode reads, tokens per GiB; and the speed-up of int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from nanoengine.attention.batch import Batch
from nanoengine.build import build_engine
from nanoengine.engine import LLMEngine
from nanoengine.runner.memory import GIB
from nanoengine.settings.config import EngineConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.suite.shapes import write_shape

BLOCK_SIZE, LONGEST = 64, 32_768  # tokens
MAX_BLOCKS = 1025  # 65,536 tokens: far more than the CPU's caches hold


def filled(model: str, kv_cache_dtype: str, dtype: str, isa: str | None) -> LLMEngine:
    """An engine whose cache contains small random values."""
    engine = build_engine(
        EngineConfig(
            model=model, load_format="dummy", device="cpu", dtype=dtype, cpu_isa=isa,
            block_size=BLOCK_SIZE, num_kv_blocks=MAX_BLOCKS, kv_cache_dtype=kv_cache_dtype,
            max_model_len=LONGEST, skip_tokenizer_init=True,
        )
    )  # fmt: skip
    kv = engine.executor.kv_cache.kv
    if kv.dtype == torch.int8:  # in each head of a block, the scales follow the values
        heads = kv.flatten(-2)
        numbers = kv.shape[-2] * (kv.shape[-1] - 4)
        heads[..., :numbers].random_(-127, 128)
        heads.view(torch.float32)[..., numbers // 4 :] = 0.01
    else:
        kv.normal_()
    return engine


def batch_of(sequences: int, context: int, queries: int) -> Batch:
    """The last query tokens of each sequence's context."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.stack([1 + torch.randperm(MAX_BLOCKS - 1)[:blocks] for _ in range(sequences)])
    positions = torch.arange(context - queries, context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(sequences + 1) * queries
    return Batch(
        token_ids=torch.arange(sequences * queries) % 1000 + 5,
        positions=positions.repeat(sequences),
        slot_mapping=slots.view(1, -1), query_start_loc=starts.int(),
        seq_lens=torch.full((sequences,), context).int(), block_tables=tables.int()[None],
        logits_indices=starts[1:] - 1, num_decodes=sequences if queries == 1 else 0,
        max_query_len=queries, max_seq_len=context,
    )  # fmt: skip


def attention_alone(engine: LLMEngine, batch: Batch) -> float:
    """Seconds for the attention of all layers, over the same keys and values as in a step.

    Each layer is one call from Python here, about 30 us.
    """
    layers, backend = engine.executor.model.attention_layers, engine.executor.backend
    spec = layers[0].spec
    q = torch.randn(len(batch.token_ids), spec.num_heads, spec.head_dim)
    batch.attention = backend.prepare(batch)
    backend.attend(q, layers[0].cache, batch)  # plans the tasks of all layers
    start = time.perf_counter()
    for layer in layers:
        backend.attend(q, layer.cache, batch)
    return time.perf_counter() - start


def step(engine: LLMEngine, batch: Batch) -> float:
    """Seconds of one step."""
    runner = engine.executor
    start = time.perf_counter()
    batch.attention = runner.backend.prepare(batch)
    runner.model.logits(runner.model.forward(batch)).argmax(-1)
    return time.perf_counter() - start


def main() -> None:
    """Parses the command line and runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", action="append", required=True, help="tokens: 1x4096, 1x4096x1024"
    )
    parser.add_argument("--dtype", default="float32", help="what the model computes in")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--kv", nargs="+", default=["auto", "bfloat16", "int8"])
    parser.add_argument("--cpu-isa")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each dtype in a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        write_shape(args.shape, Path(scratch))
        engines = {kv: filled(scratch, kv, args.dtype, args.cpu_isa) for kv in args.kv}
        for case in args.case:
            sequences, context, queries = (*map(int, case.split("x")), 1)[:3]
            batch = batch_of(sequences, context, queries)
            for engine in engines.values():
                step(engine, batch)
            for number in range(args.rounds):
                found: dict[str, list[tuple[float, float]]] = {kv: [] for kv in engines}
                for _ in range(args.steps):
                    for kv, engine in engines.items():
                        found[kv].append((step(engine, batch), attention_alone(engine, batch)))
                line: dict[str, object] = {"case": case, "round": number}
                medians = {}
                for kv, times in found.items():
                    middle, alone = map(statistics.median, zip(*times, strict=True))
                    info = engines[kv].info
                    medians[info.kv_cache_dtype] = middle, alone
                    read = sequences * context * info.block_bytes / BLOCK_SIZE
                    line[info.kv_cache_dtype] = {
                        "ms": round(1e3 * middle, 2),
                        "tok/s": round(sequences * queries / middle, 1),
                        "attention ms": round(1e3 * alone, 2),
                        "attention GB/s": round(read / alone / 1e9, 1),
                        "tokens a GiB": GIB // info.block_bytes * BLOCK_SIZE,
                    }
                for kv, (middle, alone) in medians.items():
                    if "int8" in medians and kv != "int8":
                        of_int8 = medians["int8"]
                        line[f"int8 over {kv}"] = {
                            "step": round(middle / of_int8[0], 2),
                            "attention": round(alone / of_int8[1], 2),
                        }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
