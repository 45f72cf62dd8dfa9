"""The fused and the deterministic kernels on a real GPU: bfloat16, and bits that must be equal."""

import pytest
import torch

from nanoengine.attention import make_backend
from nanoengine.attention.base import AttentionBackend
from nanoengine.layers.kernels import Kernels
from nanoengine.layers.triton_linear import TritonLinear
from nanoengine.models.triton import TritonKernels
from tests.support.attention_cases import (
    DEVICE,
    TOLERANCE,
    heads_of,
    make_case,
    norm_of,
    rotation_of,
)
from tests.support.model_helpers import DenseAttention

DTYPES = [torch.bfloat16, torch.float16]
SIZE, LENGTH = 2048, 2000
PLAIN = Kernels(DenseAttention())


def fused_kernels(dtype):
    return TritonKernels(DenseAttention(), dtype=dtype)


def deterministic(case):
    return make_backend(
        "triton", device=DEVICE, dtype=case.q.dtype, head_dim=case.spec.head_dim,
        block_size=case.k_cache.shape[1], deterministic=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_ops_equal_plain_torch(dtype):
    ops, plain, atol = fused_kernels(dtype), PLAIN, TOLERANCE[dtype]
    x, residual = torch.randn(2, 33, SIZE, device=DEVICE).to(dtype)
    weight = torch.rand(SIZE, device=DEVICE).to(dtype)
    expected = plain.add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(ops.add_rms_norm(x, residual, weight, 1e-6), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=atol, atol=atol)
    gate_up = torch.randn(33, 2 * SIZE, device=DEVICE).to(dtype)
    for name in ("silu", "gelu_pytorch_tanh"):
        ours, theirs = ops.gate(gate_up, name), plain.gate(gate_up, name)
        torch.testing.assert_close(ours, theirs, rtol=atol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_norm_rotation_and_store_equal_the_plain_steps(fp8, dtype):
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    case = make_case((1, 30), (20, 90), num_kv_heads=8, group_size=2, dtype=dtype, fp8=fp8)
    backend, norm = deterministic(case), norm_of(case, wide=False)
    case.batch.attention = backend.prepare(case.batch)
    arguments = heads_of(case), rotation_of(case, dtype), norm
    plain = case.copied_cache()
    expected = AttentionBackend.rotate_and_store(backend, *arguments, plain, case.batch)
    q = backend.rotate_and_store(*arguments, case.cache, case.batch)
    torch.testing.assert_close(q, expected, rtol=0, atol=TOLERANCE[dtype])
    slots = case.batch.slot_mapping[1]
    for ours, theirs in zip(case.cache[:2], plain[:2], strict=True):
        ours, theirs = (x.view(-1, 8, 64)[slots].float() for x in (ours, theirs))
        # One step of e4m3 is an eighth: a norm's last bit may move a key to the next one.
        torch.testing.assert_close(ours, theirs, rtol=1 / 8 if fp8 else 0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 700])
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(window, dtype):
    options = {"dtype": dtype, "group_size": 2, "num_kv_heads": 2, "sliding_window": window}
    case = make_case((LENGTH, LENGTH), **options)
    whole = case.check(deterministic(case))
    for chunk in (1, 2, 17, LENGTH // 3):
        part = make_case((chunk, LENGTH), **options)
        assert torch.equal(part.run(deterministic(part)), whole[-chunk:])
    many = make_case((1, LENGTH), *[(1, 40 + 7 * i) for i in range(90)], (300, 900), **options)
    assert torch.equal(many.run(deterministic(many))[0], whole[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_number_of_rows(dtype):
    method = TritonLinear("layer")
    method.create((2 * SIZE, SIZE), dtype, DEVICE)
    weight = torch.randn(2 * SIZE, SIZE, device=DEVICE) * SIZE**-0.5
    method.load(weight)
    x = torch.randn(777, SIZE, device=DEVICE).to(dtype)
    many = method.apply(x, None)
    expected = x.float() @ method.weight.float().T
    torch.testing.assert_close(many.float(), expected, rtol=0, atol=4 * TOLERANCE[dtype])
    for rows in (slice(5, 6), slice(100, 164), slice(0, 300)):
        assert torch.equal(method.apply(x[rows], None), many[rows])


@pytest.mark.parametrize("deterministic", [False, True])
def test_shared_splits_give_the_same_bits_in_every_run(deterministic):
    case = make_case(
        *[(1, LENGTH - i) for i in range(3)], dtype=torch.bfloat16, num_kv_heads=2, group_size=2
    )
    backend = make_backend(
        "triton", device=DEVICE, dtype=torch.bfloat16, head_dim=64, block_size=16,
        deterministic=deterministic,
    )  # fmt: skip
    out = case.check(backend)
    for _ in range(200):
        assert torch.equal(case.run(backend), out)
