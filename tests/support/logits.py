"""Lines of logits for the tests of samplers."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.runner.sampling.draw import mix, uniforms


def random_logits(seed, num_lines, vocab_size):
    """Lines of different spread; every second one is rounded, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_lines, vocab_size, generator=generator) * torch.logspace(
        -2, 1, num_lines
    ).unsqueeze(1)
    x[::2] = (x[::2] * 4).round() / 4
    x[1::3, 5::7] = -torch.inf
    return x


def uniforms_of(seeds, positions):
    """The random numbers for seeds of requests."""
    return uniforms(mix(np.asarray(seeds).astype(np.int64)), np.asarray(positions))
