"""Deterministic attention: right, and the same bits alone, in a batch, in chunks, after a hit."""

from dataclasses import replace

import pytest
import torch

from nanoengine.attention import make_backend, triton_uniform
from nanoengine.attention import triton as triton_module
from nanoengine.attention.triton import TritonBackend, kernel_config
from nanoengine.attention.triton_uniform import UniformConfig, uniform_config
from nanoengine.errors import ConfigError
from tests.support.attention_cases import DEVICE, make_case
from tests.support.row_products import row_products  # noqa: F401

pytestmark = [
    pytest.mark.guards("nanoengine/attention/*.py", "tests/support/attention_cases.py"),
    pytest.mark.usefixtures("row_products"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

SMALL = UniformConfig(rows=16, keys=16, warps=4, stages=2, split=32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(triton_uniform, "uniform_config", lambda *shape: SMALL)


def backend_for(case, num_sms=1):
    backend = TritonBackend(
        device=DEVICE,
        dtype=case.q.dtype,
        head_dim=case.spec.head_dim,
        block_size=case.k_cache.shape[1],
        deterministic=True,
    )
    backend.num_sms = num_sms  # 1: every program takes all splits; many: they share them
    return backend


def run(*lengths, num_sms=1, **options):
    case = make_case(*lengths, **options)
    return case.check(backend_for(case, num_sms))


@pytest.mark.parametrize(
    ("num_sms", "options"),
    [
        (1, {"group_size": 2, "num_kv_heads": 2}),
        (100, {"group_size": 7, "dtype": torch.float16}),
        (1, {"head_dim": 80, "sliding_window": 40, "block_size": 32}),
        (100, {"head_dim": 8, "group_size": 2}),
        (100, {"sliding_window": 9, "softcap": 4.0}),
        (100, {"fp8": True, "group_size": 3}),
        (1, {"sinks": 2.0, "group_size": 3}),
        (100, {"sinks": 200.0, "num_kv_heads": 2}),
    ],
)
def test_equals_the_oracle(num_sms, options):
    run((1, 1), (1, 75), (10, 40), (3, 20), num_sms=num_sms, **options)


@pytest.mark.parametrize("window", [None, 40])
def test_a_decode_has_the_same_bits_however_its_splits_are_shared(window):
    alone = run((1, 110), sliding_window=window, group_size=2)
    for num_sms in (1, 100):
        shared = run(
            (1, 110), (1, 3), (9, 20), num_sms=num_sms, sliding_window=window, group_size=2
        )
        assert torch.equal(shared[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 25])
def test_a_token_has_the_same_bits_in_any_chunk(window, dtype):
    """The last token of a whole prompt, of chunks of it, and alone as after a cache hit."""
    options = {"sliding_window": window, "dtype": dtype, "group_size": 2}
    whole = run((70, 70), **options)
    for chunk in (1, 7, 8, 9):
        part = run((chunk, 70), **options)
        assert torch.equal(part, whole[-chunk:]), f"chunk of {chunk}"
    shared = run((1, 70), num_sms=100, **options)
    assert torch.equal(shared, whole[-1:])


def test_the_default_kernels_do_not_promise_that(monkeypatch):
    splits = replace(kernel_config(90, 64, 1, torch.float32), split_tokens=16)
    monkeypatch.setattr(triton_module, "kernel_config", lambda *shape: splits)
    whole, alone = make_case((70, 70)), make_case((1, 70))
    backend = TritonBackend(device=DEVICE, dtype=torch.float32, head_dim=64, block_size=16)
    assert not torch.equal(whole.run(backend)[-1:], alone.run(backend))


def test_a_graph_captured_for_longer_sequences_gives_the_same():
    case = make_case((1, 70), (1, 3))
    out = case.run(backend_for(case))
    for num_sms in (1, 100):
        case.batch.max_seq_len = 1000
        assert torch.equal(case.run(backend_for(case, num_sms)), out)


def test_padding_rows_of_length_zero_give_zeros():
    for num_sms in (1, 100):
        case = make_case((1, 20), (1, 1))
        case.batch.seq_lens[1] = 0
        out = case.run(backend_for(case, num_sms))
        assert out[1].abs().max() == 0
        assert torch.isfinite(out[0]).all()


def test_other_backends_refuse_to_promise():
    options = {"device": DEVICE, "dtype": torch.float32, "head_dim": 64, "block_size": 16}
    with pytest.raises(ConfigError, match="needs the attention backend triton on a CUDA GPU"):
        make_backend("naive", **options, deterministic=True)
    assert make_backend("triton", **options, deterministic=True).deterministic


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
def test_one_config_for_every_number_of_tokens(arch):
    for head_dim in (64, 80, 128, 256):
        for group_size in (1, 2, 7, 48):
            for dtype in (torch.float16, torch.float32):
                config = uniform_config(arch, head_dim, group_size, dtype)
                assert config == replace(config)
                assert config.rows >= max(16, group_size)
                assert config.split % config.keys == 0
