"""The numba attention kernels compared with the naive backend; equal bits in any batch."""

import doctest
import itertools
from dataclasses import replace

import pytest
import torch

from nanoengine.attention import cpu, make_backend
from nanoengine.attention.cpu import query_ranges
from nanoengine.attention.kv_quantization import hadamard
from nanoengine.errors import ConfigError
from nanoengine.kernels.attention_tasks import (
    COUNT,
    KV_START,
    KV_STOP,
    NUM_QUERIES,
    PARTIAL,
    ROW_TILE,
    SEQ,
    SPLIT,
    plan_tasks,
)
from tests.support.attention_cases import CPU, Paged

# Up to a thousand products are added in another order: float64 keeps about 1e-15 of values near 1,
# float32 1e-6.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}
# Decodes within, at and after boundaries of blocks, tiles and splits; a draft; chunks with and
# without context.
LENGTHS = [
    (1, 1),
    (1, 16),
    (1, 17),
    (1, 256),
    (1, 300),
    (1, 600),
    (4, 70),
    (3, 3),
    (33, 33),
    (40, 300),
]


def check(**options) -> None:
    """Compares one forward of the kernels with the naive backend."""
    paged = Paged(**{"lengths": LENGTHS, **options})
    expected = paged.run("naive")
    assert not expected.isnan().any()
    torch.testing.assert_close(paged.run("cpu"), expected, rtol=0, atol=TOLERANCE[paged.dtype])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16),
        (torch.float32, torch.int8), (torch.float64, torch.int8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "options",
    [
        *({"group_size": size} for size in (1, 4, 5, 8, 40)),
        *({"head_dim": size} for size in (8, 16, 32, 80, 96, 128, 256)),
        *({"block_size": size} for size in (8, 64, 128, 256)),
        *({"sliding_window": window} for window in (1, 6, 101)),
        {"softcap": 1.5}, {"softcap": 1.5, "sliding_window": 30},
        # Contexts of one and of several splits; sinks far above all scores, and far below.
        *({"sinks": sinks} for sinks in (2.0, 200.0)),
        {"sinks": 2.0, "group_size": 5, "sliding_window": 30, "softcap": 1.5},
        {"lengths": [(1, 90), (1, 70), (20, 84)], "shared": {1: (0, 4), 2: (0, 4)}},
        # Blocks that another sequence writes in the same step.
        {"lengths": [(100, 100), (6, 70), (10, 106)], "shared": {1: (0, 4), 2: (0, 6)}},
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_naive_backend(options, dtype, kv_dtype):
    """The tolerance is the same for a rounded cache, because both backends store equal values."""
    check(dtype=dtype, kv_dtype=kv_dtype, **options)


@pytest.mark.parametrize("sliding_window", [1, 6, 16, 100, 257])
def test_sliding_windows_never_touch_blocks_before_them(sliding_window):
    paged = Paged(lengths=LENGTHS, sliding_window=sliding_window)
    for i, (query_len, seq_len) in enumerate(LENGTHS):
        gone = max(0, seq_len - query_len - sliding_window + 1) // paged.block_size
        paged.batch.block_tables[1, i, :gone] = 10**6  # freed: reading there would crash
    torch.testing.assert_close(paged.run("cpu"), paged.run("naive"), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "options",
    [{}, {"group_size": 5}, {"head_dim": 80}, {"head_dim": 8}, {"block_size": 8}, {"sinks": 2.0}],
)
def test_bfloat16_differs_only_by_its_rounding(options, kv_dtype):
    """Queries and weights are rounded too. Scores have errors of 2 ** -8; half are near 0."""
    paged = Paged(lengths=LENGTHS, dtype=torch.float32, kv_dtype=kv_dtype, **options)
    exact = paged.run("naive")
    paged.dtype = torch.bfloat16
    out = paged.run("cpu")
    assert out.dtype == torch.float32
    error = (out - exact).abs()
    assert 1e-4 < error.max() < 0.02


def test_an_unsupported_cache_dtype_raises():
    options = {"device": CPU, "dtype": torch.float64, "head_dim": 64, "block_size": 16}
    with pytest.raises(
        ConfigError, match="cpu does not support a KV cache of bfloat16 for a float64"
    ):
        make_backend("cpu", **options, kv_dtype=torch.bfloat16)


def test_random_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):

        def draw(high):
            return int(torch.randint(1, high, (1,), generator=generator))

        decodes = [(1, draw(700)) for _ in range(draw(6))]
        chunks = [(n, n + draw(200) - 1) for n in (draw(90) for _ in range(draw(4)))]
        check(
            lengths=decodes + chunks, num_kv_heads=draw(4), group_size=draw(5), dtype=torch.float32
        )


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, kind) for kind in (torch.float32, torch.bfloat16, torch.int8)],
)
@pytest.mark.parametrize(("sliding_window", "sinks"), [(None, None), (50, None), (None, 2.0)])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(sliding_window, sinks, dtypes):
    def run(chosen):
        lengths = [LENGTHS[i] for i in chosen]
        dtype, kv_dtype = dtypes
        out = Paged(
            lengths=lengths, seeds=chosen, dtype=dtype, kv_dtype=kv_dtype,
            sliding_window=sliding_window, sinks=sinks,
        ).run("cpu")  # fmt: skip
        return dict(zip(chosen, out.split([q for q, _ in lengths]), strict=True))

    together = run(list(range(len(LENGTHS))))
    fewer = run([5, 2, 9])
    for i in range(len(LENGTHS)):
        assert torch.equal(run([i])[i], together[i])
        assert i not in fewer or torch.equal(fewer[i], together[i])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32), (torch.float32, torch.bfloat16),
        (torch.float32, torch.int8), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8),
    ],
)  # fmt: skip
def test_a_chunk_has_the_same_bits_as_the_whole_prompt(dtype, kv_dtype):
    """Chunks with many rows, few rows, and an odd number of tokens in the last pair."""

    def run(query_len):
        shape = {"dtype": torch.float32, "kv_dtype": kv_dtype, "block_size": 64, "head_dim": 64}
        paged = Paged(lengths=[(query_len, 333)], seeds=[3], **shape)
        paged.dtype = dtype
        return paged.run("cpu")

    expected = run(333)
    assert expected.isfinite().all()
    for query_len in (17, 40, 172):  # more than one tile of queries, so the context is not split
        assert torch.equal(run(query_len), expected[-query_len:])


