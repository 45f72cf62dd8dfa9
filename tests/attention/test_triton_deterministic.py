"""Deterministic attention: correct, with equal bits in any batch and chunk and after cache hits."""

import pytest
import torch

from nanoengine.attention import make_backend
from nanoengine.attention import triton as module
from nanoengine.attention import triton_kernels as kernels
from nanoengine.attention.triton import KernelConfig, kernel_config
from nanoengine.attention.triton_kernels import TileConfig
from nanoengine.errors import ConfigError
from tests.support.attention_cases import DEVICE, backend_of, make_case
from tests.support.row_products import row_products  # noqa: F401

pytestmark = [
    pytest.mark.guards("nanoengine/attention/*.py", "tests/support/attention_cases.py"),
    pytest.mark.usefixtures("row_products"),
]

TILE = TileConfig(rows=16, keys=16, warps=4, stages=2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    config = KernelConfig(TILE, TILE, split_tokens=16)
    monkeypatch.setattr(module, "kernel_config", lambda *shape: config)


def backend_for(case):
    return backend_of(case, deterministic=True)


def run(*lengths, **options):
    case = make_case(*lengths, **options)
    return case.check(backend_for(case))


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 2, "num_kv_heads": 2},
        {"group_size": 7, "dtype": torch.float16},
        {"head_dim": 80, "sliding_window": 40, "block_size": 32},
        {"head_dim": 8, "group_size": 2},
        {"sliding_window": 9, "softcap": 4.0},
        {"fp8": True, "group_size": 3},
        {"sinks": 2.0, "group_size": 3},
        {"sinks": 200.0, "num_kv_heads": 2},
    ],
)
def test_equals_the_naive_backend(options):
    run((1, 1), (1, 75), (10, 40), (3, 20), **options)


@pytest.mark.parametrize("window", [None, 40])
def test_a_decode_has_the_same_bits_in_any_batch(window):
    alone = run((1, 110), sliding_window=window, group_size=2)
    shared = run((1, 110), (1, 3), (9, 20), sliding_window=window, group_size=2)
    assert torch.equal(shared[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 25])
def test_a_token_has_the_same_bits_in_any_chunk(window, dtype):
    """The last token of a prompt, in one piece, in chunks, and alone as after a cache hit."""
    options = {"sliding_window": window, "dtype": dtype, "group_size": 2}
    prompt = run((70, 70), **options)
    for chunk in (1, 7, 8, 9):
        part = run((chunk, 70), **options)
        assert torch.equal(part, prompt[-chunk:]), f"chunk of {chunk}"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="reads the interpreter's calls")
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_tiles_use_the_masked_code(monkeypatch, deterministic):
    """Code compiled without a mask may round differently; the interpreter does not."""
    masked, attend_tile = set(), kernels.attend_tile

    def noted(*args):
        masked.add(args[-1])
        return attend_tile(*args)

    monkeypatch.setattr(kernels, "attend_tile", noted)
    case = make_case((1, 70), (40, 70))
    backend = backend_for(case)
    backend.deterministic = deterministic
    case.run(backend)
    assert masked == ({True} if deterministic else {False, True})


def test_the_default_kernels_are_not_deterministic():
    prompt, token = make_case((70, 70)), make_case((1, 70))
    assert not torch.equal(prompt.run(backend_of(prompt))[-1:], token.run(backend_of(token)))


def test_deterministic_raises_on_other_backends():
    options = {"device": DEVICE, "dtype": torch.float32, "head_dim": 64, "block_size": 16}
    with pytest.raises(ConfigError, match="needs attention_backend='triton' on a CUDA GPU"):
        make_backend("naive", **options, deterministic=True)
    assert make_backend("triton", **options, deterministic=True).deterministic


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decode_does_not_use_the_tile_of_a_long_prompt(arch, dtype):
    for head_dim in (64, 80, 128, 256):
        for group_size in (1, 2, 7, 48):
            tile = kernel_config(arch, head_dim, group_size, dtype, True).prefill
            assert tile.rows == max(32, 1 << (group_size - 1).bit_length())
