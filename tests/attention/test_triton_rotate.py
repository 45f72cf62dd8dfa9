"""QK norm, RoPE and store in one Triton kernel, compared with the code of `AttentionBackend`."""

from dataclasses import replace

import pytest
import torch

from nanoengine.attention import triton as module
from nanoengine.attention.base import AttentionBackend, LayerCache
from nanoengine.attention.kv_quantization import FP8
from nanoengine.attention.triton import rotate_rows
from tests.support.attention_cases import (
    DEVICE,
    TOLERANCE,
    backend_of,
    heads_of,
    make_case,
    norm_of,
    rotation_of,
)

pytestmark = pytest.mark.guards("nanoengine/attention/*.py", "tests/support/attention_cases.py")

LENGTHS = ((1, 18), (1, 40), (3, 35))


def backend_for(case):
    """A backend, prepared for the case's batch."""
    backend = backend_of(case)
    case.batch.attention = backend.prepare(case.batch)
    return backend


def check(*lengths, norm=None, padding=0, **options):
    """Runs the kernel and the base class on two copies of the cache; returns the case."""
    case = make_case(*lengths, **options)
    backend = backend_for(case)
    weights = None if norm is None else norm_of(case, norm == "wide")
    arguments = heads_of(case, padding), rotation_of(case, case.q.dtype), weights
    plain, fused = case.copied_cache(), case.copied_cache()
    expected = AttentionBackend.rotate_and_store(backend, *arguments, plain, case.batch)
    q = backend.rotate_and_store(*arguments, fused, case.batch)
    assert q.shape == expected.shape
    assert q.is_contiguous()
    atol = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(q, expected, rtol=0, atol=atol)
    # Why: a 16-bit rounding difference of a key may become a larger one in fp8.
    close = {"rtol": 1 / 8 if options.get("fp8") else 0, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(fused[0].float(), plain[0].float(), **close)
    assert torch.equal(fused[1].float().nan_to_num(7.0), plain[1].float().nan_to_num(7.0))
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm", [None, "narrow", "wide"])
def test_equals_the_unfused_operations(norm, dtype):
    check(*LENGTHS, norm=norm, dtype=dtype, num_kv_heads=2, group_size=2)


@pytest.mark.parametrize(
    "options",
    [
        *({"head_dim": n, "group_size": 3, "block_size": 32} for n in (16, 80, 96, 128, 256)),
        *({"block_size": n, "num_kv_heads": 3, "group_size": 7} for n in (16, 64, 256)),
    ],
    ids=str,
)
def test_head_dims_and_group_sizes(options):
    check(*LENGTHS, norm="narrow", **options)


def test_a_strided_projection_and_many_programs_per_token():
    case = check(*LENGTHS, norm="narrow", padding=24, num_kv_heads=8, group_size=2, head_dim=128)
    assert rotate_rows(32, case.spec.head_dim) < 32


def test_window_layers_write_the_slots_of_their_own_group():
    case = make_case(*LENGTHS, sliding_window=8)
    case.batch.slot_mapping[0] = case.batch.slot_mapping[1].roll(1)
    first, second = (case.k_cache.clone() for _ in range(2))
    backend, heads, rotation = backend_for(case), heads_of(case), rotation_of(case, torch.float32)
    for group, cache in ((0, first), (1, second)):
        layer = LayerCache(cache, case.v_cache.clone(), replace(case.spec, group=group))
        backend.rotate_and_store(heads, rotation, None, layer, case.batch)
    slots = case.batch.slot_mapping
    rows = [cache.view(-1, 1, 64)[slots[g]] for g, cache in enumerate((first, second))]
    assert torch.equal(*rows)
    assert not torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


def test_a_token_has_the_same_bits_in_any_batch():
    case = make_case(*LENGTHS, num_kv_heads=2, group_size=2)
    backend, rotation = backend_for(case), rotation_of(case, torch.float32)
    heads, norm = heads_of(case), norm_of(case, wide=False)
    many = backend.rotate_and_store(heads, rotation, norm, case.cache, case.batch)
    keys = case.k_cache.view(-1, 2, 64)[case.batch.slot_mapping[1, 1]].clone()
    slots, step = case.batch.slot_mapping[:, 1:2], backend.prepare(case.batch)
    alone = replace(case.batch, slot_mapping=slots, attention=step)
    one = backend.rotate_and_store(
        heads[1:2], tuple(x[1:2] for x in rotation), norm, case.cache, alone
    )  # fmt: skip
    assert torch.equal(one[0], many[1])
    assert torch.equal(case.k_cache.view(-1, 2, 64)[case.batch.slot_mapping[1, 1]], keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_are_stored_in_an_fp8_cache(dtype):
    # Keys are rounded after RoPE, which differs between the interpreter and a GPU by half a step of
    # e4m3 (1/16 of a key).
    case = make_case(*LENGTHS, fp8=True, dtype=dtype, num_kv_heads=2, group_size=2)
    arguments = heads_of(case), rotation_of(case, dtype), norm_of(case, wide=False)
    backend, plain = backend_for(case), case.copied_cache()
    AttentionBackend.rotate_and_store(backend, *arguments, plain, case.batch)
    backend.rotate_and_store(*arguments, case.cache, case.batch)
    slots = case.batch.slot_mapping[1]
    keys, values = (x.view(-1, 2, 64)[slots].float() for x in (case.k_cache, case.v_cache))
    plain_keys, plain_values = (x.view(-1, 2, 64)[slots].float() for x in plain[:2])
    assert case.k_cache.dtype == FP8
    assert torch.equal(values, plain_values)
    near = torch.isclose(keys, plain_keys, rtol=1 / 8, atol=2**-9)
    if DEVICE.type == "cpu":  # the interpreter halves a mantissa that rounds up to 2
        near |= 2 * keys == plain_keys
    assert near.all()


def test_norm_rope_and_store_are_one_launch(monkeypatch):
    launched = []

    class Count:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(grid)

    monkeypatch.setattr(module.store_kernels, "rotate_store_kernel", Count())
    case = make_case(*LENGTHS, num_kv_heads=8, group_size=2, head_dim=128)
    backend_for(case).rotate_and_store(
        heads_of(case), rotation_of(case, torch.float32), norm_of(case, wide=False),
        case.cache, case.batch,
    )  # fmt: skip
    assert launched == [(5, 2)]
