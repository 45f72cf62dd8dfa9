"""The most likely token of each row: all that a plain row asks of its logits.

Called by the ModelRunner. What else rows may ask for (draws, edited logits, log-probabilities) is
in step_sampler.py.

Legend: L lines of logits.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence
from nanoengine.models.decoder import CausalLM
from nanoengine.settings.params import GREEDY_BELOW

MAX_VOCAB_SIZE = 2**19
"""So many tokens of weight `draw.SCALE` add up to 2**53, up to which float64 is exact."""
NO_TOKEN = "no token can be sampled: the logits hold NaN or +inf, or nothing but -inf"


def is_plain(sequence: AdmittedSequence) -> bool:
    """Whether each token is the most likely one, nothing edits logits and none are reported."""
    params = sequence.params
    return params.temperature < GREEDY_BELOW and not (
        sequence.bad_word_ids
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
        or params.logits_processors
        or params.extra_args
    )


def most_likely_tokens(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row of hidden states [L, hidden_size], as
    `SampledTokens.packed`."""
    found = model.most_likely(hidden)
    if found is not None:
        return pack_found(*found)
    largest, token_ids = model.logits(hidden).max(-1)  # the lowest of equal ids
    valid = largest.isfinite()
    return torch.stack((token_ids * valid, valid.long()))


def pack_found(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Greedy tokens, as kernels of the CPU find them: the tokens [L] with the largest logits, and
    these logits [L]. Where one is NaN, there is no token.

    Why numpy: within a step a call of torch takes 10 us, for however few numbers.
    """
    packed = np.empty((2, len(token_ids)), np.int64)
    packed[1] = valid = np.isfinite(logits.numpy())
    packed[0] = token_ids.numpy() * valid
    return torch.from_numpy(packed)


def pack_tokens(token_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`SampledTokens.packed` of ids [L] int64 and validity [L] bool, in memory of its own."""
    return torch.stack((token_ids, valid.long()))


def check_vocabulary(vocab_size: int) -> None:
    """Raises ValueError for a vocabulary that can't be sampled from."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
