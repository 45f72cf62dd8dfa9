"""Whole models on a GPU against transformers: chunks, mixed batches, decodes, graphs.

Errors are measured against float64. On a CPU with the naive backend, the engine and transformers
both had errors of 2e-2 to 7e-2 in bfloat16 (8 bits per element), 2e-3 to 9e-3 in float16 (11 bits),
and 1e-6 to 3e-6 in float32; Gemma has the largest logits. The bound is twice the error of
transformers in the same dtype on the same GPU.
"""

import pytest
import torch

from tests.gpu.scores import check_scores
from tests.support.checkpoints import FAMILIES
from tests.support.engines import checkpoint, random_prompts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROMPTS = random_prompts(7, [1, 5, 63, 64, 65, 130, 200])
"""Lengths around a block of 64, and lengths above the step's budget, which need chunks."""

SMALL_STEPS = {"max_num_batched_tokens": 48, "max_num_seqs": 8}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_bfloat16(family):
    check_scores(
        checkpoint(family), PROMPTS, BF16, "cuda", attention_backend="triton", **SMALL_STEPS
    )


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_dtypes(family, dtype):
    check_scores(
        checkpoint(family), PROMPTS, dtype, "cuda", attention_backend="triton", **SMALL_STEPS
    )


def test_prompts_in_one_step_and_without_graphs():
    options = {"attention_backend": "triton", "enforce_eager": True}
    check_scores(checkpoint("qwen3"), PROMPTS, BF16, "cuda", **options)


def test_the_naive_backend_on_a_gpu():
    check_scores(checkpoint("qwen3"), PROMPTS, BF16, "cuda", attention_backend="naive")


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_head_dims(head_dim):
    directory = checkpoint("qwen3", head_dim=head_dim)
    check_scores(directory, PROMPTS, BF16, "cuda", attention_backend="triton", **SMALL_STEPS)