@pytest.mark.parametrize("group_size", [1, 8, 40])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("seq_len", "sliding_window"), [(514, None), (700, None), (700, 300)])
def test_up_to_nine_queries_have_the_bits_of_decodes(seq_len, sliding_window, kv_dtype, group_size):
    """Queries of drafts, in one tile or several, and across the boundary of two splits."""

    def run(query_len, seq_len):
        return Paged(
            lengths=[(query_len, seq_len)], seeds=[3], dtype=torch.float32, kv_dtype=kv_dtype,
            group_size=group_size, sliding_window=sliding_window,
        ).run("cpu")  # fmt: skip

    for query_len in (2, 5, 9):
        found = run(query_len, seq_len)
        for back in range(query_len):
            assert torch.equal(found[-1 - back], run(1, seq_len - back)[0])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_tasks_cover_every_query_and_key_once_and_balance(threads):
    lengths, group_size, heads, window = LENGTHS, 2, 3, 100
    paged = Paged(lengths=lengths)
    starts = paged.batch.query_start_loc.numpy()
    tasks, bounds, merges, parts, num_partials = plan_tasks(
        starts, paged.batch.seq_lens.numpy(), query_ranges(starts, None),
        paged.batch.block_tables[1].numpy(), group_size, heads, paged.block_size, window, threads,
    )  # fmt: skip
    assert bounds[0] == 0
    assert bounds[-1] == len(tasks)
    assert (bounds[1:] >= bounds[:-1]).all()
    seen = {}
    for seq, head, query, num_queries, position, start, stop, _ in tasks.tolist():
        assert start < stop
        for i in range(num_queries):
            keys = seen.setdefault((seq, head, query + i), set())
            assert keys.isdisjoint(range(start, stop))
            keys.update(range(start, stop))
            assert position + i == lengths[seq][1] - lengths[seq][0] + query + i - int(
                paged.batch.query_start_loc[seq]
            )
    assert len(seen) == heads * sum(q for q, _ in lengths)
    for (seq, _, query), keys in seen.items():
        query_len, seq_len = lengths[seq]
        position = seq_len - query_len + query - int(paged.batch.query_start_loc[seq])
        assert keys >= set(range(max(0, position - window + 1), position + 1))
    partials = sorted(task[PARTIAL] for task in tasks if task[PARTIAL] >= 0)
    assert partials == list(range(num_partials))
    assert sum(merges[:, COUNT]) == num_partials == len(parts)


