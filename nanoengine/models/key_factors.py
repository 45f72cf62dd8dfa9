"""Factors between queries and keys, for an int8 cache of a model with key biases.

Called by `models/loader.py` before layers are fused.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import HeadNormWeights
from nanoengine.models.decoder import CausalLM

PROBES = 64
"""Random inputs on which a layer's queries and keys are measured."""
MAX_EXPONENT = 16


def balance_keys(model: CausalLM, dtype: torch.dtype) -> None:
    """Sets each layer's factors, which multiply the channels of its queries and divide the channels
    of its keys, and keeps them in `model.key_factors`.

    Why: with biases, a few channels of the keys are up to 100 times larger than the others, and all
    channels of a row share one scale. Scores do not change: factors are powers of two, and are
    equal in the two channels that RoPE rotates together.

    The rounding error of a row is spread evenly over its channels
    (`attention/kv_quantization.py`), so the factors sqrt(|k| / |q|) minimize the error of a score.
    Channel sizes are measured on normally distributed inputs, which works for weights in any
    format.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, model.config.hidden_size, generator=generator)
    found: list[HeadNormWeights] = []
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            continue
        inputs = x.to(attention.qkv_proj.bias.device, dtype)
        if (norm := getattr(layer, "input_layernorm", None)) is not None:
            inputs = norm(inputs, None)[0]
        spec = attention.attention.spec
        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        # Why the last: in some models gates precede the heads.
        heads = attention.qkv_proj(inputs)[:, -sum(counts) * spec.head_dim :].float()
        pairs = heads.square().mean(0).view(sum(counts), 2, -1).mean(1)  # [H + 2 K, D / 2]
        q, k, _ = pairs.split(counts)
        q = q.unflatten(0, (spec.num_kv_heads, -1)).mean(1)
        exponents = ((k + 1e-12) / (q + 1e-12)).log2().div(4).nan_to_num().round()
        factors = exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2().repeat(1, 2)
        factors = factors.to(torch.promote_types(dtype, torch.float32))
        of_queries = factors.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)
        weights = HeadNormWeights(weight=torch.cat((of_queries, 1 / factors)), eps=None)
        attention.norm_weights = weights
        found.append(weights)
    model.key_factors = found
