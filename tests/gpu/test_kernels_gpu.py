"""The GPU backends on a real GPU at real sizes: parity, determinism, graphs and bandwidth.

The tests cover what the interpreter does not: bfloat16, tensor cores, races, and results that
depend on concurrent programs. flash_attn is included if it is installed.
"""

import contextlib

import pytest
import torch

from nanoengine.attention import flash
from nanoengine.errors import MissingDependencyError
from nanoengine.runner.graphs import CudaGraphs
from tests.attention import test_triton_mla as latents
from tests.support.attention_cases import DEVICE, TOLERANCE, backend_of, make_case

BACKENDS = [("triton", 64)]
with contextlib.suppress(MissingDependencyError):
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    BACKENDS += [("flash_attn", 256)] if flash.import_package(hopper) else []

DECODES = [(1, 1 + 131 * i) for i in range(20)]
PREFILLS = [(300, 300), (2, 700), (65, 1000), (128, 128), (17, 17), (511, 2000)]
SHAPES = [
    {"head_dim": 128, "group_size": 2, "num_kv_heads": 2},
    {"head_dim": 64, "group_size": 1},
    {"head_dim": 64, "group_size": 7},
    {"head_dim": 96, "group_size": 4},
    {"head_dim": 80, "group_size": 8},
    {"head_dim": 256, "group_size": 2},
    {"head_dim": 128, "group_size": 4, "sliding_window": 100},
    {"head_dim": 128, "group_size": 2, "softcap": 5.0, "scale": 0.2},
]


MIXED, BF16 = [*DECODES, *PREFILLS], {"dtype": torch.bfloat16}
CASES = [
    *(
        (name, MIXED, {"block_size": size, "dtype": dtype, **shape})
        for name, size in BACKENDS
        for dtype in (torch.bfloat16, torch.float16)
        for shape in SHAPES
    ),
    *((name, DECODES, BF16 | {"block_size": size, "group_size": 2}) for name, size in BACKENDS),
    *(("triton", [*DECODES[:8], *PREFILLS[:3]], {"block_size": 64, **shape}) for shape in SHAPES),
    *(("triton", MIXED, BF16 | {"block_size": n, "head_dim": 128}) for n in (16, 32, 128, 256)),
    # More than the maximum number of splits.
    ("triton", [(1, 8192), (1, 8193), (1, 30000)], BF16 | {"block_size": 64}),
]


@pytest.mark.parametrize(("name", "lengths", "options"), CASES)
def test_parity(name, lengths, options):
    case = make_case(*lengths, **options)
    case.check(backend_of(case, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_mla_parity(heads, dtype):
    """DeepSeek's sizes, with up to the maximum of splits: more than a program merges at once."""
    lengths = *DECODES[:8], (1, 6000), (1, 20000), *PREFILLS[:3]
    made = latents.case(heads, 512, 64, *lengths, block_size=64, dtype=dtype)
    error = made.run(latents.backend(made)).double() - latents.expected(made)
    assert error.abs().max() < TOLERANCE[dtype]


def test_rows_do_not_depend_on_other_rows():
    options = {"dtype": torch.bfloat16, "block_size": 64, "head_dim": 128, "group_size": 2}
    alone = make_case((1, 2500), **options)
    among = make_case((1, 2500), *DECODES, *PREFILLS, **options)
    one, many = alone.run(backend_of(alone)), among.run(backend_of(among))
    assert torch.equal(one[0], many[0])
    alone = make_case((511, 2000), **options)
    among = make_case((511, 2000), *PREFILLS, **options)
    one, many = alone.run(backend_of(alone)), among.run(backend_of(among))
    assert torch.equal(one, many[:511])


def test_repeated_runs_have_equal_bits():
    case = make_case(*DECODES, *PREFILLS, dtype=torch.bfloat16, block_size=64, head_dim=128)
    backend = backend_of(case)
    first = case.run(backend)
    assert all(torch.equal(case.run(backend), first) for _ in range(20))


@pytest.mark.parametrize(("name", "block_size"), BACKENDS)
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_graphs_replay_the_eager_result(name, block_size, count):
    """The capture covers up to 4,096 tokens, as in an engine; the replay uses other queries."""
    case = make_case(
        *DECODES[:count], dtype=torch.bfloat16, block_size=block_size, head_dim=128, group_size=2
    )
    backend = backend_of(case, name)
    with torch.inference_mode():
        queries, expected = (case.q.clone(), case.q.flip(0)), []
        for q in queries:
            case.q.copy_(q)
            expected.append(case.run(backend))
        case.batch.max_seq_len = 4096
        replay, (out,) = CudaGraphs().capture(lambda: (case.run(backend),))
        for number in (0, 1, 0):
            case.q.copy_(queries[number])
            replay()
            torch.testing.assert_close(out, expected[number], rtol=0, atol=2e-2)
            if name == "triton":
                assert torch.equal(out, expected[number])


def test_a_store_writes_only_its_slots():
    case = make_case(*DECODES, *PREFILLS, dtype=torch.bfloat16, num_kv_heads=5, head_dim=80)
    expected = case.k_cache.clone()
    expected.view(-1, 5, 80)[case.batch.slot_mapping[1]] = case.k
    case.run(backend_of(case))
    assert torch.equal(case.k_cache.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_full_decode_batch_and_its_bandwidth(capsys):
    """256 sequences of 512 tokens, 16 query and 8 KV heads of 128: parity; prints median GB/s."""
    num_seqs, length, block_size = 256, 512, 64
    case = make_case(
        (1, length), dtype=torch.bfloat16, block_size=block_size, head_dim=128, num_kv_heads=8,
        group_size=2,
    )  # fmt: skip
    backend = backend_of(case)
    batch, per_seq = case.batch, length // block_size
    blocks = torch.randperm(num_seqs * per_seq, device=DEVICE, dtype=torch.int32).view(num_seqs, -1)
    shape = (num_seqs * per_seq, block_size, 8, 128)
    case.k_cache, case.v_cache = torch.randn(2, *shape, device=DEVICE).to(torch.bfloat16)
    case.q, case.k, case.v = (x.repeat(num_seqs, 1, 1) for x in (case.q, case.k, case.v))
    batch.slot_mapping = (blocks[:, -1].long() * block_size + block_size - 1).expand(2, -1)
    batch.block_tables = blocks.expand(2, -1, -1)
    batch.seq_lens = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
    batch.query_start_loc = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    batch.token_ids = torch.zeros(num_seqs, dtype=torch.int64, device=DEVICE)
    batch.num_decodes = num_seqs
    case.check(backend)
    seconds = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        case.run(backend)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    speed = 2 * case.k_cache.nbytes / sorted(seconds)[10] / 1e9
    with capsys.disabled():
        print(f"\ndecode attention with store and launches: {speed:.0f} GB/s of keys and values")
