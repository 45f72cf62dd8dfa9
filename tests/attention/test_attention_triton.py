"""The Triton kernels compared with the naive backend, on a GPU or interpreted."""

from dataclasses import replace

import pytest
import torch

from nanoengine.attention import triton as module
from nanoengine.attention.triton import KernelConfig, TritonBackend, kernel_config
from nanoengine.attention.triton_kernels import TileConfig
from nanoengine.errors import ConfigError
from tests.support.attention_cases import DEVICE, backend_of, make_case

pytestmark = [
    pytest.mark.guards("nanoengine/attention/*.py", "tests/support/attention_cases.py"),
    # numpy in the interpreter warns about values that are correct on a GPU: exp2(large) = inf for a
    # softcap, and padding rows of a windowed tile, which attend to no key and are never stored.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
]

TILE = TileConfig(rows=16, keys=16, warps=4, stages=2)
SMALL = KernelConfig(TILE, TILE, split_tokens=32)
"""Small tiles, so that short sequences have several, as long ones do with the default sizes."""


@pytest.fixture
def small(monkeypatch):
    """Makes every backend use SMALL."""
    monkeypatch.setattr(module, "kernel_config", lambda *shape: SMALL)


def run(*lengths, **options):
    """Checks one forward of these sequences against the naive backend and returns it."""
    case = make_case(*lengths, **options)
    return case.check(backend_of(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [6, 64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(head_dim, dtype):
    run((1, 21), (3, 25), head_dim=head_dim, dtype=dtype, group_size=2, block_size=64)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        *(([(1, 19), (3, 21)], {"num_kv_heads": 2, "group_size": n}) for n in (1, 2, 4, 7, 8)),
        *(([(1, 1), (1, 40), (1, 17), (3, 20)], {"block_size": n}) for n in (16, 32, 64)),
        *(([(1, n), (3, n)], {}) for n in (15, 16, 17, 32, 33)),  # at the ends of blocks
        *(([(1, n), (1, 3)], {}) for n in (31, 32, 33, 65)),  # at the ends of splits
        # Tiles of queries: with two heads, a tile of 16 rows has 8 tokens.
        *(([(2, 2), (n, n + 5), (8, 8), (3, 20)], {"group_size": 2}) for n in (7, 8, 9, 17)),
        *(
            ([(1, 1), (1, 33), (1, 75), (18, 50)], {"sliding_window": n})
            for n in (1, 2, 16, 17, 40, 1000)
        ),
        *(
            ([(1, 40), (18, 40)], {"softcap": n, "spread": 40.0, "head_dim": 64})
            for n in (0.5, 30.0)
        ),
        ([(1, 40), (18, 40)], {"scale": 0.37}),
        # Sinks far above all scores, and far below; decodes of one split and of several.
        *(
            (
                [(1, 1), (1, 30), (1, 90), (18, 40)],
                {"sinks": n, "num_kv_heads": 2, "group_size": 3, "sliding_window": window},
            )
            for n, window in ((2.0, None), (200.0, 37))
        ),
        ([(1, 50), (1, 40), (10, 55)], {"shared": {1: (0, 2), 2: (0, 3)}}),
        # The second sequence writes the first two blocks of the third one in this step.
        ([(1, 20), (34, 34), (5, 37)], {"shared": {2: (1, 2)}}),
        *(
            ([(1, 21), (1, 40), (3, 25)], {"fp8": True, "group_size": 2, "num_kv_heads": 2, **kind})
            for kind in ({"head_dim": 64, "dtype": torch.float16}, {"head_dim": 80})
        ),
        ([(1, 5), (1, 18)], {}),
        ([(4, 9), (2, 2)], {}),
        (
            [(1, 90), (5, 70)],
            {
                "num_kv_heads": 2, "group_size": 4, "head_dim": 80, "block_size": 32, "scale": 0.2,
                "sliding_window": 37, "softcap": 4.0, "dtype": torch.float16,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_naive_backend(small, lengths, options):
    run(*lengths, **options)


def test_one_token_and_a_chunk_of_thirty_with_default_tiles():
    run((1, 50), (30, 70), group_size=2, dtype=torch.float16)


def test_long_sequences_get_longer_splits(monkeypatch):
    config = replace(SMALL, max_splits=2)
    monkeypatch.setattr(module, "kernel_config", lambda *shape: config)
    run((1, 64), (1, 65), (1, 130))
    run((1, 140), (1, 5), sliding_window=90)


def test_more_splits_than_are_combined_at_a_time(small, monkeypatch):
    config = replace(SMALL, split_tokens=16)
    monkeypatch.setattr(module, "kernel_config", lambda *shape: config)
    case = make_case((1, 280))
    # The last key, in the second step, has the largest score, so earlier sums are rescaled.
    case.k.copy_(0.6 * case.q)
    case.check(backend_of(case))


@pytest.mark.parametrize("window", [5, 33])
def test_blocks_before_the_window_may_be_freed(small, window):
    case = make_case((1, 75), (10, 60), sliding_window=window, block_size=16)
    for row, first_needed in ((0, 75 - window), (1, 50 - window + 1)):
        case.batch.block_tables[1, row, : max(first_needed, 0) // 16] = 0
    case.check(backend_of(case))


def test_window_with_keys_wider_than_a_block(monkeypatch):
    tile = replace(TILE, keys=64)
    wide = replace(SMALL, prefill=tile, decode=tile, split_tokens=64)
    monkeypatch.setattr(module, "kernel_config", lambda *shape: wide)
    case = make_case((1, 75), (20, 70), sliding_window=20, block_size=16)
    case.batch.block_tables[1, 0, :3] = 0
    case.batch.block_tables[1, 1, :1] = 0
    case.check(backend_of(case))


def test_a_row_does_not_depend_on_other_rows(small):
    alone = run((1, 70))
    for others in (((1, 3), (1, 130)), ((3, 20),)):
        together = run((1, 70), *others)
        assert torch.equal(together[0], alone[0])
    alone = run((9, 40))
    together = run((9, 40), (5, 50), (2, 2))
    assert torch.equal(together[:9], alone)


def test_merged_splits_are_independent_of_the_number_of_programs(small, monkeypatch):
    case, outs = make_case((1, 3), (1, 90), num_kv_heads=2), []
    backend = backend_of(case)
    splits = backend._splits
    for programs in (1, 2, 3):
        grid = 4, programs
        monkeypatch.setattr(
            backend, "_splits", lambda *of, grid=grid: splits(*of)._replace(grid=grid)
        )
        outs.append(case.check(backend))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_more_sequences_than_the_limit_of_a_grid_axis(monkeypatch):
    grids, count = [], 70_000

    class Grids:
        def __getitem__(self, grid):
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(module.kernels, "decode_kernel", Grids())
    case = make_case((1, 40), num_kv_heads=2, head_dim=16)
    lengths = case.batch.seq_lens.expand(count)
    batch = replace(case.batch, seq_lens=lengths, num_decodes=count)
    backend = backend_of(case)
    batch.attention = backend.prepare(batch)
    backend.attend(case.q, case.cache, batch)
    assert grids == [(2 * count, 1)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_captured_for_longer_sequences_gives_the_same(small, deterministic):
    case = make_case((1, 70), (1, 3))
    out = case.check(backend_of(case, deterministic=deterministic))
    case.batch.max_seq_len = 1000
    assert torch.equal(case.check(backend_of(case, deterministic=deterministic)), out)


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_rows_of_length_zero_give_zeros(small, deterministic):
    case = make_case((1, 20), (1, 1))
    case.batch.seq_lens[1] = 0
    case.batch.slot_mapping[1, 1] = 0
    out = case.run(backend_of(case, deterministic=deterministic))
    assert out[1].abs().max() == 0
    assert torch.isfinite(out[0]).all()


def test_a_store_of_rows_of_any_size_writes_only_its_slots():
    case = make_case((1, 20), (3, 40), num_kv_heads=3, head_dim=80)  # 240 values per token
    before = case.k_cache.clone(), case.v_cache.clone()
    slots = case.batch.slot_mapping[1]
    backend_of(case).store(case.k, case.v, case.cache, case.batch)
    for cache, old, new in zip((case.k_cache, case.v_cache), before, (case.k, case.v), strict=True):
        old.view(-1, 3, 80)[slots] = new
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.int8}, "int8"),
        ({"head_dim": 640}, "640"),
        ({"block_size": 8}, "power of two from 16, got 8"),
        ({"block_size": 48}, "power of two from 16, got 48"),
    ],
)
def test_unsupported_arguments_raise(change, words):
    options = {"device": DEVICE, "dtype": torch.float32, "head_dim": 64, "block_size": 16}
    with pytest.raises(ConfigError, match=words):
        TritonBackend(**options | change)


def test_the_cpu_raises_unless_interpreted(monkeypatch):
    options = {"device": torch.device("cpu"), "head_dim": 64, "block_size": 16}
    monkeypatch.setattr(TritonBackend, "device_type", "cuda")
    with pytest.raises(ConfigError, match="supports cuda, got cpu"):
        TritonBackend(dtype=torch.float32, **options)
    monkeypatch.setattr(TritonBackend, "device_type", None)
    with pytest.raises(ConfigError, match="bfloat16 wrongly"):
        TritonBackend(dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(("kv_heads", "splits"), [(1, 128), (2, 128), (4, 64), (8, 32), (16, 32)])
def test_one_long_sequence_uses_the_whole_gpu(kv_heads, splits):
    """Before, one long sequence with one KV head used 32 of 132 SMs."""
    case = make_case((1, 2), num_kv_heads=kv_heads)
    case.batch.max_seq_len = 256 * 200
    found = backend_of(case)._splits(case.batch, case.spec)
    assert found.max_splits == splits
    assert found.part_lse.shape == (1, kv_heads, splits)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tile_sizes_are_consistent(arch, dtype):
    for head_dim in (64, 80, 96, 128, 256):
        for group_size in (1, 2, 3, 7, 8, 16, 48, 71):
            config = kernel_config(arch, head_dim, group_size, dtype)
            assert config == kernel_config(arch, head_dim, group_size, dtype)
            assert config.split_tokens % config.decode.keys == 0
            for tile in (config.prefill, config.decode):
                assert tile.rows >= max(16, group_size)
                assert tile.rows & (tile.rows - 1) == 0
                assert tile.keys >= 16
                assert tile.keys & (tile.keys - 1) == 0
