"""Adds storage for a KV tier that compresses blocks.

    python examples/kv_tier.py

The pool fits one prompt at a time, so the first prompt's blocks are loaded from the tier.
"""

import time
import zlib

import torch

from nanoengine import LLM, HostTier, SamplingParams
from nanoengine.assets import demo_model_path


class PackedStorage:
    """A TierStorage that keeps blocks compressed in host memory."""

    def __init__(self, kv):  # the device's cache, [2, slices, num_blocks, ...]
        self.blocks = kv.movedim(2, 0)  # [num_blocks, 2, slices, ...], a view
        self.packed = {}  # tier block id -> bytes

    def store(self, src_ids, dst_ids):
        """Copies device blocks now; the returned function would wait for the copies."""
        for src, dst in zip(src_ids, dst_ids, strict=True):
            data = self.blocks[src].contiguous().view(torch.uint8).numpy()
            self.packed[dst] = zlib.compress(data.tobytes(), 1)
        return lambda: None

    def load(self, src_ids, dst_ids):
        """Copies tier blocks to the device; returns the seconds that it took."""
        started = time.perf_counter()
        for src, dst in zip(src_ids, dst_ids, strict=True):
            raw = bytearray(zlib.decompress(self.packed[src]))
            data = torch.frombuffer(raw, dtype=torch.uint8).view(self.blocks.dtype)
            self.blocks[dst].copy_(data.view(self.blocks.shape[1:]))
        return time.perf_counter() - started


greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
first, second = list(range(10, 74)), list(range(400, 464))
tier = HostTier(gib=0.01, policy="load")
with LLM(demo_model_path(), device="cpu", block_size=8, num_kv_blocks=12, kv_tiers=[tier]) as llm:
    executor = llm.engine.executor
    executor.tier_storage["host"] = PackedStorage(executor.kv_cache.kv)
    tokens = [llm.generate(ids, greedy)[0].outputs[0].token_ids for ids in (first, second, first)]
    (host,) = llm.stats().tiers
assert tokens[0] == tokens[2]
assert host.loaded_blocks > 0
print(f"{host.stored_blocks} blocks were stored, {host.loaded_blocks} loaded")
