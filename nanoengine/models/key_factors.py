"""Moves scale from keys to queries, for an int8 KV cache of a model whose keys have biases.

Called by `models/loader.py` before layers are fused.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import HeadNormWeights
from nanoengine.models.decoder import CausalLM

PROBES = 64
"""Number of random inputs on which a layer's queries and keys are measured."""
MAX_EXPONENT = 16
"""Factors are from 2^-16 to 2^16."""


def balance_keys(model: CausalLM, dtype: torch.dtype) -> None:
    """Gives each layer one factor per channel, which multiplies queries and divides keys, and
    stores all factors in `model.key_factors`.

    Why: with biases, a few channels of a key are up to 100 times larger than the others, and all
    channels of a key share one int8 scale. Attention scores do not change: factors are powers of
    two, and equal in the two channels that RoPE rotates together.

    The rounding error of a key is spread evenly over its channels (`attention/kv_quantization.py`),
    so the factors sqrt(|k| / |q|) minimize the error of a score. Channel magnitudes are measured on
    normally distributed inputs, so weights may have any format.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, model.config.hidden_size, generator=generator)
    all_weights: list[HeadNormWeights] = []
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            continue
        inputs = x.to(attention.qkv_proj.bias.device, dtype)
        if (norm := getattr(layer, "input_layernorm", None)) is not None:
            inputs = norm(inputs, None)[0]
        spec = attention.attention.spec
        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        # Why the last columns: in some models output gates precede the heads.
        heads = attention.qkv_proj(inputs)[:, -sum(counts) * spec.head_dim :].float()
        pairs = heads.square().mean(0).view(sum(counts), 2, -1).mean(1)  # [H + 2 K, D / 2]
        q, k, _ = pairs.split(counts)
        q = q.unflatten(0, (spec.num_kv_heads, -1)).mean(1)
        exponents = ((k + 1e-12) / (q + 1e-12)).log2().div(4).nan_to_num().round()
        factors = exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2().repeat(1, 2)
        factors = factors.to(torch.promote_types(dtype, torch.float32))
        query_factors = factors.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)
        weights = HeadNormWeights(weight=torch.cat((query_factors, 1 / factors)), eps=None)
        attention.norm_weights = weights
        all_weights.append(weights)
    model.key_factors = all_weights
