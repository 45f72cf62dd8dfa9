"""Fused layers, the fp8 KV cache and deterministic=True on a GPU.

In bfloat16, which Triton's interpreter can't compute, and at the sizes of real models; float16 and
float32 are covered on a CPU.
"""

import pytest
import torch

from nanoengine.attention import make_backend
from nanoengine.attention.base import AttentionBackend, HeadNormWeights
from nanoengine.attention.stored import FP8
from nanoengine.layers.kernels import GATES, Kernels
from nanoengine.models.triton import TritonKernels
from tests.gpu.scores import engine_scores, mean_error, reference_scores
from tests.support.attention_cases import DEVICE, make_case
from tests.support.engines import checkpoint, random_prompts
from tests.support.model_helpers import DenseAttention

EPS = 1e-6
ROUNDINGS = 2**-7
"""Two roundings of bfloat16, of 8 bits each: the twins add up in another order, and round a tie's
neighbour differently."""

PROMPTS = random_prompts(7, [1, 5, 63, 64, 65, 130, 200])
PLAIN = Kernels(DenseAttention())


def fused_kernels():
    return TritonKernels(DenseAttention(), dtype=torch.bfloat16)


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(ours, theirs):
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2 * ROUNDINGS, atol=ROUNDINGS)


@pytest.mark.parametrize("tokens", [1, 256, 4096])
@pytest.mark.parametrize("size", [128, 1000, 1024, 4096])
def test_norms(tokens, size):
    fused, plain = fused_kernels(), PLAIN
    weight = 1 + 0.3 * numbers(size, seed=1)
    x, residual = numbers(tokens, size), numbers(tokens, size, seed=2)
    close(fused.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS))
    expected = plain.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    normed, summed = fused.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    close(normed, expected[0])
    assert torch.equal(summed, expected[1])


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shape", [(1, 3072), (256, 3072), (4096, 1000)])
def test_gates(shape, activation):
    x = numbers(shape[0], 2 * shape[1])
    fused = fused_kernels().gate(x.clone(), activation)
    close(fused, PLAIN.gate(x.clone(), activation))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_rotation_and_store(norm, fp8):
    case = make_case(
        *[(1, 1 + 37 * i) for i in range(20)], (300, 300), dtype=torch.bfloat16, head_dim=128,
        num_kv_heads=8, group_size=2, block_size=64, fp8=fp8,
    )  # fmt: skip
    backend = make_backend(
        "triton",
        device=DEVICE,
        dtype=torch.bfloat16,
        head_dim=128,
        block_size=64,
        kv_dtype=FP8 if fp8 else None,
    )
    case.batch.attention = backend.prepare(case.batch)
    angles = case.batch.positions[:, None].float() * 0.5 ** torch.arange(64, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16().unsqueeze(1)
    weights = HeadNormWeights(weight=1 + 0.3 * numbers(24, 128, seed=3), eps=EPS) if norm else None
    heads = torch.cat([case.q, case.k, case.v], 1)
    found = []
    for rotate_and_store in (AttentionBackend.rotate_and_store, type(backend).rotate_and_store):
        cache = case.copied_cache()
        q = rotate_and_store(backend, heads, table.chunk(2, -1), weights, cache, case.batch)
        found.append((q, cache.k_cache, cache.v_cache))
    (q, k, v), (fused_q, fused_k, fused_v) = found
    close(fused_q, q)
    assert torch.equal(fused_v.float().nan_to_num(7.0), v.float().nan_to_num(7.0))
    # Why: a key that was rounded to its neighbour in bfloat16 may round to a neighbour in fp8.
    step = 1 / 8 if fp8 else 2 * ROUNDINGS
    torch.testing.assert_close(
        fused_k.float(), k.float(), rtol=step, atol=ROUNDINGS, equal_nan=True
    )


def test_attention_over_fp8():
    decodes, prefills = [(1, 1 + 131 * i) for i in range(20)], [(300, 300), (2, 700), (65, 1000)]
    case = make_case(
        *decodes, *prefills, dtype=torch.bfloat16, head_dim=128, num_kv_heads=2, group_size=2,
        block_size=64, fp8=True,
    )  # fmt: skip
    options = {"head_dim": 128, "block_size": 64, "kv_dtype": FP8}
    case.check(make_backend("triton", device=DEVICE, dtype=torch.bfloat16, **options))


def test_a_model_with_an_fp8_cache_is_off_by_no_more_than_the_plain_one():
    """Mean error of log-probabilities against float64 without fp8, beside the naive backend's with
    the same cache in float32: rounding to 4 bits outweighs all else."""
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


def test_deterministic_scores_have_the_same_bits_alone_in_a_batch_and_in_chunks():
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
