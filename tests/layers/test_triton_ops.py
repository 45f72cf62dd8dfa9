"""Fused norms and gates against plain torch, on a GPU or in Triton's interpreter."""

import pytest
import torch

from nanoengine.errors import ConfigError
from nanoengine.layers.kernels import GATES, Kernels
from nanoengine.models.triton import TritonKernels, norm_warps
from nanoengine.runner.options import make_kernels
from tests.support.attention_cases import DEVICE
from tests.support.model_helpers import DenseAttention

EPS = 1e-6
PLAIN = Kernels(DenseAttention())
DTYPES = [torch.float32, torch.float16]
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2**-6}
"""Two roundings of values between 2 and 4, since the implementations may round ties differently."""


def kernels_of(dtype):
    return TritonKernels(DenseAttention(), dtype=dtype)


def random_tensor(*shape, dtype, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def close(found, expected):
    assert found.dtype == expected.dtype
    atol = ATOL[expected.dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 1000, 1024])
@pytest.mark.parametrize("wide", [False, True])
def test_norms_match_plain_torch(dtype, size, wide):
    check_norms(dtype, size, wide, tokens=3)


def check_norms(dtype, size, wide, tokens):
    ops, plain = kernels_of(dtype), PLAIN
    weight = 1 + random_tensor(size, dtype=torch.float32 if wide else dtype, seed=1, spread=0.3)
    x, residual = (
        random_tensor(tokens, size, dtype=dtype),
        random_tensor(tokens, size, dtype=dtype, seed=2),
    )
    close(ops.rms_norm(x, None, weight, EPS)[0], plain.rms_norm(x, None, weight, EPS)[0])
    expected = plain.rms_norm(x, residual, weight, EPS)
    normed, summed = ops.rms_norm(x, residual.clone(), weight, EPS)
    close(normed, expected[0])
    assert torch.equal(summed, expected[1])


def test_the_weights_dtype_determines_the_rounding_of_norms():
    x = random_tensor(8, 128, dtype=torch.float16)
    weight = 1 + random_tensor(128, dtype=torch.float32, seed=1, spread=0.3)
    ops, plain = kernels_of(torch.float16), PLAIN
    narrow, _ = ops.rms_norm(x, None, weight.half(), EPS)
    wide, _ = ops.rms_norm(x, None, weight.half().float(), EPS)
    assert not torch.equal(narrow, wide)
    # Nearly all elements have the same bits in both implementations. With the wrong rounding, a
    # tenth or more would differ.
    for ours, of in ((narrow, weight.half()), (wide, weight.half().float())):
        assert (ours != plain.rms_norm(x, None, of, EPS)[0]).float().mean() < 0.01


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_eps_is_added_and_zeros_stay_zeros(eps):
    x = random_tensor(2, 64, dtype=torch.float32)
    x[1] = 0
    weight = torch.ones(64, device=DEVICE)
    out, _ = kernels_of(torch.float32).rms_norm(x, None, weight, eps)
    close(out, PLAIN.rms_norm(x, None, weight, eps)[0])
    assert out[1].abs().max() == 0


def test_strided_rows_match_plain_torch():
    wide = random_tensor(4, 200, dtype=torch.float32)
    weight = torch.ones(64, device=DEVICE)
    ops, plain = kernels_of(torch.float32), PLAIN
    part = wide[:, 8:72]
    expected, _ = plain.rms_norm(part, None, weight, EPS)
    close(ops.rms_norm(part, None, weight, EPS)[0], expected)
    close(ops.gate(wide[:, 4:100], "silu"), plain.gate(wide[:, 4:100], "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(GATES))
@pytest.mark.parametrize("size", [16, 100, 1500])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_match_plain_torch(dtype, activation, size):
    check_gates(dtype, activation, size, tokens=3)


def check_gates(dtype, activation, size, tokens):
    gate_up = random_tensor(tokens, 2 * size, dtype=dtype, spread=4.0)
    expected = PLAIN.gate(gate_up, activation)
    close(kernels_of(dtype).gate(gate_up, activation), expected)


@pytest.mark.parametrize("activation", list(GATES))
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_of_large_values_match_plain_torch(activation):
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    out = kernels_of(torch.float32).gate(gate_up, activation)
    torch.testing.assert_close(out, PLAIN.gate(gate_up, activation))


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    ops = kernels_of(torch.float32)
    x, residual = (
        random_tensor(5, 192, dtype=torch.float32),
        random_tensor(5, 192, dtype=torch.float32, seed=1),
    )
    weight = random_tensor(192, dtype=torch.float32, seed=2)
    batch = ops.rms_norm(x.clone(), residual.clone(), weight, EPS)
    single = ops.rms_norm(x[3:4].clone(), residual[3:4].clone(), weight, EPS)
    assert all(torch.equal(a[3:4], b) for a, b in zip(batch, single, strict=True))
    assert torch.equal(ops.gate(x, "silu")[3:4], ops.gate(x[3:4], "silu"))


def test_kernel_sets_are_selected_by_device_and_dtype():
    from nanoengine.models.cpu import CPUKernels  # imports numba, which a GPU machine may lack

    def kind(device, dtype, backend=DenseAttention):
        return type(make_kernels(backend(), device=torch.device(device), dtype=dtype))

    class Naive(DenseAttention):
        name = "naive"

    assert kind("cuda", torch.bfloat16) is TritonKernels
    assert kind("cuda", torch.float64) is Kernels
    assert kind("cpu", torch.float32) is CPUKernels
    assert kind("cpu", torch.bfloat16) is Kernels
    for device in ("cuda", "cpu"):
        assert kind(device, torch.float32, Naive) is Kernels


def test_unsupported_dtypes_raise():
    with pytest.raises(ConfigError, match="float64"):
        kernels_of(torch.float64)


@pytest.mark.parametrize(
    ("size", "warps"), [(64, 1), (1024, 4), (2048, 8), (2560, 16), (4096, 16), (16384, 16)]
)
def test_each_thread_reads_16_bytes_at_a_time(size, warps):
    assert norm_warps(size) == warps


def test_empty_batches_give_empty_results():
    """A chunk in the middle of a prompt needs no logits, so the last layer gets no rows."""
    ops, weight = kernels_of(torch.float32), torch.ones(64, device=DEVICE)
    nothing = random_tensor(0, 64, dtype=torch.float32)
    assert ops.rms_norm(nothing, None, weight, EPS)[0].shape == (0, 64)
    assert [x.shape for x in ops.rms_norm(nothing, nothing, weight, EPS)] == [(0, 64)] * 2
    assert ops.gate(nothing, "silu").shape == (0, 32)
