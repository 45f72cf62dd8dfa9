"""The fused and the deterministic kernels on a real GPU: bfloat16, and equal bits."""

import pytest
import torch

from nanoengine.layers.triton_linear import TritonLinear
from tests.support.attention_cases import DEVICE, TOLERANCE, backend_of, make_case

DTYPES = [torch.bfloat16, torch.float16]
SIZE, LENGTH = 2048, 2000


def deterministic(case):
    return backend_of(case, deterministic=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 700])
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(window, dtype):
    options = {"dtype": dtype, "group_size": 2, "num_kv_heads": 2, "sliding_window": window}
    case = make_case((LENGTH, LENGTH), **options)
    prompt = case.check(deterministic(case))
    for chunk in (1, 2, 17, LENGTH // 3):
        part = make_case((chunk, LENGTH), **options)
        assert torch.equal(part.run(deterministic(part)), prompt[-chunk:])
    many = make_case((1, LENGTH), *[(1, 40 + 7 * i) for i in range(90)], (300, 900), **options)
    assert torch.equal(many.run(deterministic(many))[0], prompt[-1])


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
def test_shared_splits_have_the_same_bits_in_every_run(deterministic):
    case = make_case(
        *[(1, LENGTH - i) for i in range(3)], dtype=torch.bfloat16, num_kv_heads=2, group_size=2
    )
    backend = backend_of(case, deterministic=deterministic)
    out = case.check(backend)
    for _ in range(200):
        assert torch.equal(case.run(backend), out)
