"""Fused layers, the fp8 KV cache and deterministic=True on a GPU.

In bfloat16, which Triton's interpreter does not support, and at the sizes of real models. CPU tests
cover float16 and float32.
"""

import pytest
import torch

from nanoengine.attention.kv_quantization import FP8
from nanoengine.layers.kernels import GATES
from tests.attention import test_triton_rotate
from tests.gpu.scores import engine_scores, mean_error, reference_scores
from tests.layers import test_triton_ops
from tests.support.attention_cases import backend_of, make_case
from tests.support.engines import checkpoint, random_prompts

PROMPTS = random_prompts(7, [1, 5, 63, 64, 65, 130, 200])


@pytest.mark.parametrize("tokens", [1, 256, 4096])
@pytest.mark.parametrize("size", [128, 1000, 1024, 4096])
def test_norms(tokens, size):
    test_triton_ops.check_norms(torch.bfloat16, size, False, tokens)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (256, 3072), (4096, 1000)])
def test_gates(tokens, size, activation):
    test_triton_ops.check_gates(torch.bfloat16, activation, size, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [None, "narrow"])
@pytest.mark.parametrize("fp8", [False, True])
def test_rotation_and_store(norm, fp8, dtype):
    lengths = *((1, 1 + 37 * i) for i in range(20)), (300, 300)
    sizes = {"head_dim": 128, "num_kv_heads": 8, "group_size": 2, "block_size": 64}
    test_triton_rotate.check(*lengths, norm=norm, dtype=dtype, fp8=fp8, **sizes)


def test_attention_over_an_fp8_cache():
    decodes, prefills = [(1, 1 + 131 * i) for i in range(20)], [(300, 300), (2, 700), (65, 1000)]
    case = make_case(
        *decodes, *prefills, dtype=torch.bfloat16, head_dim=128, num_kv_heads=2, group_size=2,
        block_size=64, fp8=True,
    )  # fmt: skip
    case.check(backend_of(case, kv_dtype=FP8))


def test_the_error_of_an_fp8_cache_is_as_on_the_naive_backend():
    """Compares mean errors of log-probabilities against float64 without fp8: those of this backend,
    and those of the naive one in float32 with fp8. The rounding to 4 bits dominates."""
    directory = checkpoint("qwen3")
    errors = {}
    for name, dtype in (("triton", "bfloat16"), ("naive", "float32")):
        sequences, scores = engine_scores(
            directory, PROMPTS, 24, device="cuda", dtype=dtype, attention_backend=name,
            kv_cache_dtype="fp8", max_num_batched_tokens=48, max_num_seqs=8,
        )  # fmt: skip
        exact = reference_scores(directory, sequences, torch.float64, "cuda")
        errors[name] = mean_error(scores, exact)
    assert errors["triton"] < 1.5 * errors["naive"] + 0.02


def test_deterministic_scores_have_the_same_bits_in_any_batch_and_chunk():
    options = {
        "device": "cuda", "dtype": "bfloat16", "attention_backend": "triton",
        "deterministic": True,
    }  # fmt: skip
    directory = checkpoint("qwen3")
    together = engine_scores(directory, PROMPTS, 24, **options)
    chunked = engine_scores(
        directory, PROMPTS, 24, **options, max_num_batched_tokens=16, max_num_seqs=3
    )
    alone = [engine_scores(directory, [prompt], 24, **options) for prompt in PROMPTS]
    assert chunked[0] == together[0] == [sequences[0] for sequences, _ in alone]
    for i, scores in enumerate(together[1]):
        assert torch.equal(scores, chunked[1][i])
        assert torch.equal(scores, alone[i][1][0])
