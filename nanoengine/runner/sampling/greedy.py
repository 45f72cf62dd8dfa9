"""The most likely token of each row: all that a step of plain rows computes from its logits.

Called by the ModelRunner. Everything else (random draws, logits processors, log-probabilities) is
in step_sampler.py.

Legend: L lines of logits.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence
from nanoengine.models.decoder import CausalLM
from nanoengine.settings.params import DEFAULTS, EDITS, GREEDY_BELOW, SamplingParams

MAX_VOCAB_SIZE = 2**19
"""The token weights of a larger vocabulary, at most `draw.SCALE` each, could sum to more than
2**53, above which float64 does not represent all integers."""
NO_TOKEN = "no token can be sampled: the logits contain NaN or +inf, or only -inf"


def is_plain(sequence: AdmittedSequence) -> bool:
    """Whether the row is greedy, without logits processors and log-probabilities."""
    params = sequence.params
    return params.temperature < GREEDY_BELOW and not (
        sequence.bad_word_ids
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.extra_args
        or edits(params)
    )


def edits(params: SamplingParams) -> list[str]:
    """The names of the fields that change logits by a logits processor, if they are set."""
    return [name for name in EDITS if getattr(params, name) not in (DEFAULTS[name], (), {})]


def most_likely_tokens(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row of hidden states [L, hidden_size], as
    `SampledTokens.packed`."""
    found = model.most_likely(hidden)
    if found is not None:
        return pack_greedy(*found)
    largest, token_ids = model.logits(hidden).max(-1)  # the lowest of equal ids
    valid = largest.isfinite()
    return torch.stack((token_ids * valid, valid.long()))


def pack_greedy(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`SampledTokens.packed` of greedy tokens that CPU kernels have found: token ids [L] and their
    logits [L]. A token is invalid if its logit is not finite.

    Why numpy: a torch call within a step takes 10 us, however small the tensors are.
    """
    packed = np.empty((2, len(token_ids)), np.int64)
    packed[1] = valid = np.isfinite(logits.numpy())
    packed[0] = token_ids.numpy() * valid
    return torch.from_numpy(packed)


def pack_tokens(token_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`SampledTokens.packed` from ids [L] int64 and validity [L] bool, in new memory."""
    return torch.stack((token_ids, valid.long()))


def check_vocabulary(vocab_size: int) -> None:
    """Raises ValueError if the sampler doesn't support a vocabulary of this size."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
