"""Adds an attention backend, and compares its tokens with the naive backend's.

    python examples/attention_backend.py

The pool is too small for all prompts, so requests are preempted; blocks and chunks are small.
"""

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.attention import BACKENDS
from nanoengine.attention.naive import NaiveBackend
from nanoengine.errors import ConfigError


class TorchBackend(NaiveBackend):
    """Gathers the keys and values of each sequence and calls torch."""

    name: ClassVar[str] = "torch_sdpa"

    def attend(self, q, cache, batch):
        k_cache, v_cache, spec = cache
        if spec.sliding_window is not None or spec.softcap is not None:
            raise ConfigError("torch_sdpa supports neither windows nor softcaps")
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        tables = batch.block_tables[spec.group]
        for table, (start, end, seq_len) in zip(tables, batch.attention, strict=True):
            keys = torch.arange(seq_len)
            blocks, offsets = table[keys // self.block_size], keys % self.block_size
            positions = torch.arange(seq_len - (end - start), seq_len)
            out[start:end] = scaled_dot_product_attention(
                q[start:end].transpose(0, 1),  # [H, N, D]
                k_cache[blocks, offsets].transpose(0, 1),  # [K, C, D]
                v_cache[blocks, offsets].transpose(0, 1),
                attn_mask=positions[:, None] >= keys,  # [N, C]
                scale=spec.scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out


BACKENDS["torch_sdpa"] = (__name__, "TorchBackend")

greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
prompts = [[10 * n + i for i in range(7 * n)] for n in range(1, 7)]
tight = {"block_size": 8, "num_kv_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 8}
found = {}
for name in ("naive", "torch_sdpa"):
    with LLM(
        demo_model_path(),
        device="cpu",
        dtype="float64",
        attention_backend=name,
        **tight,
        admission="watermark",
    ) as llm:
        found[name] = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)]
        print(name, llm.info.attention_backend, llm.stats().preemptions, "preemptions")
assert found["naive"] == found["torch_sdpa"]
