"""Log-probabilities of whole sequences, by the engine and by transformers, to compare models with.

Why not tokens: two tokens of nearly equal probability may change places by one rounding, and then
all that follows differs. Each model scores the same tokens here, so errors don't build up.
"""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.settings.params import SamplingParams
from tests.support.engines import make_engine, reference, run

Scores = list[torch.Tensor]
"""For each sequence the log-probabilities of its tokens but the first, float64."""


def engine_scores(
    directory: str, prompts: list[list[int]], max_tokens: int, **options: Any
) -> tuple[list[list[int]], Scores]:
    """Greedy generation: all tokens of each sequence, and what the engine says of them."""
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
    """What transformers says of the same tokens, computed in `dtype`."""
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
    """Holds the engine against transformers, both in `dtype`, by their distance from float64.

    Why twice the other's error: both round as often, in another order. A wrong mask, position or
    norm is off by far more; a wrong token has a log-probability that differs by whole numbers.

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