def test_chunks_compute_only_the_required_queries():
    """The chunk of 33 needs only queries in its middle, the chunk of 40 none. Decodes are
    unchanged."""
    paged = Paged(lengths=LENGTHS)
    starts, lengths = (x.numpy() for x in (paged.batch.query_start_loc, paged.batch.seq_lens))
    rows = torch.tensor([0, starts[8] + 20, starts[8] + 9, starts[8] + 20]).numpy()
    kept = query_ranges(starts, rows)
    assert kept[[0, 8]].tolist() == [[0, 1], [9, 21]] and (kept[9, 0] >= kept[9, 1])
    tables = paged.batch.block_tables[1].numpy()
    found = []
    for of_chunks in (query_ranges(starts, None), kept):
        tasks, *_ = plan_tasks(starts, lengths, of_chunks, tables, 2, 1, 16, 1 << 62, 2)
        found.append(tasks)
    everything, fewer = found
    assert sorted(set(everything[:, SEQ])) == [*range(10)] and sorted(set(fewer[:, SEQ])) == [
        *range(9)
    ]
    assert fewer[:-1].tolist() == everything[: len(fewer) - 1].tolist()
    chunk = dict(zip(("query", "count", "position"), fewer[-1, 2:5].tolist(), strict=True))
    assert chunk == {"query": starts[8] + 9, "count": 12, "position": 9}
    assert doctest.testmod(cpu) == (0, 1)


SHARED = [(1, 700), (1, 530), (1, 512), (1, 513), (1, 900), (1, 300), (1, 40), (9, 600)]


