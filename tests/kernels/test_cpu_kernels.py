"""CPU kernels of linear layers, norms, activations and RoPE equal plain torch."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanoengine.attention import make_backend
from nanoengine.attention.base import HeadNormWeights, rotate
from nanoengine.kernels import cpu_decoder
from nanoengine.kernels.jit import source_digest
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.kernels import GATES, Kernels
from nanoengine.layers.packed import PackedLinear
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_weight import QuantizedWeight
from tests.support.attention_cases import Paged
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run
from tests.support.model_helpers import DenseAttention, cpu_kernels

CPU = torch.device("cpu")
PLAIN, FUSED = Kernels(DenseAttention()), cpu_kernels()
ROOT = Path(__file__).resolve().parents[2]


def packed(num_outputs: int, num_inputs: int) -> tuple[PackedLinear, torch.Tensor]:
    """A loaded layer and its packed weight."""
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))
    method = PackedLinear("layer")
    method.create((num_outputs, num_inputs), torch.float32, CPU)
    half = num_outputs // 2
    method.load(weight[:half])
    assert not method.is_packed, "packed before its last rows were loaded"
    method.load(weight[half:], half)
    return method, weight


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 640), (50, 72), (7, 5), (96, 4100)])
def test_linear_equals_float64_at_every_number_of_rows(outputs, inputs, bias):
    method, weight = packed(outputs, inputs)
    bias = torch.randn(outputs) if bias else None
    for rows in (0, 1, 2, 3, 4, 6, 7, 8, 13, 96, 97, 200):
        x = torch.randn(rows, inputs)
        wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        out = method.apply(x, bias)
        assert out.shape == (rows, outputs)
        # The error bound of a chain of K float32 additions of products of size 1.
        assert (out - wide).abs().sum() <= 3e-7 * inputs * out.numel()


def test_a_row_of_a_linear_layer_has_the_same_bits_alone_and_in_any_batch():
    method, _ = packed(50, 2100)
    x = torch.randn(200, 2100)
    whole = method.apply(x, None)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 96, 97):
        for first in (0, 31):
            part = x[first : first + rows]
            assert torch.equal(method.apply(part, None), whole[first : first + rows])
    assert torch.equal(method.apply(x[:, None], None)[:, 0], whole)


def test_a_nan_stays_in_its_row():
    method, _ = packed(50, 72)
    x = torch.randn(9, 72)
    clean = method.apply(x, None)
    x[4, 3] = torch.nan
    out = method.apply(x, None)
    assert out[4].isnan().all()
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[5:], clean[5:])


def test_an_embedding_reads_rows_of_a_packed_weight():
    method, weight = packed(50, 72)
    ids = torch.tensor([49, 0, 15, 16, 31, 32, 47, 48, 0])
    assert torch.equal(method.rows(ids), weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_norms_equal_torch(rows, dtype):
    x, residual = torch.randn(2, rows, 96, dtype=dtype)
    weight = torch.randn(96, dtype=dtype)
    expected, _ = PLAIN.rms_norm(x, None, weight, 1e-5)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-13, "atol": 1e-6}
    torch.testing.assert_close(FUSED.rms_norm(x, None, weight, 1e-5)[0], expected, **tolerance)
    normed, total = PLAIN.rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    got, added = FUSED.rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(added, total)
    torch.testing.assert_close(got, normed, **tolerance)
    alone, _ = FUSED.rms_norm(x[:1].clone(), residual[:1].clone(), weight, 1e-5)
    assert torch.equal(alone[0], got[0]), "other bits alone than in a batch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", sorted(GATES))
@pytest.mark.parametrize("rows", [1, 300])
def test_gates_equal_torch(rows, activation, dtype):
    gate_up = 4 * torch.randn(rows, 2 * 72, dtype=dtype)
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 0.0, -0.0])
    out = FUSED.gate(gate_up, activation)
    # Why 1e-5: where tanh is near -1, 1 + tanh keeps few float32 digits, in torch as well as here.
    tolerance = {"rtol": 2e-6, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(out, PLAIN.gate(gate_up, activation), **tolerance)
    assert torch.equal(FUSED.gate(gate_up[:1], activation)[0], out[0])
    gate_up[0, 3] = torch.nan
    assert FUSED.gate(gate_up, activation).isnan().sum() == 1


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("lengths", [[(1, 20), (3, 30)], [(1, 9), (200, 230)]])
def test_rotate_and_store_equals_its_plain_parts(lengths, normed):
    paged = Paged(lengths=lengths, dtype=torch.float32)
    spec, batch = paged.spec, paged.batch
    heads = spec.num_heads + spec.num_kv_heads
    projected = torch.randn(batch.num_tokens, heads + spec.num_kv_heads, spec.head_dim)
    table = torch.randn(batch.num_tokens, 1, spec.head_dim)
    rotation = (table[..., : spec.head_dim // 2], table[..., spec.head_dim // 2 :])
    norm = HeadNormWeights(weight=torch.randn(heads, spec.head_dim), eps=1e-6) if normed else None
    backend = make_backend("cpu", device=CPU, dtype=torch.float32, head_dim=64, block_size=16)
    batch = replace(batch, attention=backend.prepare(batch))
    cache = paged.layer("KPD")
    q = backend.rotate_and_store(projected, rotation, norm, cache, batch)
    qk, v = projected.split((heads, spec.num_kv_heads), dim=1)
    expected, k = rotate(qk, rotation, norm).split((spec.num_heads, spec.num_kv_heads), dim=1)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
    starts = batch.query_start_loc.tolist()
    for i, (query_len, _) in enumerate(lengths):
        new = slice(starts[i], starts[i + 1])
        paged.dense[i][-query_len:, spec.num_heads : heads] = k[new]
        paged.dense[i][-query_len:, heads:] = v[new]
    stored, expected = cache[:2], paged.cache("KPD", after=True)
    torch.testing.assert_close(stored[0], expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(stored[1], expected[1], rtol=0, atol=0, equal_nan=True)


def quantized_pair(outputs: int, inputs: int) -> tuple[QuantizedLinear, QuantizedLinear]:
    """The plain layer and the kernel layer over one weight that contains every 8-bit value."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    scales = (0.5 + torch.rand(outputs, 1, generator=generator)).half().float() / 64
    weight = QuantizedWeight(values=values, scales=scales, bits=8, group_size=inputs)
    methods = []
    for kind in (QuantizedLinear, CPUQuantizedLinear):
        method = kind("layer", bits=8, group_size=inputs, activations="int8")
        method.create((outputs, inputs), torch.float32, CPU)
        method.load_quantized(weight)
        methods.append(method)
    assert methods[1].is_packed
    return methods[0], methods[1]


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 640), (50, 72)])
def test_quantized_kernels_equal_the_plain_layer(outputs, inputs):
    plain, fast = quantized_pair(outputs, inputs)
    x = torch.randn(140, inputs, generator=torch.Generator().manual_seed(4))
    # Why these: the largest sums of a 16-bit lane, and a row of zeros.
    x[0], x[1] = 1.0, torch.where(torch.arange(inputs) % 2 == 0, -1.0, 1.0)
    x[2] = 0
    whole = fast.apply(x, None)
    torch.testing.assert_close(whole, plain.apply(x, None), rtol=1e-4, atol=1e-3)
    for rows in (0, 1, 2, 3, 4, 5, 9, 130):
        assert torch.equal(fast.apply(x[:rows], None), whole[:rows]), "other bits in a batch"


