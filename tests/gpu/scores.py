"""Log-probabilities of whole sequences from the engine and from transformers, for comparisons.

Why not tokens: one rounding may swap two tokens of nearly equal probability, and all later tokens
then differ. Here both models score the same tokens, so errors do not accumulate.
"""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.settings.params import SamplingParams
from tests.support.engines import make_engine, reference, run

Scores = list[torch.Tensor]
"""Per sequence, the log-probabilities of all tokens but the first, float64."""


def engine_scores(
    directory: str, prompts: list[list[int]], max_tokens: int, **options: Any
) -> tuple[list[list[int]], Scores]:
    """Greedy generation: all tokens of each sequence, and their log-probabilities in the engine."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    engine = make_engine(directory, **options)
    requests = run(engine, prompts, params)
    engine.close()
    sequences, scores = [], []
    for prompt, request in zip(prompts, requests, strict=True):
        (seq,) = request.sequences
        lines = [*request.prompt_logprobs, *seq.extras.logprobs]
        sequences.append(prompt + seq.output_token_ids)
        scores.append(torch.tensor([line[0].logprob for line in lines], dtype=torch.float64))
    return sequences, scores


@torch.inference_mode()
def reference_scores(
    directory: str, sequences: list[list[int]], dtype: torch.dtype, device: str
) -> Scores:
    """The log-probabilities of the same tokens in transformers, computed in `dtype`."""
    model = reference(directory, dtype).to(device)
    scores = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        lines = model(ids).logits[0, :-1].double().log_softmax(-1)
        scores.append(lines.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return scores


def mean_error(scores: Scores, exact: Scores) -> float:
    """Mean absolute difference over all tokens."""
    assert [len(s) for s in scores] == [len(s) for s in exact]
    return float((torch.cat(scores) - torch.cat(exact)).abs().mean())


def check_scores(
    directory: str, prompts: list[list[int]], dtype: torch.dtype, device: str, **options: Any
) -> tuple[float, float]:
    """Compares the errors of the engine and of transformers, both in `dtype`, against float64.

    Why twice the other's error: both round equally often, in a different order. A wrong mask,
    position or norm has a far larger error; a wrong token changes log-probabilities by 1 or more.

    Returns:
        The two mean errors.
    """
    name = str(dtype).removeprefix("torch.")
    sequences, scores = engine_scores(directory, prompts, 24, dtype=name, device=device, **options)
    exact = reference_scores(directory, sequences, torch.float64, device)
    ours = mean_error(scores, exact)
    theirs = mean_error(reference_scores(directory, sequences, dtype, device), exact)
    assert ours <= 2 * theirs + 1e-6, f"mean error {ours:.2g}, transformers has {theirs:.2g}"
    return ours, theirs