@pytest.mark.parametrize(
    ("block_size", "group_size", "kv_dtype"),
    [(16, 2, None), (64, 1, None), (256, 16, None), (16, 20, None), (16, 2, torch.int8)],
)
def test_decodes_that_share_a_prefix_attend_it_together_bit_for_bit(
    block_size, group_size, kv_dtype
):
    """Splits of the first 512 tokens are shared by all, by some, and by groups that end early."""
    blocks = 512 // block_size
    shared = {1: (0, blocks), 2: (0, blocks), 3: (2, blocks), 4: (0, blocks // 2)}
    shape = {"block_size": block_size, "group_size": group_size, "dtype": torch.float32}
    shape["kv_dtype"] = kv_dtype
    paged = Paged(lengths=SHARED, shared=shared, **shape)
    starts, lengths = paged.batch.query_start_loc.numpy(), paged.batch.seq_lens.numpy()
    tables = paged.batch.block_tables[1].numpy()
    tasks, _, _, parts, _ = plan_tasks(
        starts, lengths, query_ranges(starts, None), tables, group_size, 2, block_size, 1 << 62, 2,
    )  # fmt: skip
    together = max(tasks[tasks[:, SEQ] < 7][:, NUM_QUERIES])
    assert together == min(5, max(1, ROW_TILE // group_size))
    tiles = [(-(-q // max(1, ROW_TILE // group_size)), n) for q, n in SHARED if n > SPLIT]
    assert len(parts) == 2 * sum(count * -(-n // SPLIT) for count, n in tiles)  # 2 heads
    # Split 0 has five users, split 1 four of them; with 16 query heads per KV head, two at a time.
    riders = len(parts) - sum(tasks[:, PARTIAL] >= 0)
    assert riders == 2 * {1: 7, 2: 7, 16: 4, 20: 0}[group_size]
    shared = paged.run("cpu")
    assert (shared - paged.run("naive")).abs().max() < 2e-5
    alone = []
    for i, length in enumerate(SHARED):
        lone = Paged(lengths=[length], seeds=[i], **shape)
        lone.dense[0] = paged.dense[i]
        lone.fused = paged.dense[i][-length[0] :].flatten(1)
        alone.append(lone.run("cpu"))
    assert torch.equal(torch.cat(alone), shared)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_nan_stays_in_its_sequence(kv_dtype):
    lengths = [(1, 20), (1, 300), (5, 70)]
    paged = Paged(lengths=lengths, dtype=torch.float32, kv_dtype=kv_dtype)
    clean = paged.run("cpu")
    paged.dense[1][7] = float("nan")  # in the context that the cache already holds
    out = paged.run("cpu")
    assert out[1].isnan().all()
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[2:], clean[2:])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_keys_and_values_are_stored_in_their_slots(block_size, kv_dtype):
    """Rounds to bfloat16 and int8 as torch does: to nearest, ties to even."""
    paged = Paged(
        lengths=[(1, 20), (3, 130)], dtype=torch.float32, kv_dtype=kv_dtype, block_size=block_size
    )
    odd = [1 + 2**-8, 1 + 3 * 2**-8, torch.inf]
    if kv_dtype == torch.int8:
        odd = [127.0, 2.5, -3.5]
        paged.dense[1][-2, 5] *= 1e-38  # stored as zeros
    paged.dense[1][-1, 4:, :3] = torch.tensor(odd)
    if kv_dtype == torch.int8:  # values that become ties in int8
        paged.dense[1][-1, 4:, 3:] = 0
        paged.dense[1][-1, 4:] = hadamard(paged.dense[1][-1, 4:])
    paged.fused = torch.cat([paged.dense[0][-1:], paged.dense[1][-3:]]).flatten(1)
    backend = make_backend(
        "cpu", device=CPU, dtype=torch.float32, head_dim=64, block_size=block_size,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    cache = paged.layer("KPD")
    paged.batch.attention = backend.prepare(paged.batch)
    backend.forward(*paged.qkv(), cache, paged.batch)
    expected = paged.cache("KPD", after=True)
    assert torch.equal(cache.k_cache.nan_to_num(9), expected[0].nan_to_num(9))
    assert torch.equal(cache.v_cache.nan_to_num(9), expected[1].nan_to_num(9))


def test_heads_that_are_not_adjacent_in_memory():
    paged = Paged(lengths=[(1, 20), (3, 30)])
    plain = paged.run("cpu")
    q, k, v = (x.repeat_interleave(2, 1)[:, ::2] for x in paged.qkv())
    paged.qkv = lambda: (q, k, v)
    assert torch.equal(paged.run("cpu"), plain)


def test_the_thread_count_of_torch_is_unchanged():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        Paged(lengths=[(1, 20)]).run("cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "float32, float64, bfloat16, got torch.float16"),
        ({"device": torch.device("meta")}, "attention_backend='auto'"),
        ({"head_dim": 20}, "in steps of 8, got 20"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 4}, "power of two"),
    ],
)
def test_unsupported_arguments_raise(options, message):
    good = {"device": CPU, "dtype": torch.float32, "head_dim": 64, "block_size": 16}
    with pytest.raises(ConfigError, match=message):
        make_backend("cpu", **{**good, **options})


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_number_of_workers_changes_no_bit(kv_dtype):
    """Also with more workers than cores. With many workers, a chunk's tasks have fewer rows."""
    paged = Paged(lengths=[*LENGTHS, (200, 260)], dtype=torch.float32, kv_dtype=kv_dtype)
    backend = make_backend("cpu", device=CPU, dtype=torch.float32, head_dim=64, block_size=16)
    found = []
    for workers in (1, 3, 64):
        batch = replace(paged.batch, attention=backend.prepare(paged.batch))
        batch.attention.num_workers = workers
        found.append(backend.forward(*paged.qkv(), paged.layer("KPD"), batch))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("lengths", "at_64"),
    [
        ([(1024, 1024)], 1.35),  # the causal half: tasks of unequal cost
        ([(1024, 4096)], 1.2),
        ([(1, 64 + 8 * i) for i in range(32)], 1.4),  # 200 tasks for 64 workers
        ([(1, 1024)] * 64, 1.05),
    ],
)
def test_the_work_is_balanced_over_workers(lengths, at_64):
    """The cost of the busiest worker relative to the mean, 10 and 5 heads, 2 to 64 workers."""
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int().numpy()
    seq_lens = torch.tensor([n for _, n in lengths]).int().numpy()
    tables = torch.arange(len(lengths) * 64).int().view(len(lengths), 64).numpy()
    for workers, max_ratio in ((2, 1.05), (4, 1.1), (16, 1.1), (64, at_64)):
        tasks, bounds, *_ = plan_tasks(
            starts, seq_lens, query_ranges(starts, None), tables, 2, 5, 64, 1 << 62, workers
        )
        rows = 2 * tasks[:, NUM_QUERIES]
        costs = (tasks[:, KV_STOP] - tasks[:, KV_START] + 16) * (rows + 8)
        shares = [costs[lo:hi].sum() for lo, hi in itertools.pairwise(bounds)]
        assert max(shares) <= max_ratio * costs.sum() / workers