def test_an_extreme_dot_product_is_exact():
    """Inputs with the largest sum per group: alternating signs rotate to a single large input."""
    _, fast = quantized_pair(16, 64)
    values = torch.full((16, 64), -127, dtype=torch.int8)
    fast.load_quantized(
        QuantizedWeight(values=values, scales=torch.ones(16, 1), bits=8, group_size=64, inputs=64)
    )
    x = torch.zeros(1, 64)
    x[:, ::16] = 127  # after the rotation each is 127 sixteen times
    assert (fast.apply(x, None) == -127 * 127 * 64).all()


def test_weights_are_contiguous_in_one_array(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    for quantization in (None, "int8", "int4_weight_only"):
        engine = make_engine(str(tmp_path), attention_backend="cpu", quantization=quantization)
        model = engine.executor.model
        for tensors in (list(model.parameters()), list(model.buffers())):
            addresses = sorted((t.data_ptr(), t.nbytes) for t in tensors if t is not None)
            assert all(at % 64 == 0 for at, _ in addresses)
            gaps = [b - a - size for (a, size), (b, _) in itertools.pairwise(addresses)]
            assert all(0 <= gap < 64 for gap in gaps)
        engine.close()


def test_a_closed_engine_keeps_neither_cache_nor_weights():
    engine = make_engine(checkpoint("qwen3"), attention_backend="cpu")
    run(engine, random_prompts(1, [20]), greedy(2))
    kept = [weakref.ref(t) for t in (engine.executor.kv_cache.kv, engine.executor.model)]
    kept += [weakref.ref(layer.cache.k_cache) for layer in engine.executor.model.attention_layers]
    engine.close()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.guards("nanoengine/kernels/threads.py", "nanoengine/kernels/pool.py")
def test_kernels_share_torchs_threads():
    """Runs in its own process, because threads are started once per process."""
    code = (
        "import threading, torch; torch.set_num_threads(1);"
        "from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run;"
        "engines = [make_engine(checkpoint('qwen3'), attention_backend='cpu', dtype=dtype)"
        " for dtype in ('float32', 'float64')];"
        "[run(engine, random_prompts(1, [20]), greedy(2)) for engine in engines];"
        "print(torch.get_num_threads(), [t for t in threading.enumerate() if 'worker' in t.name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[-2:] == ["1", "[]"], done.stdout + done.stderr


@pytest.mark.guards("nanoengine/kernels/threads.py", "nanoengine/kernels/pool.py")
@pytest.mark.parametrize("bound", [{}, {"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}])
def test_binding_threads_to_cores_does_not_change_their_number(bound):
    """OpenMP then binds torch's main thread to one core, which must not limit the worker count."""
    code = (
        "import torch; from nanoengine.kernels.threads import num_workers, thread_reason;"
        "print(torch.get_num_threads(), num_workers(), thread_reason())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "2", **bound},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "2 2 OMP_NUM_THREADS=2\n", done.stderr


def test_compiled_code_is_valid_until_a_source_of_its_package_changes(tmp_path):
    """A kernel contains the code of the kernels it calls, including those from other files."""
    directory = Path(cpu_decoder.__file__).parent
    digest = source_digest(directory)
    for path in directory.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert source_digest.__wrapped__(tmp_path) == digest
    changed = tmp_path / "cpu_attention.py"
    changed.write_text(changed.read_text() + "\n")
    assert source_digest.__wrapped__(tmp_path) != digest
