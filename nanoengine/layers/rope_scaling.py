"""RoPE scaling for contexts longer than in pre-training (linear, llama3, yarn, longrope), and
proportional RoPE, which rotates only a part of the pairs.

`rotary.py` calls this for these types. Each type lowers some of the frequencies.
"""

from __future__ import annotations

import math

import torch

from nanoengine.checkpoint.rope import RopeConfig


def scale(rope: RopeConfig, wavelengths: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, by `rope.type`: [pairs] float32.

    Args:
        wavelengths: [pairs], without scaling, divided by 2 pi.
        max_positions: the engine's longest sequence, which selects longrope's factors. Why not each
            prompt's length: keys in the cache would have been rotated with other factors.
    """
    if rope.type == "longrope":
        is_long = max_positions > rope.original_max_position_embeddings
        slowed = torch.tensor(rope.long_factor if is_long else rope.short_factor)
        return 1.0 / (slowed * wavelengths)
    frequencies = 1.0 / wavelengths
    if rope.type in ("linear", "proportional"):
        num_rotated = int(rope.partial_rotary_factor * len(frequencies))
        frequencies[num_rotated:] = 0.0
        return frequencies / rope.factor
    return (_llama3 if rope.type == "llama3" else _yarn)(frequencies, rope)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Divides frequencies by `factor` for long wavelengths, keeps them for short wavelengths, and
    interpolates between.

    Source: Llama 3.1 (arXiv 2407.21783, section 3.4.2) and the model code released with it.
    """
    rotations = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Divides frequencies by `factor` for pairs with fewer than `beta_slow` rotations in the
    original context, keeps them for pairs with more than `beta_fast` rotations, and interpolates by
    dimension between.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """
    size = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001  # Why: a width of 0 would divide by zero
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    slowed = ((pairs - low) / width).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)
